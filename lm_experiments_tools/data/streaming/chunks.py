"""Examples of streams, from chunks of tokens that worker processes make ahead of training.

The examples of a stream are numbered from 0: those of chunk 0, then those of chunk 1, ... `stream-00003.jsonl` has a
line for each chunk (number of examples, position in the text at its end), so that any example is found without reading
the text before its chunk. Without this index a stream is read from the beginning, with the same examples.
"""

import json
import logging
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from concurrent import futures
from dataclasses import asdict, dataclass
from itertools import count, takewhile
from pathlib import Path

import numpy as np

from lm_experiments_tools.data.loader import SampleDataset, in_background
from lm_experiments_tools.data.streaming.worker import Chunk, ChunkRequest, ChunkSettings, rejected_path, work
from lm_experiments_tools.data.text.records import allowed, too_many
from lm_experiments_tools.data.workers import Worker, WorkerEnded
from lm_experiments_tools.errors import UserError

logger = logging.getLogger(__name__)

_PATIENCE = 15.0  # seconds of waiting before a message says what for
_SECONDS_TO_STOP = 10.0

BuildFunction = Callable[[Chunk, int, int], SampleDataset]


@dataclass(frozen=True)
class ChunkRecord:
    """Examples and tokens of a chunk, and the position in each text at its end."""

    num_samples: int
    num_tokens: int
    end: list[dict[str, int]]


class ExampleStream:
    """Examples of one stream by number, as an endless dataset.

    Args:
        folder: holds the indices of all streams.
        number: number of this stream.

    Attributes:
        pending: chunks that are being made, by number.
    """

    def __init__(self, folder: Path, number: int):
        self.folder, self.number = folder, number
        self.pending: dict[int, futures.Future[None]] = {}
        self._index = folder / f"stream-{number:05d}.jsonl"
        self._records: list[ChunkRecord] = []
        self._begins = [0]  # first example of each chunk and of the next one
        self._open: dict[int, SampleDataset] = {}
        self._low, self._lock = 0, threading.Lock()
        for record in self._read_index():
            self._append(record)

    def _read_index(self) -> list[ChunkRecord]:
        """Records without a gap from the first. Several processes may have written, and one may have been killed."""
        found: dict[int, ChunkRecord] = {}
        for line in self._index.read_text(encoding="utf-8").splitlines() if self._index.is_file() else ():
            try:
                values = json.loads(line)
            except ValueError:
                continue
            number = values.pop("chunk")
            found[number] = ChunkRecord(**values)
        return [found[number] for number in takewhile(found.__contains__, count())]

    def _append(self, record: ChunkRecord) -> None:
        self._records.append(record)
        self._begins.append(self._begins[-1] + record.num_samples)

    def __len__(self) -> int:
        return 1 << 62

    def lengths(self, samples: np.ndarray) -> np.ndarray:
        """int64[2, n]: tokens of inputs and targets of examples that are available."""
        lengths = np.empty((2, len(samples)), np.int64)
        for here, dataset, numbers in self.locate(samples):
            lengths[:, here] = dataset.lengths(numbers)
        return lengths

    @property
    def num_known(self) -> int:
        """Number of examples in all chunks made so far."""
        return self._begins[-1]

    @property
    def rejected_and_lines(self) -> tuple[int, int]:
        """Number of rejected records and of all records read so far, without repetitions."""
        end = self._records[-1].end if self._records else []
        return sum(text["rejected"] for text in end), sum(text["lines"] for text in end)

    def drop_before(self, sample: int) -> None:
        """Drop the chunks before that of an example."""
        with self._lock:
            self._low, first = sample, self.chunk_of(sample)
            self._open = {number: dataset for number, dataset in self._open.items() if number >= first}

    def chunk_of(self, sample: int) -> int:
        """The chunk of an example; for unknown ones, the first that does not exist."""
        return bisect_right(self._begins, sample) - 1

    def missing(self, low: int, high: int) -> int | None:
        """The next chunk to make for examples `low` to `high`; None where all are available."""
        if high >= self.num_known:
            return len(self._records)
        wanted = range(self.chunk_of(low), self.chunk_of(high) + 1)
        return next((number for number in wanted if number not in self._open), None)

    def request(self, number: int) -> ChunkRequest:
        """The request for a chunk, known or next."""
        begin = self._records[number - 1].end if number else []
        return ChunkRequest(self.number, number, begin, again=number < len(self._records))

    def accept(self, number: int, chunk: Chunk, dataset: SampleDataset) -> None:
        """Add a chunk and its examples. Raises UserError if it differs from an earlier version of the chunk."""
        record = ChunkRecord(len(dataset), len(chunk.tokens), chunk.end)
        with self._lock:
            if number == len(self._records):
                _append_line(self._index, json.dumps({"chunk": number, **asdict(record)}))
                self._append(record)
            elif record != self._records[number]:
                raise UserError(
                    f"chunk {number} of stream {self.number} differs from before: the text has changed since; restore "
                    f"it, or remove {self.folder} and start a new --model_path"
                )
            if number >= self.chunk_of(self._low):
                self._open[number] = dataset

    def locate(self, samples: np.ndarray) -> Iterable[tuple[np.ndarray, SampleDataset, np.ndarray]]:
        """For each chunk: indices into `samples` of those it holds, its dataset, and their numbers in it."""
        chunks = np.searchsorted(self._begins, samples, side="right") - 1
        for number in np.unique(chunks).tolist():
            here = np.flatnonzero(chunks == number)
            yield here, self._open[number], samples[here] - self._begins[number]


def _append_line(path: Path, line: str) -> None:
    """Append a line; it begins with the line end, because a kill or a full disk may have truncated the one before."""
    with open(path, "a", encoding="utf-8") as file:
        file.write(f"\n{line}")


class ChunkFeed:
    """Makes the chunks of streams in worker processes; each stream always uses the same one.

    Args:
        streams: all that this process reads.
        settings: settings for the workers.
        build: (chunk, stream, number of the chunk) -> its examples.
        num_workers: processes.
    """

    def __init__(
        self, streams: Sequence[ExampleStream], settings: ChunkSettings, build: BuildFunction, num_workers: int
    ):
        self.streams = {stream.number: stream for stream in streams}
        self._settings, self._build = settings, build
        self._errors: dict[Worker, Exception] = {}  # of workers that have ended
        self._workers = [Worker(work, settings) for _ in range(min(num_workers, len(streams)))]
        locked_workers = [(worker, threading.Lock()) for worker in self._workers]
        self._worker_of = {s.number: locked_workers[k % len(locked_workers)] for k, s in enumerate(streams)}

    def wait_for(self, wanted: dict[int, tuple[int, int]]) -> None:
        """Wait until the wanted examples exist, {stream number: (first, last)}, and start the chunks after them.

        Raises:
            UserError, OSError: a worker cannot read or encode the text.
        """
        ranges = [(self.streams[number], *bounds) for number, bounds in wanted.items()]
        for stream, low, _ in ranges:
            stream.drop_before(low)
        while missing := [(s, n) for s, low, high in ranges if (n := s.missing(low, high)) is not None]:
            for stream, number in missing:
                self._start(stream, number)
            for stream, number in missing:
                self._finish(stream, number)
        self._check_rejected()
        for stream, _, high in ranges:
            following = stream.chunk_of(high) + 1
            if stream.missing(high, high) is None and following not in stream._open:
                self._start(stream, following)

    def _start(self, stream: ExampleStream, number: int) -> None:
        """Have a chunk made, unless it is in progress or has failed."""
        before = stream.pending.get(number)
        if before is None or (before.done() and before.exception() is None):
            stream.pending[number] = in_background(self._make, stream, stream.request(number))

    def _make(self, stream: ExampleStream, request: ChunkRequest) -> None:
        worker, lock = self._worker_of[stream.number]
        with lock:
            if worker in self._errors:
                raise self._errors[worker]
            try:
                chunk = worker.ask(request)
            except WorkerEnded as end:
                self._errors[worker] = OSError(
                    f"the process that tokenizes ended with exit code {end.returncode} (-9: killed, often for lack of "
                    f"memory) at chunk {request.number} of stream {request.stream}"
                )
                raise self._errors[worker] from None
            except (UserError, OSError) as error:
                self._errors[worker] = error
                raise
        stream.accept(request.number, chunk, self._build(chunk, request.stream, request.number))

    def _finish(self, stream: ExampleStream, number: int) -> None:
        future = stream.pending[number]
        while not futures.wait([future], _PATIENCE).done:
            logger.info("waiting for text: stream %d has %d examples", stream.number, stream.num_known)
        future.result()
        del stream.pending[number]
        self._check_rejected()

    def _check_rejected(self) -> None:
        limit = self._settings.max_bad_lines
        rejected, lines = map(sum, zip(*(s.rejected_and_lines for s in self.streams.values()), strict=True))
        if rejected > allowed(limit, lines):
            raise UserError(
                f"{too_many(limit, rejected, lines)}, listed in {rejected_path(self._settings.folder)}: fix them or "
                "allow more with --max_bad_lines"
            )

    def close(self) -> None:
        """Stop the workers, which are killed after some seconds."""
        self._errors = dict.fromkeys(self._workers, OSError("the streams are closed"))
        pending = [future for stream in self.streams.values() for future in list(stream.pending.values())]
        is_stuck = bool(futures.wait(pending, _SECONDS_TO_STOP).not_done)
        for worker in self._workers:
            if is_stuck:
                worker.kill()
            worker.close()

"""Examples of streams, from chunks of tokens that worker processes make ahead of training.

The examples of a stream are numbered from 0: those of chunk 0, then those of chunk 1, ... `stream-00003.jsonl` has a
line for each chunk (number of examples, position in the text at its end), so the chunk of any example is found without
reading the text before it. Tokens are kept in memory only while they are in use; a chunk that is needed again is made
again from the position at the end of the one before it. Without its index a stream is read from the beginning, with
the same examples.
"""

import json
import logging
import os
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from concurrent import futures
from dataclasses import asdict, dataclass
from itertools import count, takewhile
from pathlib import Path
from typing import Any

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
    """Examples and tokens of a chunk, and the `Position` or `MixedPosition` of its end."""

    num_samples: int
    num_tokens: int
    end: dict[str, Any]


class ExampleStream:
    """Examples of one stream by number; not thread-safe, `ChunkFeed` is.

    Args:
        folder: of the indices of all streams.
        number: of this stream.
    """

    def __init__(self, folder: Path, number: int):
        self.folder, self.number = folder, number
        self._index = folder / f"stream-{number:05d}.jsonl"
        self._records: list[ChunkRecord] = []
        self._begins = [0]  # first example of each chunk and of the next one
        self._open: dict[int, SampleDataset] = {}
        self._low, self._high = 0, -1  # nothing requested yet
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

    @property
    def num_known(self) -> int:
        """Examples of all chunks made so far."""
        return self._begins[-1]

    @property
    def num_wanted(self) -> int:
        """Examples up to the last requested one."""
        return self._high + 1

    @property
    def rejected(self) -> int:
        """Rejected records of the text read so far."""
        return self._records[-1].end["rejected"] if self._records else 0

    @property
    def lines(self) -> int:
        """Records of the text read so far, rejected ones included, each once."""
        return self._records[-1].end["lines"] if self._records else 0

    def want(self, low: int, high: int) -> None:
        """Request examples `low` to `high`; earlier chunks are dropped."""
        self._low, self._high = low, high
        first = self._chunk_of(low)
        self._open = {number: dataset for number, dataset in self._open.items() if number >= first}

    def is_ready(self) -> bool:
        """True if the requested examples are available."""
        return self._high < self.num_known and self._missing() is None

    def next_request(self, ahead: bool) -> ChunkRequest | None:
        """The next chunk to make for the requested examples; with `ahead` also the one after them."""
        if self._high < 0 and self._records:
            return None  # a resumed run, whose position is not known yet
        if self._high >= self.num_known:
            number = len(self._records)
        elif (missing := self._missing()) is not None:
            number = missing
        elif ahead and (following := self._chunk_of(self._high) + 1) not in self._open:
            number = following
        else:
            return None
        begin = self._records[number - 1].end if number else {}
        return ChunkRequest(self.number, number, begin, again=number < len(self._records))

    def _chunk_of(self, sample: int) -> int:
        """The chunk of an example; beyond the known ones, the first that does not exist."""
        return bisect_right(self._begins, sample) - 1

    def _missing(self) -> int | None:
        wanted = range(self._chunk_of(self._low), self._chunk_of(self._high) + 1)
        return next((number for number in wanted if number not in self._open), None)

    def accept(self, number: int, chunk: Chunk, dataset: SampleDataset) -> None:
        """Take a chunk and its examples. Raises UserError where it differs from what was made before."""
        record = ChunkRecord(len(dataset), len(chunk.tokens), chunk.end)
        if number == len(self._records):
            self._append(record)
            _append_line(self._index, json.dumps({"chunk": number, **asdict(record)}))
        elif record != self._records[number]:
            raise UserError(
                f"chunk {number} of stream {self.number} has {record.num_tokens} tokens and had "
                f"{self._records[number].num_tokens}: the text has changed since; restore it, or remove "
                f"{self.folder} and start a new --model_path"
            )
        if number >= self._chunk_of(self._low):
            self._open[number] = dataset

    def locate(self, samples: np.ndarray) -> Iterable[tuple[np.ndarray, SampleDataset, np.ndarray]]:
        """For each chunk: indices into `samples` of those it holds, its dataset, and their numbers in it."""
        chunks = np.searchsorted(self._begins, samples, side="right") - 1
        for number in np.unique(chunks).tolist():
            here = np.flatnonzero(chunks == number)
            yield here, self._open[number], samples[here] - self._begins[number]


def _append_line(path: Path, line: str) -> None:
    """Append a line, also after one that was truncated by a kill or a full disk."""
    with open(path, "ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read() != b"\n":
                line = f"\n{line}"
        file.write(f"{line}\n".encode())


class ChunkFeed:
    """Supplies streams with chunks: a thread and a worker process for each group of streams.

    Args:
        streams: all that this process reads.
        settings: of the workers.
        build: (chunk, stream, number of the chunk) -> its examples.
        num_workers: processes.
    """

    def __init__(
        self, streams: Sequence[ExampleStream], settings: ChunkSettings, build: BuildFunction, num_workers: int
    ):
        self.streams = {stream.number: stream for stream in streams}
        self._settings, self._build = settings, build
        self._changed = threading.Condition()
        self._stopped = False
        self._workers = [Worker(work, settings) for _ in range(min(num_workers, len(streams)))]
        self._serving = [
            in_background(self._serve, worker, streams[number :: len(self._workers)])
            for number, worker in enumerate(self._workers)
        ]
        for serving in self._serving:
            serving.add_done_callback(self._notify)

    def _notify(self, _: Any) -> None:
        with self._changed:
            self._changed.notify_all()

    def _serve(self, worker: Worker, streams: Sequence[ExampleStream]) -> None:
        """Have one worker make the chunks of its streams, the most urgent first."""

        def next_request() -> ChunkRequest | None:
            candidates = (stream.next_request(ahead) for ahead in (False, True) for stream in streams)
            return next((request for request in candidates if request), None)

        with worker:
            try:
                while True:
                    with self._changed:
                        self._changed.wait_for(lambda: self._stopped or next_request())
                        if self._stopped:
                            return
                        request = next_request()
                    self._fetch(worker, request)
            except WorkerEnded as end:
                raise OSError(
                    f"the process that tokenizes ended with exit code {end.returncode} (-9: killed, often for want of "
                    f"memory) at chunk {end.request.number} of stream {end.request.stream}; the same command "
                    f"resumes from the last checkpoint"
                ) from None

    def _fetch(self, worker: Worker, request: ChunkRequest) -> None:
        chunk = worker.ask(request)
        dataset = self._build(chunk, request.stream, request.number)
        with self._changed:
            self.streams[request.stream].accept(request.number, chunk, dataset)
            self._check_rejected()
            self._changed.notify_all()

    def _check_rejected(self) -> None:
        limit, streams = self._settings.max_bad_lines, self.streams.values()
        rejected, lines = sum(stream.rejected for stream in streams), sum(stream.lines for stream in streams)
        if rejected > allowed(limit, lines):
            raise UserError(
                f"{too_many(limit, lines)}: {rejected} so far, listed in {rejected_path(self._settings.folder)}: "
                f"fix them or allow more with --max_bad_lines"
            )

    def wait_for(self, wanted: dict[int, tuple[int, int]]) -> None:
        """Wait for examples (first, last) of each stream number in `wanted`.

        Raises:
            UserError, OSError: a worker cannot make them.
        """
        with self._changed:
            for number, (low, high) in wanted.items():
                self.streams[number].want(low, high)
            self._changed.notify_all()
            waiting = [self.streams[number] for number in wanted]
            while not self._changed.wait_for(lambda: self._is_done(waiting), _PATIENCE):
                slow = min(waiting, key=lambda stream: stream.num_known / stream.num_wanted)
                logger.info(
                    "waiting for text: stream %d is at example %d of %d", slow.number, slow.num_known, slow.num_wanted
                )
        for serving in self._serving:
            if serving.done():
                serving.result()

    def _is_done(self, waiting: Sequence[ExampleStream]) -> bool:
        return any(serving.done() for serving in self._serving) or all(stream.is_ready() for stream in waiting)

    def close(self) -> None:
        """Stop the workers, which are killed after some seconds."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        for worker, serving in zip(self._workers, self._serving, strict=True):
            try:
                serving.exception(timeout=_SECONDS_TO_STOP)
            except futures.TimeoutError:
                worker.kill()

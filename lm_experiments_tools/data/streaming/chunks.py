"""Training examples for `--streaming`: worker processes tokenize the text in chunks, ahead of training.

The text is divided into streams, which are endless sequences of documents. A chunk is some consecutive documents of a
stream. The examples of a stream are numbered from 0, chunk after chunk. The file `text-0-stream-00003.jsonl` records
the number of examples and the end position of each chunk of stream 3 of the first text, so that a resumed run does not
read the text again.
Without this file the stream is read from its beginning and gives the same examples.
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

from lm_experiments_tools.data.dataset import Dataset
from lm_experiments_tools.data.loader import in_background
from lm_experiments_tools.data.streaming.worker import Chunk, ChunkRequest, ChunkSettings, rejected_path, work
from lm_experiments_tools.data.text.records import allowed, too_many
from lm_experiments_tools.data.workers import Worker, WorkerEnded
from lm_experiments_tools.errors import UserError

logger = logging.getLogger(__name__)

_PATIENCE = 15.0  # seconds of waiting before a message says what for
_SECONDS_TO_STOP = 10.0

BuildFunction = Callable[[Chunk, ChunkRequest], Dataset]


@dataclass(frozen=True)
class ChunkRecord:
    """Record of a chunk of streamed text that was tokenized, from which a resumed run finds its place in the text.

    Attributes:
        num_samples, num_tokens: examples and tokens of the chunk.
        end: position in the text where the chunk ends, a `Position` as JSON.
    """

    num_samples: int
    num_tokens: int
    end: dict[str, Any]


class ExampleStream:
    """The training examples of one stream of documents: endless, with access by number.

    Args:
        folder: folder of the files that record the chunks of all streams.
        text, number: index of the text, and of this stream of it.

    Attributes:
        pending: chunks (groups of documents) that workers are tokenizing, by their numbers.
    """

    def __init__(self, folder: Path, text: int, number: int):
        self.folder, self.text, self.number = folder, text, number
        self.pending: dict[int, futures.Future[None]] = {}
        self._index = folder / f"text-{text}-stream-{number:05d}.jsonl"
        self._records: list[ChunkRecord] = []
        self._begins = [0]  # first example of each chunk and of the next one
        self._open: dict[int, Dataset] = {}
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

    @property
    def num_known(self) -> int:
        """Number of examples in all text that has been tokenized so far."""
        return self._begins[-1]

    @property
    def rejected_and_lines(self) -> tuple[int, int]:
        """Number of records that could not be used, and of all records read so far. Each record counts once."""
        end = self._records[-1].end if self._records else {"rejected": 0, "lines": 0}
        return end["rejected"], end["lines"]

    def drop_before(self, sample: int) -> None:
        """Free the memory of examples that were used: all chunks before the one that contains example `sample`."""
        with self._lock:
            self._low, first = sample, self.chunk_of(sample)
            self._open = {number: dataset for number, dataset in self._open.items() if number >= first}

    def chunk_of(self, sample: int) -> int:
        """Return the number of the chunk (group of documents) with this example.

        If no chunk has the example yet, this is the number of the next chunk to make.
        """
        return bisect_right(self._begins, sample) - 1

    def missing(self, low: int, high: int) -> int | None:
        """Return the number of the next chunk (group of documents) to tokenize for a range of examples.

        Args:
            low, high: first and last example of the range.

        Returns:
            The number of the chunk, or None if all examples of the range are in memory.
        """
        if high >= self.num_known:
            return len(self._records)
        wanted = range(self.chunk_of(low), self.chunk_of(high) + 1)
        return next((number for number in wanted if number not in self._open), None)

    def request(self, number: int) -> ChunkRequest:
        """Return the request that makes a worker tokenize a chunk, either the next one or one made before."""
        begin = self._records[number - 1].end if number else {}
        return ChunkRequest(
            self.text, self.number, number, self._begins[number], begin, again=number < len(self._records)
        )

    def accept(self, number: int, chunk: Chunk, dataset: Dataset) -> None:
        """Add a chunk of tokenized text, and the examples made of it, to the stream.

        Args:
            number: number of the chunk.
            chunk: the tokens.
            dataset: the examples.

        Raises:
            UserError: the chunk was made before and has changed, because the text has changed.
        """
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

    def locate(self, samples: np.ndarray) -> Iterable[tuple[np.ndarray, Dataset, np.ndarray]]:
        """Find the chunks (groups of documents) that contain the examples with the given numbers.

        Returns:
            For each chunk: indices into `samples`, the chunk's dataset, and the sample numbers in that dataset.
        """
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
    """Tokenizes several streams of text in worker processes, ahead of training, one chunk of documents at a time.

    A stream always uses the same process.

    Args:
        streams: the streams that this training process reads.
        settings: settings for the workers.
        build: function (chunk, request for it) -> dataset of the chunk's examples.
        num_workers: number of processes.
    """

    def __init__(
        self, streams: Sequence[ExampleStream], settings: ChunkSettings, build: BuildFunction, num_workers: int
    ):
        self.streams = {(stream.text, stream.number): stream for stream in streams}
        self._settings, self._build = settings, build
        self._errors: dict[Worker, Exception] = {}  # of workers that have ended
        self._workers = [Worker(work, settings) for _ in range(min(num_workers, len(streams)))]
        locked = [(worker, threading.Lock()) for worker in self._workers]
        self._worker_of = {where: locked[k % len(locked)] for k, where in enumerate(self.streams)}

    def wait_for(self, wanted: dict[tuple[int, int], tuple[int, int]]) -> None:
        """Wait until the examples of a batch are in memory, then start to tokenize the next text in the background.

        Args:
            wanted: {(text, stream): (first example, last example)}.

        Raises:
            UserError, OSError: a worker cannot read or tokenize the text.
        """
        ranges = [(self.streams[where], *bounds) for where, bounds in wanted.items()]
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
        worker, lock = self._worker_of[stream.text, stream.number]
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
        stream.accept(request.number, chunk, self._build(chunk, request))

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
                f"{too_many(limit, rejected, lines)}, listed in {rejected_path(self._settings.folder)}: fix them, "
                "name another key by --text_key, or allow more with --max_bad_lines"
            )

    def close(self) -> None:
        """Stop the worker processes. They are killed if they do not end within some seconds."""
        self._errors = dict.fromkeys(self._workers, OSError("the streams are closed"))
        pending = [future for stream in self.streams.values() for future in list(stream.pending.values())]
        is_stuck = bool(futures.wait(pending, _SECONDS_TO_STOP).not_done)
        for worker in self._workers:
            if is_stuck:
                worker.kill()
            worker.close()

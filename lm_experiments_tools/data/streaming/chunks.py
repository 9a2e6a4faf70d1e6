"""Examples of streams, out of chunks of tokens that worker processes make ahead of training.

A stream's examples are numbered from 0 on: those of chunk 0, then those of chunk 1, ... Where chunks begin is kept in
`stream-00003.jsonl` (a line a chunk: its examples, and the place in the text where it ends), so that the chunk that
holds a given example is known at once. Chunks themselves are removed when they lie `KEPT_CHUNKS` behind; one that is
asked for again is made again, alone, from the place in the text where the one before it ends. Without the .jsonl file
a stream is read from its beginning, which takes as long as it took and gives the same examples.
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
from lm_experiments_tools.data.streaming.worker import (
    ChunkRequest,
    ChunkSettings,
    bad_lines_path,
    chunk_prefix,
    work,
)
from lm_experiments_tools.data.tokens.files import dataset_exists, dataset_paths
from lm_experiments_tools.data.workers import Worker, WorkerEnded
from lm_experiments_tools.errors import UserError

logger = logging.getLogger(__name__)

KEPT_CHUNKS = 32  # of a stream, behind the one in use: 16 streams have 1 GiB of them on disk
_PATIENCE = 15.0  # seconds of waiting before it is said what for
_LEAVING = 10.0  # seconds for a worker to put down its work

BuildFunction = Callable[[str, int, int], SampleDataset]


@dataclass(frozen=True)
class ChunkRecord:
    """Record of a chunk that outlives it: examples, tokens, and the `Position` or `MixedPosition` of its end."""

    num_samples: int
    num_tokens: int
    end: dict[str, Any]

    def text(self) -> tuple[int, int, dict[str, Any]]:
        """What the text alone decides; earlier versions counted empty texts among the bad lines of `end`."""
        return self.num_samples, self.num_tokens, {**self.end, "bad_lines": 0}


class ExampleStream:
    """Examples of one stream by number; not safe for threads, `ChunkFeed` is.

    Args:
        folder: of all chunks of all streams.
        number: of this stream.
    """

    def __init__(self, folder: Path, number: int):
        self.folder, self.number = folder, number
        self._index = folder / f"stream-{number:05d}.jsonl"
        self._records: list[ChunkRecord] = []
        self._begins = [0]  # first example of each chunk, and of the one that comes after them
        self._open: dict[int, SampleDataset] = {}
        self._low, self._high = 0, -1  # nothing yet
        for record in self._read_index():
            self._remember(record)

    def _read_index(self) -> list[ChunkRecord]:
        """Chunks without a gap from the first on. Several processes may have written, and one may have been killed."""
        found: dict[int, ChunkRecord] = {}
        for line in self._index.read_text(encoding="utf-8").splitlines() if self._index.is_file() else ():
            try:
                values = json.loads(line)
            except ValueError:
                continue
            number = values.pop("chunk")
            found[number] = ChunkRecord(**values)
        return [found[number] for number in takewhile(found.__contains__, count())]

    def _remember(self, record: ChunkRecord) -> None:
        self._records.append(record)
        self._begins.append(self._begins[-1] + record.num_samples)

    @property
    def known_samples(self) -> int:
        """Examples of all chunks made so far."""
        return self._begins[-1]

    @property
    def wanted_samples(self) -> int:
        """Examples up to the last one that is wanted."""
        return self._high + 1

    @property
    def bad_lines(self) -> int:
        """Bad lines of the text read so far."""
        return self._records[-1].end["bad_lines"] if self._records else 0

    def want(self, low: int, high: int) -> None:
        """From now on examples `low` to `high` are needed, and soon those that follow."""
        self._low, self._high = low, high
        first = self._chunk_of(low)
        for number in [number for number in self._open if number < first]:
            del self._open[number]
            self._remove(number - KEPT_CHUNKS)

    def is_ready(self) -> bool:
        """True if the wanted examples are available without waiting."""
        return self._high < self.known_samples and self._missing() is None

    def next_request(self, ahead: bool) -> ChunkRequest | None:
        """The chunk to make next for what is wanted; with `ahead` also the one after that."""
        if self._high < 0 and self._records:
            return None  # a run that goes on, whose position is not known yet
        if self._high >= self.known_samples:
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
        """The chunk of an example; of one that is not known yet, the first that does not exist."""
        return bisect_right(self._begins, sample) - 1

    def _missing(self) -> int | None:
        wanted = range(self._chunk_of(self._low), self._chunk_of(self._high) + 1)
        return next((number for number in wanted if number not in self._open), None)

    def accept(self, number: int, meta: dict[str, Any], dataset: SampleDataset) -> None:
        """A chunk that was made. Raises UserError where it was another when it was made before."""
        record = ChunkRecord(len(dataset), meta["num_tokens"], meta["end"])
        if number == len(self._records):
            self._remember(record)
            _append_line(self._index, json.dumps({"chunk": number, **asdict(record)}))
        elif record.text() != self._records[number].text():
            raise UserError(
                f"chunk {number} of stream {self.number} has {record.num_tokens} tokens and had "
                f"{self._records[number].num_tokens}: the text has changed since; restore it, or remove "
                f"{self.folder} and start a new --model_path"
            )
        if number >= self._chunk_of(self._low):
            self._open[number] = dataset
        else:
            self._remove(number - KEPT_CHUNKS)

    def _remove(self, number: int) -> None:
        if number >= 0:
            for path in reversed(dataset_paths(chunk_prefix(self.folder, self.number, number))):
                path.unlink(missing_ok=True)

    def locate(self, samples: np.ndarray) -> Iterable[tuple[np.ndarray, SampleDataset, np.ndarray]]:
        """For each chunk: which of `samples` it holds, its dataset, and their numbers in it."""
        chunks = np.searchsorted(self._begins, samples, side="right") - 1
        for number in np.unique(chunks).tolist():
            here = np.flatnonzero(chunks == number)
            yield here, self._open[number], samples[here] - self._begins[number]


def _append_line(path: Path, line: str) -> None:
    """A line of its own, also after one that was cut short by a kill or a full disk."""
    with open(path, "ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read() != b"\n":
                line = f"\n{line}"
        file.write(f"{line}\n".encode())


class ChunkFeed:
    """Keeps streams in chunks: a thread and a worker process for each group of them.

    Args:
        streams: all that this process reads.
        settings: of the workers.
        build: (prefix, stream, chunk) -> the examples of a chunk.
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
        """Have one worker make what its streams need, the most urgent first."""

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
                    f"memory) at chunk {end.request.number} of stream {end.request.stream}; the same command goes on "
                    f"from the last checkpoint"
                ) from None

    def _fetch(self, worker: Worker, request: ChunkRequest) -> None:
        prefix = chunk_prefix(self.streams[request.stream].folder, request.stream, request.number)
        while True:
            meta = worker.ask(request)
            try:
                dataset = self._build(prefix, request.stream, request.number)
            except UserError:
                if dataset_exists(prefix):
                    raise
                continue  # another run of the same data that is ahead of this one has just removed it
            break
        with self._changed:
            self.streams[request.stream].accept(request.number, meta, dataset)
            self._check_bad_lines()
            self._changed.notify_all()

    def _check_bad_lines(self) -> None:
        limit = self._settings.max_bad_lines
        if (found := sum(stream.bad_lines for stream in self.streams.values())) > limit:
            raise UserError(
                f"more than {limit} bad lines: {found} so far, listed in {bad_lines_path(self._settings.folder)}: "
                f"mend them or allow more with --max_bad_lines"
            )

    def wait_for(self, wanted: dict[int, tuple[int, int]]) -> None:
        """Return when examples (first, last) of each stream number in `wanted` are there.

        Raises:
            UserError, OSError: whatever keeps a worker from making them.
        """
        with self._changed:
            for number, (low, high) in wanted.items():
                self.streams[number].want(low, high)
            self._changed.notify_all()
            waiting = [self.streams[number] for number in wanted]
            while not self._changed.wait_for(lambda: self._is_over(waiting), _PATIENCE):
                slow = min(waiting, key=lambda stream: stream.known_samples / stream.wanted_samples)
                come, wanted = slow.known_samples, slow.wanted_samples
                logger.info("waiting for text: stream %d has come to example %d of %d", slow.number, come, wanted)
        for serving in self._serving:
            if serving.done():
                serving.result()

    def _is_over(self, waiting: Sequence[ExampleStream]) -> bool:
        return any(serving.done() for serving in self._serving) or all(stream.is_ready() for stream in waiting)

    def close(self) -> None:
        """End the workers: each puts down its work, or is killed after some seconds."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        for worker, serving in zip(self._workers, self._serving, strict=True):
            try:
                serving.exception(timeout=_LEAVING)
            except futures.TimeoutError:
                worker.kill()

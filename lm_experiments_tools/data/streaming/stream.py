"""Training while the text is being read and tokenized: `--streaming`.

A text is divided into V streams, which are endless sequences of documents. Worker processes tokenize each stream in
chunks of consecutive documents, ahead of training.

    text -> V streams of documents -> chunks of tokens -> examples -> batches of this training process
            (text.py)                 (text.py)           (TokenRows)

Sample g is sample g // V of stream g % V. Examples are shuffled within their chunk. The order depends only on the
seed. Rank r of W reads every n-th stream, beginning with stream r % n, where n is the greatest common divisor of W and
V. If W divides V, no two ranks read the same document. Two ranks and four streams:

    g          0  1  2  3  4  5  6  7
    stream     0  1  2  3  0  1  2  3
    rank       0  1  0  1  0  1  0  1

Each stream has its own epochs. The last example of a chunk is short and padded. The file `stream-00003.jsonl` records
the number of examples and the end position of each chunk of stream 3, so that a resumed run does not read the text
again. Without this file the stream is read from its beginning and gives the same examples.
"""

from __future__ import annotations

import json
import logging
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from itertools import count, takewhile
from math import gcd
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lm_experiments_tools.data.dataset import Dataset, SampleDataset, joined
from lm_experiments_tools.data.loader import Background
from lm_experiments_tools.data.objectives.token_rows import TokenRows, TokensInMemory
from lm_experiments_tools.data.order import stream_key
from lm_experiments_tools.data.streaming.text import (
    Chunk,
    ChunkMaker,
    ChunkRequest,
    ChunkSettings,
    Position,
    StreamPlan,
    rejected_path,
)
from lm_experiments_tools.data.text.sources import content_of
from lm_experiments_tools.data.text.tokenizer import warn_of_unknown
from lm_experiments_tools.data.tokens.tokenize import TextEncoder
from lm_experiments_tools.data.workers import Worker, WorkerEnded, available_cores
from lm_experiments_tools.errors import RunError, UserError, os_sentence
from lm_experiments_tools.files import json_sha256

if TYPE_CHECKING:
    from lm_experiments_tools.data.objectives.objective import Objective

logger = logging.getLogger(__name__)

CACHE = Path(".cache") / "streams"  # below the working directory
_VERSION = 7  # of the mapping (text, settings, seed) -> samples; part of the fingerprint
_WORKERS = 4  # processes, unless --data_n_workers says otherwise: they wait for the network more than they work
_PATIENCE = 15.0  # seconds of waiting before a message says what for
_SECONDS_TO_STOP = 10.0


class Stream:
    """The training examples of one stream of documents: endless, with access by number.

    Attributes:
        records: a line of the index for each chunk that was made, in this run or before.
        chunks: chunks in memory, or being made, by number.
    """

    def __init__(self, number: int, folder: Path, worker: Worker, build: Callable[[ChunkRequest, Chunk], Dataset]):
        self.number, self._worker, self._build, self.background = number, worker, build, Background()
        self._index = folder / f"stream-{number:05d}.jsonl"
        self.records: list[dict[str, Any]] = []
        self._begins = [0]  # first example of each chunk and of the next one
        self.chunks: dict[int, futures.Future[Dataset]] = {}
        for record in self._read_index():
            self._append(record)

    def _read_index(self) -> list[dict[str, Any]]:
        """Records without a gap from the first. Several processes may have written, and one may have been killed."""
        found: dict[int, dict[str, Any]] = {}
        for line in self._index.read_text(encoding="utf-8").splitlines() if self._index.is_file() else ():
            try:
                record = json.loads(line)
            except ValueError:
                continue
            found[record["chunk"]] = record
        return [found[number] for number in takewhile(found.__contains__, count())]

    def _append(self, record: dict[str, Any]) -> None:
        self.records.append(record)
        self._begins.append(self._begins[-1] + record["num_samples"])

    @property
    def num_rejected(self) -> int:
        """Number of records that could not be used so far. Each counts once."""
        return self.records[-1]["end"]["rejected"] if self.records else 0

    def start(self, samples: np.ndarray) -> None:
        """Begin to tokenize the chunks of the samples int64[n] of this stream, and drop all chunks before them."""
        first, last = (bisect_right(self._begins, sample) - 1 for sample in (samples.min(), samples.max()))
        self.chunks = {number: chunk for number, chunk in self.chunks.items() if number >= first}
        for number in range(first, last + 1):
            self._chunk(number)

    def read(self, samples: np.ndarray) -> Iterator[tuple[np.ndarray, Dataset, np.ndarray]]:
        """Wait for the chunks of samples; for each, yield indices into `samples`, and its dataset with its samples."""
        while samples.max() >= self._begins[-1]:
            self._wait(len(self.records))
            # A replay of a text whose records are lost keeps no chunk that it only passes.
            if self._begins[-1] <= samples.min():
                del self.chunks[len(self.records) - 1]
        chunks = np.searchsorted(self._begins, samples, side="right") - 1
        self._chunk(int(chunks.max()) + 1)  # ahead of the steps that need it
        for number in np.unique(chunks).tolist():
            here = np.flatnonzero(chunks == number)
            yield here, self._wait(number), samples[here] - self._begins[number]

    def _wait(self, number: int) -> Dataset:
        chunk = self._chunk(number)
        while not futures.wait([chunk], _PATIENCE).done:
            logger.info("waiting for text: stream %d has %d examples", self.number, self._begins[-1])
        return chunk.result()

    def _chunk(self, number: int) -> futures.Future[Dataset]:
        """A chunk, made in the background. It is at most the first one that has no record."""
        if number not in self.chunks:
            begin = Position(**self.records[number - 1]["end"]) if number else Position()
            request = ChunkRequest(self.number, number, begin, again=number < len(self.records))
            self.chunks[number] = self.background.submit(self._make, request)
        return self.chunks[number]

    def _make(self, request: ChunkRequest) -> Dataset:
        try:
            chunk = self._worker.ask(request)
        except WorkerEnded as end:
            where = f"chunk {request.number} of stream {self.number}"
            raise OSError(f"the process that tokenizes {end} at {where}") from None
        dataset = self._build(request, chunk)
        record = {"chunk": request.number, "num_samples": len(dataset), "num_tokens": len(chunk.tokens)}
        record["end"] = chunk.end._asdict()
        if request.number == len(self.records):
            _append_line(self._index, json.dumps(record))
            self._append(record)
        elif record != self.records[request.number]:
            raise UserError(
                f"chunk {request.number} of stream {self.number} differs from before: the text has changed since; "
                f"restore it, or remove {self._index.parent} and start a new --model_path"
            )
        return dataset


def _append_line(path: Path, line: str) -> None:
    # The line end comes first, as a kill or a full disk may have cut off the line before.
    with open(path, "ab") as file:
        file.write(f"\n{line}".encode())


class StreamedDataset(SampleDataset):
    """Training samples of `--streaming`, by sample number.

    Attributes:
        streams: the streams that were read so far, by number.
    """

    samples_per_epoch = None

    def __init__(
        self, workers: Sequence[Worker], settings: ChunkSettings, build: Callable[[ChunkRequest, Chunk], Dataset],
        fingerprint: str,
    ) -> None:  # fmt: skip
        self.workers, self.settings, self.fingerprint, self._build = workers, settings, fingerprint, build
        self.streams: dict[int, Stream] = {}
        self._told = False

    @classmethod
    def start(
        cls,
        plan: StreamPlan,
        encoder: TextEncoder,
        objective: Objective,
        *,
        max_bad_lines: int,
        num_workers: int | None,
        rank: int,
        world_size: int,
    ) -> StreamedDataset:
        """Start the processes of a rank and wait for its first examples, to find most errors here.

        Args:
            num_workers: number of processes; None for at most four.

        Raises:
            UserError: the text has no usable document, or too many bad lines.
            RunError: the text cannot be read, or a process has died.
        """
        vocabulary = encoder.vocabulary
        text = [content_of(plan.shards), vocabulary.fingerprint, *encoder.outputs]
        fingerprint = json_sha256([_VERSION, text, objective.settings(), plan.num_streams, plan.seed])
        folder = (CACHE / fingerprint[:16]).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        numbers = streams_of(rank, world_size, plan.num_streams)

        def build(request: ChunkRequest, chunk: Chunk) -> Dataset:
            if (request.number, request.stream) == (0, numbers[0]):  # the other streams are of the same text
                num_unknown = np.count_nonzero(chunk.tokens == vocabulary.unk_id)
                warn_of_unknown(num_unknown, len(chunk.tokens), "the text")
            seed = stream_key(plan.seed, f"stream {request.stream}, chunk {request.number}")
            return Dataset(TokenRows(TokensInMemory(chunk.tokens), objective, seed))

        settings = ChunkSettings(plan, str(folder), encoder, max_bad_lines)
        num_workers = min(num_workers or min(_WORKERS, available_cores()), len(numbers))
        dataset = cls([Worker(ChunkMaker, settings) for _ in range(num_workers)], settings, build, fingerprint)
        if unread := [number for number in numbers if not dataset.stream(number).records]:
            # The sample with the number of a stream is the stream's first.
            try:
                dataset.batch(np.array(unread))
            except (UserError, RunError):
                dataset.close()
                raise
        return dataset

    def stream(self, number: int) -> Stream:
        """Return a stream. Those that a rank reads change if a run goes on with another number of workers."""
        if number not in self.streams:
            worker = self.workers[len(self.streams) % len(self.workers)]
            self.streams[number] = Stream(number, Path(self.settings.folder), worker, self._build)
        return self.streams[number]

    def batch(self, samples: np.ndarray) -> dict[str, np.ndarray]:
        """Return a batch of the samples with the given numbers int64[n]. Waits until their text is tokenized.

        Raises RunError: the text cannot be read, or a worker process has died.
        """
        numbers, streams = np.divmod(samples, self.settings.plan.num_streams)
        rows_of = {self.stream(number): np.flatnonzero(streams == number) for number in np.unique(streams).tolist()}
        try:
            for stream, rows in rows_of.items():
                stream.start(numbers[rows])
            parts = (
                (rows[here], dataset.batch(indices))
                for stream, rows in rows_of.items()
                for here, dataset, indices in stream.read(numbers[rows])
            )
            batch = joined(parts, len(samples), "examples of --task")
        except OSError as error:
            raise RunError(f"the streamed text stopped: {os_sentence(error)}") from error
        rejected = sum(stream.num_rejected for stream in self.streams.values())
        if rejected > (limit := self.settings.max_bad_lines):
            raise UserError(
                f"more than {limit} bad lines: {rejected} so far, listed in {rejected_path(self.settings.folder)}: "
                "fix them, name another key by --text_key, or allow more with --max_bad_lines"
            )
        if rejected and not self._told:
            self._told = True
            logger.warning("bad lines are left out; they are listed in %s", rejected_path(self.settings.folder))
        return batch

    def close(self) -> None:
        for worker in self.workers:
            worker.kill()
        # Connections are closed when no thread reads them any more.
        chunks = [chunk for stream in list(self.streams.values()) for chunk in list(stream.chunks.values())]
        futures.wait(chunks, _SECONDS_TO_STOP)
        for worker in self.workers:
            worker.close()


def streams_of(rank: int, world_size: int, num_streams: int) -> range:
    """Return the numbers of the text streams that a rank reads."""
    step = gcd(world_size, num_streams)
    return range(rank % step, num_streams, step)

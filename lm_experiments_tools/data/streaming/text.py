"""The text of a `--streaming` run, divided into streams, and the worker process that tokenizes it chunk by chunk.

A stream is an endless sequence of documents. A shard is a part of a file, or a shard of a Hugging Face dataset. Each
epoch assigns the shards to V streams in another way. Six shards of equal size in two streams:

    epoch       0         1         2
    stream 0    4 1 3     0 4 2     5 3 0   ...
    stream 1    0 5 2     3 1 5     1 2 4   ...

V depends on the data and on `--streams`, not on the number of workers. A stream, and each `Position` in it, is a
function of (data, seed). A text that cannot be cut, such as one compressed file, is one stream. This module does not
import torch.
"""

import heapq
import logging
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lm_experiments_tools.data.order import permute, stream_key
from lm_experiments_tools.data.text.records import (
    BadRecord,
    Record,
    RejectedRecords,
    locate,
    no_documents,
    read_shard,
    utf8_length,
)
from lm_experiments_tools.data.text.sources import Shard, plan_shards
from lm_experiments_tools.data.tokens.indexed import token_dtype
from lm_experiments_tools.data.tokens.tokenize import TextEncoder, batches

logger = logging.getLogger(__name__)

_SHARDS_PER_STREAM = 8  # of files: streams come out of about equal size, and documents in a random order
_MIN_SHARD_BYTES = 1 << 12
_MAX_SHARD_BYTES = 64 << 20
_MAX_IMBALANCE = 1.1  # the largest stream over the average
_WAITS = (1.0, 4.0, 15.0, 60.0)  # seconds before another try, after those of the datasets package itself
# Tokens of a chunk: some hundred KB of text of each stream, and training begins; doubled chunk after chunk.
FIRST_CHUNK, LARGEST_CHUNK = 1 << 15, 1 << 20
_BATCH_BYTES = 1 << 16  # text per call into the vocabulary: small, so that the first chunk is ready soon


class Position(NamedTuple):
    """A position in a stream, from which a resumed run reads on.

    Attributes:
        epoch, shard: how often the stream has read the text, and the number of the current shard.
        items: records read in this shard, with those that could not be used.
        rejected: unusable records of epoch 0, which meets each record once.
    """

    epoch: int = 0
    shard: int = 0
    items: int = 0
    rejected: int = 0


@dataclass(frozen=True)
class StreamPlan:
    """How a text is divided among streams: its shards, and the number of streams."""

    shards: tuple[Shard, ...]
    num_streams: int
    seed: int

    @classmethod
    def make(cls, inputs: Sequence[str], max_streams: int, seed: int, document_per_line: bool = False) -> "StreamPlan":
        """Divide a text into as many streams as have about equal size: at most 1.1 times the average."""
        shards = plan_shards(inputs, document_per_line=document_per_line)
        if size := sum(shard.num_bytes for shard in shards):
            wanted = size // (_SHARDS_PER_STREAM * max_streams)
            wanted = min(max(wanted, _MIN_SHARD_BYTES), _MAX_SHARD_BYTES)
            shards = plan_shards(inputs, wanted, document_per_line=document_per_line)
        counts = range(min(max_streams, len(shards)), 0, -1)
        return next(plan for plan in (cls(tuple(shards), n, seed) for n in counts) if plan._is_balanced())

    def _is_balanced(self) -> bool:
        weights = _weights(self.shards)
        sizes = [sum(weights[number] for number in numbers) for numbers in _assign(self, 0)]
        return max(sizes) * len(sizes) <= _MAX_IMBALANCE * sum(sizes)

    def shards_of(self, stream: int, epoch: int) -> list[Shard]:
        """Return the shards that a stream reads in an epoch, in reading order."""
        return [self.shards[number] for number in _assign(self, epoch)[stream]]


def _weights(shards: Sequence[Shard]) -> list[int]:
    """Bytes of each; shards of a dataset, whose size is not known, count as the average."""
    sizes = [shard.num_bytes for shard in shards]
    average = sum(sizes) // max(sum(size > 0 for size in sizes), 1) or 1
    return [size or average for size in sizes]


@lru_cache(maxsize=4)
def _assign(plan: StreamPlan, epoch: int) -> list[list[int]]:
    """Numbers of shards by stream: the largest first, each to the smallest stream; then in random order."""
    count = len(plan.shards)
    if count == 1:  # a tiny text is read thousands of times, and the permutation takes milliseconds
        return [[0]]
    ranks = permute(np.arange(count), count, stream_key(plan.seed, "pieces"), np.full(count, epoch)).tolist()
    weights = _weights(plan.shards)
    streams: list[list[int]] = [[] for _ in range(plan.num_streams)]
    smallest = [(0, stream) for stream in range(plan.num_streams)]
    for number in sorted(range(count), key=lambda number: (-weights[number], ranks[number])):
        size, stream = smallest[0]
        heapq.heapreplace(smallest, (size + weights[number], stream))
        streams[stream].append(number)
    return [sorted(numbers, key=ranks.__getitem__) for numbers in streams]


@dataclass(frozen=True)
class ChunkSettings:
    """Settings of a worker process.

    Attributes:
        folder: folder for the list of unusable records.
    """

    plan: StreamPlan
    folder: str
    encoder: TextEncoder
    max_bad_lines: int


class StreamText:
    """The text of one stream from a position on.

    Attributes:
        documents: endless iterator.
        position: position after the last document of the iterator.
        rejected: unusable records met in epoch 0.
    """

    def __init__(self, settings: ChunkSettings, stream: int, position: Position):
        self.position = position
        self.rejected: list[BadRecord] = []
        self._key, self._counts = settings.encoder.key, RejectedRecords(settings.max_bad_lines)
        self._counts.path, self._counts.count = rejected_path(settings.folder), position.rejected
        self.documents = self._read(settings.plan, stream)

    def _read(self, plan: StreamPlan, stream: int) -> Iterator[Record]:
        num_without = 0  # shards in a row
        while True:
            shards = plan.shards_of(stream, self.position.epoch)
            while self.position.shard < len(shards):
                num_without += 1
                for document in self._read_shard(shards[self.position.shard]):
                    num_without = 0
                    yield document
                if num_without > len(plan.shards):
                    raise no_documents(list(dict.fromkeys(shard.path for shard in plan.shards)), self._counts)
                self.position = self.position._replace(shard=self.position.shard + 1, items=0)
            self.position = self.position._replace(epoch=self.position.epoch + 1, shard=0)

    def _read_shard(self, shard: Shard) -> Iterator[Record]:
        """The rest of a shard, reopened where a connection breaks; the position is after the yielded document."""
        waits = iter(_WAITS)
        while True:
            before = self.position.items
            try:
                for item in read_shard(shard, self._key, skip=before):
                    self._advance(shard, item)
                    if isinstance(item, Record):
                        yield item
                return
            except OSError as error:
                if shard.kind != "dataset":
                    raise
                waits = iter(_WAITS) if self.position.items > before else waits
                wait = next(waits, None)
                where = f"shard {shard.start} of {shard.path}, after {self.position.items:,} documents"
                if wait is None:
                    raise OSError(f"{where}: {error}; {len(_WAITS)} more tries did not help") from error
                logger.warning("%s: %s; trying again in %.0f s", where, error, wait)
                time.sleep(wait)

    def _advance(self, shard: Shard, item: Record | BadRecord) -> None:
        position, counts = self.position, self._counts
        if isinstance(item, BadRecord) and item.is_empty:
            counts.num_empty += 1
        elif position.epoch == 0 and isinstance(item, BadRecord):
            self.rejected.append(located := locate(shard, item))
            counts.add(located)
        self.position = Position(position.epoch, position.shard, position.items + 1, counts.count)


# ---- the worker process ----


class ChunkRequest(NamedTuple):
    """Request to tokenize the next documents of a stream, which together form a chunk.

    Attributes:
        begin: position where the chunk starts.
        again: True if the chunk was made before, so that its rejected records are listed already.
    """

    stream: int
    number: int
    begin: Position
    again: bool


class Chunk(NamedTuple):
    """Token ids of consecutive whole documents, and the position after them."""

    tokens: np.ndarray
    end: Position


class ChunkMaker:
    """Reads and tokenizes the text of streams, one chunk for each request. Files stay open from chunk to chunk."""

    def __init__(self, settings: ChunkSettings):
        self.settings = settings
        self._open: dict[int, StreamText] = {}

    def __call__(self, request: ChunkRequest) -> Chunk:
        """Tokenize a chunk: at least 32,768 tokens, doubled from chunk to chunk up to a million."""
        encoder, dtype = self.settings.encoder, token_dtype(self.settings.encoder.vocabulary.size)
        least = min(FIRST_CHUNK << min(request.number, 30), LARGEST_CHUNK)
        text = self._open.pop(request.stream, None)
        if text is None or text.position != request.begin:
            text = StreamText(self.settings, request.stream, request.begin)
        parts, size = [], 0
        try:
            for batch in batches(text.documents, lambda document: utf8_length(document.value), _BATCH_BYTES):
                ids = encoder.encode([part for document in batch for part in encoder.parts(document)]).ids
                parts.append(ids.astype(dtype))
                size += len(ids)
                if size >= least:
                    break
        finally:
            if text.rejected and not request.again:
                with open(rejected_path(self.settings.folder), "a", encoding="utf-8") as file:
                    file.writelines(f"{record.to_json()}\n" for record in text.rejected)
            text.rejected.clear()
        # First, because the next request may go on with the text as soon as it is back.
        chunk = Chunk(np.concatenate(parts), text.position)
        # Not after an error, which the iterator does not survive.
        self._open[request.stream] = text
        return chunk


def rejected_path(folder: str | os.PathLike) -> Path:
    """Return the path of the list of records that could not be used, in the folder of a streamed run."""
    return Path(folder) / "bad_lines.jsonl"

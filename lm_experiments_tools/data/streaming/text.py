"""The text of a `--streaming` run: it is divided into streams, which are read in an order fixed by the seed.

A stream is an endless sequence of documents. A shard is a part of a file, or a shard of a Hugging Face dataset. The
shards are assigned to V streams, differently in each epoch. Six shards of equal size in two streams:

    epoch       0         1         2
    stream 0    4 1 3     0 4 2     5 3 0   ...
    stream 1    0 5 2     3 1 5     1 2 4   ...

V depends on the data and on `--streams`, not on the number of workers. A stream, and each `Position` in it, is a
function of (data, seed). A text that cannot be cut, such as one compressed file, is one stream.
"""

import heapq
import logging
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from lm_experiments_tools.data.order import permute, stream_key
from lm_experiments_tools.data.text.records import (
    Record,
    Rejected,
    RejectedRecords,
    locate,
    no_documents,
    read_shard,
)
from lm_experiments_tools.data.text.sources import Shard, file_stamp, plan_shards
from lm_experiments_tools.errors import UserError

logger = logging.getLogger(__name__)

_SHARDS_PER_STREAM = 8  # of files: streams come out of about equal size, and documents in a random order
_MIN_SHARD_BYTES = 1 << 12
_MAX_SHARD_BYTES = 64 << 20
_MAX_IMBALANCE = 1.1  # the largest stream over the average
_WAITS = (1.0, 4.0, 15.0, 60.0)  # seconds before another try, after those of the datasets package itself


@dataclass(frozen=True)
class Position:
    """A position in one text of a stream, from which a resumed run reads on.

    Attributes:
        epoch, shard: how often the stream has read the text, and the number of the current shard (part of the text).
        items: records read in this shard, with those that could not be used.
        rejected, lines: unusable records and all records of epoch 0, which meets each record once.
    """

    epoch: int = 0
    shard: int = 0
    items: int = 0
    rejected: int = 0
    lines: int = 0


@dataclass(frozen=True)
class StreamPlan:
    """How a text is divided among streams: its shards (parts of files or datasets), and the number of streams."""

    shards: tuple[Shard, ...]
    num_streams: int
    seed: int

    @classmethod
    def make(cls, inputs: Sequence[str], max_streams: int, seed: int, document_per_line: bool = False) -> "StreamPlan":
        """Divide a text into as many streams of about equal size as possible.

        The inputs are cut into shards (parts of files or datasets). The largest stream has at most 1.1 times the
        average size.

        Args:
            inputs: files, folders and datasets.
            max_streams: maximum number of streams.
            seed: determines which stream reads which shards.
            document_per_line: each line of a text file is a document.

        Raises:
            UserError: an input does not exist or is empty.
        """
        shards = plan_shards(inputs, document_per_line=document_per_line)
        size = sum(shard.num_bytes for shard in shards)
        if size:
            wanted = size // (_SHARDS_PER_STREAM * max_streams)
            wanted = min(max(wanted, _MIN_SHARD_BYTES), _MAX_SHARD_BYTES)
            shards = plan_shards(inputs, wanted, document_per_line=document_per_line)
        counts = range(min(max_streams, len(shards)), 0, -1)
        plan = cls(tuple(shards), 1, seed)
        return replace(plan, num_streams=next(n for n in counts if plan.is_balanced(n)))

    def is_balanced(self, num_streams: int) -> bool:
        """Return True if so many streams would have about equal size."""
        sums, sizes = [0] * num_streams, sorted(_weights(self.shards), reverse=True)
        for size in sizes:
            heapq.heapreplace(sums, sums[0] + size)
        return max(sums) * num_streams <= _MAX_IMBALANCE * sum(sizes)

    def on_this_machine(self) -> "StreamPlan":
        """Return the plan with the modification times that the input files have on this machine.

        The plan was made on another machine, where copies of the files may have other times. Raises UserError if file
        sizes differ.
        """
        planned = {shard.path: shard.stamp for shard in self.shards if shard.stamp is not None}
        stamps = {path: file_stamp(path) if os.path.exists(path) else (-1, 0) for path in planned}
        for path, stamp in planned.items():
            if stamps[path][0] != stamp[0]:
                here = f"{stamps[path][0]:,} bytes" if stamps[path][0] >= 0 else "missing"
                raise UserError(
                    f"{path} has {stamp[0]:,} bytes where the run was planned and is {here} here: every machine needs "
                    "the same text"
                )
        return replace(self, shards=tuple(replace(shard, stamp=stamps.get(shard.path)) for shard in self.shards))

    def shards_of(self, stream: int, epoch: int) -> list[Shard]:
        """Return the shards (parts of the text) that a stream reads in an epoch, in reading order."""
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


class StreamText:
    """The documents that one stream reads from one text, as an endless iterator.

    Args:
        plan: the shards (parts) of the text, and the number of streams.
        stream: index of the stream.
        position: position to begin at.
        text_key: key of the text in a JSON record.
        max_bad_lines: maximum number of unusable records of this text in the stream; None stops only where most
            records are unusable.
        listed_in: path of the list of unusable records, for error messages.

    Attributes:
        position: position after the last document.
        rejected: unusable records met in epoch 0.
    """

    def __init__(
        self,
        plan: StreamPlan,
        stream: int,
        position: Position,
        text_key: str,
        max_bad_lines: int | None,
        listed_in: str | os.PathLike = "",
    ):
        self.plan, self.stream, self.position = plan, stream, position
        self.rejected: list[Rejected] = []
        self._text_key, self._counts = text_key, RejectedRecords(max_bad_lines, of_part=True)
        self._counts.path = Path(listed_in)
        self._counts.count, self._counts.lines = position.rejected, position.lines

    def __iter__(self) -> Iterator[Record]:
        num_without = 0  # shards in a row
        while True:
            shards = self.plan.shards_of(self.stream, self.position.epoch)
            while self.position.shard < len(shards):
                num_without += 1
                for document in self._documents(shards[self.position.shard]):
                    num_without = 0
                    yield document
                if num_without > len(self.plan.shards):
                    raise no_documents(list(dict.fromkeys(shard.path for shard in self.plan.shards)), self._counts)
                self.position = replace(self.position, shard=self.position.shard + 1, items=0)
            self.position = replace(self.position, epoch=self.position.epoch + 1, shard=0)

    def _documents(self, shard: Shard) -> Iterator[Record]:
        """The rest of a shard, reopened where a connection breaks; the position is after the yielded document."""
        waits = iter(_WAITS)
        while True:
            before = self.position.items
            try:
                for item in read_shard(shard, self._text_key, skip=before):
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

    def _advance(self, shard: Shard, item: Record | Rejected) -> None:
        position, counts = self.position, self._counts
        if isinstance(item, Rejected) and item.is_empty:
            counts.num_empty += 1
        elif position.epoch == 0 and isinstance(item, Record):
            counts.accept()
        elif position.epoch == 0:
            self.rejected.append(located := locate(shard, item))
            counts.add(located.where, located.reason)
        self.position = Position(position.epoch, position.shard, position.items + 1, counts.count, counts.lines)

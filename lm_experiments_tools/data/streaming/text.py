"""The text of a streamed run: its shards are assigned to streams, which read them in an order fixed by the seed.

Shards (parts of files, shards of a Hugging Face dataset) are assigned to V streams, anew in each epoch. Six shards of
equal size in two streams:

    epoch       0         1         2
    stream 0    4 1 3     0 4 2     5 3 0   ...
    stream 1    0 5 2     3 1 5     1 2 4   ...

V depends on the data and on `--streams`, never on the number of workers. A stream, and each `Position` in it, is a
function of (data, seed), whatever the speed of the source and whoever reads it.
"""

import heapq
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from lm_experiments_tools.data.order import permute, stream_key
from lm_experiments_tools.data.text import hf_datasets
from lm_experiments_tools.data.text.records import (
    Record,
    Rejected,
    RejectedRecords,
    is_hopeless,
    locate,
    no_documents,
    read_shard,
    too_many,
)
from lm_experiments_tools.data.text.sources import Shard, file_stamp, plan_shards
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.files import hash_of_ends

logger = logging.getLogger(__name__)

_SHARDS_PER_STREAM = 8  # of files: streams come out of about equal size, and documents in a random order
_MIN_SHARD_BYTES = 1 << 12
_MAX_SHARD_BYTES = 64 << 20
_MAX_IMBALANCE = 1.1  # the largest stream over the average
_WAITS = (1.0, 4.0, 15.0, 60.0)  # seconds before another try, after those of the datasets package itself


@dataclass(frozen=True)
class Position:
    """A position in a stream: after `items` records and rejected records of its shard number `shard` in an epoch.

    `rejected` and `lines` (rejected and usable records) count those of epoch 0, which meets each line once.
    """

    epoch: int = 0
    shard: int = 0
    items: int = 0
    rejected: int = 0
    lines: int = 0


@dataclass(frozen=True)
class StreamPlan:
    """The shards of a text and the number of streams that read them."""

    shards: tuple[Shard, ...]
    num_streams: int
    seed: int

    @classmethod
    def make(cls, inputs: Sequence[str], max_streams: int, seed: int, divisor: bool = False) -> "StreamPlan":
        """Cut the inputs, and choose the largest number of streams that are balanced.

        It is at most `max_streams` (a divisor of it with `divisor`), and the largest stream has at most 1.1 times the
        average. Raises UserError where an input does not exist or holds nothing.
        """
        shards = plan_shards(inputs)
        size = sum(shard.num_bytes for shard in shards)
        if size:
            wanted = size // (_SHARDS_PER_STREAM * max_streams)
            shards = plan_shards(inputs, min(max(wanted, _MIN_SHARD_BYTES), _MAX_SHARD_BYTES))
        sizes = sorted(_weights(shards), reverse=True)
        counts = [n for n in range(min(max_streams, len(shards)), 0, -1) if not (divisor and max_streams % n)]
        return cls(tuple(shards), next(n for n in counts if _is_balanced(sizes, n)), seed)

    def on_this_machine(self) -> "StreamPlan":
        """The plan with the times of the files here, which may be copies.

        Raises:
            UserError: a file is missing here, or is of another size.
        """
        stamps: dict[str, tuple[int, int]] = {}
        for shard in self.shards:
            if shard.stamp is None or shard.path in stamps:
                continue
            found = file_stamp(shard.path) if os.path.exists(shard.path) else (-1, 0)
            if found[0] != shard.stamp[0]:
                here = f"{found[0]:,} bytes" if found[0] >= 0 else "missing"
                raise UserError(
                    f"{shard.path} has {shard.stamp[0]:,} bytes where the run was planned and is {here} here: every "
                    f"machine needs the same text, and nothing may write to it"
                )
            stamps[shard.path] = found
        return replace(self, shards=tuple(replace(shard, stamp=stamps.get(shard.path)) for shard in self.shards))

    def open(self, stream: int, begin: Mapping[str, Any], **options: Any) -> "StreamText":
        """The text of a stream from a `Position` ({}: the start), with the other arguments of `StreamText`."""
        return StreamText(self, stream, Position(**begin), **options)

    def identity(self) -> list[Any]:
        """Names, bounds, sizes, beginnings and ends of files; files of a dataset. Not folders and times."""
        datasets = dict.fromkeys(shard.path for shard in self.shards if shard.kind == "dataset")
        files = dict.fromkeys(shard.path for shard in self.shards if shard.kind != "dataset")
        bounds = [(os.path.basename(s.path), s.kind, s.start, s.end, s.num_bytes) for s in self.shards]
        return [bounds, list(map(hash_of_ends, files)), list(map(hf_datasets.identity, datasets))]

    def describe(self) -> str:
        """The size, for the log."""
        return f"{len(self.shards)} shards in {self.num_streams} streams"

    def shards_of(self, stream: int, epoch: int) -> list[Shard]:
        """Shards of a stream in an epoch, in reading order."""
        return [self.shards[number] for number in _assign(self, epoch)[stream]]


def _weights(shards: Sequence[Shard]) -> list[int]:
    """Bytes of each; shards of a dataset, whose size is not known, count as the average."""
    sizes = [shard.num_bytes for shard in shards]
    average = sum(sizes) // max(sum(size > 0 for size in sizes), 1) or 1
    return [size or average for size in sizes]


def _is_balanced(sizes: Sequence[int], num_streams: int) -> bool:
    sums = [0] * num_streams
    for size in sizes:
        heapq.heapreplace(sums, sums[0] + size)
    return max(sums) * num_streams <= _MAX_IMBALANCE * sum(sums)


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
    """Documents of one stream, endlessly.

    Args:
        text_key: of the text in a record.
        max_bad_lines: limit of rejected records of all streams.
        listed_in: the list of rejected records, for messages.

    Attributes:
        position: after the last document.
        rejected: (file, record) of those rejected in epoch 0 so far.

    Raises:
        UserError: hopelessly many records are rejected in epoch 0; no document in as many shards in a row as exist.
        OSError: a source cannot be read after several tries.
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
        self.rejected: list[tuple[str, Rejected]] = []
        self._text_key, self._max_bad_lines, self._listed_in = text_key, max_bad_lines, listed_in
        self._first, self._num_empty = "", 0

    def __iter__(self) -> Iterator[Record]:
        num_without = 0  # shards in a row
        while True:
            shards = self.plan.shards_of(self.stream, self.position.epoch)
            while self.position.shard < len(shards):
                num_without += 1
                for item in self._items(shards[self.position.shard]):
                    if isinstance(item, Record):
                        num_without = 0
                        yield item
                if num_without > len(self.plan.shards):
                    raise self._no_documents()
                self.position = replace(self.position, shard=self.position.shard + 1, items=0)
            self.position = replace(self.position, epoch=self.position.epoch + 1, shard=0)

    def _no_documents(self) -> UserError:
        rejected = RejectedRecords(self._max_bad_lines)
        rejected.count, rejected.first, rejected.num_empty = self.position.rejected, self._first, self._num_empty
        rejected.path = self._listed_in
        return no_documents(list(dict.fromkeys(shard.path for shard in self.plan.shards)), rejected)

    def _items(self, shard: Shard) -> Iterator[Record | Rejected]:
        """The rest of a shard, each after the position has moved past it; reopened where a connection breaks."""
        waits = iter(_WAITS)
        while True:
            before = self.position.items
            try:
                for item in read_shard(shard, self._text_key, skip=before):
                    self._advance(shard, item)
                    yield item
                return
            except OSError as error:
                if shard.kind != "dataset":
                    raise
                waits = iter(_WAITS) if self.position.items > before else waits
                wait = next(waits, None)
                where = f"shard {shard.start} of {shard.path}, after {self.position.items:,} documents"
                if wait is None:
                    raise OSError(
                        f"{where}: {error}; {len(_WAITS)} more tries did not help: when the network is back, the same "
                        f"command resumes from the last checkpoint"
                    ) from error
                logger.warning("%s: %s; trying again in %.0f s", where, error, wait)
                time.sleep(wait)

    def _advance(self, shard: Shard, item: Record | Rejected) -> None:
        position = replace(self.position, items=self.position.items + 1)
        is_empty = isinstance(item, Rejected) and item.is_empty
        self._num_empty += is_empty
        if position.epoch == 0 and not is_empty:
            position = replace(position, lines=position.lines + 1)
        if isinstance(item, Rejected) and not is_empty:
            if position.epoch == 0:
                self.rejected.append(locate(shard, item))
                position = replace(position, rejected=position.rejected + 1)
            if not self._first:
                file, bad = locate(shard, item)
                self._first = f"{file}:{bad.line}: {bad.reason}"
        self.position = position
        if is_hopeless(self._max_bad_lines, position.rejected, position.lines):
            raise UserError(
                f"stream {self.stream} has {too_many(self._max_bad_lines, position.lines)}, the first is {self._first}"
                f"; they are listed in {self._listed_in}: fix them or allow more with --max_bad_lines"
            )

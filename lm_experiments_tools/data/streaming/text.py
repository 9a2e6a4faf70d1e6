"""The text of a streamed run: its shards are assigned to streams, which read them in an order fixed by the seed.

Shards (parts of files, shards of a Hugging Face dataset) are assigned to V streams, differently in each epoch. Six
shards of equal size in two streams:

    epoch       0         1         2
    stream 0    4 1 3     0 4 2     5 3 0   ...
    stream 1    0 5 2     3 1 5     1 2 4   ...

V depends on the data and on `--streams`, not on the number of workers. A stream, and each `Position` in it, is a
function of (data, seed).

Several texts (`--data_weights`, `--data_temperature` and so on) are mixed in each stream: the next document comes from
the text with the largest deficit in bytes. The bytes read of each text are
part of the position, so a mixture is a function of (data, settings, seed). Two texts of equal weights, with documents
of 3 bytes (a) and of 1 byte (b):

    bytes of a, b    0 0    3 0    3 1    3 2    3 3    6 3   ...
    document         a      b      b      b      a      b     ...

All texts have the same number of streams, the largest for which each of them can be balanced: one compressed file
leaves one stream.
"""

import heapq
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from lm_experiments_tools.data.mixture import mixing_rates
from lm_experiments_tools.data.order import permute, stream_key
from lm_experiments_tools.data.text.records import (
    Record,
    Rejected,
    RejectedRecords,
    locate,
    no_documents,
    read_shard,
    utf8_length,
)
from lm_experiments_tools.data.text.sources import Shard, content_of, file_stamp, plan_shards
from lm_experiments_tools.errors import UserError

logger = logging.getLogger(__name__)

_SHARDS_PER_STREAM = 8  # of files: streams come out of about equal size, and documents in a random order
_MIN_SHARD_BYTES = 1 << 12
_MAX_SHARD_BYTES = 64 << 20
_MAX_IMBALANCE = 1.1  # the largest stream over the average
_WAITS = (1.0, 4.0, 15.0, 60.0)  # seconds before another try, after those of the datasets package itself


@dataclass(frozen=True)
class Position:
    """A position in one text of a stream: after `items` records and rejected records of shard number `shard`.

    `rejected` and `lines` (rejected and usable records) count those of epoch 0, which meets each line once;
    `num_bytes` counts the bytes of all documents.
    """

    epoch: int = 0
    shard: int = 0
    items: int = 0
    rejected: int = 0
    lines: int = 0
    num_bytes: int = 0


@dataclass(frozen=True)
class StreamPlan:
    """The shards of a text and the number of streams that read them."""

    shards: tuple[Shard, ...]
    num_streams: int
    seed: int

    @classmethod
    def make(cls, inputs: Sequence[str], max_streams: int, seed: int) -> "StreamPlan":
        """Cut the inputs into shards for as many balanced streams as possible.

        Their number is at most `max_streams`; the largest has at most 1.1 times the average size. Raises UserError
        where an input does not exist or is empty.
        """
        shards = plan_shards(inputs)
        size = sum(shard.num_bytes for shard in shards)
        if size:
            wanted = size // (_SHARDS_PER_STREAM * max_streams)
            shards = plan_shards(inputs, min(max(wanted, _MIN_SHARD_BYTES), _MAX_SHARD_BYTES))
        sizes = sorted(_weights(shards), reverse=True)
        counts = range(min(max_streams, len(shards)), 0, -1)
        return cls(tuple(shards), next(n for n in counts if _is_balanced(sizes, n)), seed)

    def on_this_machine(self) -> "StreamPlan":
        """The plan with this machine's file times, since files may be copies. Raises UserError if sizes differ."""
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
    """Documents of one text in a stream, without end.

    Args:
        max_bad_lines: limit of rejected records of all streams.
        listed_in: the list of rejected records, for messages.
        rejected: receives the records rejected in epoch 0.

    Attributes:
        position: after the last document.
    """

    def __init__(
        self,
        plan: StreamPlan,
        stream: int,
        position: Position,
        text_key: str,
        max_bad_lines: int | None,
        listed_in: str | os.PathLike,
        rejected: list[Rejected] | None = None,
    ):
        self.plan, self.stream, self.position = plan, stream, position
        self.rejected: list[Rejected] = [] if rejected is None else rejected
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
        position, counts, num_bytes = self.position, self._counts, self.position.num_bytes
        if isinstance(item, Record):
            if position.epoch == 0:
                counts.accept()
            num_bytes += utf8_length(item.value)
        elif item.is_empty:
            counts.num_empty += 1
        elif position.epoch == 0:
            self.rejected.append(located := locate(shard, item))
            counts.add(located.where, located.reason)
        counted = (position.items + 1, counts.count, counts.lines, num_bytes)
        self.position = Position(position.epoch, position.shard, *counted)


# ---- the texts of a stream ----


@dataclass(frozen=True)
class MixedPlan:
    """The texts that all streams read, and their fractions of the bytes. A position has a `Position` for each text."""

    plans: tuple[StreamPlan, ...]
    shares: tuple[float, ...] = (1.0,)

    @classmethod
    def of_one(cls, inputs: Sequence[str], max_streams: int, seed: int) -> "MixedPlan":
        """The plan of inputs that are read as one text."""
        return cls((StreamPlan.make(inputs, max_streams, seed),))

    @property
    def num_streams(self) -> int:
        return self.plans[0].num_streams

    @classmethod
    def make(
        cls,
        inputs: Sequence[str],
        max_streams: int,
        seed: int,
        *,
        weights: Sequence[float] | None,
        blending: str,
        maximum: float | None,
        temperature: float,
    ) -> "MixedPlan":
        """Plan each of the inputs; the other arguments are those of `MixtureDataset`, with sizes in bytes of files."""
        seeds = [stream_key(seed, f"text {number}") for number in range(len(inputs))]
        while True:
            plans = [StreamPlan.make([path], max_streams, s) for path, s in zip(inputs, seeds, strict=True)]
            counts = {plan.num_streams for plan in plans}
            if len(counts) == 1:
                break
            max_streams = min(counts)
        rates = np.array(weights or [1.0] * len(plans), np.float64)
        if blending == "proportional":
            _check_sizes(inputs, plans)
            sizes = [sum(shard.num_bytes for shard in plan.shards) for plan in plans]
            rates = mixing_rates(sizes, rates, maximum, temperature)
        return cls(tuple(plans), tuple((rates / rates.sum()).tolist()))

    def on_this_machine(self) -> "MixedPlan":
        """See `StreamPlan.on_this_machine`."""
        return replace(self, plans=tuple(plan.on_this_machine() for plan in self.plans))

    def open(self, stream: int, begin: Sequence[Mapping[str, int]], **options: Any) -> "MixedText":
        """The text of a stream from a position as JSON ([]: the start), with the options of `StreamText`."""
        position = tuple(Position(**text) for text in begin or [{}] * len(self.plans))
        return MixedText(self, stream, position, **options)

    def identity(self) -> list[Any]:
        """Content of the shards, number of streams and seed of each text, and the fractions."""
        return [[content_of(plan.shards), plan.num_streams, plan.seed] for plan in self.plans] + [self.shares]

    def describe(self) -> str:
        """Log text: fractions and size of the texts."""
        shares = " : ".join(f"{share:.2%}" for share in self.shares)
        mixed = f"mixed {shares} of their bytes, " if len(self.plans) > 1 else ""
        return f"{mixed}{sum(len(plan.shards) for plan in self.plans)} shards in {self.num_streams} streams"


def _check_sizes(inputs: Sequence[str], plans: Sequence[StreamPlan]) -> None:
    """Refuse proportions by sizes that are unknown or not comparable."""
    kinds = {(shard.kind == "dataset", shard.end is None) for plan in plans for shard in plan.shards}
    if len(kinds) > 1 or (True, True) in kinds:
        raise UserError(
            f"the sizes of {', '.join(inputs)} do not compare (unknown for datasets, and only some files are "
            "compressed): give the shares by --data_blending megatron and --data_weights"
        )


class MixedText:
    """Documents of one stream, without end.

    Attributes:
        position: after the last document, in each text.
        rejected: records rejected in epoch 0.
    """

    def __init__(self, plan: MixedPlan, stream: int, position: tuple[Position, ...], **options: Any):
        self.position, self.rejected, self._shares = position, [], np.array(plan.shares)
        self._texts = [
            StreamText(part, stream, begin, **options, rejected=self.rejected)
            for part, begin in zip(plan.plans, position, strict=True)
        ]

    def __iter__(self) -> Iterator[Record]:
        endless = [iter(text) for text in self._texts]
        while True:
            document = next(endless[self._next_text()])
            self.position = tuple(text.position for text in self._texts)
            yield document

    def _next_text(self) -> int:
        """The text with the largest deficit in bytes."""
        if len(self._texts) == 1:
            return 0
        num_bytes = np.array([text.position.num_bytes for text in self._texts])
        return int((self._shares * max(int(num_bytes.sum()), 1) - num_bytes).argmax())

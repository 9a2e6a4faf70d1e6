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

A text that cannot be balanced over V streams, such as one compressed file, has n, a divisor of V; V / n streams read
all of each of them and use its documents in round robin, so that no document is in two streams.
"""

import heapq
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np

from lm_experiments_tools.data.mixture import mixing_rates
from lm_experiments_tools.data.order import permute, stream_key
from lm_experiments_tools.data.text.records import (
    Record,
    Rejected,
    RejectedRecords,
    is_hopeless,
    locate,
    no_documents,
    read_shard,
    too_many,
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
    """Position in a stream: after `items` records (rejected ones included) of its `shard`-th shard in an epoch.

    `rejected` and `lines` (all records) count records of epoch 0 only, so that each counts once.
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
        """Cut the inputs into shards for as many balanced streams as possible.

        Their number is at most `max_streams` (a divisor of it with `divisor`); the largest has at most 1.1 times the
        average size. Raises UserError where an input does not exist or is empty.
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

    def open(self, stream: int, begin: Mapping[str, Any], **options: Any) -> "StreamText":
        """The text of a stream from a `Position` ({}: the start), with the other arguments of `StreamText`."""
        return StreamText(self, stream, Position(**begin), **options)

    def identity(self) -> list[Any]:
        """See `content_of`."""
        return content_of(self.shards)

    def describe(self) -> str:
        """Log text: the size of the text."""
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
    """Documents of one stream, without end.

    Args:
        max_bad_lines: limit of rejected records of all streams.
        listed_in: the list of rejected records, for messages.

    Attributes:
        position: after the last document.
        rejected: (file, record) of those rejected in epoch 0.
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
        """The rest of a shard, reopened where a connection breaks; the position is after the yielded item."""
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
                    raise OSError(f"{where}: {error}; {len(_WAITS)} more tries did not help") from error
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


# ---- several texts in given proportions ----


@dataclass(frozen=True)
class TextPosition:
    """Position in one text of a mixed stream: documents read so far, and bytes of the used ones."""

    position: Position = field(default_factory=Position)
    documents: int = 0
    num_bytes: int = 0


@dataclass(frozen=True)
class MixedPosition:
    """A position in a stream of several texts; `rejected` and `lines` as in `Position`."""

    texts: tuple[TextPosition, ...]
    rejected: int = 0
    lines: int = 0


@dataclass(frozen=True)
class MixedPlan:
    """Several texts read by the same streams, and their fractions of the bytes."""

    plans: tuple[StreamPlan, ...]
    shares: tuple[float, ...]
    num_streams: int

    @classmethod
    def make(
        cls,
        inputs: Sequence[str],
        num_streams: int,
        seed: int,
        *,
        weights: Sequence[float] | None,
        blending: str,
        maximum: float | None,
        temperature: float,
    ) -> "MixedPlan":
        """Plan each of the inputs; the other arguments are those of `MixtureDataset`, with sizes in bytes of files."""
        seeds = [stream_key(seed, f"text {number}") for number in range(len(inputs))]
        plans = [StreamPlan.make([path], num_streams, s, True) for path, s in zip(inputs, seeds, strict=True)]
        rates = np.array(weights or [1.0] * len(plans), np.float64)
        if blending == "proportional":
            _check_sizes(inputs, plans)
            sizes = [sum(shard.num_bytes for shard in plan.shards) for plan in plans]
            rates = mixing_rates(sizes, rates, maximum, temperature)
        return cls(tuple(plans), tuple((rates / rates.sum()).tolist()), num_streams)

    @property
    def shards(self) -> tuple[Shard, ...]:
        """Shards of all texts."""
        return tuple(shard for plan in self.plans for shard in plan.shards)

    def on_this_machine(self) -> "MixedPlan":
        """See `StreamPlan.on_this_machine`."""
        return replace(self, plans=tuple(plan.on_this_machine() for plan in self.plans))

    def open(self, stream: int, begin: Mapping[str, Any], **options: Any) -> "MixedText":
        """The text of a stream from a `MixedPosition` ({}: the start)."""
        texts = begin.get("texts", [{"position": {}}] * len(self.plans))
        positions = [TextPosition(**{**text, "position": Position(**text["position"])}) for text in texts]
        return MixedText(self, stream, MixedPosition(**{**begin, "texts": tuple(positions)}), **options)

    def identity(self) -> list[Any]:
        """`StreamPlan.identity`, number of streams and seed of each text, and the fractions."""
        return [[plan.identity(), plan.num_streams, plan.seed] for plan in self.plans] + [self.shares]

    def describe(self) -> str:
        """Log text: fractions and size of the texts."""
        shares = " : ".join(f"{share:.2%}" for share in self.shares)
        return f"mixed {shares} of their bytes, {len(self.shards)} shards in {self.num_streams} streams"


def _check_sizes(inputs: Sequence[str], plans: Sequence[StreamPlan]) -> None:
    """Refuse proportions by sizes that are unknown or not comparable."""
    remedy = "give the shares by --data_blending megatron and --data_weights"
    compressed = [{shard.end is None for shard in plan.shards} for plan in plans]
    for path, plan, kinds in zip(inputs, plans, compressed, strict=True):
        if any(shard.kind == "dataset" for shard in plan.shards):
            raise UserError(f"how much text {path} has is not known while it is streamed: {remedy}")
        if kinds != compressed[0] or len(kinds) > 1:
            files = path if len(kinds) > 1 else f"{inputs[0]} and {path}"
            raise UserError(f"of the files of {files} only some are compressed, so sizes do not compare: {remedy}")


class MixedText:
    """Documents of one stream, without end; `position` and `rejected` are as in `StreamText`."""

    def __init__(self, plan: MixedPlan, stream: int, position: MixedPosition, **options: Any):
        self.position, self.rejected = position, []
        self._shares = np.array(plan.shares)
        self._texts = [
            StreamText(part, stream % part.num_streams, text.position, **options)
            for part, text in zip(plan.plans, position.texts, strict=True)
        ]
        # for each text: number of streams that read its documents in round robin, and the index of this one
        self._sharing = [(plan.num_streams // p.num_streams, stream // p.num_streams) for p in plan.plans]

    def __iter__(self) -> Iterator[Record]:
        endless = [iter(text) for text in self._texts]
        num_bytes = np.array([text.num_bytes for text in self.position.texts])
        while True:
            number = int((self._shares * max(int(num_bytes.sum()), 1) - num_bytes).argmax())
            yield self._take(number, endless[number])
            num_bytes[number] = self.position.texts[number].num_bytes

    def _take(self, number: int, documents: Iterator[Record]) -> Record:
        """The next document of a text that belongs to this stream; moves the position past it."""
        text, (num_sharing, index), before = self._texts[number], self._sharing[number], self.position.texts[number]
        known, seen = len(text.rejected), before.documents
        while True:
            document, seen = next(documents), seen + 1
            if (seen - 1) % num_sharing == index:
                break
        new = [] if index else text.rejected[known:]  # one of the streams lists them
        self.rejected += new
        texts = list(self.position.texts)
        texts[number] = TextPosition(text.position, seen, before.num_bytes + utf8_length(document.value))
        lines = self.position.lines + (0 if index else text.position.lines - before.position.lines)
        self.position = MixedPosition(tuple(texts), self.position.rejected + len(new), lines)
        return document

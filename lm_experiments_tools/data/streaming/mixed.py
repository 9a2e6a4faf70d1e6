"""Several texts streamed in given proportions (`--streaming` with `--data_weights`, `--data_temperature` and so on).

Every stream is a mixture: the next document comes from the text that is furthest behind its share of the bytes that
the stream has read, and each text continues, epoch after epoch, where it was left. The bytes read of each text are
part of the position in a stream, so a mixture is a function of (data, settings, seed) like a stream of one text. Two
texts of equal shares, with documents of 3 bytes (a) and of 1 byte (b):

    bytes of a, b    0 0    3 0    3 1    3 2    3 3    6 3   ...
    document         a      b      b      b      a      b     ...

A text that cannot be balanced over V streams, such as one compressed file, has fewer, a divisor n of V; the V / n
streams that share one of them read all of it and take its documents in round robin. So no document is in two streams,
and none is repeated before all of its text has been read.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from lm_experiments_tools.data.mixture import mixing_rates
from lm_experiments_tools.data.order import stream_key
from lm_experiments_tools.data.streaming.text import Position, StreamPlan, StreamText
from lm_experiments_tools.data.text.records import Record, utf8_length
from lm_experiments_tools.data.text.sources import Shard
from lm_experiments_tools.errors import UserError


@dataclass(frozen=True)
class TextPosition:
    """A position in one text of a stream: documents read so far, and bytes of those that were taken."""

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
    """Several texts read by the same streams, and their shares of the bytes, which sum to 1."""

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
        """Plan each of the inputs; the other arguments are those of `MixtureDataset`, with sizes in bytes of files.

        Raises:
            UserError: an input that does not exist or holds nothing, or shares that follow from unknown sizes.
        """
        seeds = [stream_key(seed, f"text {number}") for number in range(len(inputs))]
        plans = [StreamPlan.make([path], num_streams, own, True) for path, own in zip(inputs, seeds, strict=True)]
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
        """The plan with the times of the files here; raises as `StreamPlan.on_this_machine`."""
        return replace(self, plans=tuple(plan.on_this_machine() for plan in self.plans))

    def open(self, stream: int, begin: Mapping[str, Any], **options: Any) -> "MixedText":
        """The text of a stream from a `MixedPosition` ({}: the start)."""
        texts = begin.get("texts", [{"position": {}}] * len(self.plans))
        positions = [TextPosition(**{**text, "position": Position(**text["position"])}) for text in texts]
        return MixedText(self, stream, MixedPosition(**{**begin, "texts": tuple(positions)}), **options)

    def identity(self) -> list[Any]:
        """What `StreamPlan.identity` gives for each text, its number of streams and seed, and the shares."""
        return [[plan.identity(), plan.num_streams, plan.seed] for plan in self.plans] + [self.shares]

    def describe(self) -> str:
        """Shares and size, for the log."""
        shares = " : ".join(f"{share:.2%}" for share in self.shares)
        return f"mixed {shares} of their bytes, {len(self.shards)} shards in {self.num_streams} streams"


def _check_sizes(inputs: Sequence[str], plans: Sequence[StreamPlan]) -> None:
    """Refuse shares by the sizes of texts that are not known, or do not compare."""
    remedy = "give the shares by --data_blending megatron and --data_weights"
    compressed = [{shard.end is None for shard in plan.shards} for plan in plans]
    for path, plan, kinds in zip(inputs, plans, compressed, strict=True):
        if any(shard.kind == "dataset" for shard in plan.shards):
            raise UserError(f"how much text {path} has is not known while it is streamed: {remedy}")
        if kinds != compressed[0] or len(kinds) > 1:
            files = path if len(kinds) > 1 else f"{inputs[0]} and {path}"
            raise UserError(f"of the files of {files} only some are compressed, so sizes do not compare: {remedy}")


class MixedText:
    """Documents of one stream, endlessly; `position` and `rejected` are as in `StreamText`."""

    def __init__(self, plan: MixedPlan, stream: int, position: MixedPosition, **options: Any):
        self.position, self.rejected = position, []
        self._shares = np.array(plan.shares)
        self._texts: list[StreamText] = []
        # for each text: number of streams that share it, and the index of this one
        self._sharing: list[tuple[int, int]] = []
        for part, text in zip(plan.plans, position.texts, strict=True):
            index, number = divmod(stream, part.num_streams)
            self._texts.append(StreamText(part, number, text.position, **options))
            self._sharing.append((plan.num_streams // part.num_streams, index))

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

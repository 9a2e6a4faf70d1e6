"""Several texts streamed in given shares (`--streaming` with `--data_weights`, `--data_temperature` and their like).

Every stream is a mixture by itself: the next document comes from the text that is furthest behind its share of the
bytes that the stream has given, and each text goes on, pass after pass, where it was left. What has been given of each
is part of the place in a stream, so that a mixture is a function of (data, settings, seed) as a stream of one text is.
Two texts of equal shares, with documents of 3 bytes (a) and of 1 byte (b):

    given of a, b    0 0    3 0    3 1    3 2    3 3    6 3   ...
    document         a      b      b      b      a      b     ...

A text that cannot be dealt evenly to V streams, such as one compressed file, is dealt to fewer, a divisor n of V; the
V / n streams that share a part of it read all of that, and each takes its turn of the documents. So no document is in
two streams, and none comes again before all of its text has been read, however many streams there are.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lm_experiments_tools.data.mixture import mixing_rates
from lm_experiments_tools.data.order import stream_key
from lm_experiments_tools.data.streaming.text import Position, StreamPlan, StreamText
from lm_experiments_tools.data.text.bad_lines import BadLine
from lm_experiments_tools.data.text.documents import Document, Piece
from lm_experiments_tools.data.text.encoding import num_bytes
from lm_experiments_tools.errors import UserError


@dataclass(frozen=True)
class TextPosition:
    """A place in one of the texts of a stream: documents met up to there, and bytes given of those that were taken."""

    place: Position = Position()
    documents: int = 0
    given: int = 0


@dataclass(frozen=True)
class MixedPosition:
    """A place in a stream of several texts; `bad_lines` as those of `Position`."""

    texts: tuple[TextPosition, ...]
    bad_lines: int = 0


@dataclass(frozen=True)
class MixedPlan:
    """How several texts are dealt to the same streams, and their shares of the bytes, which sum to 1."""

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
        """Deal each of the inputs; the other arguments are those of `MixtureDataset`, with sizes in bytes of files.

        Raises:
            UserError: an input that does not exist or holds nothing, or shares that follow from unknown sizes.
        """
        seeds = [stream_key(seed, f"text {number}") for number in range(len(inputs))]
        plans = [StreamPlan.make([path], num_streams, own, True) for path, own in zip(inputs, seeds, strict=True)]
        rates = np.array(weights or [1.0] * len(plans), np.float64)
        if blending == "proportional":
            _check_sizes(inputs, plans)
            sizes = [sum(piece.num_bytes for piece in plan.pieces) for plan in plans]
            rates = mixing_rates(sizes, rates, maximum, temperature)
        return cls(tuple(plans), tuple((rates / rates.sum()).tolist()), num_streams)

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """Pieces of all texts."""
        return tuple(piece for plan in self.plans for piece in plan.pieces)

    def on_this_machine(self) -> "MixedPlan":
        """The plan with the times of the files here; raises as `StreamPlan.on_this_machine`."""
        return replace(self, plans=tuple(plan.on_this_machine() for plan in self.plans))

    def open(self, stream: int, begin: Mapping[str, Any], **reading: Any) -> "MixedText":
        """The text of a stream from a `MixedPosition` on ({}: from the start)."""
        texts = begin.get("texts", [{}] * len(self.plans))
        places = [TextPosition(**{**text, "place": Position(**text.get("place", {}))}) for text in texts]
        return MixedText(self, stream, MixedPosition(tuple(places), begin.get("bad_lines", 0)), **reading)

    def identity(self) -> list[Any]:
        """What `StreamPlan.identity` gives for each text, how it is dealt, and the shares."""
        return [[plan.identity(), plan.num_streams, plan.seed] for plan in self.plans] + [self.shares]

    def describe(self) -> str:
        """Shares and size, for the log."""
        shares = " : ".join(f"{share:.2%}" for share in self.shares)
        return f"mixed {shares} of their bytes, {len(self.pieces)} pieces in {self.num_streams} streams"


def _check_sizes(inputs: Sequence[str], plans: Sequence[StreamPlan]) -> None:
    """Refuse shares by the sizes of texts that are not known, or do not compare."""
    remedy = "say the shares by --data_blending megatron and --data_weights"
    compressed = [{piece.end is None for piece in plan.pieces} for plan in plans]
    for path, plan, kinds in zip(inputs, plans, compressed, strict=True):
        if any(piece.kind == "dataset" for piece in plan.pieces):
            raise UserError(f"how much text {path} has is not known while it is streamed: {remedy}")
        if kinds != compressed[0] or len(kinds) > 1:
            files = path if len(kinds) > 1 else f"{inputs[0]} and {path}"
            raise UserError(f"of the files of {files} only some are compressed, so sizes do not compare: {remedy}")


class MixedText:
    """Documents of one stream, endlessly; `position` and `bad_lines` are those of a `StreamText`."""

    def __init__(self, plan: MixedPlan, stream: int, position: MixedPosition, **reading: Any):
        self.position, self.bad_lines = position, []
        self._shares = np.array(plan.shares)
        self._texts: list[StreamText] = []
        self._turns: list[tuple[int, int]] = []  # of each text: streams that share its part, and this one's place
        for part, text in zip(plan.plans, position.texts, strict=True):
            place, number = divmod(stream, part.num_streams)
            self._texts.append(StreamText(part, number, text.place, **reading))
            self._turns.append((plan.num_streams // part.num_streams, place))

    def __iter__(self) -> Iterator[Document]:
        endless = [iter(text) for text in self._texts]
        given = np.array([text.given for text in self.position.texts])
        while True:
            number = int((self._shares * max(int(given.sum()), 1) - given).argmax())
            yield self._take(number, endless[number])
            given[number] = self.position.texts[number].given

    def _take(self, number: int, documents: Iterator[Document]) -> Document:
        """The next document of a text that is this stream's to take, and the position behind it."""
        text, (turns, own), before = self._texts[number], self._turns[number], self.position.texts[number]
        known, seen = len(text.bad_lines), before.documents
        while True:
            document, seen = next(documents), seen + 1
            if (seen - 1) % turns == own:
                break
        new: list[tuple[Piece, BadLine]] = [] if own else text.bad_lines[known:]  # each is listed by one stream
        self.bad_lines += new
        places = list(self.position.texts)
        places[number] = TextPosition(text.position, seen, before.given + num_bytes(document.text))
        self.position = MixedPosition(tuple(places), self.position.bad_lines + len(new))
        return document

"""The text of a streamed run: dealt to streams, read in an order that the seed fixes, from any position on.

Pieces (parts of files, shards of a Hugging Face dataset) are dealt to V streams. Each stream reads its pieces,
document after document, and when they end goes on with another pass over the text, divided anew. Six pieces of equal
size in two streams, each pass in an order of its own:

    pass        0         1         2
    stream 0    4 1 3     0 4 2     5 3 0   ...
    stream 1    0 5 2     3 1 5     1 2 4   ...

V depends on the data and on `--streams`, never on the number of workers. A stream is a function of (data, seed), and
so is each place in it (`Position`), whatever the speed of the source and whoever reads it.
"""

import heapq
import logging
import os
import time
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from typing import Any

import numpy as np

from lm_experiments_tools.data.order import permute, stream_key
from lm_experiments_tools.data.text import hf_datasets
from lm_experiments_tools.data.text.bad_lines import BadLine, EmptyText, no_documents
from lm_experiments_tools.data.text.documents import Document, Piece, file_stamp, lines_before, plan_pieces, read_piece
from lm_experiments_tools.data.text.encoding import Encoding, encode_documents, num_bytes
from lm_experiments_tools.data.text.vocabulary import Vocabulary
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.files import hash_of_ends

logger = logging.getLogger(__name__)

_PIECES_PER_STREAM = 8  # of files: streams come out of about equal size, and documents in a random order
_SMALLEST_PIECE = 1 << 12
_LARGEST_PIECE = 64 << 20
_UNEVEN = 1.1  # the largest stream may have so many times the average
_BATCH_BYTES = 1 << 16  # text per call into sentencepiece: little, so that the first chunk is there soon
_KEPT_BYTES = 1 << 20  # text of each stream held in memory: a chunk may be made of thousands of passes over a tiny one
_ITEM_BYTES = 200  # of a document besides its text
_COUNTED_BYTES = 256 << 20  # of a file, read to give the number of a bad line: a fraction of a second
_WAITS = (1.0, 4.0, 15.0, 60.0)  # seconds before another try, after those of the datasets package itself


@dataclass(frozen=True)
class Position:
    """A place in a stream: behind it are `items` documents and bad lines of piece `piece` of pass `passes`.

    `bad_lines` counts those of pass 0, in which each line of the text is met once.
    """

    passes: int = 0
    piece: int = 0
    items: int = 0
    bad_lines: int = 0


@dataclass(frozen=True)
class StreamPlan:
    """How pieces are dealt to streams."""

    pieces: tuple[Piece, ...]
    num_streams: int
    seed: int

    @classmethod
    def make(cls, inputs: Sequence[str], max_streams: int, seed: int, divisor: bool = False) -> "StreamPlan":
        """Cut the inputs and choose the number of streams.

        It is the largest up to `max_streams` (a divisor of it, if so asked) for which the largest stream has at most
        1.1 times the average.

        Raises:
            UserError: an input does not exist or holds nothing.
        """
        pieces = plan_pieces(inputs)
        size = sum(piece.num_bytes for piece in pieces)
        if size:
            wanted = size // (_PIECES_PER_STREAM * max_streams)
            pieces = plan_pieces(inputs, min(max(wanted, _SMALLEST_PIECE), _LARGEST_PIECE))
        loads = sorted(_weights(pieces), reverse=True)
        counts = [n for n in range(min(max_streams, len(pieces)), 0, -1) if not (divisor and max_streams % n)]
        num_streams = next(n for n in counts if _is_even(loads, n))
        return cls(tuple(pieces), num_streams, seed)

    def on_this_machine(self) -> "StreamPlan":
        """The plan with the times of the files here, which may be copies of those of the process that made it.

        Raises:
            UserError: a file is missing here, or is of another size.
        """
        stamps: dict[str, tuple[int, int]] = {}
        for piece in self.pieces:
            if piece.stamp is None or piece.path in stamps:
                continue
            found = file_stamp(piece.path) if os.path.exists(piece.path) else (-1, 0)
            if found[0] != piece.stamp[0]:
                here = f"{found[0]:,} bytes" if found[0] >= 0 else "missing"
                raise UserError(
                    f"{piece.path} has {piece.stamp[0]:,} bytes where the run was planned and is {here} here: every "
                    f"machine needs the same text, and nothing may write to it"
                )
            stamps[piece.path] = found
        return replace(self, pieces=tuple(replace(piece, stamp=stamps.get(piece.path)) for piece in self.pieces))

    def open(self, stream: int, begin: Mapping[str, Any], **reading: Any) -> "StreamText":
        """The text of a stream from a `Position` on ({}: from the start), with the other arguments of `StreamText`."""
        return StreamText(self, stream, Position(**begin), **reading)

    def identity(self) -> list[Any]:
        """Names, bounds, sizes, beginnings and ends of files; files of a dataset. Not where they lie or since when."""
        identities = {
            path: hf_datasets.identity(path)
            for path in dict.fromkeys(piece.path for piece in self.pieces if piece.kind == "dataset")
        }
        pieces = [
            (os.path.basename(piece.path), piece.kind, piece.start, piece.end, piece.num_bytes)
            for piece in self.pieces
        ]
        files = dict.fromkeys(piece.path for piece in self.pieces if piece.kind != "dataset")
        return [pieces, [hash_of_ends(path) for path in files], list(identities.values())]

    def describe(self) -> str:
        """The size, for the log."""
        return f"{len(self.pieces)} pieces in {self.num_streams} streams"

    def pieces_of(self, stream: int, passes: int) -> list[Piece]:
        """Pieces of a stream in one pass, in the order in which they are read."""
        return [self.pieces[number] for number in _deal(self, passes)[stream]]


def _weights(pieces: Sequence[Piece]) -> list[int]:
    """Bytes of each; shards of a dataset, whose size is not known, count as the average."""
    sizes = [piece.num_bytes for piece in pieces]
    average = sum(sizes) // max(sum(size > 0 for size in sizes), 1) or 1
    return [size or average for size in sizes]


def _is_even(loads: Sequence[int], num_streams: int) -> bool:
    sums = [0] * num_streams
    for load in loads:
        heapq.heapreplace(sums, sums[0] + load)
    return max(sums) * num_streams <= _UNEVEN * sum(sums)


@lru_cache(maxsize=4)
def _deal(plan: StreamPlan, passes: int) -> list[list[int]]:
    """Numbers of pieces by stream: the largest piece first, each to the emptiest stream; then in random order."""
    count = len(plan.pieces)
    if count == 1:  # of a tiny text, read in thousands of passes; the permutation takes milliseconds
        return [[0]]
    ranks = permute(np.arange(count), count, stream_key(plan.seed, "pieces"), np.full(count, passes)).tolist()
    weights = _weights(plan.pieces)
    streams: list[list[int]] = [[] for _ in range(plan.num_streams)]
    emptiest = [(0, stream) for stream in range(plan.num_streams)]
    for number in sorted(range(count), key=lambda number: (-weights[number], ranks[number])):
        load, stream = emptiest[0]
        heapq.heapreplace(emptiest, (load + weights[number], stream))
        streams[stream].append(number)
    return [sorted(numbers, key=ranks.__getitem__) for numbers in streams]


class StreamText:
    """Documents of one stream, endlessly.

    Attributes:
        position: behind the last document given.
        bad_lines: those of pass 0 met so far.

    Args:
        listed_in: the file where the caller lists `bad_lines`, for messages.

    Raises:
        UserError: more than `max_bad_lines` in pass 0; no document in as many pieces in a row as there are.
        OSError: a source that cannot be read, after some tries.
    """

    def __init__(
        self,
        plan: StreamPlan,
        stream: int,
        position: Position,
        text_key: str,
        max_bad_lines: int,
        listed_in: str | os.PathLike = "",
    ):
        self.plan, self.stream, self.position = plan, stream, position
        self._text_key, self._max_bad_lines, self._listed_in = text_key, max_bad_lines, listed_in
        self._first_bad_line, self._num_empty = "", 0
        self.bad_lines: list[tuple[Piece, BadLine]] = []
        self._kept: dict[Piece, list[Document | BadLine]] = {}
        self._room = _KEPT_BYTES

    def __iter__(self) -> Iterator[Document]:
        empty_pieces = 0
        while True:
            pieces = self.plan.pieces_of(self.stream, self.position.passes)
            while self.position.piece < len(pieces):
                piece = pieces[self.position.piece]
                found = False
                for item in self._kept_or_read(piece):
                    self._advance(piece, item)
                    if isinstance(item, Document):
                        found = True
                        yield item
                empty_pieces = 0 if found else empty_pieces + 1
                if empty_pieces > len(self.plan.pieces):
                    paths = list(dict.fromkeys(piece.path for piece in self.plan.pieces))
                    first = self._first_bad_line
                    raise no_documents(paths, self.position.bad_lines, first, self._listed_in, self._num_empty)
                self.position = replace(self.position, piece=self.position.piece + 1, items=0)
            self.position = replace(self.position, passes=self.position.passes + 1, piece=0)

    def _advance(self, piece: Piece, item: Document | BadLine) -> None:
        bad_lines = self.position.bad_lines
        is_bad = isinstance(item, BadLine) and not isinstance(item, EmptyText)
        self._num_empty += isinstance(item, EmptyText)
        if is_bad and not self._first_bad_line:
            self._first_bad_line = "{file}:{line}: {reason}".format(**_listing(piece, item))
        if is_bad and self.position.passes == 0:
            self.bad_lines.append((piece, item))
            bad_lines += 1
        self.position = replace(self.position, items=self.position.items + 1, bad_lines=bad_lines)
        if bad_lines > self._max_bad_lines:
            raise UserError(
                f"stream {self.stream} has more than {self._max_bad_lines} bad lines, the first is "
                f"{self._first_bad_line}; they are listed in {self._listed_in}: mend them or allow more with "
                f"--max_bad_lines"
            )

    def _kept_or_read(self, piece: Piece) -> Iterator[Document | BadLine]:
        """The rest of a piece; the first pieces that were read whole are kept for the passes to come."""
        begin = self.position.items
        if piece in self._kept:
            yield from islice(self._kept[piece], begin, None)
            return
        items: list[Document | BadLine] = []
        room = self._room if begin == 0 else -1
        for item in self._items(piece):
            room -= _weight(item)
            if room >= 0:
                items.append(item)
            else:
                items.clear()
            yield item
        if room >= 0:
            self._kept[piece], self._room = items, room

    def _items(self, piece: Piece) -> Iterator[Document | BadLine]:
        """The rest of a piece; begun again where the connection to a remote one breaks."""
        waits = iter(_WAITS)
        while True:
            before = self.position.items
            try:
                yield from read_piece(piece, self._text_key, skip=before)
                return
            except OSError as error:
                waits = iter(_WAITS) if self.position.items > before else waits
                wait = next(waits, None)
                if piece.kind != "dataset":
                    raise
                where = f"shard {piece.start} of {piece.path}, after {self.position.items:,} documents"
                if wait is None:
                    raise OSError(
                        f"{where}: {error}; {len(_WAITS)} more tries did not help: when the network is back, the same "
                        f"command goes on from the last checkpoint"
                    ) from error
                logger.warning("%s: %s; trying again in %.0f s", where, error, wait)
                time.sleep(wait)


def _weight(item: Document | BadLine) -> int:
    """Bytes of memory, about."""
    return _ITEM_BYTES + len(item.text if isinstance(item, Document) else item.content)


def _listing(piece: Piece, bad: BadLine) -> dict[str, Any]:
    """File, line, reason and content of a bad line.

    Where the file before its piece is too long to count, lines count from there.
    """
    file, line = piece.path, bad.line
    if piece.kind == "dataset":
        file += f", shard {piece.start}"
    elif piece.start <= _COUNTED_BYTES:
        line += lines_before(piece)
    else:
        file += f", from byte {piece.start} on"
    return {"file": file, "line": line, "reason": bad.reason, "content": bad.content}


class StreamTokens:
    """Token ids of the documents of one stream; `position` is behind the last one given.

    Args:
        text: a `StreamText`, or what else gives documents, a position behind each, and bad lines.
    """

    def __init__(self, text: Any, vocabulary: Vocabulary, encoding: Encoding):
        self._text, self._vocabulary, self._encoding = text, vocabulary, encoding
        self._encoded = self._encode()
        self.position = text.position
        self._taken_bad_lines = self._first_bad_line = text.position.bad_lines

    def next_document(self) -> tuple[array, int]:
        """Ids of the next document, and its bytes of text. Raises as `StreamText`."""
        ids, size, self.position = next(self._encoded)
        return ids, size

    def take_bad_lines(self, all_met: bool = False) -> list[dict[str, Any]]:
        """Bad lines of pass 0 before `position` that were not taken yet; `all_met`: those read ahead too."""
        first, last = self._taken_bad_lines, self.position.bad_lines
        self._taken_bad_lines = last
        offset = self._first_bad_line
        lines = self._text.bad_lines[first - offset : None if all_met else last - offset]
        return [_listing(piece, bad) for piece, bad in lines]

    def _encode(self) -> Iterator[tuple[array, int, Position]]:
        batch: list[tuple[str, int, Position]] = []
        batch_bytes = 0
        for document in self._text:
            batch.append((document.text, num_bytes(document.text), self._text.position))
            batch_bytes += batch[-1][1]
            if batch_bytes >= _BATCH_BYTES:
                texts, sizes, positions = zip(*batch, strict=True)
                encoded = encode_documents(texts, self._vocabulary, self._encoding)
                yield from zip(encoded, sizes, positions, strict=True)
                batch, batch_bytes = [], 0

"""Rows of whole documents for encoders, packed by lengths: random access, no state.

One worked example, rows of 8, [CLS] 1, [SEP] 2, padding 0, documents 11 ... 19, 21 22, 31 and 41 42 43. A row has room
for 6 tokens of one document, so the first becomes two chunks:

    chunks               11 ... 16    17 18 19    21 22    31    41 42 43
    with [CLS] and [SEP]         8           5        4     3           5
    patterns of lengths  (8) once, (5 3) once, (5) once, (4) once

    input_ids      1 17 18 19  2  1 31  2        attention_mask  1 1 1 1 1 1 1 1
    segment_ids    1  1  1  1  1  2  2  2

Which lengths share a row is decided once, by best-fit decreasing on the histogram of lengths (Krell et al., "Efficient
Sequence Packing without Cross-contamination", https://arxiv.org/abs/2107.02027, section 3). All chunks of one length
are interchangeable, so every epoch deals them to the places of that length anew, and permutes the rows. A row is a
pure function of (seed, epoch, row).
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from lm_experiments_tools.data.objectives.token_stream import CHECKED_AT_START, check_ids
from lm_experiments_tools.data.order import permute, sample_words, stream_key
from lm_experiments_tools.errors import UserError

if TYPE_CHECKING:
    from lm_experiments_tools.data.tokens.indexed import IndexedDataset

_VERSION = 1  # of the mapping (seed, sample) -> row; part of the fingerprint
_32 = np.uint64(32)


class Patterns(NamedTuple):
    """Kinds of rows, by the lengths of their chunks.

    Attributes:
        lengths: int64[places], of each place of a pattern, pattern after pattern.
        sizes: int64[patterns], number of places.
        counts: int64[patterns], number of rows of each.
    """

    lengths: np.ndarray
    sizes: np.ndarray
    counts: np.ndarray


def pack_lengths(counts: np.ndarray, width: int) -> Patterns:
    """Best-fit decreasing on a histogram: the fullest row that has room takes the next longest chunk.

    The time depends on the number of different lengths, not on that of chunks.

    Args:
        counts: int64[width + 1], number of chunks of each length.
        width: tokens of a row.
    """
    open_rows: list[list[tuple[tuple[int, ...], int]]] = [[] for _ in range(width + 1)]  # by free tokens
    for length in range(width, 0, -1):
        left = int(counts[length])
        free = length
        while left and free <= width:
            if not open_rows[free]:
                free += 1
                continue
            pattern, rows = open_rows[free].pop()
            fitting = min(free // length, left)  # of this length in one row
            taken = min(rows, left // fitting)
            if taken < rows:
                open_rows[free].append((pattern, rows - taken))
            open_rows[free - fitting * length].append((pattern + (length,) * fitting, taken))
            left -= fitting * taken
        in_one = width // length
        for size, rows in ((in_one, left // in_one), (left % in_one, 1)):
            if size and rows:
                open_rows[width - size * length].append(((length,) * size, rows))
    found = [group for groups in open_rows for group in groups]
    sizes = np.array([len(pattern) for pattern, _ in found], np.int64)
    lengths = np.array([length for pattern, _ in found for length in pattern], np.int64)
    return Patterns(lengths, sizes, np.array([rows for _, rows in found], np.int64))


class DocumentRows:
    """Rows of documents or chunks of them between [CLS] and [SEP], addressed by a global sample number.

    Global sample g is row permutation(seed, e)(i) of epoch e with e, i = divmod(g, len(self)). Every token of every
    document that is long enough is in one row of each epoch.

    Args:
        tokens: token file; the sequences of a document are read as one text.
        width: tokens of a row, special tokens included.
        cls_id, sep_id, pad_id: special tokens.
        vocab_size: ids at or above it are refused.
        packed: several chunks in a row; False puts each in a row of its own.
        min_length: shorter documents are left out, in tokens.
        has_end: documents end with a token that is no text (EOS), which is left out.
        seed: fixes the order.

    Raises:
        UserError: no document that is long enough, or a token id outside the vocabulary.
    """

    def __init__(
        self,
        tokens: IndexedDataset,
        width: int,
        *,
        cls_id: int,
        sep_id: int,
        pad_id: int,
        vocab_size: int,
        packed: bool = True,
        min_length: int = 1,
        has_end: bool = False,
        seed: int = 0,
    ) -> None:
        self.tokens, self.width, self.vocab_size, self.seed = tokens, width, vocab_size, seed
        self.cls_id, self.sep_id, self.pad_id = cls_id, sep_id, pad_id
        self.packed, self.min_length, self.has_end = packed, max(1, min_length), has_end
        begins, lengths = self._chunks()
        check_ids(np.asarray(tokens.tokens[:CHECKED_AT_START]), vocab_size)
        shuffled = permute(np.arange(len(lengths)), len(lengths), seed, np.zeros(len(lengths), np.int64))
        order = shuffled[np.argsort(lengths[shuffled], kind="stable")]
        self._begins = begins[order]  # of chunks by length, those of one length in random order
        self._of_length = np.bincount(lengths, minlength=width + 1)  # number of chunks of each length
        self._first_of_length = np.cumsum(self._of_length) - self._of_length
        found = self._patterns = self._choose_patterns()
        self._row_ends = np.cumsum(found.counts)
        self._first_place = np.cumsum(found.sizes) - found.sizes
        self._first_chunk = self._places()
        self._num_tokens = int(lengths.sum())
        self._shift_key = stream_key(seed, "deal")

    def _chunks(self) -> tuple[np.ndarray, np.ndarray]:
        """Begin in the token file and length with [CLS] and [SEP] of all chunks, int64[n] each."""
        tokens, room = self.tokens, self.width - 2
        bounds = [tokens.offsets(block) for block in tokens.document_bounds()]
        begins = np.concatenate([np.empty(0, np.int64), *(block[:-1] for block in bounds)])
        lengths = np.concatenate([np.empty(0, np.int64), *(np.diff(block) for block in bounds)]) - self.has_end
        long_enough = lengths >= self.min_length
        self.num_short = int(np.count_nonzero(~long_enough))
        begins, lengths = begins[long_enough], lengths[long_enough]
        if not len(lengths):
            raise UserError(
                f"{tokens.prefix} has no document of {self.min_length} tokens or more ({self.num_short} shorter): "
                "check the text, or lower --min_document_length."
            )
        self.num_documents = len(lengths)
        parts = -(-lengths // room)
        part = np.arange(parts.sum()) - np.repeat(np.cumsum(parts) - parts, parts)
        return np.repeat(begins, parts) + part * room, np.minimum(np.repeat(lengths, parts) - part * room, room) + 2

    def _choose_patterns(self) -> Patterns:
        if self.packed:
            return pack_lengths(self._of_length, self.width)
        lengths = np.flatnonzero(self._of_length)
        return Patterns(lengths, np.ones_like(lengths), self._of_length[lengths])

    def _places(self) -> np.ndarray:
        """int64[places]: the first chunk, of those of its length, that a place has; its next row has the next."""
        lengths, counts = self._patterns.lengths, np.repeat(self._patterns.counts, self._patterns.sizes)
        by_length = np.argsort(lengths, kind="stable")
        before = np.cumsum(counts[by_length]) - counts[by_length]
        first = np.empty_like(before)
        first[by_length] = before - self._first_of_length[lengths[by_length]]
        return first

    def __len__(self) -> int:
        """Rows in an epoch, the same in each."""
        return int(self._row_ends[-1])

    @property
    def fill(self) -> float:
        """Part of the cells of all rows that holds tokens."""
        return self._num_tokens / (len(self) * self.width)

    def describe(self) -> str:
        """The rows and the size of the data, for the log."""
        short = f", {self.num_short:,} shorter than {self.min_length} tokens left out" if self.num_short else ""
        kind = "packed rows" if self.packed else "rows of one document"
        return (
            f"{len(self):,} {kind} of {self.width} tokens, {self.fill:.1%} full, of {self.num_documents:,} documents"
            f"{short}; {self.tokens.num_tokens:,} training tokens"
        )

    def settings(self) -> dict[str, Any]:
        """What besides data and seed decides the rows; JSON values."""
        ids = [self.cls_id, self.sep_id, self.pad_id]
        return {"width": self.width, "ids": ids, "packed": self.packed, "shortest": [self.min_length, self.has_end]}

    @property
    def fingerprint(self) -> str:
        """sha256 over data, settings and seed: equal fingerprints give equal rows for equal numbers."""
        parts = {"version": _VERSION, "tokens": self.tokens.fingerprint, "seed": self.seed, **self.settings()}
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    order = fingerprint

    def batch(self, samples: np.ndarray) -> dict[str, np.ndarray]:
        """Rows of global sample numbers int64[n], any order, any epochs.

        Returns:
            int64[n, width] `input_ids`, `attention_mask` and, of packed rows, `segment_ids` (from 1 on, 0: padding).

        Raises:
            UserError: a token id outside the vocabulary.
        """
        sizes, begins, lengths = self._chunks_of(samples)
        row = np.repeat(np.arange(len(sizes)), sizes)
        ends = np.cumsum(lengths)
        first = np.cumsum(sizes) - sizes
        starts = ends - lengths
        column = starts - np.repeat(starts[first], sizes)  # of the [CLS] of each chunk
        cell = np.repeat(row * self.width + column - starts, lengths) + np.arange(ends[-1])
        place = np.arange(ends[-1]) - np.repeat(starts, lengths)
        ids = np.full((len(sizes), self.width), self.pad_id, np.int64)
        segments = np.zeros_like(ids)
        is_text = (place > 0) & (place < np.repeat(lengths - 1, lengths))
        found = np.asarray(self.tokens.tokens)[(np.repeat(begins - 1, lengths) + place)[is_text]]
        check_ids(found, self.vocab_size)
        ids.ravel()[cell[is_text]] = found
        ids.ravel()[cell[starts]], ids.ravel()[cell[ends - 1]] = self.cls_id, self.sep_id
        segments.ravel()[cell] = np.repeat(np.arange(len(row)) - first[row] + 1, lengths)
        batch = {"input_ids": ids, "attention_mask": (segments > 0).astype(np.int64)}
        return {**batch, "segment_ids": segments} if self.packed else batch

    def maps(self) -> tuple[np.ndarray, ...]:
        """The arrays that lie on the disk."""
        return self.tokens.maps()

    def will_need(self, samples: np.ndarray) -> None:
        """Prefetch the tokens of samples from the disk."""
        _, begins, lengths = self._chunks_of(samples)
        self.tokens.will_need(begins, begins + lengths - 2)

    def _chunks_of(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Chunks of each row int64[n]; begin and length with special tokens of each chunk, row after row."""
        epochs, indices = np.divmod(np.asarray(samples, np.int64), len(self))
        rows = permute(indices, len(self), self.seed, epochs)
        pattern = np.searchsorted(self._row_ends, rows, side="right")
        number = rows - (self._row_ends - self._patterns.counts)[pattern]  # among the rows of its pattern
        sizes = self._patterns.sizes[pattern]
        within = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        place = np.repeat(self._first_place[pattern], sizes) + within
        lengths = self._patterns.lengths[place]
        count = self._of_length[lengths]
        words = sample_words(self._shift_key, np.repeat(epochs, sizes), lengths, 2)
        shift = (words[0] << _32 | words[1]) % count.astype(np.uint64)
        chunk = (self._first_chunk[place] + np.repeat(number, sizes) + shift.astype(np.int64)) % count
        return sizes, self._begins[self._first_of_length[lengths] + chunk], lengths

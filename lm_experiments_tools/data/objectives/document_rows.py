"""Training rows of whole documents for encoders such as BERT, with several documents per row if packed.

Example with rows of 8 tokens, [CLS] 1, [SEP] 2, padding 0, and the documents 11 ... 19, 21 22, 31 and 41 42 43. A row
has 6 tokens besides [CLS] and [SEP], so the first document is cut into two chunks:

    chunks               11 ... 16    17 18 19    21 22    31    41 42 43
    with [CLS] and [SEP]         8           5        4     3           5
    rows, by lengths     (8) once, (5 3) once, (5) once, (4) once

    input_ids      1 17 18 19  2  1 31  2        attention_mask  1 1 1 1 1 1 1 1
    segment_ids    1  1  1  1  1  2  2  2

The lengths that share a row are computed once, on the histogram of lengths (`packing.pack_counts`). Each epoch
permutes the rows, and exchanges chunks of equal length.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from lm_experiments_tools.data.objectives.token_rows import CHECKED_AT_START, check_ids
from lm_experiments_tools.data.order import draw_integers, permute, row_generators, stream_key
from lm_experiments_tools.data.packing import Patterns, Segments, pack_counts
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.files import json_sha256

if TYPE_CHECKING:
    from lm_experiments_tools.data.objectives.mlm import MaskedLM
    from lm_experiments_tools.data.tokens.indexed import IndexedDataset

_ORDER_VERSION = 1  # of the mapping (seed, epoch, row) -> tokens; part of the fingerprint
_VERSION = 2  # of the mapping (seed, epoch, row) -> example; part of the fingerprint


class DocumentRows:
    """Rows of whole documents for BERT-like encoders, a `data.dataset.Rows`: each document between [CLS] and [SEP].

    Args:
        tokens: token file; the sequences of a document (such as its sentences) are read as one text.
        objective: masks the rows, which have its `input_length` tokens.
        min_length: shorter documents are dropped, in tokens.
        has_end: True if documents end with an EOS token, which is then dropped.

    Raises:
        UserError: all documents are too short, or a token id is outside the vocabulary.
    """

    def __init__(
        self, tokens: IndexedDataset, objective: MaskedLM, *, cls_id: int, sep_id: int,
        packed: bool = True, min_length: int = 1, has_end: bool = False, seed: int = 0,
    ) -> None:  # fmt: skip
        self.tokens, self.objective, self.width = tokens, objective, objective.input_length
        self.cls_id, self.sep_id, self.pad_id = cls_id, sep_id, objective.vocabulary.pad_id
        self.packed, self.seed, self.vocab_size = packed, seed, objective.vocabulary.size
        settings = [tokens.fingerprint, seed, self.width, cls_id, sep_id, self.pad_id, packed, min_length, has_end]
        self.order = json_sha256([_ORDER_VERSION, *settings])
        self.fingerprint = json_sha256([_VERSION, self.order, objective.settings()])
        begins, lengths = self._chunks(max(1, min_length), has_end)
        check_ids(np.asarray(tokens.tokens[:CHECKED_AT_START]), self.vocab_size)
        shuffled = permute(np.arange(len(lengths)), len(lengths), seed, np.zeros(len(lengths), np.int64))
        order = shuffled[np.argsort(lengths[shuffled], kind="stable")]
        self._begins = begins[order]  # of chunks by length, those of one length in random order
        self._of_length = np.bincount(lengths, minlength=self.width + 1)
        self._first_of_length = np.cumsum(self._of_length) - self._of_length
        used = np.flatnonzero(self._of_length)
        alone = Patterns(used, np.ones_like(used), self._of_length[used])
        self._patterns = pack_counts(self._of_length, self.width) if packed else alone
        self._row_ends = np.cumsum(self._patterns.counts)
        self._first_place = np.cumsum(self._patterns.sizes) - self._patterns.sizes
        self._first_chunk = self._chunks_of_places()
        self.fill = int(lengths.sum()) / (len(self) * self.width)  # the fraction of positions that are not padding
        self._rotation_key, self._noise_key = stream_key(seed, "rotation"), stream_key(seed, "noise")

    def _chunks(self, min_length: int, has_end: bool) -> tuple[np.ndarray, np.ndarray]:
        """Begin in the token file, and length with [CLS] and [SEP], of all chunks, int64[n] each."""
        room, bounds = self.width - 2, [self.tokens.offsets(block) for block in self.tokens.document_bounds()]
        begins = np.concatenate([np.empty(0, np.int64), *(block[:-1] for block in bounds)])
        lengths = np.concatenate([np.empty(0, np.int64), *(np.diff(block) for block in bounds)]) - has_end
        kept = lengths >= min_length
        short = f"{np.count_nonzero(~kept):,} shorter than {min_length}"
        if not kept.any():
            raise UserError(
                f"{self.tokens.prefix} has no document of {min_length} tokens or more ({short}): check the text, or "
                "lower --min_document_length."
            )
        begins, lengths = begins[kept], lengths[kept]
        self._documents = f"{len(lengths):,} documents ({short} left out)"
        parts = -(-lengths // room)
        before = (np.arange(parts.sum()) - np.repeat(np.cumsum(parts) - parts, parts)) * room
        return np.repeat(begins, parts) + before, np.minimum(np.repeat(lengths, parts) - before, room) + 2

    def _chunks_of_places(self) -> np.ndarray:
        """int64[places]: the chunk, among those of its length, of a place in the first row of its pattern."""
        lengths, counts = self._patterns.lengths, np.repeat(self._patterns.counts, self._patterns.sizes)
        by_length = np.argsort(lengths, kind="stable")
        first = np.empty_like(counts)
        first[by_length] = np.cumsum(counts[by_length]) - counts[by_length]
        return first - self._first_of_length[lengths]

    def __len__(self) -> int:
        return int(self._row_ends[-1])

    def describe(self) -> str:
        kind = "packed rows" if self.packed else "rows of one document"
        return (
            f"{self.objective.describe()}; {len(self):,} {kind}, {self.fill:.1%} full, of {self._documents}; "
            f"{self.tokens.num_tokens:,} tokens"
        )

    def batch(self, epochs: np.ndarray, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Return the rows int64[n] in epochs int64[n], masked.

        Returns:
            int64[n, width]: `input_ids`, `labels`, `attention_mask` and, if packed, `segment_ids` (1, 2, ... for the
            documents of a row; 0 for padding).

        Raises:
            UserError: a token id is outside the vocabulary.
        """
        sizes, begins, lengths = self._chunks_of(epochs, rows)
        segments = Segments(sizes, lengths, self.width)
        is_text = (segments.places > 0) & (segments.places < np.repeat(lengths - 1, lengths))
        text = np.asarray(self.tokens.tokens)[(np.repeat(begins - 1, lengths) + segments.places)[is_text]]
        check_ids(text, self.vocab_size)
        ids = np.full(len(segments.cells), self.sep_id, np.int64)
        ids[is_text], ids[segments.cu_seqlens[:-1]] = text, self.cls_id
        numbers = segments.ids()
        rngs = row_generators(self._noise_key, epochs, rows)
        batch = self.objective.examples(segments.filled(ids, self.pad_id), rngs)
        batch["attention_mask"] = (numbers > 0).astype(np.int64)
        return {**batch, "segment_ids": numbers} if self.packed else batch

    def _chunks_of(self, epochs: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Number of chunks of each row int64[n]; begin and length of each chunk, row after row."""
        pattern = np.searchsorted(self._row_ends, rows, side="right")
        number = rows - (self._row_ends - self._patterns.counts)[pattern]  # among the rows of its pattern
        sizes = self._patterns.sizes[pattern]
        place = np.arange(sizes.sum()) + np.repeat(self._first_place[pattern] - np.cumsum(sizes) + sizes, sizes)
        lengths = self._patterns.lengths[place]
        high, low = draw_integers(self._rotation_key, np.repeat(epochs, sizes), lengths, 2)
        count = self._of_length[lengths]
        shift = ((high << np.uint64(32) | low) % count.astype(np.uint64)).astype(np.int64)
        chunk = (self._first_chunk[place] + np.repeat(number, sizes) + shift) % count
        return sizes, self._begins[self._first_of_length[lengths] + chunk], lengths

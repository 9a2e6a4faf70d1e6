"""One endless tape of tokens, cut into rows that every objective numbers, shuffles and reads in the same way.

Eight tokens in rows of 3, in an epoch that starts at token 5 (`epoch_shift`):

    tape     0 1 2 3 4 5 6 7 | 0 1 2 ...        end joined to beginning
    row 0    5 6 7
    row 1    0 1 2
    row 2    3 4                                the rest: shorter, never dropped

Rows may have lengths in turn, for objectives that need more text in one row than in another: with lengths (3, 1) the
rows are 5 6 7, 0, 1 2 3, 4. Global sample g is row permutation(seed, e)(i) of epoch e, where e, i = divmod(g, rows).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from lm_experiments_tools.data.order import epoch_shift, permute
from lm_experiments_tools.errors import UserError

BLOCK = 64  # rows made at once: few enough for the caches, enough to spread the cost of numpy's calls
_CHECKED_AT_START = 1 << 20  # tokens of each source compared with the vocabulary before the first step
_VERSION = 1  # of the mapping (seed, sample) -> example; part of the fingerprint


class TokenSource(Protocol):
    """The part of an `IndexedDataset` that a tape reads."""

    tokens: np.ndarray
    fingerprint: str

    def will_need(self, begins: np.ndarray, ends: np.ndarray) -> None: ...


class Tape:
    """The tokens of one or several sources, read one after the other and then from the beginning again.

    Args:
        tokens: an `IndexedDataset` or several.
        vocab_size: ids at or above it are refused.

    Raises:
        UserError: no tokens, or a token id outside the vocabulary.
    """

    def __init__(self, tokens: TokenSource | Sequence[TokenSource], vocab_size: int) -> None:
        self.sources = list(tokens) if isinstance(tokens, Sequence) else [tokens]
        self.vocab_size = vocab_size
        # Plain arrays: a memmap's own slicing costs more than the copy of a row.
        self._filled = [source for source in self.sources if source.tokens.size]
        self._parts = [np.asarray(source.tokens) for source in self._filled]
        sizes = np.array([part.size for part in self._parts], np.int64)
        self._ends = np.cumsum(sizes)
        self._begins = self._ends - sizes
        if not self._parts:
            raise UserError(
                f"The token data is empty ({len(self.sources)} file(s), 0 tokens): check the path and that "
                "tokenization found text."
            )
        self.num_tokens = int(self._ends[-1])
        self._windows: dict[int, np.ndarray] = {}  # length -> view of the only part, for `read`
        for part in self._parts:
            self._check_ids(part[:_CHECKED_AT_START])

    def read(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Tokens int64[n, length] from each of `starts` int64[n] on, going round from the end to the beginning."""
        if len(self._parts) == 1 and int(starts.max()) <= self.num_tokens - length:
            if length not in self._windows:
                self._windows[length] = np.lib.stride_tricks.sliding_window_view(self._parts[0], length)
            found = self._windows[length][starts]
            self._check_ids(found)
            return found.astype(np.int64)
        tokens = np.empty((len(starts), length), np.int64)
        part_of = np.searchsorted(self._ends, starts, side="right")
        offsets = starts - self._begins[part_of]
        for row, part, offset in zip(tokens, part_of.tolist(), offsets.tolist(), strict=True):
            piece = self._parts[part][offset : offset + length]
            filled = piece.size
            row[:filled] = piece
            while filled < length:
                part = (part + 1) % len(self._parts)
                piece = self._parts[part][: length - filled]
                row[filled : filled + piece.size] = piece
                filled += piece.size
        self._check_ids(tokens)
        return tokens

    def will_need(self, starts: np.ndarray, lengths: np.ndarray) -> None:
        """Begin to read rows of these lengths, int64[n] each, from the disk."""
        part_of = np.searchsorted(self._ends, starts, side="right")
        for number in np.unique(part_of).tolist():
            here = part_of == number
            begins = starts[here] - self._begins[number]
            ends = np.minimum(begins + lengths[here], len(self._parts[number]))  # what goes round is not worth more
            self._filled[number].will_need(begins, ends)

    def _check_ids(self, tokens: np.ndarray) -> None:
        worst = int(tokens.max())
        if worst < self.vocab_size and tokens.dtype.kind == "i":
            worst = min(worst, int(tokens.min()))
        if not 0 <= worst < self.vocab_size:
            raise UserError(
                f"The token data holds id {worst}, but the vocabulary has ids 0 to {self.vocab_size - 1}: it was "
                "tokenized with another vocabulary; give that one, or tokenize again."
            )


class TapeDataset:
    """Base of all objectives: rows of a tape, addressed by a global sample number.

    Epoch e starts at a token drawn from (seed, e), so that cut points differ between epochs while every token is read
    exactly once in each. One row per epoch spans the join of the end with the beginning, as others span the border of
    two documents. A subclass makes examples of rows and draws its noise from (seed, epoch, row): an example is a pure
    function of (seed, g), whatever batch it is asked for in.

    Args:
        tokens, vocab_size: as `Tape`.
        row_lengths: tokens of a row; several are taken in turn.
        seed: fixes order, cut points and noise.
    """

    def __init__(
        self, tokens: TokenSource | Sequence[TokenSource], vocab_size: int, row_lengths: Sequence[int], seed: int
    ) -> None:
        self.tape = Tape(tokens, vocab_size)
        self.seed = seed
        self._row_ends = np.cumsum(np.asarray(row_lengths, np.int64))  # within one turn
        self._row_begins = self._row_ends - row_lengths
        turns, rest = divmod(self.num_tokens, int(self._row_ends[-1]))
        rows_of_rest = int(np.searchsorted(self._row_ends, rest)) + 1 if rest else 0
        self._num_samples = turns * len(row_lengths) + rows_of_rest
        last = self._num_samples - 1
        self.last_row_length = self.num_tokens - int(self._offsets(np.array([last]))[0])
        self.last_row_is_short = self.last_row_length < row_lengths[last % len(row_lengths)]

    @property
    def num_tokens(self) -> int:
        return self.tape.num_tokens

    @property
    def vocab_size(self) -> int:
        return self.tape.vocab_size

    def __len__(self) -> int:
        """Samples in an epoch, the same in each."""
        return self._num_samples

    @property
    def fingerprint(self) -> str:
        """sha256 over data, objective and seed: equal fingerprints give equal samples for equal numbers."""
        parts = {
            "version": _VERSION,
            "sources": [source.fingerprint for source in self.tape.sources],
            "seed": self.seed,
            **self.settings(),
        }
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    @property
    def order(self) -> str:
        """sha256 over what decides which tokens a sample is made of, whatever the objective does with them."""
        parts = [_VERSION, [s.fingerprint for s in self.tape.sources], self.seed, self._row_ends.tolist()]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def settings(self) -> dict[str, Any]:
        """The settings that, besides data and seed, decide how a sample looks; JSON values."""
        raise NotImplementedError

    def rows_of(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Epoch and row, int64[n] each, of global sample numbers int64[n]."""
        epochs, indices = np.divmod(np.asarray(samples, np.int64), self._num_samples)
        return epochs, permute(indices, self._num_samples, self.seed, epochs)

    def starts_of(self, epochs: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Where rows begin on the tape, int64[n]."""
        shifts = np.array([epoch_shift(self.seed, epoch, self.num_tokens) for epoch in epochs.tolist()], np.int64)
        return (shifts + self._offsets(rows)) % self.num_tokens

    def will_need(self, samples: np.ndarray) -> None:
        """See `SampleDataset.will_need`."""
        epochs, rows = self.rows_of(samples)
        lengths = self._row_ends - self._row_begins
        self.tape.will_need(self.starts_of(epochs, rows), lengths[rows % len(lengths)])

    def _offsets(self, rows: np.ndarray) -> np.ndarray:
        turns, places = np.divmod(rows, len(self._row_ends))
        return turns * self._row_ends[-1] + self._row_begins[places]

    def is_short(self, rows: np.ndarray) -> np.ndarray:
        """bool[n]: the rows that are the short last one of an epoch."""
        return (rows == self._num_samples - 1) & self.last_row_is_short

"""Token streams: the tokens of all documents, one document after the other, cut into rows for training.

Example with eight tokens and rows of 3 tokens, in an epoch that starts at token 5 (see `epoch_shift`):

    stream   0 1 2 3 4 5 6 7 | 0 1 2 ...        continues at the beginning
    row 0    5 6 7
    row 1    0 1 2
    row 2    3 4                                the short last row is not dropped

Several row lengths alternate: with lengths (3, 1) the rows are 5 6 7, 0, 1 2 3, 4. Samples are numbered over all
epochs: with R rows per epoch, sample g is a row of epoch g // R, and `permute` maps g % R to its row number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from lm_experiments_tools.data.order import epoch_shift, permute
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.files import json_sha256

BLOCK = 64  # rows made at once: few enough for the caches, enough to spread the cost of numpy's calls
CHECKED_AT_START = 1 << 20  # tokens of each source compared with the vocabulary before the first step
_VERSION = 1  # of the mapping (seed, sample) -> row; part of the fingerprint


class TokenSource(Protocol):
    """Interface of tokenized text: an array of the token ids of all documents, such as an `IndexedDataset`."""

    tokens: np.ndarray
    fingerprint: str

    def will_need(self, begins: np.ndarray, ends: np.ndarray) -> None: ...


@dataclass(frozen=True)
class TokensInMemory:
    """Tokenized text in memory: a `TokenSource` whose token ids are a NumPy array."""

    tokens: np.ndarray
    fingerprint: str = ""

    def will_need(self, begins: np.ndarray, ends: np.ndarray) -> None:
        """Do nothing. The method belongs to the interface, but tokens in memory need no prefetching."""


class TokenStream:
    """Rows of consecutive tokens of a token stream, which can be read by sample number, in any order.

    Every token is read once per epoch. Each epoch starts at a random token, so that rows differ between epochs.

    Args:
        tokens: an `IndexedDataset`, or several that are read one after the other.
        vocab_size: number of ids; larger ids in `tokens` are an error.
        row_lengths: tokens per row; several lengths alternate.
        seed: determines order and row boundaries.

    Raises:
        UserError: there are no tokens, or a token id is outside the vocabulary.
    """

    def __init__(
        self, tokens: TokenSource | Sequence[TokenSource], vocab_size: int, row_lengths: Sequence[int], seed: int
    ) -> None:
        self.sources = list(tokens) if isinstance(tokens, Sequence) else [tokens]
        self.vocab_size, self.seed = vocab_size, seed
        self._filled = [source for source in self.sources if source.tokens.size]
        if not self._filled:
            raise UserError(f"The token data is empty ({len(self.sources)} file(s)): check the path and the text.")
        # Plain arrays: a memmap's own slicing costs more than the copy of a row.
        self._arrays = [np.asarray(source.tokens) for source in self._filled]
        self._part_ends = np.cumsum(np.array([part.size for part in self._arrays], np.int64))
        self._part_begins = self._part_ends - [part.size for part in self._arrays]
        self.num_tokens = int(self._part_ends[-1])
        self._windows: dict[int, np.ndarray] = {}  # length -> view of the only part, for `read`
        for part in self._arrays:
            check_ids(part[:CHECKED_AT_START], vocab_size)
        self._row_ends = np.cumsum(np.asarray(row_lengths, np.int64))  # within one round
        self._row_begins = self._row_ends - row_lengths
        rounds, rest = divmod(self.num_tokens, int(self._row_ends[-1]))
        rows_of_rest = int(np.searchsorted(self._row_ends, rest)) + 1 if rest else 0
        self._num_samples = rounds * len(row_lengths) + rows_of_rest
        last = self._num_samples - 1
        self.last_row_length = self.num_tokens - int(self._offsets(np.array([last]))[0])
        self.last_row_is_short = self.last_row_length < row_lengths[last % len(row_lengths)]

    def __len__(self) -> int:
        """Samples per epoch."""
        return self._num_samples

    @property
    def order(self) -> str:
        """sha256 over data, row lengths and seed, which determine the tokens of each sample before noise is added."""
        parts = [_VERSION, [s.fingerprint for s in self.sources], self.seed, self._row_ends.tolist()]
        return json_sha256(parts)

    def rows_of(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Convert sample numbers int64[n], which count over all epochs, to epochs and rows.

        Returns:
            The epoch int64[n] of each sample, and the number int64[n] of its row in that epoch.
        """
        epochs, indices = np.divmod(np.asarray(samples, np.int64), self._num_samples)
        return epochs, permute(indices, self._num_samples, self.seed, epochs)

    def starts_of(self, epochs: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Return the index int64[n] of the first token of each row in the token stream.

        Args:
            epochs: int64[n], the epoch of each row.
            rows: int64[n], the number of each row in its epoch.
        """
        shifts = np.array([epoch_shift(self.seed, epoch, self.num_tokens) for epoch in epochs.tolist()], np.int64)
        return (shifts + self._offsets(rows)) % self.num_tokens

    def is_short(self, rows: np.ndarray) -> np.ndarray:
        """Return bool[n]: True for each row that is the last of an epoch and shorter than the others.

        Args:
            rows: int64[n], numbers of the rows in their epochs.
        """
        return (rows == self._num_samples - 1) & self.last_row_is_short

    def read(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Read `length` tokens from each start index int64[n]. After the last token, reading continues at the first.

        Returns:
            int64[n, length].

        Raises:
            UserError: a token id is outside the vocabulary.
        """
        if len(self._arrays) == 1 and int(starts.max()) <= self.num_tokens - length:
            if length not in self._windows:
                self._windows[length] = np.lib.stride_tricks.sliding_window_view(self._arrays[0], length)
            found = self._windows[length][starts]
            check_ids(found, self.vocab_size)
            return found.astype(np.int64)
        tokens = np.empty((len(starts), length), np.int64)
        part_of = np.searchsorted(self._part_ends, starts, side="right")
        offsets = starts - self._part_begins[part_of]
        for row, part, offset in zip(tokens, part_of.tolist(), offsets.tolist(), strict=True):
            filled = 0
            while filled < length:
                chunk = self._arrays[part][offset : offset + length - filled]
                row[filled : filled + chunk.size] = chunk
                filled, part, offset = filled + chunk.size, (part + 1) % len(self._arrays), 0
        check_ids(tokens, self.vocab_size)
        return tokens

    def will_need(self, samples: np.ndarray) -> None:
        """Prefetch the samples with the given numbers from the disk."""
        epochs, rows = self.rows_of(samples)
        starts = self.starts_of(epochs, rows)
        lengths = (self._row_ends - self._row_begins)[rows % len(self._row_ends)]
        part_of = np.searchsorted(self._part_ends, starts, side="right")
        for number in np.unique(part_of).tolist():
            here = part_of == number
            begins = starts[here] - self._part_begins[number]
            ends = np.minimum(begins + lengths[here], len(self._arrays[number]))  # the wrapped rest is not worth more
            self._filled[number].will_need(begins, ends)

    def maps(self) -> tuple[np.ndarray, ...]:
        """Return the arrays, possibly memory-mapped, that the tokens are read from."""
        return tuple(source.tokens for source in self.sources)

    def _offsets(self, rows: np.ndarray) -> np.ndarray:
        rounds, positions = np.divmod(rows, len(self._row_ends))
        return rounds * self._row_ends[-1] + self._row_begins[positions]


def check_ids(tokens: np.ndarray, vocab_size: int) -> None:
    """Raise UserError if a token id is outside the vocabulary, [0, vocab_size)."""
    worst = int(tokens.max())
    if worst < vocab_size and tokens.dtype.kind == "i":
        worst = min(worst, int(tokens.min()))
    if not 0 <= worst < vocab_size:
        raise UserError(
            f"The token data holds id {worst}, but the vocabulary has ids 0 to {vocab_size - 1}: it was "
            "tokenized with another vocabulary; give that one, or tokenize again."
        )

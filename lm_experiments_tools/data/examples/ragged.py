"""Rows of different lengths in one flat array."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np


class Ragged:
    """Integer rows of different lengths in one flat array.

    Memory: 4 bytes per ID (2 if all IDs fit), 8 bytes per row.

    Args:
        values: integer[total].
        lengths: int64[rows].
    """

    def __init__(self, values: np.ndarray, lengths: np.ndarray) -> None:
        self.values, self.lengths = values, lengths
        self.starts = np.concatenate([[0], np.cumsum(lengths)])[:-1]

    def __len__(self) -> int:
        return len(self.lengths)

    def flat(self, rows: np.ndarray) -> np.ndarray:
        """Concatenate the values of these rows int64[n]."""
        lengths = self.lengths[rows]
        shifts = self.starts[rows] - (np.cumsum(lengths) - lengths)
        return self.values[np.repeat(shifts, lengths) + np.arange(lengths.sum())]

    def padded(self, rows: np.ndarray, width: int, fill: int, *, left: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Pad these rows int64[n] to `width`.

        Args:
            left: pad on the left instead of the right.

        Returns:
            Values int64[n, width], and mask bool[n, width], False for padding.
        """
        columns, lengths = np.arange(width), self.lengths[rows][:, None]
        real = columns >= width - lengths if left else columns < lengths
        padded = np.full(real.shape, fill, np.int64)
        padded[real] = self.flat(rows)
        return padded, real


class RaggedBuilder:
    """Builds a `Ragged` row by row, in about the memory of the result."""

    def __init__(self, dtype: type[np.integer] = np.int32) -> None:
        self.dtype = dtype
        self._values: list[np.ndarray] = []
        self._lengths: list[np.ndarray] = []

    def extend(self, rows: Iterable[Sequence[int]]) -> None:
        """Append rows."""
        rows = list(rows)
        lengths = np.array([len(row) for row in rows], np.int64)
        flat = np.fromiter(chain.from_iterable(rows), self.dtype, int(lengths.sum()))
        self._values.append(flat)
        self._lengths.append(lengths)

    def build(self) -> Ragged:
        """Return all appended rows."""
        return Ragged(
            np.concatenate([np.empty(0, self.dtype), *self._values]),
            np.concatenate([np.empty(0, np.int64), *self._lengths]),
        )

"""Rows of integers of different lengths, such as token ids, in one flat array."""

from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np


class Ragged:
    """Rows of integers, such as token ids, of different lengths, stored in one flat array.

    Rows may form groups, such as the targets of one example. Without `sizes` each row is a group.

    Args:
        lengths: int64[number of rows], number of integers in each row.
        sizes: int64[number of groups], number of rows in each group.

    Attributes:
        firsts: int64[number of groups + 1]: group n has the rows firsts[n] to firsts[n + 1] - 1.
    """

    def __init__(self, values: np.ndarray, lengths: np.ndarray, sizes: np.ndarray | None = None) -> None:
        self.values, self.lengths = values, lengths
        self.starts = np.cumsum(lengths) - lengths
        self.firsts = np.concatenate([[0], np.cumsum(np.ones_like(lengths) if sizes is None else sizes)])

    def __len__(self) -> int:
        return len(self.lengths)

    def flat(self, rows: np.ndarray) -> np.ndarray:
        """Return the values of the rows with the given numbers int64[n], concatenated."""
        lengths = self.lengths[rows]
        shifts = self.starts[rows] - (np.cumsum(lengths) - lengths)
        return self.values[np.repeat(shifts, lengths) + np.arange(lengths.sum())]

    def padded(self, rows: np.ndarray, width: int, fill: int, *, left: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Return the selected rows as a matrix, padded to the same width.

        Returns:
            Values int64[n, width], and a mask bool[n, width] that is False for padding.
        """
        columns, lengths = np.arange(width), self.lengths[rows][:, None]
        real = columns >= width - lengths if left else columns < lengths
        padded = np.full(real.shape, fill, np.int64)
        padded[real] = self.flat(rows)
        return padded, real


class RaggedBuilder:
    """Builds a `Ragged` from some rows at a time, with little more memory than the result needs."""

    def __init__(self, dtype: type[np.integer] = np.int32) -> None:
        self.dtype = dtype
        self._values, self._lengths = [np.empty(0, dtype)], [np.empty(0, np.int64)]
        self._sizes: list[int] = []

    def extend(self, rows: Sequence[Sequence[int]], sizes: Iterable[int] | None = None) -> None:
        self._values.append(np.fromiter(chain.from_iterable(rows), self.dtype))
        self._lengths.append(np.array([len(row) for row in rows], np.int64))
        self._sizes += [1] * len(rows) if sizes is None else sizes

    def build(self) -> Ragged:
        sizes = np.array(self._sizes, np.int64)
        return Ragged(np.concatenate(self._values), np.concatenate(self._lengths), sizes)

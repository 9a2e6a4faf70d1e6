"""Pack sequences into rows, and lay out rows of packed segments as arrays.

Example: segments of 3, 2 and 4 tokens, packed into rows of 6 as (3 2) and (4); 0 is padding:

    ids           1 1 1 2 2 0     1 1 1 1 0 0     number of the segment in its row, from 1
    positions     0 1 2 0 1 0     0 1 2 3 0 1     place in the segment; padding counts anew
    cu_seqlens    0 3 5 9                         bounds of the segments among the tokens of all rows
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

_OPEN_ROWS = 64


class Patterns(NamedTuple):
    """Result of packing by lengths alone. A pattern is a combination of lengths that fill one row."""

    lengths: np.ndarray  # int64, the lengths of all patterns, one pattern after the other
    sizes: np.ndarray  # int64[number of patterns], number of segments of each pattern
    counts: np.ndarray  # int64[number of patterns], number of rows that have each pattern


def pack(lengths: np.ndarray, capacity: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Pack items into rows in their order: each into the first of the last 64 rows that has enough space.

    An item may have several lengths, such as those of its input and of its target. An item longer than the capacity
    gets a row of its own.

    Args:
        lengths: int64[sides, n], the lengths of n items.
        capacity: int64[sides], maximum sum of lengths per row.

    Returns:
        The indices of the items int64[n], row after row in the order in which the rows were opened, and the number of
        items of each row int64[rows].
    """
    room = np.zeros((len(capacity), _OPEN_ROWS), np.int64)  # of the open rows, oldest first
    open_rows: list[list[int]] = []
    rows: list[list[int]] = []
    for item, length in enumerate(lengths.T):
        fits = (room[:, : len(open_rows)] >= length[:, None]).all(axis=0)
        place = int(fits.argmax()) if fits.any() else -1
        if place < 0:
            if len(open_rows) == _OPEN_ROWS:
                open_rows.pop(0)
                room = np.roll(room, -1, axis=1)
            place = len(open_rows)
            open_rows.append([])
            rows.append(open_rows[-1])
            room[:, place] = capacity
        open_rows[place].append(item)
        room[:, place] -= length
    return np.array([item for row in rows for item in row], np.int64), np.array(list(map(len, rows)), np.int64)


def pack_counts(counts: np.ndarray, capacity: int) -> Patterns:
    """Pack any number of items of each length by best-fit decreasing: each into the fullest row with enough space.

    Source: Krell et al., "Efficient Sequence Packing without Cross-contamination", arXiv 2107.02027, section 3.

    Args:
        counts: int64[capacity + 1], number of items of each length.
    """
    open_rows: list[list[tuple[tuple[int, ...], int]]] = [[] for _ in range(capacity + 1)]  # by free tokens
    for length in range(capacity, 0, -1):
        left, free = int(counts[length]), length
        while left and free <= capacity:
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
        most = capacity // length
        for size, rows in ((most, left // most), (left % most, 1)):
            if size and rows:
                open_rows[capacity - size * length].append(((length,) * size, rows))
    found = [group for groups in open_rows for group in groups]
    columns = [n for pattern, _ in found for n in pattern], [len(p) for p, _ in found], [rows for _, rows in found]
    return Patterns(*(np.array(column, np.int64) for column in columns))


class Segments:
    """Cells of the tokens of packed rows.

    Args:
        sizes: int64[rows], number of segments of each row.
        lengths: int64[segments], number of tokens of each segment, row after row.

    Attributes:
        cu_seqlens: int64[segments + 1], bounds of the segments among the tokens of all rows.
        rows, numbers: int64[segments], the row of each segment, and its number in the row, from 0.
        places, cells: int64[tokens], place of each token in its segment, and its cell in the flat array of all rows.
        used: int64[rows], number of tokens of each row.
    """

    def __init__(self, sizes: np.ndarray, lengths: np.ndarray, width: int) -> None:
        first = np.cumsum(sizes) - sizes
        self.lengths, self.cu_seqlens = lengths, np.concatenate([[0], np.cumsum(lengths)])
        self.rows = np.repeat(np.arange(len(sizes)), sizes)
        self.numbers = np.arange(len(lengths)) - first[self.rows]
        self.used = np.add.reduceat(lengths, first)
        self.shape = (len(sizes), width)
        before = self.cu_seqlens[:-1]
        begins = self.rows * width + before - before[first][self.rows]  # the cell of each first token
        self.places = np.arange(self.cu_seqlens[-1]) - np.repeat(before, lengths)
        self.cells = np.repeat(begins, lengths) + self.places

    def filled(self, values: np.ndarray, fill: int) -> np.ndarray:
        """Return int64[rows, width] with the values int64[tokens], one in the cell of each token."""
        out = np.full(self.shape, fill, np.int64)
        out.ravel()[self.cells] = values
        return out

    def ids(self) -> np.ndarray:
        """Return int64[rows, width]: numbers of the segments from 1 on, 0 for padding."""
        return self.filled(np.repeat(self.numbers + 1, self.lengths), 0)

    def positions(self) -> np.ndarray:
        """Return int64[rows, width]: places in segments; those of padding begin again too."""
        out = np.maximum(np.arange(self.shape[1]) - self.used[:, None], 0)
        out.ravel()[self.cells] = self.places
        return out

    def by_segment(self, values: np.ndarray, most: int, fill: float) -> np.ndarray:
        """Return [rows, `most`, ...] with the values [segments, ...] of each row."""
        out = np.full((self.shape[0], most, *values.shape[1:]), fill, values.dtype)
        out[self.rows, self.numbers] = values
        return out

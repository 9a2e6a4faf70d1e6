"""Plots of curves in a terminal, in Braille characters."""

from __future__ import annotations

import math
from collections.abc import Sequence

_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))  # of a Braille character, by column and row


def plot(
    curves: dict[str, Sequence[tuple[float, float]]],
    width: int,
    height: int,
    *,
    dots: bool = True,
    ends: tuple[str, str] | None = None,
) -> list[str]:
    """Lines of curves with their axes; later curves are drawn over earlier ones.

    Args:
        curves: {name: (x, y) sorted by x}; empty ones are skipped.
        width, height: size of the plot, in characters.
        dots: Braille characters; False draws asterisks.
        ends: labels of the first and the last x. None: their rounded values.
    """
    points = [point for curve in curves.values() for point in curve]
    if not points or width < 24 or height < 4:
        return []
    low, high = _range(sorted(y for _, y in points))
    left, right = min(x for x, _ in points), max(x for x, _ in points)
    labels = [f"{high:.4g}", f"{(high + low) / 2:.4g}", f"{low:.4g}"]
    margin = max(map(len, labels))
    columns, rows = width - margin - 2, height - 2
    cells = [[" "] * columns for _ in range(rows)]
    across, down = (2, 4) if dots else (1, 1)
    for curve in curves.values():
        marked: dict[tuple[int, int], int] = {}
        for x, y in _pixels(curve, (left, right), (low, high), columns * across, rows * down):
            bit = _DOTS[x % across][y % down] if dots else 1
            marked[y // down, x // across] = marked.get((y // down, x // across), 0) | bit
        for (row, column), bits in marked.items():
            cells[row][column] = chr(0x2800 + bits) if dots else "*"
    shown = {0: labels[0], (rows - 1) // 2: labels[1], rows - 1: labels[2]}
    side, corner, floor = ("│", "└", "─") if dots else ("|", "+", "-")
    lines = [f"{shown.get(number, ''):>{margin}} {side}{''.join(row)}" for number, row in enumerate(cells)]
    first, last = ends or (f"{left:,.0f}", f"{right:,.0f}")
    below = f"{'':{margin + 2}}{first}{last:>{max(columns - len(first), len(last) + 1)}}"
    return [*lines, f"{'':{margin}} {corner}{floor * columns}", below]


def _range(ordered: Sequence[float]) -> tuple[float, float]:
    """Lowest and highest, but first values far above the rest do not flatten the curve."""
    low, high = ordered[0], ordered[-1]
    usual = ordered[int(0.97 * (len(ordered) - 1))]
    if len(ordered) > 40 and high - low > 4 * max(usual - low, 1e-9):
        high = low + 1.5 * (usual - low)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _pixels(
    curve: Sequence[tuple[float, float]], xs: tuple[float, float], ys: tuple[float, float], width: int, height: int
) -> list[tuple[int, int]]:
    """Pixels (column, row from the top) of a line through the mean of each column's points."""
    columns: dict[int, list[float]] = {}
    for x, y in curve:
        columns.setdefault(round((x - xs[0]) / (xs[1] - xs[0] or 1) * (width - 1)), []).append(y)
    found: list[tuple[int, int]] = []
    previous: tuple[int, float] | None = None
    for column, values in sorted(columns.items()):
        row = (ys[1] - sum(values) / len(values)) / (ys[1] - ys[0]) * (height - 1)
        start, before = previous or (column, row)
        for x in range(start, column + 1):
            here = before + (row - before) * (x - start) / (column - start or 1)
            there = before + (row - before) * max(x - 1 - start, 0) / (column - start or 1)
            top, bottom = math.floor(min(here, there) + 0.5), math.floor(max(here, there) + 0.5)
            found += [(x, y) for y in range(max(top, 0), min(bottom, height - 1) + 1)]
        previous = (column, row)
    return found

"""A curve in a terminal."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def plot(points: Sequence[tuple[float, float]], width: int, height: int, ends: tuple[str, str]) -> list[str]:
    """Lines of a curve with its axes; each column shows the mean of its points.

    Args:
        points: (x, y), sorted by x.
        width, height: size of the plot in characters; nothing is drawn below 24 x 4.
        ends: labels of the first and the last x.
    """
    if not points or width < 24 or height < 4:
        return []
    x, y = np.array(points, dtype=float).T
    low, high = float(y.min()), float(np.quantile(y, 0.97) if len(y) > 40 else y.max())
    labels = [f"{high:.4g}", f"{(high + low) / 2:.4g}", f"{low:.4g}"]
    margin = max(map(len, labels))
    columns, rows = width - margin - 2, height - 2
    column = np.rint((x - x[0]) / ((x[-1] - x[0]) or 1) * (columns - 1)).astype(int)
    row = np.rint((high - y.clip(low, high)) / ((high - low) or 1) * (rows - 1)).astype(int)
    cells = np.full((rows, columns), " ")
    for position in set(column.tolist()):
        cells[round(row[column == position].mean()), position] = "*"
    shown = {0: labels[0], (rows - 1) // 2: labels[1], rows - 1: labels[2]}
    lines = [f"{shown.get(number, ''):>{margin}} |{''.join(line)}" for number, line in enumerate(cells)]
    last = f"{ends[1]:>{max(columns - len(ends[0]), len(ends[1]) + 1)}}"
    return [*lines, f"{'':{margin}} +{'-' * columns}", f"{'':{margin + 2}}{ends[0]}{last}"]

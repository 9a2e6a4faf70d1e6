"""Pictures and tables that a notebook shows under a cell, in HTML of their own: no package is needed."""

from __future__ import annotations

import math
from html import escape
from typing import Any

from lm_experiments_tools.tracking.progress import in_notebook

_WIDTH, _HEIGHT, _MARGIN = 560, 200, 44
_COLOURS = {"train": "#1f77b4", "valid": "#d62728"}


class LiveCurve:
    """The loss of a run against its updates, redrawn under the cell of a notebook at each line of the log."""

    def __init__(self) -> None:
        self.points: dict[str, list[tuple[int, float]]] = {}
        self._display: Any = None

    def add(self, split: str, step: int, loss: float) -> None:
        from IPython.display import display

        self.points.setdefault(split, []).append((step, loss))
        if self._display is None:
            self._display = display(self, display_id=True)
        else:
            self._display.update(self)

    def _repr_html_(self) -> str:
        """An SVG picture with a line for each split."""
        steps, losses = zip(*(point for points in self.points.values() for point in points), strict=True)
        low, high, last = min(losses), max(losses), max(steps)
        plot = _WIDTH - 2 * _MARGIN, _HEIGHT - 2 * _MARGIN

        def place(step: int, loss: float) -> str:
            height = (high - loss) / (high - low) if high > low else 0.5
            return f"{_MARGIN + plot[0] * step / max(last, 1):.1f},{_MARGIN + plot[1] * height:.1f}"

        shapes = []
        for number, (split, points) in enumerate(self.points.items()):
            colour = _COLOURS.get(split, "#2ca02c")
            line = " ".join(place(step, loss) for step, loss in points)
            shapes.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
            # A line of one point would not be seen.
            x, y = place(*points[-1]).split(",")
            shapes.append(f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}"/>')
            label = f"{escape(split)} {points[-1][1]:.3f}"
            shapes.append(f'<text x="{_MARGIN + 130 * number}" y="20" fill="{colour}">{label}</text>')
        for x, y, text in ((4, _MARGIN, f"{high:.2f}"), (4, _MARGIN + plot[1], f"{low:.2f}")):
            shapes.append(f'<text x="{x}" y="{y}" fill="gray">{text}</text>')
        shapes.append(f'<text x="{_MARGIN}" y="{_HEIGHT - 12}" fill="gray">loss, until update {last}</text>')
        size = f'width="{_WIDTH}" height="{_HEIGHT}" font-family="sans-serif" font-size="13"'
        return f"<svg {size}>{''.join(shapes)}</svg>"


def live_curve() -> LiveCurve | None:
    """A new curve in a notebook; None elsewhere."""
    return LiveCurve() if in_notebook() else None


class Results(dict):
    """Metrics by name, or by split and name, which a notebook shows as a table."""

    def _repr_html_(self) -> str:
        splits = self if self and all(isinstance(values, dict) for values in self.values()) else {"": dict(self)}
        names = dict.fromkeys(name for values in splits.values() for name in values)
        head = "".join(f"<th>{escape(split)}</th>" for split in splits)
        rows = [
            f"<tr><th>{escape(name)}</th>{''.join(f'<td>{_cell(v.get(name))}</td>' for v in splits.values())}</tr>"
            for name in names
        ]
        return f"<table><tr><th></th>{head}</tr>{''.join(rows)}</table>"


def _cell(value: Any) -> str:
    is_number = isinstance(value, float) and math.isfinite(value)
    return f"{value:.4g}" if is_number else "" if value is None else escape(str(value))

"""The loss curves of runs as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lm_experiments_tools.errors import UserError


def new_figure(width: float, height: float) -> Any:
    """Create an empty matplotlib figure of `width` x `height` inches. Raises UserError without matplotlib."""
    try:
        import matplotlib  # noqa: F401
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("drawing a picture needs matplotlib: pip install matplotlib.") from None
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def plot_runs(runs: Mapping[str, Sequence[Mapping[str, Any]]], png: Path) -> None:
    """Draw the losses of runs in one picture: of training as lines, of validation dashed.

    `runs` maps names to records of metrics.jsonl. UserError without matplotlib or losses.
    """
    figure = new_figure(8, 4.8)
    axes = figure.subplots()
    for number, (name, records) in enumerate(runs.items()):
        for split, style in (("train", "-"), ("valid", "--o")):
            points = [(r["step"], r["loss"]) for r in records if r["split"] == split and r.get("loss") is not None]
            if points:
                axes.plot(*zip(*sorted(points), strict=True), style, color=f"C{number}", label=f"{name} {split}")
    if not axes.lines:
        raise UserError(f"{', '.join(runs)}: there are no losses to draw.")
    axes.set(xlabel="optimizer updates", ylabel="loss (nats a token)")
    axes.grid(axis="y", alpha=0.4)
    axes.legend()
    png.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(png, dpi=150)

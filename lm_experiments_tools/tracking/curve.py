"""The loss curve of a run as a picture, drawn from its metrics.jsonl."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lm_experiments_tools.errors import UserError
from lm_experiments_tools.tracking.tracker import parse_record


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


def plot_curve(metrics_jsonl: Path | str, png: Path | str) -> Path:
    """Draw the training and validation loss of a run against optimizer updates, and return the PNG's path.

    Args:
        metrics_jsonl: file metrics.jsonl of the run directory.
        png: picture to write.

    Raises:
        UserError: matplotlib is missing, or the file has no loss.
    """
    source, target = Path(metrics_jsonl), Path(png)
    records = [parse_record(line) for line in source.read_text(encoding="utf-8").splitlines()]
    losses = [r for r in records if r is not None and isinstance(r.get("loss"), (int, float))]
    if not losses:
        raise UserError(f"{source} has no losses to draw: was --log_interval longer than the run?")
    figure = new_figure(8, 4.8)
    axes = figure.subplots()
    for split in dict.fromkeys(record["split"] for record in losses):
        points = sorted((r["step"], r["loss"]) for r in losses if r["split"] == split)
        marker = "o" if split != "train" else None
        axes.plot(*zip(*points, strict=True), marker=marker, label=f"{split} {points[-1][1]:.3f}")
    axes.set(xlabel="optimizer updates", ylabel="loss (nats a token)", title=source.resolve().parent.name)
    axes.grid(axis="y", alpha=0.4)
    axes.legend()
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=150)
    return target

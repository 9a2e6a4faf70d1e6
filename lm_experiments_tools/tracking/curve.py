"""The loss curve of a run as a picture, drawn from its metrics.jsonl."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


def plot_runs(runs: Mapping[str, Sequence[Mapping[str, Any]]], png: Path | str) -> None:
    """Draw the losses of several runs in one picture: of training as lines, of validation dashed.

    Args:
        runs: name of each run -> its records, as in metrics.jsonl.
        png: picture to write.

    Raises:
        UserError: matplotlib is missing, or no run has a loss.
    """
    figure = new_figure(8, 4.8)
    axes = figure.subplots()
    for number, (name, records) in enumerate(runs.items()):
        for split, style in (("train", "-"), ("valid", "--")):
            points = [(r["step"], r["loss"]) for r in records if r["split"] == split and r.get("loss") is not None]
            if points:
                axes.plot(*zip(*sorted(points), strict=True), style, color=f"C{number}", label=f"{name} {split}")
    if not axes.lines:
        raise UserError(f"{', '.join(runs)}: there are no losses to draw.")
    axes.set(xlabel="optimizer updates", ylabel="loss (nats a token)")
    axes.grid(axis="y", alpha=0.4)
    axes.legend()
    Path(png).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(png, dpi=150)

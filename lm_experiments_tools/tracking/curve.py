"""The loss curve of a run as a picture, drawn from its metrics.jsonl."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from lm_experiments_tools.errors import UserError
from lm_experiments_tools.tracking.tracker import parse_record

_TRAIN, _VALID, _INK = "#4c72b0", "#c44e52", "#333333"
_SMOOTHING_POINTS = 40  # more train points than this get a running mean drawn over them


def plot_curve(metrics_jsonl: Path | str, png: Path | str, *, title: str | None = None) -> Path:
    """Draw train and validation loss against updates, with tokens on a second axis, and return the PNG's path.

    Raises:
        UserError: matplotlib is missing, or the file has no loss of train or valid.
    """
    source, target = Path(metrics_jsonl), Path(png)
    curves = {split: _loss(source, split) for split in ("train", "valid")}
    if not any(points for points in curves.values()):
        raise UserError(f"{source} has no losses to draw: was --log_interval longer than the run?")
    try:
        import matplotlib
    except ImportError:
        raise UserError("drawing the curve needs matplotlib: pip install matplotlib.") from None
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # a Figure with its own Agg canvas: no display, and no global backend changed under the user's notebook
    with matplotlib.rc_context({"font.size": 10, "axes.edgecolor": "#999999", "axes.labelcolor": _INK}):
        figure = Figure(figsize=(8, 4.8), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots()
        _draw(axes, curves)
        _add_tokens_axis(axes, curves["train"] or curves["valid"])
        axes.set_title(title or source.resolve().parent.name, loc="left", color=_INK, fontweight="bold")
        target.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(target, dpi=150)
    return target


def _loss(source: Path, split: str) -> list[tuple[int, int, float]]:
    """(step, tokens, loss) of a split's records with a finite loss, by step; a torn last line is skipped."""
    try:
        lines = source.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UserError(f"{source} cannot be read ({error.strerror}): give the metrics.jsonl of a run.") from error
    points = []
    for line in lines:
        record = parse_record(line)
        if record is not None and record["split"] == split and isinstance(record.get("loss"), (int, float)):
            points.append((record["step"], record["tokens"], record["loss"]))
    return sorted(points)


def _draw(axes: Any, curves: dict[str, list[tuple[int, int, float]]]) -> None:
    train, valid = curves["train"], curves["valid"]
    if train:
        steps, losses = [p[0] for p in train], [p[2] for p in train]
        smooth = len(train) > _SMOOTHING_POINTS
        axes.plot(steps, losses, color=_TRAIN, linewidth=1 if smooth else 1.8, alpha=0.35 if smooth else 1)
        shown = _running_mean(losses, len(losses) // 40) if smooth else losses
        tail = losses[-max(len(losses) // 40, 1) :]
        label = f"train {sum(tail) / len(tail):.3f}" + (" (running mean)" if smooth else "")
        axes.plot(steps, shown, color=_TRAIN, linewidth=1.8, label=label)
    if valid:
        steps, losses = [p[0] for p in valid], [p[2] for p in valid]
        label = f"validation {losses[-1]:.3f}"
        axes.plot(steps, losses, color=_VALID, linewidth=1.8, marker="o", markersize=4, label=label)
        best = min(valid, key=lambda point: point[2])
        axes.annotate(
            f"best {best[2]:.3f}", (best[0], best[2]), (0, 12), textcoords="offset points", ha="center", color=_VALID
        )
    axes.set_xlabel("optimizer updates")
    axes.set_ylabel("loss (nats a token)")
    axes.set_ylim(*_loss_range([p[2] for p in [*train, *valid]]))
    axes.margins(x=0.02)
    axes.grid(axis="y", color="#e5e5e5", linewidth=0.8)
    axes.spines[["right", "top"]].set_visible(False)
    axes.tick_params(color="#999999", labelcolor=_INK)
    axes.legend(frameon=False, loc="upper right")


def _add_tokens_axis(axes: Any, points: list[tuple[int, int, float]]) -> None:
    """Tokens grow in proportion to updates, so the second axis is a scale of the first."""
    step, tokens, _ = points[-1]
    if not step or not tokens:
        return
    per_step = tokens / step
    second = axes.secondary_xaxis("top", functions=(lambda x: x * per_step, lambda x: x / per_step))
    second.set_xlabel("tokens", fontsize=8, color="#777777")
    second.tick_params(labelsize=8, color="#cccccc", labelcolor="#777777")
    second.spines["top"].set_visible(False)
    second.xaxis.set_major_formatter(lambda value, _: _count(value))


def _running_mean(values: list[float], half: int) -> list[float]:
    """Mean over `half` neighbours on each side, fewer and still symmetric at the ends, so that it does not lag."""
    sums = list(itertools.accumulate(values, initial=0.0))
    means = []
    for i in range(len(values)):
        reach = min(half, i, len(values) - 1 - i)
        means.append((sums[i + reach + 1] - sums[i - reach]) / (2 * reach + 1))
    return means


def _loss_range(losses: list[float]) -> tuple[float, float]:
    """Room above and below, but a first loss far above the rest does not flatten the curve."""
    ordered = sorted(losses)
    low, high = ordered[0], ordered[-1]
    usual = ordered[int(0.98 * (len(ordered) - 1))]
    if high - low > 4 * max(usual - low, 1e-9) and len(ordered) > _SMOOTHING_POINTS:
        high = low + 1.5 * (usual - low)
    margin = 0.06 * (high - low) or 0.1
    return low - margin, high + 1.5 * margin


def _count(value: float) -> str:
    for unit in ("", "k", "M", "B"):
        if abs(value) < 1000:
            return f"{value:.3g}{unit}"
        value /= 1000
    return f"{value:.3g}T"

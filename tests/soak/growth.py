"""Decides from samples of a job if anything grows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tests.soak.watch import Sample

STEADY = ("open files", "threads", "processes", "files", "mappings")
LOGS = ("metrics.jsonl", "TensorBoard")
BLOCKS = 20  # neighbouring samples are alike, means of a twentieth of the second half hardly
STUDENT = 2.101  # two-sided 95 % of Student's t with BLOCKS - 2 degrees of freedom


@dataclass(frozen=True)
class Bounds:
    """Largest growth that passes."""

    memory: float = 100.0  # KiB in 1,000 steps, of the upper end of the 95 % interval
    level: float = 1.05  # median of the last tenth of the run to that of the third, of memory
    line: float = 1.05  # bytes of a log line in the second half to those in the first
    mappings: float = 5.0  # in 1,000 steps: allocations make and join some
    checkpoints: int = 5  # two, the best, one that is written and one that is removed


@dataclass(frozen=True)
class Slope:
    """Growth in 1,000 steps over the second half of a run, and half the width of its 95 % interval."""

    value: float
    margin: float

    @classmethod
    def of(cls, steps: np.ndarray, values: np.ndarray) -> Slope:
        """Least squares through the means of BLOCKS equal spans of steps."""
        half = steps >= steps[-1] / 2
        steps, values = steps[half] / 1000, values[half]
        spans = np.digitize(steps, np.linspace(steps[0], steps[-1], BLOCKS + 1)[1:-1])
        filled = [span for span in range(BLOCKS) if (spans == span).any()]
        if len(filled) < BLOCKS:
            return cls(float("nan"), float("inf"))
        means = [(steps[spans == span].mean(), values[spans == span].mean()) for span in filled]
        (slope, _), covariance = np.polyfit(*np.array(means).T, 1, cov=True)
        return cls(float(slope), STUDENT * float(np.sqrt(covariance[0, 0])))

    def __str__(self) -> str:
        return f"{self.value:+.3f} ± {self.margin:.3f}"


def judge(samples: list[Sample], bounds: Bounds) -> tuple[str, list[str]]:
    """A table of what the samples hold, and a sentence on each thing that grows."""
    samples = [sample for sample in samples if sample["step"] < samples[-1]["step"]]  # not of a run that closes
    if len(samples) < 2 * BLOCKS:
        return "", [f"FAULT: {len(samples)} samples are too few: more steps, or a shorter --interval"]
    names = [name for name in samples[-1] if name not in ("step", "lines", "cpu")]
    columns = {name: np.array([sample.get(name, 0.0) for sample in samples]) for name in samples[-1]}
    steps = columns["step"]
    rows = [f"{'':<20} {'third tenth':>12} {'last tenth':>12} {'ratio':>7}   in 1,000 steps (95 %)"]
    faults = []
    for name in names:
        early, late = _medians(steps, columns[name])
        slope = Slope.of(steps, columns[name])
        ratio = f"{late / early:.3f}" if early else ""
        rows.append(f"{name:<20} {early:>12,.0f} {late:>12,.0f} {ratio:>7}   {slope}")
        if fault := _fault(name, slope, early, late, bounds):
            faults.append(f"FAULT: {name}: {fault}")
    for name in LOGS:
        row, ratio = _halves(f"{name}, B a line", columns["lines"], columns[name] * 1024, steps)
        rows.append(row)
        if ratio > bounds.line:
            faults.append(f"FAULT: {name}: {ratio:.2f} times the bytes a line in the second half of the run")
    rows.append(_halves("CPU, ms a step", steps, columns["cpu"] * 1000, steps)[0])
    return "\n".join(rows), faults


def _medians(steps: np.ndarray, values: np.ndarray) -> tuple[float, float]:
    """Of the third tenth of the steps, and of the last."""
    tenth = np.minimum(steps * 10 // steps[-1], 9)
    return tuple(float(np.median(values[tenth == n])) if (tenth == n).any() else float("nan") for n in (2, 9))


def _halves(title: str, of: np.ndarray, values: np.ndarray, steps: np.ndarray) -> tuple[str, float]:
    """A row with the growth of `values` with `of`, from a tenth of the run to its half and after; the ratio."""
    at = np.searchsorted(steps, [steps[-1] * 0.1, steps[-1] * 0.5, steps[-1]])
    first, second = np.diff(values[at]) / np.maximum(np.diff(of[at]), 1)
    ratio = float(second / first) if first else float("nan")
    return f"{title:<20} {first:>12,.2f} {second:>12,.2f} {ratio:>7.3f}   second half to first", ratio


def _fault(name: str, slope: Slope, early: float, late: float, bounds: Bounds) -> str | None:
    """How the thing of this name grows, if it must not."""
    upper = slope.value + slope.margin
    if name == "memory" and not upper <= bounds.memory:
        return f"{slope} KiB in 1,000 steps; the upper end may be {bounds.memory:g}"
    if name == "memory" and not late <= bounds.level * early:
        return f"{late:,.0f} KiB at the end, {late / early:.2f} times those of the third tenth"
    if name == "mappings":
        return f"{slope} in 1,000 steps" if slope.value - slope.margin > bounds.mappings else None
    if name == "checkpoints" and late > bounds.checkpoints:
        return f"{late:g} at the end, more than {bounds.checkpoints}"
    if name in STEADY and not late <= early:
        return f"{late:g} at the end, {early:g} in the third tenth"
    return None

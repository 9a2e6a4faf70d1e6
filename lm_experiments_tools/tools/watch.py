"""Watch a run from a terminal: progress, loss curve, speed, checkpoints and warnings, until it ends.

    lmtools watch runs/mine
    lmtools watch runs/mine --once

Ends with the run: exit code 0 after its last step, 1 if it failed or was stopped before. Ctrl-C leaves the run alone.
Where there is no terminal, one picture is printed.
"""

from __future__ import annotations

import io
import os
import shutil
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from lm_experiments_tools.config.flags import POSITIVE, check_groups
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.tools.runs.records import Run, read_run, state_of
from lm_experiments_tools.tracking.terminal import bar, coloured, plot
from lm_experiments_tools.tracking.tracker import ConsoleLine

POSITIONAL = "run"
_CODES = {"failed": 1, "stopped": 1}
_WARNINGS = 3


@dataclass(frozen=True, kw_only=True)
class WatchArgs:
    """What is watched."""

    run: str | None = None
    """Run directory; the name of this flag may be left out where it stands first."""
    metric: str = "loss"
    """What is drawn, of training and validation."""
    once: bool = False
    """Print one picture and end."""
    every: Annotated[float, POSITIVE] = 2.0
    """Seconds between two looks at the run's files."""

    def __post_init__(self) -> None:
        check_groups(self, (WatchArgs,))
        if self.run is None:
            raise UserError("lmtools watch: name the run directory, as in lmtools watch runs/mine.")


def run(args: WatchArgs) -> int:
    """Show the run until it ends; returns 1 if it failed or was stopped, else 0."""
    path = Path(args.run)
    seen, watched = _stamp(path), read_run(path)
    screen = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    if screen and not args.once:
        with _other_screen():
            while watched.state in ("running", "unknown"):
                lines = picture(watched, args.metric)
                print("\033[H" + "".join(f"{line}\033[K\n" for line in lines) + "\033[J", end="", flush=True)
                time.sleep(args.every)
                if (now := _stamp(path)) != seen:  # taken before reading: what is written meanwhile is read next time
                    seen, watched = now, read_run(path)
                watched.state = state_of(watched)
            watched = read_run(path)  # what it wrote last
    print("\n".join(picture(watched, args.metric)))
    return _CODES.get(watched.state, 0)


@contextmanager
def _other_screen() -> Iterator[None]:
    """Draw where nothing is scrolled away; the terminal is as it was afterwards."""
    print("\033[?1049h\033[?25l", end="")
    try:
        yield
    finally:
        print("\033[?25h\033[?1049l", end="", flush=True)


def _stamp(path: Path) -> list[tuple[int, int] | None]:
    """Sizes and times of the files that a run writes to."""
    stamp: list[tuple[int, int] | None] = []
    for name in ("metrics.jsonl", "metrics.json", "config.json", "logs/rank0.log"):
        try:
            stat = (path / name).stat()
            stamp.append((stat.st_size, stat.st_mtime_ns))
        except OSError:
            stamp.append(None)
    return stamp


def picture(run: Run, metric: str) -> list[str]:
    """Lines that fit the terminal."""
    size = shutil.get_terminal_size()
    width, height = max(size.columns - 1, 40), max(size.lines - 1, 12) if sys.stdout.isatty() else 36
    dots = (sys.stdout.encoding or "").lower().startswith("utf")
    colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    head = [*_headline(run, width, dots, colour), "", *_numbers(run, width)]
    foot = [*_warnings(run, width, colour), *(coloured(text[:width], "bad", colour) for text in run.problems)]
    curves = {
        split: [(r["step"], r[metric]) for r in run.of(split) if isinstance(r.get(metric), (int, float))]
        for split in ("train", "valid")
    }
    drawn = plot(curves, width, max(min(height - len(head) - len(foot) - 4, 24), 6), dots=dots, colour=colour)
    names = {"train": "training", "valid": "validation"}
    shown = ", ".join(coloured(names[split], split, colour) for split, points in curves.items() if points)
    if not drawn:
        return [*head, "", f"no {metric} to draw yet", *foot]
    return [*head, "", f"{metric} of {shown}, by step", *drawn, *foot]


def _headline(run: Run, width: int, dots: bool, colour: bool) -> list[str]:
    step, iters = max((record["step"] for record in run.records), default=0), run.config.get("iters")
    kind = {"running": "good", "ended": "good", "failed": "bad", "stopped": "bad"}.get(run.state, "soft")
    about = {"running": "", "failed": f": {run.failure}", "stopped": " before its end, by a signal or a kill"}
    about["unknown"] = ": its process is on another machine"
    if run.records:
        about["running"] = f", last line {max(time.time() - run.records[-1].get('time', 0), 0):.0f} s ago"
    lines = [f"{run.name}  {coloured(run.state, kind, colour)}{about.get(run.state, '')[: max(width - 20, 20)]}"]
    if isinstance(iters, int) and iters > 0:
        says = f" {step:,}/{iters:,}  {100 * step / iters:.0f} %{_eta(run, iters - step)}"
        lines.append(coloured(bar(step / iters, max(width - len(says), 10), dots), "train", colour) + says)
    else:
        lines.append(f"step {step:,}")
    return lines


def _eta(run: Run, steps: int) -> str:
    """When a run that goes on will have made its last update, by the pace of its last line."""
    pace, train = run.last("seconds_per_step"), run.of("train")
    if run.state != "running" or pace is None or "time" not in train[-1]:
        return ""
    return f"  eta {_age(max(pace * steps - (time.time() - train[-1]['time']), 0))}"


def _numbers(run: Run, width: int) -> list[str]:
    """The last measurements, as the run's console has them, and the checkpoints."""
    lines = []
    console = ConsoleLine(run.config.get("iters"), stream=io.StringIO())
    for split in dict.fromkeys(["train", "valid", *(record["split"] for record in run.records)]):
        record = next((r for r in reversed(run.of(split)) if r.get("metrics")), None)
        if record is not None:
            metrics = {name: record.get(name) for name in record["metrics"]}
            lines += textwrap.wrap(console.format(split, record["step"], metrics, record), width)
    for name in run.metrics("valid"):
        if (best := run.best(name)) is not None:
            lines.append(f"best {name} on validation {best[name]:.4g}, at step {best['step']:,}"[:width])
    links = [name for name in ("last", "best") if (run.path / name).exists()]
    saved = [f"{name} {(run.path / name).resolve().name}" for name in links]
    if links:
        age = max(time.time() - (run.path / links[0]).resolve().stat().st_mtime, 0)
        saved[0] += f" ({_age(age)} ago)"
    return [*lines, f"checkpoints: {', '.join(saved) or 'none yet'}"]


def _age(seconds: float) -> str:
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def _warnings(run: Run, width: int, colour: bool) -> list[str]:
    lines = [f"{when} {level.lower()}: {text}"[:width] for when, level, text in run.warnings[-_WARNINGS:]]
    more = len(run.warnings) - len(lines)
    if not lines:
        return []
    return ["", *(coloured(line, "valid", colour) for line in lines), *([f"({more} more before)"] if more > 0 else [])]

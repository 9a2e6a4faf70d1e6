"""Compare runs: their progress, their metrics, and the settings that differ.

    lmtools compare runs/a runs/b
    lmtools compare runs

Reads run directories, or folders of them, finished or not. TensorBoard, trackio and wandb draw the curves.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Any

from lm_experiments_tools.errors import UserError
from lm_experiments_tools.tools.run_records import Run, differences, find_runs

POSITIONAL = "runs"  # words before the first flag are its values
_POSITION = ("step", "samples", "tokens", "seconds")
_WIDEST = 60  # characters of a setting


@dataclass(frozen=True, kw_only=True)
class CompareArgs:
    """Runs to compare."""

    runs: tuple[str, ...] = ()
    """Run directories, or folders of them. As the first arguments they need no flag."""

    def __post_init__(self) -> None:
        if not self.runs:
            raise UserError(
                "lmtools compare: name the run directories to compare, as in lmtools compare runs/a runs/b."
            )


def run(args: CompareArgs) -> None:
    """Print the tables; problems with single runs go to standard error.

    Raises:
        UserError: no run can be shown.
    """
    from lm_experiments_tools.tools.evaluate import table

    found, problems = find_runs(args.runs)
    runs = [run for run in found if run.records or run.config]
    differing = differences(runs)
    problems += [problem for run in found for problem in run.problems]
    if not runs:
        raise UserError(f"there is no run to show: {' '.join(problems)}")
    lines = ["runs", *table([progress(run) for run in runs], texts=("run", "state"))]
    splits = dict.fromkeys(["valid", *(r["split"] for run in runs for r in run.records if r["split"] != "train")])
    for split in splits:
        rows = [{"run": run.name} | {name: measured(run, name, split) for name in run.metrics(split)} for run in runs]
        if any(len(row) > 1 for row in rows):
            title = "validation" if split == "valid" else split
            lines += ["", f"{title}: last (best @ its step)", *table(rows, texts=("run",))]
    if differing:
        columns = ["setting", *(run.name for run in runs)]
        rows = [dict(zip(columns, [name, *map(_setting, values)], strict=True)) for name, values in differing.items()]
        lines += ["", "settings that differ", *table(rows, texts=columns)]
    print("\n".join(lines))
    for problem in problems:
        print(problem, file=sys.stderr)


def progress(run: Run) -> dict[str, str]:
    """Progress of a run, a row of a table."""
    newest = {name: max((r[name] for r in run.records if r.get(name) is not None), default=None) for name in _POSITION}
    row = {"run": run.name, "state": run.state}
    row |= {name: "-" if value is None else f"{value:,.0f}" for name, value in newest.items()}
    if isinstance(iters := run.config.get("iters"), int) and newest["step"] is not None:
        row["step"] += f"/{iters:,}"
    speed, loss = run.last("tokens_per_second"), run.last("loss")
    row["tokens/s"] = "-" if speed is None else f"{speed:,.0f}"
    row["train loss"] = "-" if loss is None else f"{loss:.4g}"
    return row


def measured(run: Run, name: str, split: str) -> str:
    """The last value of a metric, the best one, and the step of the best."""
    last, best = run.last(name, split), run.best(name, split)
    return "-" if best is None else f"{last:.4g} ({best[name]:.4g} @ {best['step']:,})"


def _setting(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    text = "-" if value is None else text if text.strip() else json.dumps(text)
    return text if len(text) <= _WIDEST else f"{text[: _WIDEST - 1]}…"

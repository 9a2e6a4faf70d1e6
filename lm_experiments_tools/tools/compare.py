"""Compare runs: their progress, their metrics, and the settings that differ.

    lmtools compare runs/a runs/b
    lmtools compare runs

Reads run directories, or folders of them, finished or not. TensorBoard, trackio and wandb draw the curves.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lm_experiments_tools.errors import UserError
from lm_experiments_tools.tools.runs.records import POSITION, Run, differences, find_runs

POSITIONAL = "runs"  # words before the first flag are its values
_SPLITS = {"valid": "validation"}
_WIDEST = 60  # characters of a setting in the terminal


@dataclass(frozen=True, kw_only=True)
class CompareArgs:
    """Runs to compare."""

    runs: tuple[str, ...] = ()
    """Run directories, or folders of them; the name of this flag may be left out where they stand first."""

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
    found, problems = find_runs(args.runs)
    runs = [run for run in found if run.records or run.config]
    differing = differences(runs)
    problems += [problem for run in found for problem in run.problems]
    if not runs:
        raise UserError(f"there is no run to show: {' '.join(problems)}")
    tables = {
        "runs": [progress(run) for run in runs],
        **{
            f"{_SPLITS.get(split, split)}: last (best @ its step)": measured(runs, split) for split in _measuring(runs)
        },
        "settings that differ": differing_rows(runs, differing),
    }
    print("\n".join(_lines(tables)))
    for problem in problems:
        print(problem, file=sys.stderr)


def progress(run: Run) -> dict[str, str]:
    """How far a run is, a row of a table."""
    newest = {name: max((r[name] for r in run.records if r.get(name) is not None), default=None) for name in POSITION}
    iters = run.config.get("iters")
    row = {"run": run.name, "state": run.state}
    row |= {name: "-" if value is None else f"{value:,.0f}" for name, value in newest.items()}
    if isinstance(iters, int) and newest["step"] is not None:
        row["step"] += f"/{iters:,}"
    speed, loss = run.last("tokens_per_second"), run.last("loss")
    return row | {
        "tokens/s": "-" if speed is None else f"{speed:,.0f}",
        "train loss": "-" if loss is None else f"{loss:.4g}",
    }


def _measuring(runs: Sequence[Run]) -> list[str]:
    """The splits besides training: validation, and the suites of lmtools evaluate."""
    return list(dict.fromkeys(["valid", *(r["split"] for run in runs for r in run.records if r["split"] != "train")]))


def measured(runs: Sequence[Run], split: str = "valid") -> list[dict[str, str]]:
    """Metrics of a split, a row a run: the last value, the best, and the step of the best."""
    rows = [{"run": run.name} | {name: _measured(run, name, split) for name in run.metrics(split)} for run in runs]
    return rows if any(len(row) > 1 for row in rows) else []


def _measured(run: Run, name: str, split: str) -> str:
    last, best = run.last(name, split), run.best(name, split)
    return "-" if best is None else f"{last:.4g} ({best[name]:.4g} @ {best['step']:,})"


def differing_rows(runs: Sequence[Run], differing: Mapping[str, Sequence[Any]]) -> list[dict[str, str]]:
    """Settings that differ, a row each with a column for each run."""
    names = [run.name for run in runs]
    return [
        {"setting": name} | dict(zip(names, map(_setting, values), strict=True)) for name, values in differing.items()
    ]


def _setting(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return "-" if value is None else text if text.strip() else json.dumps(text)


def _lines(tables: Mapping[str, Sequence[Mapping[str, str]]]) -> list[str]:
    from lm_experiments_tools.tools.evaluate import table

    lines = []
    for title, rows in tables.items():
        short = [{name: _cut(text) for name, text in row.items()} for row in rows]
        columns = list(dict.fromkeys(name for row in rows for name in row))
        if short:
            lines += ["", title, *table(short, texts=columns if title.startswith("settings") else ("run", "state"))]
    return lines[1:]


def _cut(text: str) -> str:
    return text if len(text) <= _WIDEST else f"{text[: _WIDEST - 1]}…"

"""The curves of runs as one HTML page: their points, thinned, and the tables beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from lm_experiments_tools.tools.pages.html import html_page
from lm_experiments_tools.tools.runs.curves_page import BODY, SCRIPT, STYLE
from lm_experiments_tools.tools.runs.records import POSITION, Run

MAX_POINTS = 1000  # of a curve; of more records, each point is the mean of several, shown with their range


def curves_page(
    runs: Sequence[Run], tables: Mapping[str, Sequence[Mapping[str, str]]], problems: Sequence[str]
) -> str:
    """The text of the page."""
    made = f"{len(runs)} run{'s' * (len(runs) != 1)}, read {datetime.now():%Y-%m-%d %H:%M}"
    data = {
        "made": made,
        "runs": [{"name": run.name, "state": run.state, "splits": _splits(run)} for run in runs],
        "measured": list(dict.fromkeys(n for run in runs for split in _splits_of(run) for n in run.metrics(split))),
        "tables": [{"title": title, "rows": rows} for title, rows in tables.items() if rows],
        "problems": list(problems),
    }
    return html_page("Runs", data, style=STYLE, body=BODY, script=SCRIPT)


def _splits_of(run: Run) -> list[str]:
    return list(dict.fromkeys(["valid", "train", *(record["split"] for record in run.records)]))


def _splits(run: Run) -> dict[str, Any]:
    """{split: {"x": {axis: numbers}, "curves": {name: {"mean", and, where thinned, "low", "high": numbers}}}}."""
    splits = {}
    for split in dict.fromkeys(record["split"] for record in run.records):
        records = run.of(split)
        size = -(-len(records) // MAX_POINTS)
        groups = [records[start : start + size] for start in range(0, len(records), size)]
        left_out = {*POSITION, "split", "time", "metrics", "of"}
        names = dict.fromkeys(name for record in records for name in record if name not in left_out)
        curves = {
            name: _curve([[_number(record.get(name)) for record in group] for group in groups]) for name in names
        }
        splits[split] = {
            "x": {axis: [_number(group[len(group) // 2].get(axis)) for group in groups] for axis in POSITION},
            "curves": {name: curve for name, curve in curves.items() if any(y is not None for y in curve["mean"])},
        }
    return splits


def _curve(groups: Sequence[Sequence[float | None]]) -> dict[str, list[float | None]]:
    """Mean of each group of values and, of groups of several, the lowest and highest; None where none is finite."""
    finite = [[value for value in group if value is not None] for group in groups]
    curve = {"mean": [_short(sum(values) / len(values)) if values else None for values in finite]}
    if max(map(len, groups)) > 1:
        curve |= {"low": [_short(min(values, default=None)) for values in finite]}
        curve |= {"high": [_short(max(values, default=None)) for values in finite]}
    return curve


def _number(value: Any) -> float | None:
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")

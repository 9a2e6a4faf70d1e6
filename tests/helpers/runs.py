"""Scripts started with flags given as keywords, and the records that they log."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def words(**flags: Any) -> list[str]:
    """Flags as a command line: None leaves one out, True writes its name alone, a tuple gives several values."""
    line: list[str] = []
    for name, value in flags.items():
        if value is not None:
            values = () if value is True else value if isinstance(value, tuple) else (value,)
            line += [f"--{name}", *map(str, values)]
    return line


def records(run_dir: str | Path, split: str = "train") -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl that hold metrics of a split."""
    lines = map(json.loads, Path(run_dir, "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["split"] == split and line["metrics"]]


def losses(run_dir: str | Path) -> list[tuple[int, float]]:
    """(step, loss) of the training steps that were logged."""
    return [(line["step"], line["loss"]) for line in records(run_dir)]

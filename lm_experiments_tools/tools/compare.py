"""Compare the progress, the metrics and the different settings of runs.

    lmtools compare runs/a runs/b
    lmtools compare runs --plot curves.png

Arguments are run directories, finished or not, or folders of them.
"""

from __future__ import annotations

import fcntl
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lm_experiments_tools.errors import UserError
from lm_experiments_tools.files import read_json

POSITIONAL = "runs"  # words before the first flag are its values
_POSITION = ("step", "samples", "tokens", "seconds")
_WIDEST = 60  # characters of a setting
_START = re.compile(r"config(?:\.(\d+))?\.json")


@dataclass(frozen=True, kw_only=True)
class CompareArgs:
    """Runs to compare."""

    runs: tuple[str, ...] = ()
    """Run directories, or folders of them. As the first arguments they need no flag."""
    plot: str | None = None
    """Picture (PNG) of the losses of the runs, to write."""

    def __post_init__(self) -> None:
        if not self.runs:
            raise UserError("lmtools compare: name the run directories, as in lmtools compare runs/a runs/b.")


def run(args: CompareArgs) -> None:
    """Print the tables that compare runs. Problems with single runs go to stderr.

    Raises UserError: no run can be read.
    """
    from lm_experiments_tools.tools.evaluate import table

    runs, problems = _find_runs(args.runs)
    differing = differences(runs)
    problems += [problem for run in runs for problem in run.problems]
    if not runs:
        raise UserError(f"there is no run to show: {' '.join(problems)}")
    lines = ["runs", *table([_progress(run) for run in runs], texts=("run", "state"))]
    splits = dict.fromkeys(["valid", *(r["split"] for run in runs for r in run.records if r["split"] != "train")])
    for split in splits:
        rows = [{"run": run.name} | {name: _measured(run, name, split) for name in run.metrics(split)} for run in runs]
        if any(len(row) > 1 for row in rows):
            title = "validation" if split == "valid" else split
            lines += ["", f"{title}: last (best @ its step)", *table(rows, texts=("run",))]
    if differing:
        columns = ["setting", *(run.name for run in runs)]
        rows = [dict(zip(columns, [name, *map(_setting, values)], strict=True)) for name, values in differing.items()]
        lines += ["", "settings that differ", *table(rows, texts=columns)]
    print("\n".join(lines))
    if args.plot is not None:
        from lm_experiments_tools.tracking.curve import plot_runs

        plot_runs({run.name: run.records for run in runs}, Path(args.plot))
        print(f"\n{args.plot}: training loss, and validation loss dashed")
    for problem in problems:
        print(problem, file=sys.stderr)


@dataclass
class Run:
    """The contents of a run directory, as read by `read_run`.

    Attributes:
        records: lines of metrics.jsonl, one for each step and split; "seconds" is the training time so far.
        config: settings of the newest job that trained in this directory; empty if none are recorded.
        state: "running", "ended", or "stopped" (by an error or a signal).
        problems: error messages about unreadable files.
    """

    path: Path
    name: str
    records: list[dict[str, Any]] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    state: str = "stopped"
    problems: list[str] = field(default_factory=list)

    def of(self, split: str) -> list[dict[str, Any]]:
        """Return the metrics of one split ("train", "valid", ...), one dict for each line of metrics.jsonl."""
        return [record for record in self.records if record["split"] == split]

    def last(self, name: str, split: str = "train") -> Any:
        """Return the last finite value of a metric on a split, or None."""
        return next((r[name] for r in reversed(self.of(split)) if _is_number(r.get(name))), None)

    def best(self, name: str, split: str = "valid") -> dict[str, Any] | None:
        """Return the line of metrics.jsonl that has the best value of a metric; None if the metric was not measured.

        The direction is `--optimize_mode` for the run's own metric, otherwise `metrics.lower_is_better`.
        """
        from lm_experiments_tools.metrics import lower_is_better

        records = [record for record in self.of(split) if _is_number(record.get(name))]
        mode = self.config.get("optimize_mode") if self.config.get("optimize_metric") == name else None
        falls = mode == "min" if mode in ("min", "max") else lower_is_better(name)
        return (min if falls else max)(records, key=lambda record: record[name], default=None)

    def metrics(self, split: str) -> list[str]:
        """Return the names of the metrics that were measured on a split, such as "valid"."""
        return list(dict.fromkeys(name for record in self.of(split) for name in record["metrics"]))


def read_run(path: Path, name: str | None = None) -> Run:
    """Read a run directory; damaged files are listed in `problems`."""
    run = Run(path, name or path.resolve().name)
    starts = {file: match for file in path.glob("config*.json") if (match := _START.fullmatch(file.name))}
    files = sorted(starts, key=lambda file: int(starts[file][1] or 0))
    for file in files:
        try:
            config = read_json(file)
        except UserError as error:
            run.problems.append(f"{run.name}: {error}")
            continue
        if not (run.config and config.get("validate_only")):
            run.config = config
    if not run.config:
        run.problems.append(f"{run.name} records no settings (config.json).")
    _read_records(run)
    step, iters = max((record["step"] for record in run.records), default=0), run.config.get("iters")
    end = path / "metrics.json"
    if _is_locked(path / ".lock"):
        run.state = "running"
    elif end.is_file() and (not files or end.stat().st_mtime >= files[-1].stat().st_mtime):
        run.state = "ended"
    elif isinstance(iters, int) and step >= iters:
        run.state = "ended"
    return run


def _find_runs(paths: Sequence[str]) -> tuple[list[Run], list[str]]:
    """The runs of these directories, or inside them, and an error message for each directory without any."""
    folders: list[Path] = []
    problems = []
    for path in map(Path, paths):
        inside = [path] if _is_run(path) else sorted(filter(_is_run, path.glob("*")))
        folders += inside
        if not inside:
            problems.append(f"{path} holds no metrics.jsonl and no config.json: is it the --model_path of a run?")
    folders = list(dict.fromkeys(folders))
    names = [folder.resolve().name for folder in folders]
    if len(set(names)) < len(names):
        names = list(map(str, folders))
    return [read_run(folder, name) for folder, name in zip(folders, names, strict=True)], problems


def _is_run(path: Path) -> bool:
    return (path / "metrics.jsonl").is_file() or (path / "config.json").is_file()


def _is_locked(lock: Path) -> bool:
    """True while a process writes to the run directory."""
    try:
        with lock.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _validated(run: Run) -> list[dict[str, Any]]:
    """Metrics written by `--validate_only`, as records at step 0."""
    file = run.path / "metrics.json"
    if not (run.config.get("validate_only") and file.is_file()):
        run.problems.append(f"{run.name} has logged nothing yet.")
        return []
    try:
        splits = read_json(file)
    except UserError as error:
        run.problems.append(f"{run.name}: {error}")
        return []
    return [{"step": 0, "split": split, "metrics": list(values), **values} for split, values in splits.items()]


def _read_records(run: Run) -> None:
    """Set `records` from metrics.jsonl. An unterminated last line is ignored: the run may be writing it."""
    from lm_experiments_tools.tracking.tracker import parse_record

    file = run.path / "metrics.jsonl"
    text = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
    records = [parse_record(line) for line in text[: text.rfind("\n") + 1].splitlines() if line.strip()]
    if damaged := records.count(None):
        run.problems.append(f"{run.name}: {damaged} of {len(records)} lines of metrics.jsonl are damaged.")
    elif not records:
        records = _validated(run)
    merged: dict[tuple[int, str], dict[str, Any]] = {}
    for record in filter(None, records):
        before = merged.setdefault((record["step"], record["split"]), {"metrics": []})
        merged[record["step"], record["split"]] = before | record | {"metrics": before["metrics"] + record["metrics"]}
    run.records = sorted(merged.values(), key=lambda record: record["step"])
    _add_seconds(run)


def _add_seconds(run: Run) -> None:
    """Set "seconds" of each record: the time of its training steps, without validation and pauses."""
    interval, seconds = run.config.get("log_interval"), 0.0
    first = run.records[0]["step"] if run.records else 0
    counted = max(first - interval, 0) if isinstance(interval, int) else 0  # a run may start from another's step
    for record in run.records:
        if record["split"] == "train" and _is_number(record.get("seconds_per_step")):
            seconds += record["seconds_per_step"] * (record["step"] - counted)
            counted = record["step"]
        record["seconds"] = seconds


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def differences(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """Return the settings that differ: name -> value in each run, None if a run does not record it."""
    settings = [_settings(run) for run in runs]
    known = [flat for run, flat in zip(runs, settings, strict=True) if run.config]
    names = dict.fromkeys(name for flat in known for name in flat)
    differing = [name for name in names if any(flat.get(name) != known[0].get(name) for flat in known)]
    return {name: [flat.get(name) for flat in settings] for name in differing}


def _settings(run: Run) -> dict[str, Any]:
    """Settings as a flat dict: arguments, and the model's configuration (model.NAME)."""
    left_out = ("ENV", "MACHINE", "COMMIT", "model_path")
    flat = {name: value for name, value in run.config.items() if name not in left_out}
    file = run.path / "model_config.json"
    try:
        model = read_json(file) if file.is_file() else {}
    except UserError as error:
        run.problems.append(f"{run.name}: {error}")
        return flat
    left_out = ("_name_or_path", "transformers_version")
    return flat | {f"model.{name}": value for name, value in model.items() if name not in left_out}


def _progress(run: Run) -> dict[str, str]:
    newest = {name: max((r[name] for r in run.records if r.get(name) is not None), default=None) for name in _POSITION}
    row = {"run": run.name, "state": run.state}
    row |= {name: "-" if value is None else f"{value:,.0f}" for name, value in newest.items()}
    if isinstance(iters := run.config.get("iters"), int) and newest["step"] is not None:
        row["step"] += f"/{iters:,}"
    speed, loss = run.last("tokens_per_second"), run.last("loss")
    row["tokens/s"] = "-" if speed is None else f"{speed:,.0f}"
    row["train loss"] = "-" if loss is None else f"{loss:.4g}"
    return row


def _measured(run: Run, name: str, split: str) -> str:
    """The last value of a metric, the best one with its step, and the one before training if it was measured."""
    last, best = run.last(name, split), run.best(name, split)
    if best is None:
        return "-"
    measured = [record for record in run.of(split) if _is_number(record.get(name))]
    start = f", {measured[0][name]:.4g} @ 0" if measured[0]["step"] == 0 < best["step"] else ""
    return f"{last:.4g} ({best[name]:.4g} @ {best['step']:,}{start})"


def _setting(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    text = "-" if value is None else text if text.strip() else json.dumps(text)
    return text if len(text) <= _WIDEST else f"{text[: _WIDEST - 1]}…"

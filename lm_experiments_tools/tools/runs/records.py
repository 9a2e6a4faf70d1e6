"""A run directory read back, whatever its state: its measurements, its settings, if it goes on or how it ended.

What is missing or damaged is a sentence in `Run.problems`, and the rest is there.
"""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from lm_experiments_tools.errors import UserError
from lm_experiments_tools.files import read_json
from lm_experiments_tools.metrics import lower_is_better

POSITION = ("step", "samples", "tokens", "seconds")
_LOG_BYTES = 1 << 18  # of the end of a log
_LOG_LINE = re.compile(r"\S+ \d\d:\d\d:\d\d,\d+ rank\d+ ([A-Z]+) \S+: (.*)")
_MACHINE_PACKAGES = ("torch", "transformers", "accelerate", "deepspeed", "horovod", "triton", "peft")
_START = re.compile(r"config(?:\.(\d+))?\.json")


@dataclass
class Run:
    """One run directory.

    Attributes:
        records: lines of metrics.jsonl by step, those of one step and split joined; "seconds" are of training, without
            validation and pauses.
        config: settings of the newest start that trained; empty where none is recorded.
        state: running, ended, failed, stopped (by a signal or a kill), or unknown (its process is elsewhere).
        problems: sentences on what could not be read.
        failure: last line of rank 0's log, if that is an error.
    """

    path: Path
    name: str
    records: list[dict[str, Any]] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    state: str = "unknown"
    problems: list[str] = field(default_factory=list)
    failure: str | None = None

    def of(self, split: str) -> list[dict[str, Any]]:
        return [record for record in self.records if record["split"] == split]

    def last(self, name: str, split: str = "train") -> Any:
        """The last finite value of a number, None without one."""
        return next((r[name] for r in reversed(self.of(split)) if _is_number(r.get(name))), None)

    def best(self, name: str, split: str = "valid") -> dict[str, Any] | None:
        """The record with the best value of a metric: by --optimize_mode, else by the registry of metrics."""
        records = [record for record in self.of(split) if _is_number(record.get(name))]
        mode = self.config.get("optimize_mode") if self.config.get("optimize_metric") == name else None
        falls = mode == "min" if mode in ("min", "max") else lower_is_better(name)
        return (min if falls else max)(records, key=lambda record: record[name], default=None)

    def metrics(self, split: str) -> list[str]:
        """Names of the metrics measured on a split, in the order of the record."""
        return list(dict.fromkeys(name for record in self.of(split) for name in record.get("metrics", ())))


def find_runs(paths: Sequence[str]) -> tuple[list[Run], list[str]]:
    """The runs of these directories, or inside them, and a sentence for each directory that holds none."""
    folders, problems = [], []
    for path in map(Path, paths):
        inside = [path] if _is_run(path) else sorted(filter(_is_run, path.glob("*")) if path.is_dir() else ())
        folders += inside
        if not inside:
            there = "holds no metrics.jsonl and no config.json: is it the --model_path of a run?"
            problems.append(f"{path} {there if path.is_dir() else 'is no directory.'}")
    folders = list(dict.fromkeys(folders))
    return [read_run(folder, name) for folder, name in zip(folders, _short_names(folders), strict=True)], problems


def read_run(path: Path, name: str | None = None) -> Run:
    """All that can be read of a run directory.

    Raises:
        UserError: it is none.
    """
    if not _is_run(path):
        raise UserError(f"{path} is no run directory: it holds neither metrics.jsonl nor config.json.")
    run = Run(path, name or path.resolve().name)
    run.config = _read_config(run)
    run.records = _read_records(run)
    _read_log(run)
    run.state = state_of(run)
    return run


def _is_run(path: Path) -> bool:
    return (path / "metrics.jsonl").is_file() or (path / "config.json").is_file()


def _short_names(folders: Sequence[Path]) -> list[str]:
    """The ends of paths that tell them apart."""
    parts = [folder.resolve().parts for folder in folders]
    for length in range(1, max(map(len, parts), default=1) + 1):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(names):
            break
    return names if folders else []


# ---- settings


def _read_config(run: Run) -> dict[str, Any]:
    starts = _starts(run.path)
    if not starts:
        run.problems.append(f"{run.name} records no settings (config.json): it is damaged or of another program.")
    for file in reversed(starts):
        try:
            config = read_json(file)
        except UserError as error:
            run.problems.append(f"{run.name}: {error}")
            continue
        if not config.get("validate_only"):
            return config
    return {}


def _starts(path: Path) -> list[Path]:
    """config.json, config.1.json, ...: a file a start."""
    numbered = {
        int(match[1] or 0): file for file in path.glob("config*.json") if (match := _START.fullmatch(file.name))
    }
    return [numbered[number] for number in sorted(numbered)]


def settings_of(run: Run) -> dict[str, Any]:
    """What was set and where, flat: settings, the model's configuration (model.NAME), versions, the machine."""
    flat = {name: value for name, value in run.config.items() if name not in ("ENV", "model_path")}
    flat |= {f"ENV.{name}": value for name, value in (run.config.get("ENV") or {}).items()}
    for file, add in (("model_config.json", _model_settings), ("env.json", _machine_settings)):
        if (run.path / file).is_file():
            try:
                flat |= add(read_json(run.path / file))
            except (UserError, AttributeError, TypeError) as error:
                run.problems.append(f"{run.name}: {file} is left out: {error}")
    return flat


def _model_settings(config: dict[str, Any]) -> dict[str, Any]:
    left_out = ("_name_or_path", "transformers_version")
    return {f"model.{name}": value for name, value in config.items() if name not in left_out}


def _machine_settings(environment: dict[str, Any]) -> dict[str, Any]:
    packages = {name.lower(): version for name, version in environment.get("packages", {}).items()}
    cpu, gpus = environment.get("cpu", {}), environment.get("gpus", [])
    return {
        "python": environment.get("python", "").partition(" ")[0],
        "cpu": f"{cpu.get('model')}, {cpu.get('count')} cores",
        "gpus": ", ".join(str(gpu.get("name")) for gpu in gpus) or "none",
        **{f"package {name}": packages.get(name) for name in _MACHINE_PACKAGES},
    }


def differences(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """{setting: its value in each run} of those that differ; None where a run does not record it."""
    settings = [settings_of(run) for run in runs]
    known = [flat for run, flat in zip(runs, settings, strict=True) if run.config]
    names = dict.fromkeys(name for flat in known for name in flat)
    differing = [name for name in names if any(flat.get(name) != known[0].get(name) for flat in known)]
    return {name: [flat.get(name) for flat in settings] for name in differing}


# ---- measurements


def _read_records(run: Run) -> list[dict[str, Any]]:
    file = run.path / "metrics.jsonl"
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        run.problems.append(f"{run.name} has no measurements: {file} cannot be read ({error.strerror}).")
        return []
    # a last line without an end is being written, or was when the run was killed
    lines = text[: text.rfind("\n") + 1].splitlines()
    records = [_record(line) for line in lines if line.strip()]
    damaged, older = records.count(None), [r for r in records if r is not None and not {"samples", "tokens"} <= set(r)]
    if damaged:
        run.problems.append(
            f"{run.name}: {damaged} of {len(records)} lines of metrics.jsonl are damaged and left out."
        )
    if older:
        run.problems.append(f"{run.name} is of an older version: {len(older)} lines count no samples or no tokens.")
    joined: dict[tuple[int, str], dict[str, Any]] = {}
    for record in filter(None, records):
        before = joined.setdefault((record["step"], record["split"]), record)
        if before is not record:
            metrics = [*before.get("metrics", ()), *record.get("metrics", ())]
            before |= record | {"metrics": metrics}
    found = sorted(joined.values(), key=lambda record: record["step"])
    if not found and not damaged:
        cut = (
            "no whole line in metrics.jsonl: it is damaged, or its first one is being written" if text.strip() else ""
        )
        run.problems.append(f"{run.name} has {cut or 'logged nothing yet'}.")
    for record, seconds in zip(found, _seconds(found, run.config.get("log_interval")), strict=True):
        record["seconds"] = seconds
    return found


def _record(line: str) -> dict[str, Any] | None:
    """A line's record, of older versions too, which counted less; None for a damaged one."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    fits = isinstance(record, dict) and type(record.get("step")) is int and isinstance(record.get("split"), str)
    return record if fits and isinstance(record.get("metrics", []), list) else None


def _seconds(records: Sequence[dict[str, Any]], interval: Any) -> Iterator[float | None]:
    """Seconds of training up to each record: of its steps, or, in logs without these, of the clock."""
    train = [r for r in records if r["split"] == "train"]
    if not any(_is_number(record.get("seconds_per_step")) for record in train):
        start = next((record["time"] for record in records if _is_number(record.get("time"))), None)
        yield from (r["time"] - start if start is not None and _is_number(r.get("time")) else None for r in records)
        return
    # a run that takes over another's weights and steps begins at a step above 0
    passed, total = max(records[0]["step"] - interval, 0) if isinstance(interval, int) else 0, 0.0
    pace = next(r["seconds_per_step"] for r in train if _is_number(r.get("seconds_per_step")))
    for record in records:
        steps = max(record["step"] - passed, 0)
        pace = record["seconds_per_step"] if _is_number(record.get("seconds_per_step")) else pace
        yield total + pace * steps
        if record["split"] == "train":
            passed, total = record["step"], total + pace * steps


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


# ---- its state


def _read_log(run: Run) -> None:
    """Set `failure` from the end of rank 0's log."""
    try:
        with open(run.path / "logs" / "rank0.log", "rb") as file:
            file.seek(max(os.fstat(file.fileno()).st_size - _LOG_BYTES, 0))
            lines = file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return
    found = [match for line in lines if (match := _LOG_LINE.match(line))]
    if found and found[-1][1] == "ERROR":
        run.failure = found[-1][2]


def state_of(run: Run) -> str:
    """One of the states of `Run`, as it is now."""
    holder = _holder(run.path)
    starts, end = _starts(run.path), run.path / "metrics.json"
    if holder == "here":
        return "running"
    if end.is_file() and (not starts or end.stat().st_mtime >= starts[-1].stat().st_mtime):
        return "ended"
    if run.failure is not None:
        return "failed"
    step, iters = max((record["step"] for record in run.records), default=0), run.config.get("iters")
    if isinstance(iters, int) and step >= iters:
        return "ended"
    return "stopped" if holder is None else "unknown"


def _holder(path: Path) -> str | None:
    """Where the process is that writes to a run directory: here, elsewhere (another machine), None: it has ended."""
    try:
        match = re.match(r"process (\d+) on (.*)", (path / ".lock").read_text(encoding="utf-8"))
        claimed = (path / ".lock").stat().st_mtime
    except (OSError, UnicodeDecodeError):
        return None
    if match is None:
        return None
    if match[2] != platform.node():
        return "elsewhere"
    try:  # another process may have got its number since
        process = psutil.Process(int(match[1]))
        ended = process.status() == psutil.STATUS_ZOMBIE or process.create_time() > claimed + 1
        return None if ended else "here"
    except psutil.Error:
        return None

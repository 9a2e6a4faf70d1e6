"""A run directory read back: measurements, settings, and whether the run is going on or how it ended.

What is missing or damaged is a sentence in `Run.problems`; the rest is read.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from lm_experiments_tools.errors import UserError
from lm_experiments_tools.files import read_json
from lm_experiments_tools.metrics import lower_is_better
from lm_experiments_tools.tracking.tracker import parse_record

_LOG_BYTES = 1 << 18  # of the end of a log
_LOG_LINE = re.compile(r"\S+ \d\d:\d\d:\d\d,\d+ rank\d+ ([A-Z]+) \S+: (.*)")
_MACHINE_PACKAGES = ("torch", "transformers", "accelerate", "deepspeed", "horovod", "triton", "peft")
_START = re.compile(r"config(?:\.(\d+))?\.json")


@dataclass
class Run:
    """One run directory.

    Attributes:
        records: lines of metrics.jsonl by step, those of one step and split merged; "seconds" counts training alone.
        config: settings of the newest start that trained; empty if none is recorded.
        state: running, ended, failed, stopped (by a signal or a kill), or unknown (its process is on another machine).
        problems: sentences about what could not be read.
        failure: last line of rank 0's log if it is an error.
    """

    path: Path
    name: str
    records: list[dict[str, Any]] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    state: str = "unknown"
    problems: list[str] = field(default_factory=list)
    failure: str | None = None

    def of(self, split: str) -> list[dict[str, Any]]:
        """Records of a split."""
        return [record for record in self.records if record["split"] == split]

    def last(self, name: str, split: str = "train") -> Any:
        """The last finite value of a metric; None without one."""
        return next((r[name] for r in reversed(self.of(split)) if _is_number(r.get(name))), None)

    def best(self, name: str, split: str = "valid") -> dict[str, Any] | None:
        """The record with the best value of a metric: by --optimize_mode, else by the registry of metrics."""
        records = [record for record in self.of(split) if _is_number(record.get(name))]
        mode = self.config.get("optimize_mode") if self.config.get("optimize_metric") == name else None
        falls = mode == "min" if mode in ("min", "max") else lower_is_better(name)
        return (min if falls else max)(records, key=lambda record: record[name], default=None)

    def metrics(self, split: str) -> list[str]:
        """Names of the metrics measured on a split, in the order of the record."""
        return list(dict.fromkeys(name for record in self.of(split) for name in record["metrics"]))


def find_runs(paths: Sequence[str]) -> tuple[list[Run], list[str]]:
    """The runs of these directories, or inside them, and a sentence for each directory without any."""
    folders, problems = [], []
    for path in map(Path, paths):
        inside = [path] if _is_run(path) else sorted(filter(_is_run, path.glob("*")) if path.is_dir() else ())
        folders += inside
        if not inside:
            reason = "holds no metrics.jsonl and no config.json: is it the --model_path of a run?"
            problems.append(f"{path} {reason if path.is_dir() else 'is no directory.'}")
    folders = list(dict.fromkeys(folders))
    return [read_run(folder, name) for folder, name in zip(folders, _short_names(folders), strict=True)], problems


def read_run(path: Path, name: str | None = None) -> Run:
    """Read a run directory. Raises UserError if it is none."""
    if not _is_run(path):
        raise UserError(f"{path} is no run directory: it holds neither metrics.jsonl nor config.json.")
    run = Run(path, name or path.resolve().name)
    _read_config(run)
    _read_records(run)
    _read_log(run)
    run.state = _state(run)
    return run


def _is_run(path: Path) -> bool:
    return (path / "metrics.jsonl").is_file() or (path / "config.json").is_file()


def _short_names(folders: Sequence[Path]) -> list[str]:
    """The shortest ends of paths that differ."""
    parts = [folder.resolve().parts for folder in folders]
    lengths = range(1, max(map(len, parts), default=0) + 1)
    names = (["/".join(part[-length:]) for part in parts] for length in lengths)
    return next((found for found in names if len(set(found)) == len(found)), [])


def _starts(path: Path) -> list[Path]:
    """config.json, config.1.json, ...: the settings of each start."""
    matches = {file: _START.fullmatch(file.name) for file in path.glob("config*.json")}
    return sorted(filter(matches.get, matches), key=lambda file: int(matches[file][1] or 0))


def _read_config(run: Run) -> None:
    starts = _starts(run.path)
    if not starts:
        run.problems.append(f"{run.name} records no settings (config.json): it is damaged or of another program.")
    for file in starts:
        try:
            config = read_json(file)
        except UserError as error:
            run.problems.append(f"{run.name}: {error}")
            continue
        if not config.get("validate_only"):
            run.config = config


def _read_records(run: Run) -> None:
    file = run.path / "metrics.jsonl"
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        run.problems.append(f"{run.name} has no measurements: {file} cannot be read ({error.strerror}).")
        return
    # A last line without a line end is being written, or was when the run was killed.
    records = [parse_record(line) for line in text[: text.rfind("\n") + 1].splitlines() if line.strip()]
    if damaged := records.count(None):
        problem = f"{damaged} of {len(records)} lines of metrics.jsonl are damaged and left out."
        run.problems.append(f"{run.name}: {problem}")
    elif not records:
        problem = "no whole line in metrics.jsonl" if text.strip() else "logged nothing yet"
        run.problems.append(f"{run.name} has {problem}.")
    merged: dict[tuple[int, str], dict[str, Any]] = {}
    for record in filter(None, records):
        before = merged.setdefault((record["step"], record["split"]), {"metrics": []})
        merged[record["step"], record["split"]] = before | record | {"metrics": before["metrics"] + record["metrics"]}
    run.records = sorted(merged.values(), key=lambda record: record["step"])
    _add_seconds(run)


def _add_seconds(run: Run) -> None:
    """Set "seconds" of each record: of its training steps, without validation and pauses."""
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


def _state(run: Run) -> str:
    holder, starts, end = _holder(run.path), _starts(run.path), run.path / "metrics.json"
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
    """Where the process is that writes to a run directory: here, elsewhere (another machine); None: it has ended."""
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


def settings_of(run: Run) -> dict[str, Any]:
    """Settings as a flat dict: arguments, ENV.NAME, the model's configuration (model.NAME), versions, the machine."""
    flat = {name: value for name, value in run.config.items() if name not in ("ENV", "model_path")}
    flat |= {f"ENV.{name}": value for name, value in (run.config.get("ENV") or {}).items()}
    for file, flatten in (("model_config.json", _model_settings), ("env.json", _machine_settings)):
        if (run.path / file).is_file():
            try:
                flat |= flatten(read_json(run.path / file))
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
    """{setting: its value in each run} of settings that differ; None if a run does not record it."""
    settings = [settings_of(run) for run in runs]
    known = [flat for run, flat in zip(runs, settings, strict=True) if run.config]
    names = dict.fromkeys(name for flat in known for name in flat)
    differing = [name for name in names if any(flat.get(name) != known[0].get(name) for flat in known)]
    return {name: [flat.get(name) for flat in settings] for name in differing}

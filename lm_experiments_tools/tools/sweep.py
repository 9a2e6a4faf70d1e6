"""Run a script once for each of several settings, and compare the runs.

    lmtools sweep sweep.yaml --output runs/sweep
    lmtools sweep sweep.yaml --output runs/sweep --jobs 2

The file says what is run, and with which values::

    script: pretrain-t5            # or pretrain-bert, finetune
    config: run.yaml               # its other flags, looked for beside this file
    parameters:
      lr: [5e-3, 1e-2, 2e-2]       # flag: values
      optimizer: [AdamW, AdamWScale]
    metric: loss                   # of validation: the best value of a run counts
    direction: min

Every combination is run. With `trials: 20` Optuna chooses as many instead, and a flag may have a range, as in
`lr: {low: 1e-4, high: 1e-1, log: true}`. `launcher: [torchrun, --nproc_per_node, "2"]` stands before the script.
The same command again goes on: what is finished is not repeated, what was interrupted continues.
"""

from __future__ import annotations

import fcntl
import json
import math
import shutil
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from lm_experiments_tools.config.suggestions import suggestion
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.files import read_json, write_atomic
from lm_experiments_tools.tools.runs.candidates import Candidate, Grid, OptunaSearch, check_parameters, run_name

POSITIONAL = "settings"  # words before the first flag are its values
_KEYS = ("script", "config", "launcher", "parameters", "metric", "direction", "trials")
_SCRIPTS = ("pretrain-t5", "pretrain-bert", "finetune")
_BY_SIGNAL = (130, 137, 143)  # Ctrl-C, kill -9, SIGTERM, as a launcher reports them
_POLL = 1.0  # seconds


@dataclass(frozen=True, kw_only=True)
class SweepArgs:
    """A sweep."""

    settings: str | None = None
    """YAML file of the sweep; the name of this flag may be left out where it stands first."""
    output: str | None = None
    """Folder for the runs, their output and the results; an existing one is gone on with."""
    jobs: int = 1
    """Runs at a time."""
    retry: bool = False
    """Try runs again that failed before."""

    def __post_init__(self) -> None:
        if self.settings is None or self.output is None:
            raise UserError("lmtools sweep: give its file and --output, as in lmtools sweep s.yaml --output runs/s.")
        if self.jobs < 1:
            raise UserError(f"--jobs is {self.jobs}: it must be at least 1.")


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """What the file says."""

    script: str
    parameters: dict[str, Any]
    config: str | None = None
    launcher: tuple[str, ...] = ()
    metric: str = "loss"
    direction: str = "min"
    trials: int | None = None


def run(args: SweepArgs) -> int:
    """Make the runs that are missing, print their results and the comparison; 1 if none has a result.

    Raises:
        UserError: the file, or a folder of another sweep.
    """
    sweep = read_sweep(Path(args.settings))
    if args.retry and sweep.trials is not None:
        raise UserError("--retry is for grids: Optuna proposes other values after a failure.")
    folder = Path(args.output)
    folder.mkdir(parents=True, exist_ok=True)
    with _only_one(folder):
        _check_same(folder, sweep)
        work = _Work(sweep, folder, args.retry)
        with ThreadPoolExecutor(args.jobs) as pool:
            workers = [pool.submit(work.until_done) for _ in range(args.jobs)]
            try:
                for worker in workers:
                    worker.result()
            except BaseException:  # Ctrl-C too: no further run is begun
                work.stopped = True
                raise
    return _show(work, sweep)


def _read_lines(path: Path) -> dict[str, Any]:
    try:
        said = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid YAML: {' '.join(str(error).split())}.") from None
    if not isinstance(said, dict):
        raise UserError(f"{path} must hold lines of `name: value`; lmtools sweep --help shows an example.")
    return said


def read_sweep(path: Path) -> Sweep:
    """The file, checked: keys, names of flags, values. Raises UserError."""
    from lm_experiments_tools.tools.main import arguments_of

    said = _read_lines(path)
    for key in said:
        if key not in _KEYS:
            raise UserError(f"{path}: unknown setting {key!r}: there are {', '.join(_KEYS)}.")
    if said.get("script") not in _SCRIPTS:
        raise UserError(f"{path}: script is {said.get('script')!r}: choose one of {', '.join(_SCRIPTS)}.")
    flags = {field.name: field for field in fields(arguments_of(said["script"]))}
    check_parameters(said.get("parameters"), str(path))
    for flag in said["parameters"]:
        if flag not in flags:
            raise UserError(f"{path}: parameters: unknown flag {flag!r}{suggestion(str(flag), flags)}")
        if flag == "model_path":
            raise UserError(f"{path}: parameters: model_path is a folder in --output for each run: leave it out.")
    trials, launcher = said.get("trials"), said.get("launcher", [])
    if trials is not None and (type(trials) is not int or trials < 1):
        raise UserError(f"{path}: trials is {trials!r}: it is the number of runs, at least 1.")
    if not isinstance(said.get("metric", "loss"), str):
        raise UserError(f"{path}: metric is {said['metric']!r}: name one of validation, such as loss.")
    if said.get("direction", "min") not in ("min", "max"):
        raise UserError(f"{path}: direction is {said['direction']!r}: choose min or max.")
    launcher = launcher.split() if isinstance(launcher, str) else launcher
    if not isinstance(launcher, list) or (launcher and shutil.which(str(launcher[0])) is None):
        raise UserError(f"{path}: launcher {launcher!r} is no program to be found: give a list of words.")
    config = said.get("config")
    if config is not None and not (config := path.parent / str(config)).is_file():
        raise UserError(f"{path}: config {config} is not there.")
    more = {"config": config and str(config), "launcher": tuple(map(str, launcher))}
    return Sweep(**said | more)


@contextmanager
def _only_one(folder: Path) -> Iterator[None]:
    with open(folder / ".lock", "w", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"--output {folder}: another sweep is at work there; --jobs makes several runs.") from None
        yield


def _check_same(folder: Path, sweep: Sweep) -> None:
    """Results of different questions do not belong into one table."""
    file = folder / "sweep.json"
    asked = {name: getattr(sweep, name) for name in ("script", "metric", "direction")}
    asked["search"] = "grid" if sweep.trials is None else "optuna"
    config = json.loads(json.dumps(_read_lines(Path(sweep.config)), default=str)) if sweep.config else {}
    if not file.exists():
        write_atomic(file, json.dumps(asked | {"settings": config}) + "\n")
        return
    before = read_json(file)
    then = before.pop("settings", config)  # sweeps of before do not have it
    if before != asked:
        raise UserError(f"--output {folder} holds a sweep of {before}, this is one of {asked}: choose another folder.")
    if changed := [name for name in sorted({*then, *config}) if then.get(name) != config.get(name)]:
        said = ", ".join(f"{name} {then.get(name)}, now {config.get(name)}" for name in changed)
        raise UserError(f"--output {folder} holds runs of {sweep.config} with {said}: choose another folder.")


class _Work:
    """The runs of a sweep, taken by several threads.

    Attributes:
        done: {name of a run: its line in results.jsonl, with a value or an error}.
        stopped: set to begin no further run.
    """

    def __init__(self, sweep: Sweep, folder: Path, retry: bool):
        self.sweep, self.folder, self.stopped = sweep, folder, False
        self._lock = threading.Lock()
        self._at_work: dict[str, threading.Lock] = defaultdict(threading.Lock)  # two candidates may have equal values
        self._results = folder / "results.jsonl"
        self.done: dict[str, dict[str, Any]] = {}
        if self._results.exists():
            whole, _, cut_short = self._results.read_text(encoding="utf-8").rpartition("\n")
            try:
                self.done = {result["run"]: result for result in map(json.loads, whole.splitlines())}
            except (ValueError, KeyError, TypeError):
                sentence = f"{self._results} is damaged: remove it; the runs that have ended are then read again."
                raise UserError(sentence) from None
            if cut_short:  # by a kill
                write_atomic(self._results, whole + "\n" * bool(whole))
        if retry:
            self.done = {name: result for name, result in self.done.items() if "error" not in result}
        (folder / "logs").mkdir(exist_ok=True)
        if sweep.trials is None:
            self._source: Grid | OptunaSearch = Grid(sweep.parameters)
        else:
            self._source = OptunaSearch(sweep.parameters, sweep.direction, sweep.trials, folder / "optuna.journal")

    def until_done(self) -> None:
        """Make runs as long as there are any."""
        while not self.stopped:
            with self._lock:
                candidate = self._source.next()
                if candidate is None:
                    return
                name = run_name(candidate.values)
                at_work = self._at_work[name]
            with at_work:
                result = self.done.get(name) or self._made(name, candidate.values)
                if result is not None:
                    with self._lock:
                        self._keep(candidate, result)

    def _keep(self, candidate: Candidate, result: dict[str, Any]) -> None:
        self._source.tell(candidate, result.get("value"))
        if result["run"] not in self.done:
            self.done[result["run"]] = result
            with self._results.open("a", encoding="utf-8") as file:
                file.write(json.dumps(result) + "\n")
            print(f"{result['run']}: {result.get('error') or result['value']}", flush=True)

    def _made(self, name: str, values: Mapping[str, Any]) -> dict[str, Any] | None:
        """A run's line of results; None for one that a signal ended, which the next start continues."""
        from lm_experiments_tools.tools.runs.records import read_run

        path = self.folder / name
        while path.is_dir() and any(path.iterdir()) and _state(path) == "running":  # left behind by a killed sweep
            time.sleep(_POLL)
        log = self.folder / "logs" / f"{name}.log"
        with log.open("ab") as file:
            start = file.tell()
            code = subprocess.run(self._command(path, values), stdout=file, stderr=file, check=False).returncode
        if code < 0 or code in _BY_SIGNAL:
            print(f"{name}: ended by a signal; the same command continues it", flush=True)
            return None
        result: dict[str, Any] = {"run": name, "values": values}
        if code:
            lines = log.read_bytes()[start:].decode("utf-8", "replace").strip().splitlines() or [f"exit code {code}"]
            said = next((line for line in reversed(lines) if line.startswith("error: ")), lines[-1])
            return result | {"error": said.removeprefix("error: ")}
        try:
            found = read_run(path)
        except UserError as error:
            return result | {"error": str(error)}
        metric, sign = self.sweep.metric, 1 if self.sweep.direction == "min" else -1
        numbers = [r[metric] for r in found.of("valid") if isinstance(r.get(metric), (int, float))]
        numbers = [number for number in numbers if math.isfinite(number)]
        if not numbers:
            there = ", ".join(found.metrics("valid")) or "none: give --valid_data_path"
            return result | {"error": f"no finite {metric} of validation; there is {there}."}
        return result | {"value": min(numbers, key=lambda number: sign * number)}

    def _command(self, path: Path, values: Mapping[str, Any]) -> list[str]:
        from lm_experiments_tools.tools.main import script_path

        words = [*(self.sweep.launcher or (sys.executable,)), str(script_path(self.sweep.script))]
        words += ["--config", self.sweep.config] if self.sweep.config else []
        for flag, value in values.items():
            words.append(f"--{flag}={'none' if value is None else str(value)}")
        return [*words, f"--model_path={path}"]


def _state(path: Path) -> str:
    from lm_experiments_tools.tools.runs.records import Run, state_of

    return state_of(Run(path, path.name))


def _show(work: _Work, sweep: Sweep) -> int:
    """Print a line for each run, the best first, and what `lmtools compare` says of them."""
    from lm_experiments_tools.tools import compare
    from lm_experiments_tools.tools.evaluate import table

    sign = 1 if sweep.direction == "min" else -1
    good = sorted((r for r in work.done.values() if "error" not in r), key=lambda r: sign * r["value"])
    if good:
        rows = [{"run": result["run"], f"best {sweep.metric}": result["value"]} for result in good]
        print("\n".join(["", *table(rows, texts=("run",))]))
        print()
        compare.run(compare.CompareArgs(runs=tuple(str(work.folder / result["run"]) for result in good)))
    for result in work.done.values():
        if "error" in result:
            print(f"failed: {result['run']}: {result['error']}", file=sys.stderr)
    return 0 if good else 1

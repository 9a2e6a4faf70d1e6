"""Send the numbers of metrics.jsonl to trackio and wandb (`--log_to`), on rank 0.

A restart continues the service's run. Steps that are repeated after a restart appear twice, because the services
cannot delete records. A service that fails is reported once and then ignored.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import os
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm_experiments_tools.config.flags import telling_settings
from lm_experiments_tools.errors import UserError, first_line
from lm_experiments_tools.files import dump_json, to_jsonable, write_atomic

if TYPE_CHECKING:
    from lm_experiments_tools.config.training import LoggingArgs

logger = logging.getLogger(__name__)

_chosen: dict[Path, LoggingArgs] = {}  # of the run directories that this process writes to


class TrackioRun:
    """Connection to a run in the local trackio database (TRACKIO_DIR), to which metrics are sent."""

    def __init__(self, project: str, name: str, run_id: str, settings: dict[str, Any], run_dir: Path) -> None:
        import trackio

        self._service, known = trackio, {"name": f"{name}-{run_id}", "config": settings, "resume": "allow"}
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):  # several lines of advice
            self._run = trackio.init(project, auto_log_gpu=False, auto_log_cpu=False, embed=False, **known)

    def log(self, numbers: dict[str, float], step: int) -> None:
        self._run.log(numbers, step=step)

    def close(self) -> None:
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            self._service.finish()


class WandbRun:
    """Connection to a wandb run, to which metrics are sent.

    The run is stored in `wandb/` of the run directory. It is offline by default; WANDB_MODE changes that.
    """

    def __init__(self, project: str, name: str, run_id: str, settings: dict[str, Any], run_dir: Path) -> None:
        import wandb

        mode = os.environ.get("WANDB_MODE", "offline")
        known = {"project": project, "name": name, "id": run_id, "config": settings, "dir": str(run_dir)}
        self._run = wandb.init(
            **known,
            mode=mode,
            resume="allow" if mode == "online" else None,
            settings=wandb.Settings(console="off", silent=True, disable_git=True, save_code=False),
        )
        self._run.define_metric("*", step_metric="step")

    def log(self, numbers: dict[str, float], step: int) -> None:
        self._run.log({**numbers, "step": step})

    def close(self) -> None:
        self._run.finish()


_SERVICES = {"trackio": TrackioRun, "wandb": WandbRun}


def choose_services(args: LoggingArgs, run_dir: Path) -> None:
    """Check and record the services of `--log_to` for `run_dir`. Raises UserError if one is not installed."""
    for name in args.log_to:
        found = importlib.util.find_spec(name)
        if name in _SERVICES and (found is None or found.origin is None):  # wandb leaves folders of its own name
            raise UserError(f"--log_to {name}: {name} is not installed: pip install {name}, or leave it out.")
    _chosen[run_dir.resolve()] = args


class Services:
    """Sends metrics to all services that `choose_services` has recorded for a run directory.

    Args:
        start_step: number of updates already applied; -1 starts a new run in each service.
    """

    def __init__(self, run_dir: Path, start_step: int) -> None:
        self._open: dict[str, TrackioRun | WandbRun] = {}
        args = _chosen.get(run_dir.resolve())
        self.tensorboard = args is None or "tensorboard" in args.log_to
        names = [] if args is None else [name for name in dict.fromkeys(args.log_to) if name in _SERVICES]
        if not names:
            return
        run_dir = run_dir.resolve()
        settings, run_id = to_jsonable(telling_settings(args)), _run_id(run_dir, new=start_step < 0)
        for name in names:
            project = os.environ.get(f"{name.upper()}_PROJECT") or run_dir.parent.name or "runs"
            with self._reported_once(name):
                self._open[name] = _SERVICES[name](project, run_dir.name, run_id, settings, run_dir)

    def log(self, record: Mapping[str, Any]) -> None:
        """Send one line of metrics.jsonl, parsed to a dict, to all services."""
        for name, service in list(self._open.items()):
            with self._reported_once(name):
                service.log(numbers_of(record), record["step"])

    def close(self) -> None:
        for name, service in list(self._open.items()):
            with self._reported_once(name):
                service.close()
        self._open.clear()

    @contextlib.contextmanager
    def _reported_once(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # a failing service must not end the training
            self._open.pop(name, None)
            reason = f"{type(error).__name__}: {first_line(error)}"
            logger.warning("%s gets no more of this run (%s); metrics.jsonl has all of it", name, reason)


def numbers_of(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers in a line of metrics.jsonl by name: {"loss/valid": 2.1, "lr": 1e-3}. Null becomes NaN."""
    numbers: dict[str, float] = {}
    for name, value in record.items():
        if name in ("step", "split", "metrics", "time"):  # services have their own clock
            continue
        plain = to_jsonable(value)
        tag = f"{name}/{record['split']}" if name in record["metrics"] else name
        parts = [(f"{tag}/{i}", part) for i, part in enumerate(plain)] if isinstance(plain, list) else [(tag, plain)]
        for key, part in parts:
            if part is None or isinstance(part, (int, float)):
                numbers[key] = float("nan") if part is None else float(part)
    return numbers


def _run_id(run_dir: Path, new: bool) -> str:
    """The run's ID in services, the same after a restart."""
    file = run_dir / "services.json"
    if not new:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            return str(json.loads(file.read_text(encoding="utf-8"))["id"])
    run_id = secrets.token_hex(4)
    write_atomic(file, dump_json({"id": run_id}) + "\n")
    return run_id

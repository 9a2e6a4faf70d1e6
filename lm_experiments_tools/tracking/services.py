"""Send the numbers of metrics.jsonl to trackio and wandb (`--log_to`), on rank 0.

A restart continues the service's run; steps that are repeated appear twice there. A service that fails is reported
once and then ignored.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm_experiments_tools.errors import UserError, first_line
from lm_experiments_tools.files import dump_json, read_json, to_jsonable, write_atomic

if TYPE_CHECKING:
    from lm_experiments_tools.config.training import LoggingArgs

logger = logging.getLogger(__name__)

_chosen: dict[Path, LoggingArgs] = {}  # of the run directories that this process writes to


def choose_services(args: LoggingArgs, run_dir: Path) -> None:
    """Check and record the services of `--log_to` for `run_dir`. Raises UserError if one is not installed."""
    for name in args.log_to:
        found = importlib.util.find_spec(name)
        if name != "tensorboard" and (found is None or found.origin is None):  # wandb leaves folders of its own name
            raise UserError(f"--log_to {name}: {name} is not installed: pip install {name}, or leave it out.")
    _chosen[run_dir.resolve()] = args


class Services:
    """Sends metrics to all services that `choose_services` has recorded for a run directory."""

    def __init__(self, run_dir: Path) -> None:
        self._open: dict[str, tuple[Callable, Callable]] = {}  # methods that log and close
        args, run_dir = _chosen.get(run_dir.resolve()), run_dir.resolve()
        names = ("tensorboard",) if args is None else dict.fromkeys(args.log_to)
        self.tensorboard = "tensorboard" in names
        for name in names:
            if name != "tensorboard":
                with self._reported_once(name):
                    self._open[name] = _opened(name, run_dir, to_jsonable(asdict(args)))

    def log(self, record: Mapping[str, Any]) -> None:
        """Send one line of metrics.jsonl, parsed to a dict, to all services."""
        for name, (log, _) in list(self._open.items()):
            with self._reported_once(name):
                log(numbers_of(record), record["step"])

    def close(self) -> None:
        for name, (_, close) in list(self._open.items()):
            with self._reported_once(name):
                close()
        self._open.clear()

    @contextlib.contextmanager
    def _reported_once(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # a failing service must not end the training
            self._open.pop(name, None)
            reason = f"{type(error).__name__}: {first_line(error)}"
            logger.warning("%s gets no more of this run (%s); metrics.jsonl has all of it", name, reason)


def _opened(name: str, run_dir: Path, settings: dict[str, Any]) -> tuple[Callable, Callable]:
    """Functions that log and close a run, which a restart in the same directory continues."""
    project = os.environ.get(f"{name.upper()}_PROJECT") or run_dir.parent.name or "runs"
    run_id = _run_id(run_dir)
    if name == "trackio":
        import trackio

        quiet = {"auto_log_gpu": False, "auto_log_cpu": False, "embed": False}
        run = trackio.init(project, name=f"{run_dir.name}-{run_id}", config=settings, resume="allow", **quiet)
        return (lambda numbers, step: run.log(numbers, step=step)), trackio.finish
    import wandb

    mode = os.environ.get("WANDB_MODE", "offline")
    named = {"project": project, "name": run_dir.name, "id": run_id, "dir": str(run_dir), "config": settings}
    quiet = wandb.Settings(console="off", silent=True)
    run = wandb.init(**named, mode=mode, resume="allow" if mode == "online" else None, settings=quiet)
    run.define_metric("*", step_metric="step")
    return (lambda numbers, step: run.log({**numbers, "step": step})), run.finish


def _run_id(run_dir: Path) -> str:
    """Random ID of the run in services, kept in its directory; its path may name other runs, earlier or elsewhere."""
    file = run_dir / "services.json"
    if not file.exists():
        write_atomic(file, dump_json({"id": secrets.token_hex(4)}) + "\n")
    return str(read_json(file)["id"])


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

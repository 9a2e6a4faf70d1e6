"""Workers forked from a process that has imported torch and the project, so that a start costs no imports.

`start` gives each child the environment that horovodrun or torchrun would, and `Job.wait` does as they do when a
worker ends badly: SIGTERM to the others, SIGKILL after a grace period.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from tests.chaos.moments import Kill, Watch, install
from tests.helpers.warm import leave, rank_variables, rendezvous

KINDS = {"horovod": "horovodrun", "ddp": "torchrun"}  # whose environment the workers of a backend get
BACKENDS = tuple(KINDS)
PRELOADED = (
    "horovod.torch",
    "torch.distributed",
    "lm_experiments_tools.backends.accelerate",
    "lm_experiments_tools.backends.horovod",
    "lm_experiments_tools.recipes.t5",
    "lm_experiments_tools.recipes.t5_sources",
    "lm_experiments_tools.training.trainer",
    "modeling_t5",
    "run_t5_pretraining",
    "transformers.optimization",
)
GRACE_SECONDS, PATIENCE_SECONDS = 30.0, 150.0


def preload() -> None:
    """Import what every worker needs, before the first fork."""
    for name in PRELOADED:
        importlib.import_module(name)
    from lm_experiments_tools.tracking import run_directory

    environment = run_directory.describe_environment()  # of 500 packages, the same at each start
    run_directory.describe_environment = lambda: dict(environment)


@dataclass
class Ended:
    """How a start ended: exit codes by rank (negative: a signal), the seconds, and if the kill was delivered."""

    codes: dict[int, int]
    seconds: float
    landed: bool
    hung: bool = False
    forced: list[int] = field(default_factory=list)


def start(
    main: Callable[[Sequence[str]], None],
    argv: Sequence[str],
    backend: str,
    workers: int,
    folder: Path,
    kill: Kill | None,
) -> Job:
    """Fork the workers of a start; what they print goes to `folder`/rank<N>.log."""
    folder.mkdir(parents=True, exist_ok=True)
    kind = KINDS[backend]
    server, common = rendezvous(kind, workers)
    common["ACCELERATE_USE_CPU"] = "true"
    pids = {}
    for rank in range(workers):
        if (pid := os.fork()) == 0:
            _work(main, argv, {**common, **rank_variables(kind, rank, workers)}, folder, rank, kill)
        pids[rank] = pid
    return Job(pids, server, folder, kill)


class Job:
    """Workers that run, by rank."""

    def __init__(self, pids: dict[int, int], server: int | None, folder: Path, kill: Kill | None) -> None:
        self.pids, self.server, self.folder, self.kill = pids, server, folder, kill
        self.begun = time.monotonic()
        self._sent = False

    def wait(self, random: Random) -> Ended:
        """Return when all have ended, as their launcher would see to."""
        alive, codes, forced = dict(self.pids), {}, []
        react, patience = random.uniform(0.0, 1.0), self.begun + PATIENCE_SECONDS
        failed_at, told, hung = None, False, False
        while alive:
            self._send(alive)
            for rank, pid in list(alive.items()):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    codes[rank] = os.waitstatus_to_exitcode(status)
                    del alive[rank]
                    failed_at = failed_at or (time.monotonic() if codes[rank] else None)
            now = time.monotonic()
            if failed_at and not told and now > failed_at + react:
                told = True
                _signal(alive, signal.SIGTERM)
            if (failed_at and now > failed_at + GRACE_SECONDS) or now > patience:
                hung = hung or now > patience
                forced = forced or sorted(alive)
                _signal(alive, signal.SIGKILL)
            time.sleep(0.01)
        if self.server is not None:
            os.kill(self.server, signal.SIGKILL)
            os.waitpid(self.server, 0)
        landed = self._sent or (self.folder / "landed").exists()
        return Ended(codes, time.monotonic() - self.begun, landed, hung, forced)

    def _send(self, alive: dict[int, int]) -> None:
        kill = self.kill
        if kill is None or kill.phase != "any time" or self._sent or kill.rank not in alive:
            return
        if time.monotonic() - self.begun >= kill.delay:
            os.kill(alive[kill.rank], kill.sign)
            self._sent = True


def _signal(alive: dict[int, int], sign: int) -> None:
    for pid in alive.values():
        os.kill(pid, sign)


def _work(
    main: Any, argv: Sequence[str], environment: dict[str, str], folder: Path, rank: int, kill: Kill | None
) -> None:
    """Be a worker: never returns."""
    code = 70
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: none outlives the harness
        log = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.update(environment)
        os.chdir(folder.parent)  # token files of text go to .cache of the current folder
        if kill is not None and kill.rank == rank and kill.phase != "any time":
            install(Watch(kill, lambda: (folder / "landed").touch()), rank)
        from lm_experiments_tools.config.cli import run_main

        try:
            run_main(lambda: main(argv))
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    finally:
        leave(code)

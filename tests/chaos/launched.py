"""Starts by horovodrun and `accelerate launch` themselves, of which one worker is killed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

import psutil

from tests.chaos.moments import Kill
from tests.chaos.zygote import PATIENCE_SECONDS, Ended
from tests.distributed.launch import ROOT, environment, horovodrun, shipped

SCRIPT = ROOT / "run_t5_pretraining.py"


def start(launcher: str, workers: int, argv: list[str], folder: Path, kill: Kill | None) -> Ended:
    """Run the script to its end, or its killed worker's; `kill.delay` counts from when all workers are there."""
    folder.mkdir(parents=True)
    command = horovodrun(workers) if launcher == "horovodrun" else shipped("ddp")
    begun = time.monotonic()
    with (folder / "output.log").open("w") as log:
        job = subprocess.Popen(
            [*command, str(SCRIPT), *argv], cwd=folder.parent, env=environment(), stdout=log, stderr=log,
            start_new_session=True,
        )  # fmt: skip
        try:
            landed = kill is not None and _kill(job, workers, kill)
            job.wait(PATIENCE_SECONDS)
            hung = False
        except subprocess.TimeoutExpired:
            hung = True
        finally:
            for left in _workers(job.pid):  # horovodrun's are in sessions of their own
                with contextlib.suppress(psutil.NoSuchProcess):
                    left.kill()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)
            job.wait()
    return Ended({0: job.returncode}, time.monotonic() - begun, landed, hung)


def _kill(job: subprocess.Popen, workers: int, kill: Kill) -> bool:
    """Send the signal; False if the job had ended by then."""
    while len(found := _workers(job.pid)) < workers:
        if job.poll() is not None:
            return False
        time.sleep(0.05)
    with contextlib.suppress(subprocess.TimeoutExpired):
        job.wait(kill.delay)
        return False
    try:
        found[kill.rank].send_signal(kill.sign)
    except psutil.NoSuchProcess:
        return False
    return True


def _workers(launcher: int) -> list[psutil.Process]:
    """Processes of the script that started none of it themselves."""
    found = []
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in psutil.Process(launcher).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                runs = str(SCRIPT) in process.cmdline() and "python" in process.name()
                if runs and not any(str(SCRIPT) in child.cmdline() for child in process.children()):
                    found.append(process)
    return found

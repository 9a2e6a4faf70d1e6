"""Start a script as a real multi-process job, wait for it, and never leave a process behind."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest

from tests.helpers import ROOT
from tests.helpers.warm import run_job

SHIM = Path(__file__).with_name("cpu_shim.py")
CPU = {"ACCELERATE_USE_CPU": "true"}
LAUNCHER_VARIABLES = ("ACCELERATE_", "HOROVOD_", "FSDP_", "OMPI_", "PMI_", "MPI_", "SLURM_", "TORCHELASTIC_")
RANK_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "DS_ACCELERATOR",
)


@dataclass
class Job:
    """An ended job: its exit code (None: killed at the time limit) and everything it printed."""

    returncode: int | None
    output: str


def missing(*modules: str) -> str | None:
    """Why a test must be skipped: the first of these modules that is not installed."""
    absent = [name for name in modules if importlib.util.find_spec(name) is None]
    return f"{absent[0]} is not installed" if absent else None


def skip_without(*modules: str) -> None:
    """Skip the test if one of these modules is not installed."""
    if reason := missing(*modules):
        pytest.skip(reason)


def slow(names: Iterable[str], *minutes: str) -> list:
    """Parameters of a test; `minutes` are left to `make test-all`, as what they run is run by another one too."""
    return [pytest.param(name, marks=[pytest.mark.slow] if name in minutes else []) for name in names]


def torchrun(workers: int = 2) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(workers)]


def horovodrun(workers: int = 2) -> list[str]:
    return ["horovodrun", "--gloo", "-np", str(workers), sys.executable]


def accelerate_launch(*options: str) -> list[str]:
    return [sys.executable, "-m", "accelerate.commands.launch", *options]


def shipped(name: str) -> list[str]:
    """accelerate launch with a file of accelerate_configs/, on CPUs."""
    file = ROOT / "accelerate_configs" / f"{name}.yaml"
    options = ("--config_file", str(file), "--num_processes", "2", "--main_process_port", "0")
    return [*accelerate_launch(*options), str(SHIM), "launched"]


def shim(mode: str, workers: int = 2) -> list[str]:
    """FSDP2 or ZeRO on CPUs, see cpu_shim.py."""
    return [*torchrun(workers), str(SHIM), mode]


@dataclass(frozen=True)
class Kind:
    """A launcher with a backend.

    Args:
        command: launcher of a number of workers.
        described: part of the line in which a run describes its backend.
        needs: packages.
        variables: environment of the job.
        shipped: file of accelerate_configs/ by which `accelerate launch` starts it, see `shipped`.
    """

    command: Callable[[int], list[str]]
    described: str
    needs: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    shipped: str = ""

    def launcher(self) -> list[str]:
        """The real launcher of two workers: for sharded models `accelerate launch`."""
        return shipped(self.shipped) if self.shipped else self.command(2)


KINDS = {
    "alone": Kind(lambda _: [sys.executable], "backend local, 1 worker(s)"),
    "horovod": Kind(horovodrun, "backend horovod, 2 worker(s)", ("horovod",)),
    "ddp": Kind(torchrun, "DistributedDataParallel", ("accelerate",), CPU),
    "fsdp": Kind(partial(shim, "fsdp"), "FSDP", ("accelerate",), shipped="fsdp"),
    **{
        zero: Kind(partial(shim, zero), "DeepSpeedEngine", ("accelerate", "deepspeed"), shipped=zero)
        for zero in ("zero1", "zero2", "zero3")
    },
}


def start(
    kind: str, *command: object, workers: int = 2, real: bool = False, fails: bool = False, **options: Any
) -> str:
    """The output of a job of a kind (KINDS), which must end with 0, or if it `fails` with another code.

    Skips the test if a package is absent. Workers are forked (see `forked`), or started by the `real` launcher.
    """
    how = KINDS[kind]
    skip_without(*how.needs)
    start_by = run if real else forked
    job = start_by(how.launcher() if real else how.command(workers), *command, **{**how.variables, **options})
    assert job.returncode is not None and (job.returncode != 0) == fails, job.output[-4000:]
    return job.output


def environment(**extra: str) -> dict[str, str]:
    """This process' environment without any launcher's marks, one thread per rank, the repository importable."""
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(LAUNCHER_VARIABLES) and name not in RANK_VARIABLES
    }
    clean["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{clean.get('PATH', '')}"
    clean["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [clean.get("PYTHONPATH")])])
    return {**clean, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", **extra}


def run(launcher: list[str], *command: object, timeout: float = 150, **extra: str) -> Job:
    """Run `launcher command...` from the repository's root; keyword arguments are environment variables.

    One job at a time: those of pytest's other workers wait for its end. At the time limit, counted from its start, the
    job's own process group gets SIGTERM, then SIGKILL.
    """
    with Path(__file__).open() as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        process = subprocess.Popen(
            [*launcher, *map(str, command)],
            cwd=ROOT,
            env=environment(**extra),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=timeout)
            return Job(process.returncode, output)
        except subprocess.TimeoutExpired:
            return Job(None, _end(process))


def forked(launcher: list[str], *command: object, timeout: float = 150, **extra: str) -> Job:
    """Run the workers of a job as `run` does, forked from a process that has imported torch: no launcher, no imports.

    What differs from a real start: all workers have the hash seed of that process.

    Of `accelerate launch`, only its reading of options and files runs. A launcher other than those here is started.
    """
    if launcher[1:3] == accelerate_launch()[1:3]:
        launcher, command, extra = _without_accelerate([*launcher[3:], *map(str, command)], extra)
    if launcher[0] == "horovodrun":
        workers = int(launcher[launcher.index("-np") + 1])
        assert launcher == horovodrun(workers), f"{launcher} is to be started by run()"
        kind, script = "horovodrun", []
    elif launcher[1:3] == torchrun()[1:3]:
        number = launcher.index("--nproc_per_node") + 1
        kind, workers, script = "torchrun", int(launcher[number]), launcher[number + 1 :]
    elif launcher[0] in ("srun", "mpiexec"):
        kind, workers, script = launcher[0], int(launcher[2]), []
    elif launcher == [sys.executable]:
        kind, workers, script = "python", 1, []
    else:
        return run(launcher, *command, timeout=timeout, **extra)
    with tempfile.TemporaryDirectory() as folder, Path(__file__).open() as turn:
        log = Path(folder, "log")
        fcntl.flock(turn, fcntl.LOCK_EX)
        code = run_job(kind, workers, [*script, *map(str, command)], environment(**extra), log, timeout)
        return Job(code, log.read_text(errors="replace"))


def _without_accelerate(options: list[str], extra: dict[str, str]) -> tuple[list[str], list[str], dict[str, str]]:
    """(torchrun, script with arguments, variables) that `accelerate launch` makes of its options."""
    from accelerate.commands import launch

    with mock.patch.dict(os.environ, environment(**extra), clear=True), mock.patch("torch.distributed.run.run") as run:
        variables: dict[str, str] = {}
        run.side_effect = lambda _: variables.update(os.environ)
        launch.launch_command(launch.launch_command_parser().parse_args(options))
    (args,) = run.call_args.args
    return torchrun(int(args.nproc_per_node)), [args.training_script, *args.training_script_args], variables


def kill_after(kind: str, command: list[object], appears: Path, timeout: float) -> None:
    """Start a job by its real launcher and SIGKILL all of its processes as soon as a path exists."""
    skip_without(*KINDS[kind].needs)
    process = subprocess.Popen(
        [*KINDS[kind].launcher(), *map(str, command)], cwd=ROOT, env=environment(**KINDS[kind].variables),
        start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    end = time.monotonic() + timeout
    while not appears.exists() and process.poll() is None and time.monotonic() < end:
        time.sleep(0.01)
    assert process.poll() is None, "the run ended before it could be killed"
    family = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    process.wait()
    assert appears.exists(), "the run did not come so far"


def kill_and_resume(kind: str, command: list[object], run_dir: Path, step: int = 10, **options: Any) -> str:
    """The output of a job that is killed after the checkpoint of a step and started again by `start`."""
    options = {"timeout": 200, **options}
    kill_after(kind, command, run_dir / "checkpoints" / f"step_{step:06d}", options["timeout"])
    output = start(kind, *command, **options)
    assert KINDS[kind].described in output and "resumed from" in output
    return output


def _end(process: subprocess.Popen) -> str:
    for sign, grace in ((signal.SIGTERM, 15), (signal.SIGKILL, 15)):
        os.killpg(process.pid, sign)
        try:
            return process.communicate(timeout=grace)[0]
        except subprocess.TimeoutExpired:
            continue
    return "(the job did not end)"

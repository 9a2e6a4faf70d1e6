"""Jobs of several workers without launchers and imports, forked from a process that has imported torch.

`run_job` sends a job to a server, which is this module run as a program and lives as long as the test process. The
server forks the workers, gives each the environment that torchrun or horovodrun would, and ends the others as these do
when one fails. A worker runs the script as `__main__`. Tests about launchers themselves start real ones
(`tests.distributed.launch.run`).
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib
import json
import logging
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

PRELOADED = (
    "triton",
    "torch.distributed",
    "transformers.models.bert.modeling_bert",
    "transformers.models.t5.modeling_t5",
    "transformers.optimization",
    "accelerate",
    "horovod.torch",
    "lm_experiments_tools.recipes.finetuner",
    "lm_experiments_tools.recipes.t5",
    "lm_experiments_tools.training.trainer",
    "lm_experiments_tools.backends.accelerate",
    "modeling_t5",
    "modeling_bert",
)
OPTIONAL = {"triton", "accelerate", "horovod.torch", "lm_experiments_tools.backends.accelerate"}
GRACE_SECONDS = 15.0
# A task's number in its job, and on its machine.
TASK_VARIABLES = {"srun": ("SLURM_PROCID", "SLURM_LOCALID"), "mpiexec": ("PMI_RANK", "MPI_LOCALRANKID")}
_PR_SET_PDEATHSIG = 1
_servers: dict[int, subprocess.Popen] = {}  # by process: pytest's workers are forked from one


def run_job(
    kind: str, workers: int, command: Sequence[str], environment: Mapping[str, str], log: Path, timeout: float
) -> int | None:
    """Run a script in several workers and wait for them.

    Args:
        kind: launcher whose environment the workers get: "torchrun", "horovodrun", "srun", "mpiexec", or "python"
            (one worker, no launcher).
        command: the script and its arguments.
        environment: all variables of a worker, besides those of the kind.
        log: file that gets the output of all workers.

    Returns:
        0 if all workers ended with 0; the worker's own code for "python", else 1; None at the time limit.
    """
    job = {
        "kind": kind,
        "workers": workers,
        "command": [str(word) for word in command],
        "environment": dict(environment),
        "cwd": os.getcwd(),
        "log": str(log),
        "timeout": timeout,
    }
    server = _server(environment["PYTHONPATH"])
    server.stdin.write(json.dumps(job) + "\n")
    server.stdin.flush()
    answer = server.stdout.readline()
    if not answer:
        raise RuntimeError("the server of forked jobs has ended")
    return json.loads(answer)


def _server(python_path: str) -> subprocess.Popen:
    if os.getpid() not in _servers:
        server = subprocess.Popen(
            [sys.executable, "-m", "tests.helpers.warm"], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[2], env={**os.environ, "PYTHONPATH": python_path, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        _servers[os.getpid()] = server
        atexit.register(server.stdin.close)
    return _servers[os.getpid()]


def preload(*more: str) -> None:
    """Import what workers need, before the first fork."""
    for name in (*PRELOADED, *more):
        with contextlib.suppress(*([ImportError] if name in OPTIONAL else [])):
            importlib.import_module(name)
    from lm_experiments_tools.tracking.run_directory import installed_packages

    installed_packages()  # once for all jobs


def serve() -> None:
    """Run the jobs that come on standard input, one JSON object a line, and answer each with its exit code."""
    preload()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # nothing that a library prints is an answer
    for line in sys.stdin:
        answers.write(json.dumps(_run(json.loads(line))) + "\n")
        answers.flush()


def _run(job: dict) -> int | None:
    server, shared = rendezvous(job["kind"], job["workers"])
    alive = {}
    for rank in range(job["workers"]):
        if (pid := os.fork()) == 0:
            _work(job, {**job["environment"], **shared, **rank_variables(job["kind"], rank, job["workers"])})
        alive[pid] = rank
    code = _wait(alive, time.monotonic() + job["timeout"])
    if server is not None:
        os.kill(server, signal.SIGKILL)
        os.waitpid(server, 0)
    return code if code is None or job["kind"] == "python" else int(code != 0)


def _wait(alive: dict[int, int], end: float) -> int | None:
    """The first exit code that is not 0, once all workers have ended; None if the time limit ended them."""
    code, failed_at, timed_out = 0, None, False
    while alive:
        for pid in list(alive):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del alive[pid]
                code = code or os.waitstatus_to_exitcode(status)
                if code and failed_at is None:
                    failed_at = time.monotonic()
                    _signal(alive, signal.SIGTERM)
        now = time.monotonic()
        if now > end and not timed_out:
            timed_out, failed_at = True, now
            _signal(alive, signal.SIGTERM)
        if failed_at is not None and now > failed_at + GRACE_SECONDS:
            _signal(alive, signal.SIGKILL)
        time.sleep(0.01)
    return None if timed_out else code


def _signal(alive: Mapping[int, int], number: int) -> None:
    for pid in alive:
        os.kill(pid, number)


def _work(job: dict, environment: dict[str, str]) -> NoReturn:
    """Run the script in this forked process. Workers share the hash seed, unlike real ones."""
    os.environ.clear()

    def main() -> None:
        sys.modules["numpy"].random.seed()  # the server's state would be that of all workers
        script, *arguments = job["command"]
        sys.argv, sys.orig_argv = [script, *arguments], [sys.executable, script, *arguments]
        sys.path[0] = str(Path(script).resolve().parent)
        runpy.run_path(script, run_name="__main__")

    work(main, environment, Path(job["log"]), job["cwd"], at_exit=atexit._run_exitfuncs)


def work(
    main: Callable[[], None], environment: Mapping[str, str], log: Path, folder: str | Path,
    at_exit: Callable[[], None] = lambda: None,
) -> NoReturn:  # fmt: skip
    """Be a worker in this forked process: run `main` in a folder, with its output added to a log, and leave."""
    code = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # none outlives its parent
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for stream, target in ((os.open(os.devnull, os.O_RDONLY), 0), (output, 1), (output, 2)):
            os.dup2(stream, target)
        os.environ.update(environment)
        os.chdir(folder)
        try:
            main()
            code = 0
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
            if isinstance(ended.code, str):
                print(ended.code, file=sys.stderr)
        at_exit()
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    finally:
        leave(code)


def leave(code: int) -> NoReturn:
    """End a forked process with what it has logged and printed, and without its parent's exit functions."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def rank_variables(kind: str, rank: int, workers: int) -> dict[str, str]:
    """What a launcher tells one worker of a machine that has them all."""
    if kind == "python":
        return {}
    if kind in TASK_VARIABLES:
        return dict.fromkeys(TASK_VARIABLES[kind], str(rank))
    if kind == "horovodrun":
        places = {"RANK": rank, "SIZE": workers, "LOCAL_RANK": rank, "LOCAL_SIZE": workers}
        places |= {"CROSS_RANK": 0, "CROSS_SIZE": 1}
        return {f"HOROVOD_{name}": str(value) for name, value in places.items()}
    places = {"RANK": rank, "WORLD_SIZE": workers, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": workers}
    return {name: str(value) for name, value in places.items()}


def rendezvous(kind: str, workers: int) -> tuple[int | None, dict[str, str]]:
    """The process that Horovod's workers meet at (None for others), and the variables of all workers."""
    if kind in ("python", "srun"):
        return None, {}
    if kind in ("torchrun", "mpiexec"):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        return None, {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    reading, writing = os.pipe()
    if (server := os.fork()) == 0:
        _serve_horovod(writing, workers)
    os.close(writing)
    with os.fdopen(reading) as answer:
        port = answer.readline().strip()
    return server, {
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
        "HOROVOD_GLOO_RENDEZVOUS_PORT": port,
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_IFACE": "lo",
        "HOROVOD_HOSTNAME": "localhost",
    }


def _serve_horovod(answer: int, workers: int) -> None:
    """Run horovodrun's rendezvous server in a process of its own, because a fork should find no threads."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
    from horovod.runner.http.http_server import RendezvousServer

    server = RendezvousServer(0)
    port = server.start()
    server.init(get_host_assignments(parse_hosts(f"localhost:{workers}"), workers))
    os.write(answer, f"{port}\n".encode())
    while True:
        time.sleep(3600)


if __name__ == "__main__":
    serve()

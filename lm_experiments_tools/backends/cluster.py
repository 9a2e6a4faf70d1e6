"""Jobs of several processes that srun, mpirun or mpiexec starts, connected without torchrun.

These launchers start one command several times (as "tasks") and set environment variables that torch does not read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, MutableMapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

from lm_experiments_tools.config.launchers import on_several_machines
from lm_experiments_tools.errors import UserError

T = TypeVar("T")

# Larger step numbers are the batch script, salloc's shell and Slurm's own processes.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0
# Ports of jobs, below the ephemeral ports (from 32768 on).
_FIRST_PORT, _NUM_PORTS = 15000, 15000
# launcher -> variables of the number of tasks, this one's number, its number and their number on this machine
_VARIABLES = {
    "mpirun (Open MPI)": (
        "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "mpiexec (MPICH, Intel MPI)": ("PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}  # fmt: skip


@dataclass(frozen=True)
class Tasks:
    """Tasks of a launcher, as its environment variables report them.

    Attributes:
        source: name of the variable that holds `count`.
        local_rank, local_count: on this machine; None where the launcher does not say.
        address, port: where rank 0 can be reached; None where the launcher does not say.
        interactive: the task runs in a terminal (`srun --pty`).
    """

    launcher: str
    source: str
    count: int
    rank: int
    local_rank: int | None = None
    local_count: int | None = None
    address: str | None = None
    port: int | None = None
    interactive: bool = False


def started_tasks(environ: Mapping[str, str] = os.environ) -> Tasks | None:
    """Read from the environment which task this process is; None if no launcher started it.

    `SLURM_NTASKS` does not count: a batch script and salloc set it without starting the process as a task.
    """
    by_srun, by_mpi = _slurm_step(environ), _mpi_tasks(environ)
    if by_mpi is None or (by_srun is not None and (by_srun.count, by_srun.rank) == (by_mpi.count, by_mpi.rank)):
        return by_srun
    # mpirun's own daemons may be tasks of srun.
    return by_mpi


def _mpi_tasks(environ: Mapping[str, str]) -> Tasks | None:
    for launcher, names in _VARIABLES.items():
        count, rank, local_rank, local_count = (_number(environ, name) for name in names)
        if count is not None and count > 1 and rank is not None:
            return Tasks(launcher, names[0], count, rank, local_rank, local_count)
    return None


def _slurm_step(environ: Mapping[str, str]) -> Tasks | None:
    step = _number(environ, "SLURM_STEP_ID")
    if step is None or step >= _FIRST_SPECIAL_STEP:
        return None
    source = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    count, rank = _number(environ, source), _number(environ, "SLURM_PROCID")
    if count is None or count < 2 or rank is None:
        return None
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    host = first_host(nodes)
    alone = host is not None and host == nodes
    job = _number(environ, "SLURM_JOB_ID")
    return Tasks(
        "srun", source, count, rank,
        local_rank=_number(environ, "SLURM_LOCALID"),
        local_count=_tasks_of_node(environ),
        address="127.0.0.1" if alone else host,
        port=None if job is None else _FIRST_PORT + (job + 7919 * step) % _NUM_PORTS,
        interactive="SLURM_PTY_PORT" in environ,
    )  # fmt: skip


def first_host(nodes: str) -> str | None:
    """First name of a Slurm host list such as `n[01-04,7],gpu3`; None if the list is empty."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first[0]) if first else None


def _tasks_of_node(environ: Mapping[str, str]) -> int | None:
    """Tasks of the step on this machine, from a list such as `2(x3),1`."""
    node, text = _number(environ, "SLURM_NODEID"), environ.get("SLURM_STEP_TASKS_PER_NODE", "")
    counts = [int(count) for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text) for _ in range(int(times or 1))]
    return counts[node] if node is not None and node < len(counts) else None


def _number(environ: Mapping[str, str], name: str) -> int | None:
    return int(environ[name]) if environ.get(name, "").isdigit() else None


def attempt(function: Callable[[], T]) -> Callable[[], T]:
    """Call `function` now, but raise its error later; returns a function that gives the result or raises the error.

    On several machines a UserError is raised only by the returned function. Call it under `on_all`: then no worker
    waits for one that failed, for example because its machine lacks a file. On one machine it is raised immediately.
    """
    future: Future[T] = Future()
    try:
        future.set_result(function())
    except UserError as error:
        if not on_several_machines():
            raise
        future.set_exception(error)
    return future.result


def form_job(tasks: Tasks, environ: MutableMapping[str, str] = os.environ) -> None:
    """Set RANK, WORLD_SIZE and the other variables by which torch connects the tasks of a launcher to one job.

    Existing values of MASTER_ADDR and MASTER_PORT are kept. UserError if the launcher reports too little, or the task
    may be an interactive shell.
    """
    hint = f"`torchrun --nproc_per_node {tasks.count} SCRIPT ...` (or horovodrun) forms a job on one machine"
    if tasks.interactive:
        raise UserError(
            f"{tasks.launcher} --pty started {tasks.count} tasks ({tasks.source}), and this may be the only one of "
            f"them that trains: leave --pty out to train in all of them, or start one task (-n1); {hint}"
        )
    address, port = environ.get("MASTER_ADDR", tasks.address), environ.get("MASTER_PORT", tasks.port)
    if address is None or port is None or tasks.local_rank is None:
        missing = "the address of the first task" if tasks.local_rank is not None else "a task's number on its machine"
        raise UserError(
            f"{tasks.launcher} started {tasks.count} tasks ({tasks.source}) but does not tell {missing}, so each "
            f"would train alone: set MASTER_ADDR and MASTER_PORT for all of them (mpirun -x, mpiexec -genv); {hint}"
        )
    ours = {
        "RANK": tasks.rank,
        "WORLD_SIZE": tasks.count,
        "LOCAL_RANK": tasks.local_rank,
        "LOCAL_WORLD_SIZE": tasks.local_count,
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
    }
    environ.update({name: str(value) for name, value in ours.items() if value is not None})

"""Backends, which make one or several worker processes train together (Horovod, Accelerate, a single process).

`get_backend` picks the backend that fits the launcher of the process (horovodrun, accelerate, torchrun or none).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from lm_experiments_tools.backends import cluster
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.names import resolve_name

if TYPE_CHECKING:
    from lm_experiments_tools.backends.backend import Backend
    from lm_experiments_tools.config.training import TrainerArgs

# Names of --backend, and module:Class in this folder; a module is imported when its backend is chosen.
BACKENDS = {
    "local": "backend:LocalBackend",
    "horovod": "horovod:HorovodBackend",
    "accelerate": "accelerate:AccelerateBackend",
}


def detect_backend(environ: Mapping[str, str] = os.environ) -> str:
    """Name of the backend that fits the launcher, read from its environment variables.

    Returns:
        "horovod" under horovodrun, and under mpirun without MASTER_ADDR; "accelerate" under accelerate launch,
        torchrun, srun and similar; otherwise "local".
    """
    if "HOROVOD_RANK" in environ or "HOROVOD_SIZE" in environ:
        return "horovod"
    if any(name.startswith("ACCELERATE_") for name in environ) or "WORLD_SIZE" in environ:
        return "accelerate"
    if (tasks := cluster.started_tasks(environ)) is not None:
        by_mpi = tasks.source == "OMPI_COMM_WORLD_SIZE" and "MASTER_ADDR" not in environ
        return "horovod" if by_mpi else "accelerate"
    return "local"


def get_backend(args: TrainerArgs) -> Backend:
    """Create the backend that `--backend` names; "auto" uses `detect_backend`. Raises UserError."""
    detected, tasks = detect_backend(), cluster.started_tasks()
    name = detected if args.backend == "auto" else args.backend
    if any(variable in os.environ for variable in ("WORLD_SIZE", "HOROVOD_SIZE")):
        # torchrun or horovodrun has formed a job already.
        tasks = None
    # Horovod with MPI forms its own job, and srun may start several independent runs
    is_alone = tasks is not None and (name == "horovod" or (name == "local" and tasks.launcher == "srun"))
    if tasks is not None and name == "accelerate":
        cluster.form_job(tasks)
    elif name != detected and detected != "local" and not is_alone:
        raise UserError(
            f"--backend {name} was asked for, but the launcher is one of {detected}, so each worker would train "
            f"alone: leave --backend out or start with the launcher of {name}"
        )
    backend = resolve_name(f"{__name__}.{BACKENDS[name]}").from_args(args)
    backend.reproduce(args)
    return backend

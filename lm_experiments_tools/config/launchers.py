"""Read a worker's rank, and if its job has several machines, from the environment variables of launchers.

Standard library only.
"""

import os
from collections.abc import Mapping

# Variables in which launchers tell the number of workers, of all machines and of this one.
_COUNTS = (
    ("WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    ("HOROVOD_SIZE", "HOROVOD_LOCAL_SIZE"),
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
)


def launcher_rank(environ: Mapping[str, str] = os.environ) -> int:
    """Return this process's rank from the variables of Horovod, torchrun, MPI or Slurm; 0 without a launcher."""
    for name in ("HOROVOD_RANK", "RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"):
        if environ.get(name, "").isdigit():
            return int(environ[name])
    return 0


def launcher_size(environ: Mapping[str, str] = os.environ) -> int:
    """Return the number of workers from the variables of Horovod, torchrun, MPI or Slurm; 1 without a launcher."""
    names = ["HOROVOD_SIZE", "WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"]
    return next((int(environ[name]) for name in names if environ.get(name, "").isdigit()), 1)


def on_several_machines(environ: Mapping[str, str] = os.environ) -> bool:
    """Return True if the launcher's variables show that the job has workers on other machines."""
    counts = [[environ.get(name, "") for name in names] for names in _COUNTS]
    nodes = environ.get("SLURM_STEP_NUM_NODES", "") if "SLURM_STEP_NUM_TASKS" in environ else ""
    return any(a.isdigit() and b.isdigit() and int(a) > int(b) for a, b in [*counts, (nodes, "1")])

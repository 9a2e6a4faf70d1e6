"""Checks that a job runs with the number of processes and the sharding that the user requested.

Without these checks Accelerate may silently run one process, several independent ones, or DDP instead of FSDP or
DeepSpeed.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from lm_experiments_tools.backends.cluster import started_tasks
from lm_experiments_tools.errors import UserError

if TYPE_CHECKING:
    from accelerate import Accelerator

logger = logging.getLogger(__name__)

COUNTS = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "HOROVOD_SIZE")  # variables in which launchers tell it
SHARDING = {"ACCELERATE_USE_FSDP": "FSDP", "ACCELERATE_USE_DEEPSPEED": "DEEPSPEED"}  # variable -> distributed_type
CPU_FORM = "`torchrun --nproc_per_node {n} SCRIPT ...` trains on CPUs with DDP"


def wanted_sharding(environ: Mapping[str, str] = os.environ) -> str | None:
    """Sharding that the launcher's environment requests: "FSDP", "DEEPSPEED" or None."""
    return next((kind for name, kind in SHARDING.items() if environ.get(name, "false").lower() == "true"), None)


def wanted_processes(environ: Mapping[str, str] = os.environ) -> tuple[int, str]:
    """Number of workers that the launcher was asked for, and the environment variable that reports it."""
    reported = [(int(environ[variable]), variable) for variable in COUNTS if environ.get(variable, "").isdigit()]
    if (tasks := started_tasks(environ)) is not None:
        reported.append((tasks.count, tasks.source))
    return max(reported or [(1, "nothing")], key=lambda pair: pair[0])


def cpu_asked(environ: Mapping[str, str] = os.environ) -> bool:
    return environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes", "on", "y", "t")


def check_device(initialized: bool) -> None:
    """Check that the GPUs suffice for what the launcher's environment asks for. Raises UserError.

    FSDP and DeepSpeed need a GPU; without CPU mode, each worker of this machine needs one of its own. An Accelerator
    that exists already has chosen a device (`initialized`).
    """
    sharding, (count, _) = wanted_sharding(), wanted_processes()
    if initialized:
        return
    if sharding and not torch.accelerator.is_available():
        raise UserError(
            f"the launcher asked for {sharding}, but this machine has no GPU, where Accelerate would silently run "
            f"something else; {CPU_FORM.format(n=max(count, 2))}"
        )
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if torch.cuda.is_available() and not cpu_asked() and local > torch.cuda.device_count():
        raise UserError(
            f"{local} workers on this machine but {torch.cuda.device_count()} GPU(s): start at most one worker per "
            "GPU (srun: without --gpus-per-task and --gpu-bind), or set ACCELERATE_USE_CPU=1 to train on CPUs"
        )


def check_accelerator(accelerator: Accelerator) -> None:
    """Check that an Accelerator has the processes and sharding that the launcher requested. Raises UserError."""
    kind, found = str(accelerator.distributed_type.value), accelerator.num_processes
    wanted, source = wanted_processes()
    if wanted > found and source.startswith("SLURM_"):
        raise UserError(
            f"srun started {wanted} tasks ({source}) but each is in its own group of {found} worker(s): start the "
            "script itself with srun, or `srun --ntasks-per-node=1 torchrun --nnodes N --rdzv_backend c10d "
            "--rdzv_endpoint HOST:PORT --nproc_per_node M SCRIPT ...`"
        )
    if wanted > found:
        raise UserError(
            f"the launcher started {wanted} workers ({source}) but Accelerate formed a group of {found}, so each "
            f"would train alone; without GPUs, set ACCELERATE_USE_CPU=1 or make the Accelerator with cpu=True, then "
            f"{CPU_FORM.format(n=wanted)}"
        )
    sharding = wanted_sharding()
    if sharding and kind != sharding:
        raise UserError(
            f"the launcher asked for {sharding} but Accelerate runs {kind} on {found} worker(s): it shards on at "
            "least two workers with a GPU each, never with ACCELERATE_USE_CPU"
        )
    if found > 1 and kind not in ("FSDP", "DEEPSPEED") and not kind.startswith("MULTI_"):
        raise UserError(f"Accelerate's {kind} is not supported: DDP, FSDP and DeepSpeed are")
    if accelerator.parallelism_config is not None:
        raise UserError("the Accelerator's parallelism_config is not supported: only data parallelism is")
    # `accelerate launch` sets this variable.
    if found == 1 and accelerator.device.type == "cpu" and "ACCELERATE_MIXED_PRECISION" in os.environ:
        logger.warning(
            "accelerate launch starts one process on CPUs, whatever --num_processes says; for several, %s",
            CPU_FORM.format(n="N"),
        )


def open_deepspeed_settings() -> None:
    """Remove the DeepSpeed settings that `accelerate launch` sets by default, for `fill_config`. Raises UserError."""
    try:
        import deepspeed  # noqa: F401
    except ImportError as error:
        raise UserError(f"DeepSpeed was asked for but cannot be imported ({error}); `pip install deepspeed`") from None
    # accelerate launch passes its defaults on as if they had been requested, and an Accelerator cannot read "auto"
    for variable, default in (("GRADIENT_ACCUMULATION_STEPS", "1"), ("GRADIENT_CLIPPING", "1.0")):
        if os.environ.get(f"ACCELERATE_{variable}") in (default, "auto"):
            del os.environ[f"ACCELERATE_{variable}"]

"""Workers and how they talk: one protocol, three backends; imports config and modules.

`get_backend` picks the backend of the launcher that started the process."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from lm_experiments_tools.errors import UserError

if TYPE_CHECKING:
    from lm_experiments_tools.backends.backend import Backend
    from lm_experiments_tools.config.training import TrainerArgs


def detect_backend(environ: Mapping[str, str] = os.environ) -> str:
    """Name of the backend whose launcher set this environment: horovodrun, accelerate launch or torchrun, or none."""
    if "HOROVOD_RANK" in environ or "HOROVOD_SIZE" in environ:
        return "horovod"
    if any(name.startswith("ACCELERATE_") for name in environ) or "WORLD_SIZE" in environ:
        return "accelerate"
    if int(environ.get("OMPI_COMM_WORLD_SIZE", "1")) > 1:
        return "accelerate" if "MASTER_ADDR" in environ else "horovod"
    return "local"


def get_backend(args: TrainerArgs) -> Backend:
    """The backend that `--backend` names, `auto` reading the launcher's environment.

    Raises:
        UserError: the launcher started several workers but the backend asked for is for one, or its package is absent.
    """
    detected = detect_backend()
    name = detected if args.backend == "auto" else args.backend
    if name != detected and detected != "local":
        raise UserError(
            f"--backend {name} was asked for, but this process was started by a launcher of {detected}: each worker "
            f"would train alone; leave --backend out or start with the launcher of {name}"
        )
    if name == "horovod":
        from lm_experiments_tools.backends.horovod import HorovodBackend

        return HorovodBackend.from_args(args)
    if name == "accelerate":
        from lm_experiments_tools.backends.accelerate import AccelerateBackend

        return AccelerateBackend.from_args(args)
    if name == "local":
        if args.fp16_allreduce:
            raise UserError("--fp16_allreduce is about gradients sent between workers, but this run has only one")
        from lm_experiments_tools.backends.backend import LocalBackend
        from lm_experiments_tools.backends.precision import get_precision

        return LocalBackend(get_precision(**args.precision_options()))
    raise UserError(f"--backend {name}: choose auto, horovod, accelerate or local")

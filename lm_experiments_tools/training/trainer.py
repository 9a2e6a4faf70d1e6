"""The training loop on a backend of its own: `Trainer` on Horovod, `TrainerAccelerate` on an Accelerator."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from lm_experiments_tools.backends import guard
from lm_experiments_tools.backends.collective import on_all
from lm_experiments_tools.tracking.run_directory import setup_logging
from lm_experiments_tools.training.attempt import TrainingDiverged
from lm_experiments_tools.training.loop import TrainingLoop

if TYPE_CHECKING:
    from accelerate import Accelerator

    from lm_experiments_tools.backends.backend import Backend
    from lm_experiments_tools.config.training import TrainerArgs

__all__ = ["Trainer", "TrainerAccelerate", "TrainingDiverged", "TrainingLoop"]


class Trainer(TrainingLoop):
    """The loop on Horovod: `Trainer(args, model, optimizer, train_dataloader, valid_dataloader, ...)`."""

    def __init__(
        self, args: TrainerArgs, model: nn.Module, optimizer: Optimizer | None, *others: Any, **options: Any
    ) -> None:
        from lm_experiments_tools.backends.horovod import HorovodBackend

        guard.watch(args)
        backend = HorovodBackend.from_args(args)
        _show_progress(args, backend)
        super().__init__(args, backend, model, optimizer, *others, **options)


class TrainerAccelerate(TrainingLoop):
    """The loop on an `accelerate.Accelerator`: `TrainerAccelerate(args, accelerator, model, optimizer, ...)`."""

    def __init__(
        self,
        args: TrainerArgs,
        accelerator: Accelerator,
        model: nn.Module,
        optimizer: Optimizer | None,
        *others: Any,
        **options: Any,
    ) -> None:
        from lm_experiments_tools.backends.accelerate import AccelerateBackend

        guard.watch(args)
        backend = AccelerateBackend.from_accelerator(accelerator, args)
        _show_progress(args, backend)
        super().__init__(args, backend, model, optimizer, *others, **options)


def _show_progress(args: TrainerArgs, backend: Backend) -> None:
    """Log to the console and the run directory, as the scripts do, unless the program has handlers of its own."""
    if all(getattr(handler, "set_up_by_run", False) for handler in logging.getLogger().handlers):
        on_all(backend, lambda: setup_logging(args.model_path, backend.rank))

"""The training loop on a backend of its own: `Trainer` on Horovod, `TrainerAccelerate` on an Accelerator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from lm_experiments_tools.training.loop import TrainingDiverged, TrainingLoop

if TYPE_CHECKING:
    from accelerate import Accelerator

    from lm_experiments_tools.config.training import TrainerArgs

__all__ = ["Trainer", "TrainerAccelerate", "TrainingDiverged", "TrainingLoop"]


class Trainer(TrainingLoop):
    """The loop on Horovod: `Trainer(args, model, optimizer, train_dataloader, valid_dataloader, ...)`."""

    def __init__(
        self, args: TrainerArgs, model: nn.Module, optimizer: Optimizer | None, *others: Any, **options: Any
    ) -> None:
        from lm_experiments_tools.backends.horovod import HorovodBackend

        super().__init__(args, HorovodBackend.from_args(args), model, optimizer, *others, **options)


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

        backend = AccelerateBackend.from_accelerator(accelerator, args)
        super().__init__(args, backend, model, optimizer, *others, **options)

"""The parts of a training loop: checked, built and restored from a checkpoint before its first step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from lm_experiments_tools.checkpoint.saving import Saver
from lm_experiments_tools.training.batches import BatchStream
from lm_experiments_tools.training.callbacks import Callback
from lm_experiments_tools.training.checks import check_parts
from lm_experiments_tools.training.flops import FlopMeter, flop_meter
from lm_experiments_tools.training.losses import Loss
from lm_experiments_tools.training.non_finite import OutputWatch
from lm_experiments_tools.training.phases import Phase
from lm_experiments_tools.training.profiling import profile_callback
from lm_experiments_tools.training.resume import Restorer, Start, data_identity
from lm_experiments_tools.training.run_folder import open_saver
from lm_experiments_tools.training.schedules import LearningRate
from lm_experiments_tools.training.step import Step

if TYPE_CHECKING:
    from lm_experiments_tools.backends.backend import Backend
    from lm_experiments_tools.config.training import TrainerArgs


@dataclass(frozen=True)
class Parts:
    """What a training loop runs; None where flags, or a device of unknown peak, leave a part out.

    `first` and `last` are callbacks of flags that run before and after all others.
    """

    stream: BatchStream | None
    step: Step
    learning_rate: LearningRate
    saver: Saver
    restorer: Restorer
    start: Start
    meter: FlopMeter | None
    watch: OutputWatch | None
    first: Sequence[Callback]
    last: Sequence[Callback]


def build_parts(
    args: TrainerArgs,
    backend: Backend,
    model: nn.Module,
    optimizer: Optimizer | None,
    train_dataloader: Iterable | None,
    valid_dataloader: Iterable | None,
    train_sampler: Any,
    *,
    loss: Loss,
    phase: Phase | None,
    tokenizer_dir: Path | None,
    batch_transform_fn: Callable | None,
    batch_metrics_fn: Callable,
    forward_kwargs: Mapping[str, Any] | None,
) -> Parts:
    """Check and build the parts of a training loop, and restore its checkpoint; see `TrainingLoop`; collective."""
    check_parts(args, model, optimizer, train_dataloader, valid_dataloader)
    stream = None if train_dataloader is None else BatchStream(train_dataloader, train_sampler)
    # For a backend that a library program has made itself; `get_backend` has called it already, before data is read.
    backend.reproduce(args)
    step = Step(args, backend, model, loss, batch_transform_fn, batch_metrics_fn, forward_kwargs or {})
    learning_rate = LearningRate(args, optimizer, 0 if phase is None else phase.start)
    saver = open_saver(args, backend, tokenizer_dir, phase)
    restorer = Restorer(args, backend, saver, learning_rate, stream, data_identity(valid_dataloader), phase)
    start = restorer.restore(model, optimizer)
    meter = None if args.validate_only else flop_meter(args, backend, start.interval)
    watch = OutputWatch(backend.unwrap()) if args.debug_non_finite else None
    profile = profile_callback(args, start.state.step, backend)
    first, last = ((), ()) if profile is None else ((profile.end,), (profile,))
    return Parts(stream, step, learning_rate, saver, restorer, start, meter, watch, first, last)

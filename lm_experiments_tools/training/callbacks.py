"""Callbacks: functions that the training loop runs after every n applied optimizer steps, never at step 0."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from lm_experiments_tools.errors import UserError

if TYPE_CHECKING:
    from lm_experiments_tools.config.training import TrainerArgs
    from lm_experiments_tools.training.metrics import StepInfo
    from lm_experiments_tools.training.trainer import TrainingLoop


class Callback(Protocol):
    """Base class of callbacks, whose method `on_step_end` the training loop calls on every worker.

    The method is called after every `every` applied optimizer steps; never if `every` is None.
    """

    every: int | None

    def on_step_end(self, trainer: TrainingLoop, info: StepInfo) -> None: ...


def is_due(callback: Callback, step: int) -> bool:
    return bool(callback.every) and step > 0 and step % callback.every == 0


@dataclass
class Every:
    """Callback that calls `function(trainer)` every n optimizer steps."""

    every: int | None
    function: Callable[[TrainingLoop], None]

    def on_step_end(self, trainer: TrainingLoop, info: StepInfo) -> None:
        self.function(trainer)


class ValidateCallback:
    """Callback that validates the model and acts on the result.

    A validation updates the best metric and the patience of early stopping. It may also lower the learning rate and
    save the best checkpoint.
    """

    def __init__(self, args: TrainerArgs, *, has_data: bool) -> None:
        self.every = args.effective_valid_interval() if has_data else None
        self.metric, self.mode, self.save_best = args.optimize_metric, args.optimize_mode, args.save_best

    def on_step_end(self, trainer: TrainingLoop, info: StepInfo | None = None) -> None:
        self.run(trainer)

    def run(self, trainer: TrainingLoop) -> None:
        """Validate now, and update the best metric, patience and learning rate; every worker calls it.

        Raises:
            UserError: validation does not give `--optimize_metric`, or not as a number; a checkpoint is saved first.
        """
        values = trainer.validate(trainer.valid_dataloader)
        if values is None:  # cut short by a signal; the restarted run makes up for it
            return
        if self.metric not in values:
            trainer.save()  # a mistyped name must not cost the updates made so far
            raise UserError(
                f"--optimize_metric {self.metric} is not produced by validation, which gives "
                f"{', '.join(sorted(values))}; choose one of these "
                "(metrics of generated text need --use_generate_on_valid)"
            )
        state = trainer.state
        try:
            value = float(values[self.metric])
        except (TypeError, ValueError) as error:
            trainer.save()
            raise UserError(f"--optimize_metric {self.metric} is not a number: {values[self.metric]!s:.40}") from error
        state.last_validated_step = state.step
        sign = -1 if self.mode == "max" else 1
        improved = not math.isnan(value) and (state.best_metric is None or sign * value < sign * state.best_metric)
        if improved:
            state.best_metric, state.best_step, state.patience = value, state.step, 0
            trainer.say(f"step {state.step}: best {self.metric} on validation so far: {value:.4f}")
        else:
            state.patience += 1
        trainer.log("valid", {}, patience=state.patience)
        if trainer.learning_rate.plateau is not None:
            trainer.learning_rate.plateau.update(value)
        if improved and self.save_best:
            trainer.save(is_best=True, unless_last=True)

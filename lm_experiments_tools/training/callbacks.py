"""Callbacks: functions that the training loop runs after every n applied optimizer steps, never at step 0."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from lm_experiments_tools.training.metrics import StepInfo


class Callback(Protocol):
    """Base class of callbacks, whose method `on_step_end` the training loop calls on every worker.

    The method is called after every `every` applied optimizer steps; never if `every` is None.
    """

    every: int | None

    def on_step_end(self, trainer: Any, info: StepInfo) -> None:
        """Act after an optimizer step.

        Args:
            trainer: the `TrainingLoop`.
        """


@dataclass
class Every:
    """Callback that calls `function(trainer)` every n optimizer steps."""

    every: int | None
    function: Callable[[Any], None]

    def on_step_end(self, trainer: Any, info: StepInfo) -> None:
        self.function(trainer)

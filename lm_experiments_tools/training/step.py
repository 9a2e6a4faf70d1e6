"""One attempted update, and the verbs of the training loop that hooks use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from lm_experiments_tools.backends.backend import Backend
    from lm_experiments_tools.checkpoint.train_state import TrainState
    from lm_experiments_tools.config.training import TrainerArgs
    from lm_experiments_tools.tracking.tracker import Tracker
    from lm_experiments_tools.training.losses import Loss
    from lm_experiments_tools.training.micro_batches import MicroBatch, StepBatch
    from lm_experiments_tools.training.schedules import LearningRate
    from lm_experiments_tools.training.signals import StopSignals
    from lm_experiments_tools.training.splitting import Splitter


@dataclass(frozen=True)
class StepInfo:
    """One attempted update, the same numbers on every worker but the times.

    Attributes:
        step: updates applied, this one included if it was.
        applied: False where the gradient was not finite.
        grad_norm: global L2 norm of the reduced gradient before clipping.
        samples, tokens: of the global step (input tokens that are not padding, plus target tokens of a decoder).
        seconds, data_seconds: of the step, and of the wait for its batch before it.
    """

    step: int
    applied: bool
    grad_norm: float
    samples: int
    tokens: int
    seconds: float
    data_seconds: float


class Loop(Protocol):
    """The training loop as hooks see it; each verb is collective, so every worker calls it."""

    args: TrainerArgs
    backend: Backend
    state: TrainState
    learning_rate: LearningRate
    valid_dataloader: Iterable
    loss: Loss
    kept: Any
    batch_metrics_fn: Callable[[Any, Any], Mapping[str, Any]]
    forward_kwargs: dict[str, Any]
    micro_batches: list[MicroBatch]
    split: Splitter
    signals: StopSignals
    compared_splits: set[str]
    tracker: Tracker | None

    def agree(self, part: StepBatch) -> tuple[dict[str, int], int, int, int]:
        """Global weights, samples and tokens, and the largest number of micro-batches."""

    def validate(self, dataloader: Iterable) -> dict[str, float] | None:
        """Metrics over all of `dataloader`, or None when a signal cut it short."""

    def save(self, is_best: bool = False, *, unless_last: bool = False) -> None:
        """Begin a checkpoint, unless there is one of this very moment, or this step is the last and saved later."""

    def log_train(self) -> None:
        """Log what has been added up since the last time."""

    def log_patience(self) -> None:
        """Log the validations in a row without improvement."""

    def say(self, message: str) -> None:
        """Log an event of the run, once."""

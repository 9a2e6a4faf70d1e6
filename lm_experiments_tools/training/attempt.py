"""One attempted update: made first, and counted once it is known whether it was applied."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lm_experiments_tools.errors import RunError
from lm_experiments_tools.training.step import StepInfo

if TYPE_CHECKING:
    from lm_experiments_tools.checkpoint.train_state import TrainState
    from lm_experiments_tools.training.first_bad import Replay
    from lm_experiments_tools.training.metrics import MetricSums, Window

logger = logging.getLogger(__name__)


class TrainingDiverged(RunError):
    """Too many updates in a row had a gradient that was not finite."""


@dataclass(frozen=True)
class Attempt:
    """An update on its way, and what is to be counted of its step.

    Attributes:
        outcome: (global L2 norm of the gradient, whether the update was applied); waits for a device that has not
            come so far.
        sums: losses and metrics of the step's micro-batches on this worker.
        samples, tokens, seconds, data_seconds: as in `StepInfo`.
        replay: the step once more, to find what was not finite if it is skipped.
    """

    outcome: Callable[[], tuple[float, bool]]
    sums: MetricSums
    samples: int
    tokens: int
    seconds: float
    data_seconds: float
    replay: Replay

    def settle(self, state: TrainState, window: Window, max_skipped: int) -> StepInfo:
        """Count it, whether applied or skipped, in the state of the run and the sums of its next log line.

        Raises:
            TrainingDiverged: it is the last of `max_skipped` in a row that were skipped.
        """
        grad_norm, applied = self.outcome()
        state.step += int(applied)
        state.consumed_samples += self.samples
        state.consumed_tokens += self.tokens
        info = StepInfo(
            state.step, applied, grad_norm, self.samples, self.tokens, self.seconds, self.data_seconds
        )  # fmt: skip
        window.add(self.sums, info)
        if applied:
            state.skipped_in_a_row = 0
        else:
            _count_skipped(state, info)
            self.replay.trace(state)
            _check_diverged(state, max_skipped)
        return info


def _count_skipped(state: TrainState, info: StepInfo) -> None:
    state.skipped_updates += 1
    state.skipped_in_a_row += 1
    first = state.consumed_samples - info.samples
    logger.warning(
        "gradient norm %s after step %d: update skipped on all workers (samples %d to %d; %d skipped so far)",
        info.grad_norm, info.step, first, state.consumed_samples - 1, state.skipped_updates,
    )  # fmt: skip


def _check_diverged(state: TrainState, most: int) -> None:
    if state.skipped_in_a_row >= most:
        raise TrainingDiverged(
            f"{state.skipped_in_a_row} updates in a row had a non-finite gradient (--max_skipped_updates); the "
            "weights are those of the last applied one; lower --lr, set --clip_grad_norm, or use --bf16 not --fp16"
        )

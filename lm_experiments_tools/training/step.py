"""What hooks see of the training loop: one attempted update, and the verbs of the loop."""

from __future__ import annotations

from dataclasses import dataclass


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

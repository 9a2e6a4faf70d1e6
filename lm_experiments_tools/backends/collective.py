"""Workers of a job: their collectives, the reduction of gradients, and functions whose errors reach every worker."""

from __future__ import annotations

import logging
import platform
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lm_experiments_tools.errors import RunError, UserError, os_sentence

logger = logging.getLogger(__name__)

T = TypeVar("T")
E = TypeVar("E", bound=Exception)

# Timeout of collectives until the first step. Rank 0 may tokenize a large corpus for hours while the others wait; a
# day is enough for that, and still ends a job that hangs before its first step.
START_SECONDS = 24 * 3600
# Default of --stall_timeout, which holds from the first step on: rank 0 may save or measure while the others wait.
STALL_SECONDS = 1800


class Workers:
    """Communication of one worker with the other workers of its job; this base class is for a single process.

    Attributes:
        rank: number of this worker in the whole job.
    """

    rank = 0
    world_size = 1

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """Sum a float64 or int64 tensor, on the CPU or the device, over all workers; every worker gets the result."""
        return values

    def gather(self, value: Any) -> list[Any]:
        """Collect the picklable `value` of every worker, in rank order, on all workers."""
        return [value]

    def broadcast(self, value: Any) -> Any:
        """Send rank 0's picklable `value` to all workers, and return it."""
        return value

    def broadcast_tensors(self, tensors: list[Tensor]) -> None:
        """Overwrite the tensors of every worker with those of rank 0."""

    def limit_waiting(self) -> None:
        """Let later collectives wait for a late or lost worker no longer than `--stall_timeout`; collective.

        It has no effect for Horovod, which reads its limits once at its start.
        """


class Reduction:
    """Reduction of the gradients of one optimizer step over micro-batches and workers.

    A backend has one object for it. This class is for one process, and where the model's wrapper needs no more; others
    are those of DDP, FSDP, ZeRO and Horovod, and `ExactSum`.

    Attributes:
        averaged_over: number of workers that gradients are averaged over; a loss is multiplied by it, to sum them.
        reproducible: [value of --reproducible, number of virtual ranks]; a resumed run must have the same.
        is_exact: True if sums do not depend on the order of their summands.
    """

    is_exact = False

    def __init__(self, averaged_over: int = 1, reproducible: list[Any] | None = None) -> None:
        self.averaged_over, self.reproducible = averaged_over, reproducible or ["off", None]

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the model whose backward passes reduce gradients."""
        return model

    def passes(self, last: bool) -> AbstractContextManager[None]:
        """Context for the forward and backward pass of one micro-batch.

        Args:
            last: True for the last micro-batch of a step, after which gradients are reduced.
        """
        return nullcontext()

    def after_backward(self, last: bool) -> None:
        """Take a micro-batch's gradients; after the last one leave the reduced gradients in the parameters."""

    def release(self) -> None:
        """Leave the model's parameters alone from now on."""


def total_norm(tensors: Iterable[Tensor]) -> Tensor:
    """Global L2 norm over all tensors, a plain scalar; 0 without tensors. Collective for DTensors."""
    return norms_of(tensors)[1]


def norms_of(tensors: Iterable[Tensor]) -> tuple[list[Tensor], Tensor]:
    """L2 norm of each tensor, and the global norm over all of them, a plain scalar; collective for DTensors.

    The norm of a DTensor is a DTensor, whose local part is the norm of the local shard.
    """
    tensors = list(tensors)
    if not tensors:
        return [], torch.tensor(0.0)
    norms = list(torch._foreach_norm(tensors))
    norm = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))
    return norms, norm.full_tensor() if hasattr(norm, "full_tensor") else norm


def on_all(workers: Workers, function: Callable[[], T], *, only_main: bool = False) -> T | None:
    """Run `function` on every worker, or on rank 0 alone, and raise its error on all of them.

    Without this, the other workers would wait forever for one that failed alone. Returns the result on this worker;
    None where it was not run.
    """
    result, failure = None, None
    if workers.is_main or not only_main:
        try:
            result = function()
        except UserError as error:
            failure = (True, str(error))
        except OSError as error:
            failure = (False, os_sentence(error))
        except RunError as error:
            failure = (False, str(error))
    reports = workers.gather((platform.node(), failure))
    failures = [report for report in reports if report[1] is not None]
    if failures:
        host, (by_user, message) = failures[0]
        if len({other for other, _ in reports}) > len({other for other, _ in failures}):
            message = f"on {host}: {message}"
        raise agreed(UserError(message) if by_user else RunError(message))
    return result


def agreed(error: E) -> E:
    """Mark an error as one that all workers raise, so that its message is not prefixed with this machine's name."""
    error.agreed = True
    return error


def on_main(workers: Workers, function: Callable[[], T]) -> T:
    """Run `function` on rank 0; every worker gets its result or raises its error."""
    return workers.broadcast(on_all(workers, function, only_main=True))


def say(workers: Workers, message: str) -> None:
    """Log a message, on rank 0 only."""
    if workers.is_main:
        logger.info(message)

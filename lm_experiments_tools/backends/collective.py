"""Collectives between the workers of a job, and functions whose errors reach every worker."""

from __future__ import annotations

import logging
import platform
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from lm_experiments_tools.errors import RunError, UserError, os_sentence

logger = logging.getLogger(__name__)
T = TypeVar("T")
E = TypeVar("E", bound=Exception)

STALL_SECONDS = 1800  # --stall_timeout: rank 0 may tokenize, save or measure while the others wait
_BEAT = 10.0  # seconds between two looks at who is still at work


class Collectives:
    """Communication of one worker with the other workers of its job; this base class is for a single process.

    Attributes:
        rank: number of this worker in the whole job.
        local_rank: number of this worker among those of its machine.
    """

    rank = local_rank = 0
    world_size = 1

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """Sum a float64 or int64 CPU tensor over all workers; every worker gets the result."""
        return values

    def sum_in_place(self, values: Tensor) -> None:
        """Sum an int64 tensor on the device over all workers, in place."""

    def gather(self, value: Any) -> list[Any]:
        """Collect the picklable `value` of every worker, in rank order, on all workers."""
        return [value]

    def broadcast(self, value: Any) -> Any:
        """Send rank 0's picklable `value` to all workers, and return it."""
        return value

    def broadcast_tensors(self, tensors: list[Tensor]) -> None:
        """Overwrite the tensors of every worker with those of rank 0."""

    def missing(self) -> list[int] | None:
        """Ranks that no longer answer after a collective has failed; None if the backend cannot tell.

        Raises:
            ConnectionError: the key-value store of the job cannot be reached.
        """
        return None


def on_all(
    workers: Collectives, function: Callable[[], T], *, only_main: bool = False, takes_long: bool = False
) -> T | None:
    """Run `function` on every worker, or on rank 0 alone, and raise its error on all of them.

    Without this, the other workers would wait forever for one that failed alone.

    Args:
        only_main: True to run it on rank 0 alone.
        takes_long: `function` may take longer on some workers than a collective may wait. It must not use collectives.

    Returns:
        The result of `function` on this worker; None where it was not run.
    """
    if takes_long and workers.world_size > 1:
        function = _wait_for_all(workers, function if workers.is_main or not only_main else lambda: None)
        only_main = False
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


def on_main(workers: Collectives, function: Callable[[], T], *, takes_long: bool = False) -> T:
    """Run `function` on rank 0; every worker gets its result or raises its error."""
    return workers.broadcast(on_all(workers, function, only_main=True, takes_long=takes_long))


def _wait_for_all(workers: Collectives, function: Callable[[], T]) -> Callable[[], T]:
    """Wrap `function`: it returns, or raises what `on_all` handles, only when all workers are done.

    Horovod, NCCL and gloo end a job in which a worker waits in a collective for half an hour. Who is done first waits
    here: in one short collective after the other, made in a thread, so that the work itself need not be interrupted.
    """
    done, given_up, errors = threading.Event(), threading.Event(), []

    def count_working() -> None:
        """Count the workers that are still at work, every few seconds, until there are none."""
        try:
            working, beats = workers.world_size, 0
            while working:
                waits = done.wait(_BEAT)
                beats += waits
                if given_up.is_set():
                    return
                if waits and workers.is_main and beats > 1 and beats.bit_count() == 1:  # the 2nd, 4th, 8th, ...
                    logger.info("waiting for %d of %d workers", working, workers.world_size)
                working = int(workers.sum(torch.tensor([0 if done.is_set() else 1])))
        except (RuntimeError, OSError) as error:  # of a worker that is gone, raised where it is expected
            errors.append(error)

    def run() -> T:
        thread = threading.Thread(target=count_working, name="beats", daemon=True)
        thread.start()
        try:
            return function()
        except BaseException as error:
            if not isinstance(error, (UserError, OSError, RunError)):  # this worker ends, and those that wait for it
                given_up.set()
            raise
        finally:
            done.set()
            if not given_up.is_set():
                thread.join()
                if errors:
                    raise errors[0]

    return run

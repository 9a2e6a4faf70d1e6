"""Work done on every worker, or on rank 0 for all, whose errors reach every worker."""

from __future__ import annotations

import logging
import platform
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

import torch

from lm_experiments_tools.backends.backend import Backend
from lm_experiments_tools.errors import RunError, UserError, os_sentence

logger = logging.getLogger(__name__)
T = TypeVar("T")
E = TypeVar("E", bound=Exception)

_BEAT = 10.0  # seconds between two collectives while some workers are busy


def on_all(
    backend: Backend, function: Callable[[], T], *, only_main: bool = False, takes_long: bool = False
) -> T | None:
    """Run `function` on every worker (or on rank 0 alone); an error on any of them is raised on all of them.

    Otherwise a full disk on one worker would leave the others waiting in a barrier forever. The message names the
    machine unless all have the same error.

    Args:
        takes_long: it may take some workers minutes or hours longer than others (see `_wait_for_all`); it then runs
            in a thread and may not use the backend.
    """
    if takes_long and backend.world_size > 1:
        work, only_main = function if backend.is_main or not only_main else lambda: None, False

        def function() -> T | None:
            return _wait_for_all(backend, work)

    result, failure = None, None
    if backend.is_main or not only_main:
        try:
            result = function()
        except UserError as error:
            failure = (True, str(error))
        except OSError as error:
            failure = (False, os_sentence(error))
        except RunError as error:
            failure = (False, str(error))
    reports = backend.gather((platform.node(), failure))
    failures = [report for report in reports if report[1] is not None]
    if failures:
        host, (by_user, message) = failures[0]
        if len({other for other, _ in reports}) > len({other for other, _ in failures}):
            message = f"on {host}: {message}"
        raise agreed(UserError(message) if by_user else RunError(message))
    return result


def agreed(error: E) -> E:
    """Mark an error as one that every worker raises, whichever machine it is about."""
    error.agreed = True
    return error


def on_main(backend: Backend, function: Callable[[], T], *, takes_long: bool = False) -> T:
    """Run `function` on rank 0 and give its result, or raise its error, on every worker."""
    return backend.broadcast(on_all(backend, function, only_main=True, takes_long=takes_long))


def _wait_for_all(backend: Backend, function: Callable[[], T]) -> T:
    """Result of `function`, which runs in a thread, once it has ended on every worker.

    Horovod, NCCL and gloo end a job in which a worker waits in one collective for half an hour. So the workers count
    every few seconds how many of them are still busy.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="long work", daemon=True).start()
    busy, beats = backend.world_size, 0
    while busy:
        beats += not wait([future], timeout=_BEAT).not_done
        if future.done() and not isinstance(future.exception(), (UserError, OSError, RunError, type(None))):
            break  # a bug: this worker ends, and the others lose it
        if backend.is_main and beats > 1 and beats.bit_count() == 1:  # the 2nd, 4th, 8th, ...
            logger.info("waiting for %d of %d workers", busy, backend.world_size)
        busy = int(backend.sum(torch.tensor([int(not future.done())])))
    return future.result()

"""Work done on every worker, or on rank 0 for all, whose errors reach every worker."""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import TypeVar

from lm_experiments_tools.backends.backend import Backend
from lm_experiments_tools.errors import RunError, UserError, os_sentence

T = TypeVar("T")
E = TypeVar("E", bound=Exception)


def on_all(backend: Backend, function: Callable[[], T], *, only_main: bool = False) -> T | None:
    """Run `function` on every worker (or on rank 0 alone); an error on any of them is raised on all of them.

    Without this a full disk on one worker would leave the others waiting in a barrier forever. The sentence names the
    machine where it is not that of all.
    """
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


def on_main(backend: Backend, function: Callable[[], T]) -> T:
    """Run `function` on rank 0 and give its result, or raise its error, on every worker."""
    return backend.broadcast(on_all(backend, function, only_main=True))

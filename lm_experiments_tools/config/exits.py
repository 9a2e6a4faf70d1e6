"""Signals that stop a run, Ctrl-C before training handles it, and an immediate exit."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
from types import FrameType
from typing import NoReturn

# What stops a run at the end of a step. After the first two: those by which batch systems announce a time limit.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGXCPU)
_interrupts: list[int] = []  # Ctrl-C before training listens for it


def note_interrupts() -> None:
    """Record each Ctrl-C from now on, because Python may lose one.

    Python ignores a KeyboardInterrupt that is raised inside a destructor or callback.
    """
    if threading.current_thread() is threading.main_thread():
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    _interrupts.append(number)
    raise KeyboardInterrupt


def was_interrupted() -> bool:
    """Return True if `note_interrupts` has recorded a Ctrl-C."""
    return bool(_interrupts)


def leave(code: int) -> NoReturn:
    """Exit the process with `code` without running exit handlers, which may wait for lost workers."""
    logging.shutdown()
    with contextlib.suppress(BrokenPipeError):  # of a launcher that has ended
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)

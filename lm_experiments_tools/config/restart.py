"""Restart the workers of an elastic Horovod job when workers join or leave.

The driver (`horovodrun --min-np ... --host-discovery-script ...`) starts new workers. The existing ones execute their
program again in the same process, get new ranks from the driver and resume from the newest checkpoint.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
from types import FrameType
from typing import NoReturn

_FOLDER = os.getcwd()  # of the start: a run enters its own
_MARK = "LMTOOLS_WORKERS_CHANGED"  # variable of a worker that has begun anew
_asked: set[str] = set()  # why this process has to stop: "hosts", "signal"
_interrupts: list[int] = []  # Ctrl-C before training listens for it


def is_elastic() -> bool:
    """Return True in a worker of an elastic Horovod job."""
    return os.environ.get("HOROVOD_ELASTIC") == "1"


def has_begun_anew() -> bool:
    """Return True if this worker of an elastic job was restarted in the same process.

    The variables RANK and SIZE in the environment may then be outdated.
    """
    return _MARK in os.environ


def hosts_changed() -> None:
    """Request that all workers of an elastic job save a checkpoint and restart, because its hosts have changed."""
    _asked.add("hosts")


def have_hosts_changed() -> bool:
    """Return True once `hosts_changed` has requested a restart."""
    return "hosts" in _asked


def note_signal() -> None:
    """Record that this process received SIGTERM or SIGINT."""
    _asked.add("signal")


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


def is_restart(code: object) -> bool:
    """Return True if an elastic worker that ends with exit code `code` must restart instead of exiting.

    Such a worker stopped because the workers changed (code 128 + SIGTERM), not because of a signal of its own.
    """
    return is_elastic() and code == 128 + signal.SIGTERM and "signal" not in _asked


def begin_anew() -> NoReturn:
    """Restart this worker: close files, kill child processes and execute the program again in the same process."""
    import psutil

    print(f"process {os.getpid()}: the workers of the job change, restarting", file=sys.stderr)
    children = psutil.Process().children(recursive=True)  # of a data loader: they look for a parent that is still here
    for child in children:
        child.kill()
    psutil.wait_procs(children)
    _flush()
    for file in os.listdir("/dev/fd"):
        if int(file) > 2:
            with contextlib.suppress(OSError):  # the one of the listing itself
                os.set_inheritable(int(file), False)
    os.chdir(_FOLDER)
    os.environ[_MARK] = "1"
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def leave(code: int) -> NoReturn:
    """Exit the process with `code` without running exit handlers, which may wait for lost workers."""
    _flush()
    os._exit(code)


def _flush() -> None:
    logging.shutdown()
    with contextlib.suppress(BrokenPipeError):  # of a launcher that has ended
        sys.stdout.flush()
        sys.stderr.flush()

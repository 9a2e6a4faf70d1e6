"""Workers of an elastic Horovod job begin anew, in the same process, when the workers of the job change.

The driver (`horovodrun --min-np ... --host-discovery-script ...`) starts workers in places that are new or whose
worker has died. Those that are left have to stay and ask it for their new ranks: they load their program once more,
which goes on from the newest checkpoint as after any restart.
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
    """True for a worker of an elastic Horovod job."""
    return os.environ.get("HOROVOD_ELASTIC") == "1"


def has_begun_anew() -> bool:
    """True for a worker whose rank and number of workers in the environment may be those of an earlier start."""
    return _MARK in os.environ


def hosts_changed() -> None:
    """The driver has found other hosts: training saves and stops, on all workers, and they begin anew.

    No SIGTERM says so: before and after training it would end this worker.
    """
    _asked.add("hosts")


def have_hosts_changed() -> bool:
    """True once the driver has told this process of other hosts."""
    return "hosts" in _asked


def note_signal() -> None:
    """SIGTERM or SIGINT has come to this process."""
    _asked.add("signal")


def note_interrupts() -> None:
    """Note each Ctrl-C that is raised from now on: Python drops a KeyboardInterrupt in a destructor or a callback."""
    if threading.current_thread() is threading.main_thread():
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    _interrupts.append(number)
    raise KeyboardInterrupt


def was_interrupted() -> bool:
    """True if Ctrl-C came before training listened for it; where the program is still there, it was dropped."""
    return bool(_interrupts)


def is_restart(code: object) -> bool:
    """True if a worker that has saved and would end with `code` has to begin anew: it was not told itself to end."""
    return is_elastic() and code == 128 + signal.SIGTERM and "signal" not in _asked


def begin_anew() -> NoReturn:
    """Load this program once more, with nothing that the old one has opened or started."""
    import psutil

    print(f"process {os.getpid()}: the workers of the job change, beginning anew", file=sys.stderr)
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
    """End at once: what Python and libraries do at an exit may wait for the workers that are gone."""
    _flush()
    os._exit(code)


def _flush() -> None:
    logging.shutdown()
    with contextlib.suppress(BrokenPipeError):  # of a launcher that has ended
        sys.stdout.flush()
        sys.stderr.flush()

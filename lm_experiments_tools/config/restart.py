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
from typing import NoReturn

_FOLDER = os.getcwd()  # of the start: a run enters its own
_MARK = "LMTOOLS_WORKERS_CHANGED"  # variable of a worker that has begun anew
_signals: list[str] = []  # why this process was asked to stop, in order: "hosts" or "signal"


def is_elastic() -> bool:
    """True for a worker of an elastic Horovod job."""
    return os.environ.get("HOROVOD_ELASTIC") == "1"


def has_begun_anew() -> bool:
    """True for a worker whose rank and number of workers in the environment may be those of an earlier start."""
    return _MARK in os.environ


def hosts_changed() -> None:
    """The driver has found other hosts: save and stop, on all workers, and begin anew."""
    _signals.append("hosts")
    os.kill(os.getpid(), signal.SIGTERM)


def note_signal() -> None:
    """SIGTERM or SIGINT has come to this process."""
    _signals.append("signal")


def is_restart(code: object) -> bool:
    """True if a worker that has saved because of a signal, and would end with `code`, has to begin anew.

    It begins anew when the hosts have changed or another worker was told to leave, not when it was told itself.
    """
    told = _signals.count("signal") > _signals.count("hosts")  # each word of other hosts sends one, which may merge
    return is_elastic() and code == 128 + signal.SIGTERM and not told


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

"""The part of a worker in an elastic Horovod job: its rank from the driver, and word of other hosts."""

from __future__ import annotations

import os
import sys
import threading
import urllib.error
import urllib.request
from typing import Any

from lm_experiments_tools.config import restart
from lm_experiments_tools.errors import RunError

_NAMES = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")  # HOROVOD_..., in the answer

_PATIENCE = 60  # seconds of waiting for a rank before the log says so
_START = 300  # seconds in which a worker on a new machine loads; Horovod gives 30, and then aborts those that wait


def ask_for_rank() -> None:
    """Before `hvd.init`: a worker that has begun anew waits for the others and takes the place that it is given.

    Raises:
        SystemExit: with 0, the job goes on without this worker.
        RunError: the driver has ended.
    """
    if not restart.is_elastic() or not restart.has_begun_anew():
        return
    server, port = _driver()
    place = f"{os.environ['HOROVOD_HOSTNAME']}:{os.environ['HOROVOD_LOCAL_RANK']}"
    reminder = threading.Timer(_PATIENCE, _say_that_it_waits)
    reminder.daemon = True
    reminder.start()
    try:
        with urllib.request.urlopen(f"http://{server}:{port}/rank_and_size/{place}") as answer:
            numbers = answer.read().decode("ascii").split(",")
    except (urllib.error.URLError, ConnectionError) as error:
        raise _has_ended(error) from None
    finally:
        reminder.cancel()
    if int(numbers[0]) < 0:
        raise SystemExit(0)
    os.environ.update({f"HOROVOD_{name}": number for name, number in zip(_NAMES, numbers, strict=True)})


def listen(manager: Any) -> None:
    """Be told by the driver, through Horovod's WorkerNotificationManager, when hosts come or go; wait for new workers.

    It comes before `ask_for_rank`: of hosts that change later than that answer, the driver tells once.

    Raises:
        RunError: the driver has ended.
    """
    if not restart.is_elastic():
        return
    os.environ.setdefault("HOROVOD_GLOO_TIMEOUT_SECONDS", str(_START))
    manager.register_listener(_Listener())
    try:
        manager.init()
    except (RuntimeError, ConnectionError) as error:  # the first is Horovod's for what urllib raises
        raise _has_ended(error) from None


def _say_that_it_waits() -> None:
    print(
        f"process {os.getpid()} has waited {_PATIENCE} s for its rank: horovodrun waits for the other workers, or for "
        "--min-np places as long as --elastic-timeout says",
        file=sys.stderr,
        flush=True,
    )


def _driver() -> tuple[str, str]:
    return os.environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"], os.environ["HOROVOD_GLOO_RENDEZVOUS_PORT"]


def _has_ended(error: Exception) -> RunError:
    return RunError(f"the driver of this elastic job at {':'.join(_driver())} has ended ({error})")


class _Listener:
    def on_hosts_updated(self, timestamp: float, update: int) -> None:
        """See horovod.common.elastic.State."""
        restart.hosts_changed()

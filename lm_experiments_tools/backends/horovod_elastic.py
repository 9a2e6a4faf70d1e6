"""Elastic Horovod jobs: a worker's rank, and notifications when hosts are added or removed."""

from __future__ import annotations

import os
import urllib.error
import urllib.request
from typing import Any

from lm_experiments_tools.config import restart
from lm_experiments_tools.errors import RunError

_NAMES = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")  # HOROVOD_..., in the answer

_START = 300  # seconds in which a worker on a new machine loads; Horovod gives 30, and then aborts those that wait


def ask_for_rank() -> None:
    """Wait for the other workers, and take the rank that Horovod's driver (`horovodrun`) assigns to this one.

    Call it before `hvd.init`.

    Raises:
        SystemExit: with 0, because the job continues without this worker.
        RunError: the driver has ended.
    """
    if not restart.is_elastic() or not restart.has_begun_anew():
        return
    server, port = _driver()
    place = f"{os.environ['HOROVOD_HOSTNAME']}:{os.environ['HOROVOD_LOCAL_RANK']}"
    try:
        with urllib.request.urlopen(f"http://{server}:{port}/rank_and_size/{place}") as answer:
            numbers = answer.read().decode("ascii").split(",")
    except (urllib.error.URLError, ConnectionError) as error:
        raise _has_ended(error) from None
    if int(numbers[0]) < 0:
        raise SystemExit(0)
    os.environ.update({f"HOROVOD_{name}": number for name, number in zip(_NAMES, numbers, strict=True)})


def listen(manager: Any) -> None:
    """Register this worker for notifications that hosts were added or removed. Raises RunError.

    Call it before `ask_for_rank`.

    Args:
        manager: Horovod's WorkerNotificationManager.
    """
    if not restart.is_elastic():
        return
    os.environ.setdefault("HOROVOD_GLOO_TIMEOUT_SECONDS", str(_START))
    manager.register_listener(_Listener())
    try:
        manager.init()
    except (RuntimeError, ConnectionError) as error:  # the first is Horovod's for what urllib raises
        raise _has_ended(error) from None


def _driver() -> tuple[str, str]:
    return os.environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"], os.environ["HOROVOD_GLOO_RENDEZVOUS_PORT"]


def _has_ended(error: Exception) -> RunError:
    return RunError(f"the driver of this elastic job at {':'.join(_driver())} has ended ({error})")


class _Listener:
    def on_hosts_updated(self, timestamp: float, update: int) -> None:
        """See horovod.common.elastic.State."""
        restart.hosts_changed()

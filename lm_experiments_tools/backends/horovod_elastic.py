"""The part of a worker in an elastic Horovod job: its rank from the driver, and word of other hosts."""

from __future__ import annotations

import os
import urllib.error
import urllib.request
from typing import Any

from lm_experiments_tools.config import restart
from lm_experiments_tools.errors import RunError

_NAMES = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")  # HOROVOD_..., in the answer


def ask_for_rank() -> None:
    """Before `hvd.init`: a worker that has begun anew waits for the others and takes the place that it is given.

    Raises:
        SystemExit: with 0, the job goes on without this worker.
        RunError: the driver has ended.
    """
    if not restart.is_elastic() or not restart.has_begun_anew():
        return
    server, port = os.environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"], os.environ["HOROVOD_GLOO_RENDEZVOUS_PORT"]
    place = f"{os.environ['HOROVOD_HOSTNAME']}:{os.environ['HOROVOD_LOCAL_RANK']}"
    try:
        with urllib.request.urlopen(f"http://{server}:{port}/rank_and_size/{place}") as answer:
            numbers = answer.read().decode("ascii").split(",")
    except (urllib.error.URLError, ConnectionError) as error:
        raise RunError(f"the driver of this elastic job at {server}:{port} has ended ({error})") from None
    if int(numbers[0]) < 0:
        raise SystemExit(0)
    os.environ.update({f"HOROVOD_{name}": number for name, number in zip(_NAMES, numbers, strict=True)})


def listen(manager: Any) -> None:
    """After `hvd.init`: be told by the driver, through Horovod's WorkerNotificationManager, when hosts come or go."""
    if restart.is_elastic():
        manager.init()
        manager.register_listener(_Listener())


class _Listener:
    def on_hosts_updated(self, timestamp: float, update: int) -> None:
        """See horovod.common.elastic.State."""
        restart.hosts_changed()

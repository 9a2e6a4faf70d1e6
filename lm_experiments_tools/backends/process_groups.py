"""torch's process groups: timeouts and restarts; and what is done when a worker of the job is lost."""

from __future__ import annotations

import gc
import json
import logging
import os
import platform
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d as c10d

from lm_experiments_tools.errors import LostWorkerError, RunError, UserError, first_line

logger = logging.getLogger(__name__)

# Words in the error of a collective whose other side is gone or late.
_LIBRARIES = ("gloo", "nccl", "horovod")
_SIGNS = ("timed out", "timeout", "closed", "reset", "peer", "remote", "shut down", "read error", "writev", "connect")

Peers = Sequence[tuple[str, int]]  # (host, process) of each worker, by rank


# ---- forming and leaving groups -------------------------------------------------------------------------------------
@contextmanager
def meeting(seconds: float) -> Iterator[None]:
    """Context in which the workers of a job connect to each other (rendezvous).

    LostWorkerError if a worker is missing after `seconds`.
    """
    try:
        yield
    except (dist.DistStoreError, dist.DistNetworkError, dist.DistBackendError) as error:
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise LostWorkerError(
            f"the workers of the job did not all meet at {where} within {seconds:g} s ({first_line(error)}): see the "
            "other workers' messages, open the ports between the machines, and set GLOO_SOCKET_IFNAME and "
            "NCCL_SOCKET_IFNAME to the network that they share"
        ) from error


def restarts_store() -> str | None:
    """Rendezvous URL for workers that torchrun has restarted (`--max-restarts`); None if torch's default works.

    torchrun's key-value store survives a restart and holds the old workers' addresses. The URL gives each restart keys
    of its own. UserError for torchrun on several machines, where restarts are counted independently.
    """
    env = os.environ.get
    if env("TORCHELASTIC_USE_AGENT_STORE") != "True" or env("TORCHELASTIC_MAX_RESTARTS", "0") == "0":
        return None
    if env("GROUP_WORLD_SIZE", "1") != "1":
        raise UserError(
            "--max-restarts of torchrun on several machines needs --rdzv_backend c10d and, in the environment of each "
            "torchrun, TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
        )
    count = env("TORCHELASTIC_RESTART_COUNT", "0")
    if count == "0":
        return None
    dist.register_rendezvous_handler("restart", _rendezvous_of_restart)
    return f"restart://{count}"


def _rendezvous_of_restart(url: str, **options: Any) -> Iterator[tuple[dist.Store, int, int]]:
    """Torch's env:// with keys that begin with the number of this restart."""
    for store, rank, world_size in dist.rendezvous("env://", **options):
        yield dist.PrefixStore(url.partition("?")[0], store), rank, world_size


def set_timeouts(seconds: float) -> None:
    for group in list(c10d._world.pg_map):
        c10d._set_pg_timeout(timedelta(seconds=seconds), group)


def host_group(world_size: int, device: torch.device, seconds: float) -> dist.ProcessGroup | None:
    """Create a gloo group for CPU tensors; None for one worker or on CPUs. Raises LostWorkerError after `seconds`."""
    if world_size == 1 or device.type == "cpu":
        return None
    with meeting(seconds):
        return dist.new_group(backend="gloo", timeout=timedelta(seconds=seconds))


def last_to_report(key: str, value: Any) -> list[Any] | None:
    """Report a JSON value of this worker; the last one to report gets the values of all ranks, others None.

    Nothing waits, so threads beside the training may call it. Every worker uses a `key` once.
    """
    store, number = dist.PrefixStore(key, c10d._get_default_store()), dist.get_world_size()
    store.set(str(dist.get_rank()), json.dumps(value))
    if store.add("reports", 1) < number:
        return None
    values = [json.loads(store.get(str(rank))) for rank in range(number)]
    for name in ("reports", *map(str, range(number))):
        store.delete_key(name)
    return values


def leave_group(drop_wrapper: weakref.WeakMethod[Callable[[], None]]) -> None:
    """Destroy gloo groups at exit; without this a gloo thread may abort the process (pytorch issue 190489).

    NCCL groups stay. Nothing is destroyed after an error, or if the program still holds a DDP model.
    """
    # After an error the other workers may still wait in a collective.
    if not dist.is_initialized() or hasattr(sys, "last_value"):
        return
    if drop := drop_wrapper():
        drop()
    del drop
    gc.collect()
    if not any(issubclass(type(thing), nn.parallel.DistributedDataParallel) for thing in gc.get_objects()):
        # The default group goes last.
        for group in reversed([g for g in c10d._world.pg_map if dist.get_backend(g) == "gloo"]):
            dist.destroy_process_group(group)


# ---- lost workers ---------------------------------------------------------------------------------------------------
def lost_worker(error: Exception) -> LostWorkerError | None:
    """Error for a collective that failed because another worker is lost or late; None for any other error."""
    text = f"{type(error).__name__} {error}".lower()
    is_lost = any(library in text for library in _LIBRARIES) and any(sign in text for sign in _SIGNS)
    if not isinstance(error, RuntimeError) or isinstance(error, RunError) or not is_lost:
        return None
    return LostWorkerError(
        "another worker is lost, or did not answer within --stall_timeout; the logs of the other ranks may say why "
        f"({first_line(error)})"
    )


def end_suspended(peers: Peers) -> None:
    """Kill the workers on this machine that are suspended (SIGSTOP), so that the job can end.

    A suspended worker ignores its launcher's SIGTERM; torchrun would wait 30 seconds for it, and horovodrun 10.
    """
    for rank, (host, process) in enumerate(peers):
        with suppress(psutil.Error):
            if host == platform.node() and psutil.Process(process).status() == psutil.STATUS_STOPPED:
                logger.error("rank %d (process %d on %s) is suspended and is killed", rank, process, host)
                psutil.Process(process).kill()

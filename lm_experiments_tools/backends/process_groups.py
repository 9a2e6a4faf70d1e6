"""torch's process groups: timeouts, restarts, and error messages that name a lost worker."""

from __future__ import annotations

import gc
import os
import platform
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d as c10d

from lm_experiments_tools.backends.collective import Collectives
from lm_experiments_tools.errors import LostWorkerError, RunError, UserError, first_line

_ANSWER_SECONDS = 3.0  # workers learn of the same loss at about the same time
_WAIT_SECONDS = 1.0  # a process closes its connections shortly before its end
_END_SECONDS = 4.0  # the same if it must be on this machine: a failing Python process takes a while to end
_SIGNS = ("connection", "peer", "socket", "remote", "gloo", "nccl", "horovod")  # in the message of a broken collective
_STATES = {psutil.STATUS_ZOMBIE: "", psutil.STATUS_STOPPED: ", stopped by a signal"}

Peers = Sequence[tuple[str, int]]  # (host, process) of each worker, by rank


# ---- forming and leaving groups -------------------------------------------------------------------------------------
@contextmanager
def meeting(seconds: float) -> Iterator[None]:
    """Context in which the workers of a job connect to each other (rendezvous).

    Raises:
        LostWorkerError: a worker is missing after `seconds`.
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
    of its own.

    Raises:
        UserError: torchrun runs on several machines, where restarts are counted independently.
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


def limit_waiting(seconds: float | None) -> None:
    """Set the timeout of all existing process groups, in seconds; None changes nothing."""
    if seconds is not None:
        for group in list(c10d._world.pg_map):
            c10d._set_pg_timeout(timedelta(seconds=seconds), group)


def host_group(world_size: int, device: torch.device, seconds: float) -> dist.ProcessGroup | None:
    """Create a gloo group for CPU tensors; None for one worker or on CPUs. Raises LostWorkerError after `seconds`."""
    if world_size == 1 or device.type == "cpu":
        return None
    with meeting(seconds):
        return dist.new_group(backend="gloo", timeout=timedelta(seconds=seconds))


def leave_group(drop_wrapper: weakref.WeakMethod[Callable[[], None]]) -> None:
    """Destroy gloo groups at exit; without this a gloo thread may abort the process (pytorch issue 190489).

    NCCL groups stay. Nothing is destroyed after an error, or if the program still holds a DDP model.

    Args:
        drop_wrapper: weak reference to the method by which the backend drops its DDP wrapper.
    """
    if not dist.is_initialized() or hasattr(sys, "last_value"):  # after an error others may wait in a collective
        return
    if drop := drop_wrapper():
        drop()
    del drop
    gc.collect()
    if not any(issubclass(type(thing), nn.parallel.DistributedDataParallel) for thing in gc.get_objects()):
        for group in reversed([g for g in c10d._world.pg_map if dist.get_backend(g) == "gloo"]):  # the default last
            dist.destroy_process_group(group)


# ---- naming a lost worker -------------------------------------------------------------------------------------------
def lost_peer(error: Exception, peers: Peers, workers: Collectives) -> str | None:
    """Error message that names the lost worker after a failed collective; None for any other error.

    Args:
        peers: (host, process ID) of each rank.
    """
    text = f"{type(error).__name__} {error}".lower()
    if not isinstance(error, RuntimeError) or isinstance(error, RunError) or len(peers) == 1:
        return None
    if not any(sign in text for sign in _SIGNS):
        return None
    here = platform.node()
    near = {r: process for r, (host, process) in enumerate(peers) if host == here and process != os.getpid()}
    far = sorted({host for host, _ in peers} - {here})
    is_near = not far and ("peer" in text or "shut down" in text)
    reason = f"({first_line(error)})"
    gone = _ended(near, _END_SECONDS if is_near else _WAIT_SECONDS if near else 0)
    if not gone and is_near and len(near) == 1:
        gone = dict.fromkeys(near, ", which has closed its connections")
    if gone:
        named = ", ".join(f"{rank} (process {near[rank]} on {here}{how})" for rank, how in gone.items())
        return f"lost rank {named}, whose own log says why if it could {reason}"
    if not far and "timed out" not in text:  # all are here and run, so the error is another one
        return None
    try:
        missing = workers.missing()
    except ConnectionError:
        return f"lost {peers[0][0]}, the machine of rank 0, or the connection to it {reason}"
    if missing:
        named = ", ".join(f"rank {rank} on {peers[rank][0]}" for rank in missing)
        return f"lost {named}, or the connection there: no answer {reason}"
    if missing is not None:
        return f"all workers answer, but one came too late, or two of them have no connection {reason}"
    ranks = [str(rank) for rank, (host, _) in enumerate(peers) if host in far]
    who = f"rank {' or '.join(ranks)}" if len(far) == 1 else "a worker"
    return f"lost {who} on {' or '.join(far)}, or the connection to it {reason}" if far else None


def _ended(processes: dict[int, int], seconds: float) -> dict[int, str]:
    """{rank: how} of those processes that end, or are stopped, within some seconds; returns at the first."""
    deadline = time.monotonic() + seconds  # soon, because a launcher may end this worker too
    while True:
        gone = {}
        for rank, process in processes.items():
            try:
                how = _STATES.get(psutil.Process(process).status())
            except psutil.NoSuchProcess:
                how = ""
            if how is not None:
                gone[rank] = how
        if gone or time.monotonic() > deadline:
            return gone
        time.sleep(0.05)


def missing_ranks(rank: int, world_size: int) -> list[int]:
    """Ranks that do not answer after a collective has failed; all live workers call this at about the same time.

    Raises:
        ConnectionError: torch's key-value store, on the machine of rank 0, does not answer.
    """
    answers: list[list[int]] = []

    def ask() -> None:
        try:
            store, silent = c10d._get_default_store(), list(range(world_size))
            store.set(f"present/{rank}", "")
            deadline = time.monotonic() + _ANSWER_SECONDS
            while silent and time.monotonic() < deadline:
                time.sleep(0.1)
                silent = [other for other in silent if not store.check([f"present/{other}"])]
            answers.append(silent)
        except (RuntimeError, ValueError):  # the store is gone, or there is no group
            return

    thread = threading.Thread(target=ask, daemon=True)  # a store without a connection never answers
    thread.start()
    thread.join(_ANSWER_SECONDS + 0.5)
    if not answers:
        raise ConnectionError("the store of the process group does not answer")
    return answers[0]

"""torch's process groups: timeouts, restarts, and the name of a lost worker."""

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
    """Context of the rendezvous at the start of a job. Raises LostWorkerError."""
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
    """The init_method of workers that torchrun has restarted (`--max-restarts`); None where torch's own works.

    torchrun keeps its store over a restart, with the addresses of the old workers, which the new ones would try to
    reach. Each restart writes under its own prefix instead.

    Raises:
        UserError: on several machines, whose agents count restarts independently.
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
    """Set the timeout of all existing groups; None leaves them as they are."""
    if seconds is not None:
        for group in list(c10d._world.pg_map):
            c10d._set_pg_timeout(timedelta(seconds=seconds), group)


def host_group(world_size: int, device: torch.device, seconds: float) -> dist.ProcessGroup | None:
    """A gloo group for CPU tensors, so that counts do not wait for the GPU; None if the default group is gloo.

    Raises:
        LostWorkerError: the workers do not reach one another within `seconds`.
    """
    if world_size == 1 or device.type == "cpu":
        return None
    with meeting(seconds):
        return dist.new_group(backend="gloo", timeout=timedelta(seconds=seconds))


def leave_group(drop_wrapper: weakref.WeakMethod[Callable[[], None]]) -> None:
    """Leave gloo groups at the end of a program that did not close its backend, unless it uses DDP itself.

    A gloo thread that frees a tensor while Python ends aborts the process
    (https://github.com/pytorch/pytorch/issues/190489). NCCL groups stay: all workers leave them together, and this
    one may have failed alone.

    Args:
        drop_wrapper: of the backend, if it still exists.
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
    """Error message that names the lost worker, if `error` is a collective's; None for any other error.

    Workers of this machine are looked up by their process; those of others answer through the store, or do not.
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
    """Ranks that do not answer after a collective has failed; the others call this at about the same time.

    They answer through the store by which they met, which is on the machine of rank 0.

    Raises:
        ConnectionError: the store does not answer.
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

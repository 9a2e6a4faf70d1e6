"""How long workers of torch's process groups wait for one another, and who answers once waiting was in vain."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d as c10d

from lm_experiments_tools.errors import LostWorkerError, UserError, first_line

_SECONDS = 3.0  # in which those that are there answer: they learn of the same loss at about the same time


@contextmanager
def meeting(seconds: float) -> Iterator[None]:
    """The start of a job, in which workers find one another.

    Raises:
        LostWorkerError: they do not, within `seconds`.
    """
    try:
        yield
    except (dist.DistStoreError, dist.DistNetworkError, dist.DistBackendError) as error:
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise LostWorkerError(
            f"the workers of the job did not all meet at {where} within {seconds:g} s ({first_line(error)}): see what "
            "the others say, whether a firewall closes ports between the machines, and whether GLOO_SOCKET_IFNAME "
            "and NCCL_SOCKET_IFNAME name the network that they share"
        ) from error


def restarts_store() -> str | None:
    """The init_method of workers that torchrun has started again (`--max-restarts`); None where torch's own serves.

    torchrun keeps its store over a restart, with the addresses of the workers that were: the new ones would try to
    reach these. Here they write under a name of their own.

    Raises:
        UserError: on several machines, whose agents do not count restarts alike.
    """
    told = os.environ.get
    if told("TORCHELASTIC_USE_AGENT_STORE") != "True" or told("TORCHELASTIC_MAX_RESTARTS", "0") == "0":
        return None
    if told("GROUP_WORLD_SIZE", "1") != "1":
        raise UserError(
            "--max-restarts of torchrun on several machines needs --rdzv_backend c10d and, in the environment of each "
            "torchrun, TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1: else restarted workers look for those of before"
        )
    count = told("TORCHELASTIC_RESTART_COUNT", "0")
    if count == "0":
        return None
    dist.register_rendezvous_handler("restart", _rendezvous_of_restart)
    return f"restart://{count}"


def _rendezvous_of_restart(url: str, **options: Any) -> Iterator[tuple[dist.Store, int, int]]:
    """Torch's env:// with the keys of this start apart."""
    for store, rank, world_size in dist.rendezvous("env://", **options):
        yield dist.PrefixStore(url.partition("?")[0], store), rank, world_size


def limit_waiting(seconds: float | None) -> None:
    """End every collective that waits longer, of the groups that exist; None leaves them their limits."""
    if seconds is not None:
        for group in list(c10d._world.pg_map):
            c10d._set_pg_timeout(timedelta(seconds=seconds), group)


def host_group(world_size: int, device: torch.device, seconds: float) -> dist.ProcessGroup | None:
    """A group for tensors of the host, so that no count waits behind a GPU's work; None where the first is one.

    Raises:
        LostWorkerError: the workers do not reach one another within `seconds`.
    """
    if world_size == 1 or device.type == "cpu":
        return None
    with meeting(seconds):
        return dist.new_group(backend="gloo", timeout=timedelta(seconds=seconds))


def leave_group(drop_wrapper: weakref.WeakMethod[Callable[[], None]]) -> None:
    """Leave groups of gloo at the end of a program that has not closed its backend, unless it holds a DDP of its own.

    Those of NCCL stay: all workers leave them together, and this one may have failed alone. A thread of gloo that
    frees a tensor of the last collective while Python ends aborts a process whose work is done
    (https://github.com/pytorch/pytorch/issues/190489).

    Args:
        drop_wrapper: of the backend, if it is still there.
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


def missing_ranks(rank: int, world_size: int) -> list[int]:
    """Ranks that do not answer after a collective has failed; those that are there call this too, at about one time.

    They answer through the store by which they met, which is on the machine of rank 0.

    Raises:
        ConnectionError: the store does not answer.
    """
    answers: list[list[int]] = []

    def ask() -> None:
        try:
            answers.append(_ask(rank, world_size))
        except (RuntimeError, ValueError):  # the store is gone; there is no group
            return

    thread = threading.Thread(target=ask, daemon=True)  # a store without a connection answers never
    thread.start()
    thread.join(_SECONDS + 0.5)
    if not answers:
        raise ConnectionError("the store of the process group does not answer")
    return answers[0]


def _ask(rank: int, world_size: int) -> list[int]:
    store, silent = c10d._get_default_store(), list(range(world_size))
    store.set(f"present/{rank}", "")
    deadline = time.monotonic() + _SECONDS
    while silent and time.monotonic() < deadline:
        time.sleep(0.1)
        silent = [other for other in silent if not store.check([f"present/{other}"])]
    return silent

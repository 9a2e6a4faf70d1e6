"""Which worker is gone, when a collective fails: the libraries name an address at best."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import psutil

from lm_experiments_tools.errors import RunError, first_line

if TYPE_CHECKING:
    from lm_experiments_tools.backends.backend import Backend

_WAIT_SECONDS = 1.0  # a process closes its connections shortly before it is seen to have ended
_SIGNS = ("connection", "peer", "socket", "remote", "gloo", "nccl", "horovod")  # in the message of a broken collective

Peers = Sequence[tuple[str, int]]  # (host, process) of each worker, by rank


def all_peers(backend: Backend) -> Peers:
    """Host and process of every worker; collective."""
    return backend.gather((platform.node(), os.getpid()))


def lost_peer(error: Exception, peers: Peers) -> str | None:
    """A sentence on who is gone, if `error` is a collective's; None for any other error.

    Workers of this machine are looked for; of others, no more is known than that it is one of them.
    """
    text = f"{type(error).__name__} {error}".lower()
    here = (platform.node(), os.getpid())
    if not isinstance(error, RuntimeError) or isinstance(error, RunError) or len(peers) == 1:
        return None
    if not any(sign in text for sign in _SIGNS):
        return None
    near = {rank: process for rank, (host, process) in enumerate(peers) if host == here[0] and process != here[1]}
    deadline = time.monotonic() + _WAIT_SECONDS
    while not (gone := [rank for rank, process in near.items() if _has_ended(process)]):
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    reason = f"({first_line(error)})"
    if gone:
        named = ", ".join(f"{rank} (process {near[rank]} on {here[0]})" for rank in gone)
        return f"lost rank {named}, whose own log says why if it could {reason}"
    far = sorted({host for host, _ in peers} - {here[0]})
    if not far:
        return None
    return f"lost a worker on {' or '.join(far)}, or the connection to it {reason}"


def _has_ended(process: int) -> bool:
    try:
        return psutil.Process(process).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True

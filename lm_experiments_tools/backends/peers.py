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
_END_SECONDS = 4.0  # the same where it must be one of this machine: a Python process that fails takes a while to end
_SIGNS = ("connection", "peer", "socket", "remote", "gloo", "nccl", "horovod")  # in the message of a broken collective
_STATES = {psutil.STATUS_ZOMBIE: "", psutil.STATUS_STOPPED: ", stopped by a signal"}

Peers = Sequence[tuple[str, int]]  # (host, process) of each worker, by rank


def all_peers(backend: Backend) -> Peers:
    """Host and process of every worker; collective."""
    return backend.gather((platform.node(), os.getpid()))


def lost_peer(error: Exception, peers: Peers, backend: Backend) -> str | None:
    """A sentence on who is gone, if `error` is a collective's; None for any other error.

    Workers of this machine are looked for; those of others answer a roll call, or do not.
    """
    text = f"{type(error).__name__} {error}".lower()
    here = (platform.node(), os.getpid())
    if not isinstance(error, RuntimeError) or isinstance(error, RunError) or len(peers) == 1:
        return None
    if not any(sign in text for sign in _SIGNS):
        return None
    near = {rank: process for rank, (host, process) in enumerate(peers) if host == here[0] and process != here[1]}
    far = sorted({host for host, _ in peers} - {here[0]})
    closed_here = not far and ("peer" in text or "shut down" in text)
    # a launcher may soon end this worker too
    deadline = time.monotonic() + (_END_SECONDS if closed_here else _WAIT_SECONDS if near else 0)
    while not (gone := {rank: why for rank, process in near.items() if (why := _gone(process)) is not None}):
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    reason = f"({first_line(error)})"
    if not gone and closed_here and len(near) == 1:  # it takes its time to end
        gone = dict.fromkeys(near, ", which has closed its connections")
    if gone:
        named = ", ".join(f"{rank} (process {near[rank]} on {here[0]}{why})" for rank, why in gone.items())
        return f"lost rank {named}, whose own log says why if it could {reason}"
    if not far and "timed out" not in text:  # else all are here and run, and the error may be another's
        return None
    try:
        missing = backend.missing()
    except ConnectionError:
        return f"lost {peers[0][0]}, the machine of rank 0, or the connection to it {reason}"
    if missing:
        named = ", ".join(f"rank {rank} on {peers[rank][0]}" for rank in missing)
        return f"lost {named}, or the connection there: no answer {reason}"
    if missing is not None:
        return f"all workers answer, but one came too late, or two of them have no connection {reason}"
    ranks = [str(rank) for rank, (host, _) in enumerate(peers) if host in far]
    who = f"rank {' or '.join(ranks)}" if len(far) == 1 else "a worker"  # of more machines there are too many
    return f"lost {who} on {' or '.join(far)}, or the connection to it {reason}" if far else None


def _gone(process: int) -> str | None:
    """How a process of this machine is gone, for a sentence; None if it runs."""
    try:
        return _STATES.get(psutil.Process(process).status())
    except psutil.NoSuchProcess:
        return ""

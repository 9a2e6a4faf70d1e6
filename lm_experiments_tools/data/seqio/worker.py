"""The process that owns TensorFlow: it makes seqio's examples for the training processes of its machine.

| message of the worker | to |
|---|---|
| `(level, text)`, a line for the log | its parent while it builds the task, later each client |
| `{"fingerprint", "title", "validation"}`: the task is built | its parent |
| int32[rows, inputs_length + targets_length], padded with `PADDING` | each client, its rows of every global batch |
| a UserError, before it ends | as a line for the log |

Clients connect to a Unix socket. TensorFlow's output goes to stdout and stderr. TensorFlow is imported only by
tasks.py, which only the worker process loads.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import threading
from contextlib import suppress
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

import numpy as np

from lm_experiments_tools.data.seqio.job import SOCKET, VALIDATION, Job, one_line
from lm_experiments_tools.data.workers import Caller
from lm_experiments_tools.errors import UserError


class Hub:
    """Connections of the TensorFlow process to its parent and to its clients, the training processes of a machine.

    A client connects once for each position at which it starts to read. It sends `start` (the number of the first
    example), `rows` (examples per step and client), `rank` and `world_size` (its number, and the number of training
    processes). When all clients have sent the same request, each gets batch after batch: row k of rank r is row k *
    world_size + r of the global batch. When one client disconnects to seek, all are expected to connect again.
    """

    def __init__(self, caller: Caller) -> None:
        self._caller, self._lock = caller, threading.Lock()  # text is read, and lines are logged, in several threads
        self._clients: list[tuple[Connection, dict[str, int]]] = []
        self._is_ready = False

    def answer(self, message: dict[str, Any]) -> None:
        """Tell the parent process that the task is built. The parent reads no further message."""
        with self._lock:
            self._caller.send(message)
            self._is_ready = True

    def tell(self, message: Any) -> None:
        """Send a message, such as a log line, to all clients, or to the parent while the task is being built."""
        with self._lock:
            receivers = [client for client, _ in self._clients] if self._is_ready else [self._caller]
            for receiver in receivers:
                with suppress(ConnectionError):
                    receiver.send(message)

    def accept(self, listener: Listener, clients: int) -> dict[str, int]:
        """Wait until all training processes of the machine have connected, and return their common request.

        All must send the same request, except for the rank.

        Args:
            listener: the socket that clients connect to.
            clients: number of clients to wait for.
        """
        with self._lock:
            for client, _ in self._clients:
                client.close()
            self._clients = []
        while len(self._clients) < clients:
            client = listener.accept()
            with suppress(EOFError, ConnectionError):  # it has sought again already
                self._clients.append((client, client.recv()))
        requests = [{**request, "rank": 0} for _, request in self._clients]
        if any(request != requests[0] for request in requests):
            raise ValueError(f"workers of one machine ask for different batches: {requests}")
        return requests[0]

    def send(self, batch: np.ndarray) -> None:
        """Send each client its rows of a global batch. Raises ConnectionError if a client has disconnected."""
        with self._lock:
            for client, request in self._clients:
                client.send(batch[request["rank"] :: request["world_size"]])


def import_triton() -> None:
    """Import triton before TensorFlow, if it is installed. Importing it later would abort the process."""
    if not importlib.util.find_spec("triton"):
        return
    try:
        import triton  # noqa: F401
    except (ImportError, OSError) as error:
        print(f"triton is not loaded: {one_line(error)}", file=sys.stderr)


def serve(job: Job, hub: Hub) -> None:
    """Build the seqio task of a job, then send endless batches to the training processes."""
    import_triton()
    from lm_experiments_tools.data.seqio.tasks import TaskExamples, limit_threads

    limit_threads(job.threads)
    examples = TaskExamples(job, lambda level, text: hub.tell((level, text)))
    validation = write_validation(examples, Path(job.folder) / VALIDATION) if job.validation else None
    with Listener(os.path.join(job.folder, SOCKET), "AF_UNIX", backlog=job.clients) as listener:
        hub.answer({"fingerprint": examples.fingerprint(), "title": examples.title, "validation": validation})
        while True:
            request = hub.accept(listener, job.clients)
            with suppress(ConnectionError):  # clients have sought another position, and connect again
                for batch in examples.batches(request["start"], request["rows"] * request["world_size"]):
                    hub.send(batch)


def write_validation(examples: Any, path: Path) -> int:
    """Write the validation examples to a file and return their number.

    Args:
        examples: the seqio task's examples.
        path: file for int32[n, inputs_length + targets_length], inputs and targets of n examples.
    """
    rows = 0
    with open(path, "wb") as file:
        for batch in examples.validation():
            file.write(np.ascontiguousarray(batch).data)
            rows += len(batch)
    return rows


def end_with_caller(caller: Caller, folder: str) -> None:
    """End this worker process, and remove its folder, when the parent process has ended."""
    for _ in caller:
        pass
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def work(caller: Caller) -> None:
    """Run the seqio worker process: the function that the parent process starts it with."""
    job, hub = caller.settings, Hub(caller)
    threading.Thread(target=end_with_caller, args=(caller, job.folder), daemon=True).start()
    sys.path.insert(0, os.getcwd())  # where the user's module may lie
    try:
        serve(job, hub)
    except UserError as error:
        hub.tell(UserError(str(error)))
        print(error, file=sys.stderr)  # for a client that has just disconnected
        sys.exit(2)

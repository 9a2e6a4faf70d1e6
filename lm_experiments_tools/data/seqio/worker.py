"""The process that runs TensorFlow: makes seqio's examples for the training processes of its machine.

| channel | content |
|---|---|
| `Caller`, to the parent | `{"log": (level, text)}`, `{"ready": {...}}`, `{"error": text, "by_user": bool}` |
| stdout, stderr | output of TensorFlow and the user's module |
| Unix socket, to each client | its rows of each global batch, see `Hub` |

Only this process imports TensorFlow (in tasks.py).
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import socket
import sys
import threading
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from lm_experiments_tools.data.seqio.job import FRAME, SOCKET, VALIDATION, Job, one_line
from lm_experiments_tools.data.workers import Caller
from lm_experiments_tools.errors import UserError


class Hub:
    """The worker's connections to its parent and to its clients, the training processes.

    A client connects and sends one line of JSON with `start` (sample number), `rows` (per step and client), `rank` and
    `world_size`. After all clients have sent the same request, each receives one message per batch: a `FRAME`, then
    int32[rows, inputs_length + targets_length], padded with `PADDING`. Row k of rank r is row k * world_size + r of
    the global batch. To seek, all clients disconnect and connect again.
    """

    def __init__(self, caller: Caller) -> None:
        self._caller, self._lock = caller, threading.Lock()
        self._clients: list[tuple[socket.socket, dict[str, int]]] = []
        self._listener: socket.socket | None = None

    def tell(self, **message: Any) -> None:
        """Send a message to the parent process; thread-safe."""
        with self._lock:
            self._caller.send(message)

    def log(self, level: int, text: str) -> None:
        """Send a line for the run's log to the parent process."""
        self.tell(log=(level, text))

    def fail(self, text: str, by_user: bool) -> None:
        """Send the reason for the worker's end to the parent and to all clients."""
        self.tell(error=text, by_user=by_user)
        content = json.dumps({"error": text, "by_user": by_user}).encode()
        for client, _ in self._clients:
            client.settimeout(5.0)  # of a client that is not listening
            try:
                client.sendall(FRAME.pack(False, len(content)) + content)
            except OSError:
                continue

    def listen(self, path: str, clients: int) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen(clients)

    def accept(self, clients: int) -> dict[str, int]:
        """Wait for `clients` clients and return their request. All must send the same request, except for the rank."""
        self.disconnect()
        while len(self._clients) < clients:
            client, _ = self._listener.accept()
            line = client.makefile("rb").readline()
            if line:  # else it has sought again already
                self._clients.append((client, json.loads(line)))
        requests = [{**request, "rank": 0} for _, request in self._clients]
        if any(request != requests[0] for request in requests):
            raise ValueError(f"workers of one machine ask for different batches: {requests}")
        return requests[0]

    def send(self, batch: np.ndarray) -> None:
        """Send each client its rows. Raises ConnectionError if a client has disconnected."""
        for client, request in self._clients:
            rows = np.ascontiguousarray(batch[request["rank"] :: request["world_size"]])
            client.sendall(FRAME.pack(True, rows.nbytes))
            client.sendall(rows.data)

    def disconnect(self) -> None:
        for client, _ in self._clients:
            client.close()
        self._clients = []


def import_triton() -> None:
    """Import triton, if it works. It aborts the process if imported after TensorFlow."""
    if not importlib.util.find_spec("triton"):
        return
    try:
        import triton  # noqa: F401
    except (ImportError, OSError) as error:
        print(f"triton is not loaded: {one_line(error)}", file=sys.stderr)


def serve(job: Job, hub: Hub) -> None:
    """Build the task, then serve endless batches."""
    import_triton()
    from lm_experiments_tools.data.seqio.tasks import TaskExamples, limit_threads

    limit_threads(job.threads)
    examples = TaskExamples(job, hub.log)
    validation = None
    if job.validation:
        validation = write_validation(examples, Path(job.folder) / VALIDATION)
    hub.listen(os.path.join(job.folder, SOCKET), job.clients)
    hub.tell(ready={"fingerprint": examples.fingerprint(), "title": examples.title, "validation": validation})
    while True:
        request = hub.accept(job.clients)
        try:
            for batch in examples.batches(request["start"], request["rows"] * request["world_size"]):
                hub.send(batch)
        except ConnectionError:
            continue  # they have sought another position, and ask again


def write_validation(examples: Any, path: Path) -> int:
    """Write the validation examples as int32[n, inputs_length + targets_length]. Returns n."""
    rows = 0
    with open(path, "wb") as file:
        for batch in examples.validation():
            file.write(np.ascontiguousarray(batch).data)
            rows += len(batch)
    return rows


def end_with_caller(caller: Caller, folder: str) -> None:
    """End this process when its parent process has ended."""
    for _ in caller:
        pass
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def work(caller: Caller) -> None:
    """Main function of the worker process."""
    job, hub = caller.settings, Hub(caller)
    threading.Thread(target=end_with_caller, args=(caller, job.folder), daemon=True).start()
    sys.path.insert(0, os.getcwd())  # where the user's module may lie

    def report_crash(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        traceback.print_exception(kind, error, trace)
        hub.fail(one_line(error), by_user=False)

    sys.excepthook = report_crash
    try:
        serve(job, hub)
    except UserError as error:
        hub.fail(str(error), by_user=True)
        sys.exit(2)

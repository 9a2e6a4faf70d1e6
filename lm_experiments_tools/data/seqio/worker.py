"""The process that owns TensorFlow: it makes seqio's examples and hands them to the training processes of its machine.

Started by `seqio_data` as `python -m lm_experiments_tools.data.seqio.worker`; one serves all workers of a machine.

| channel | what goes over it |
|---|---|
| stdin | one line, the `Job` as JSON; then nothing: its end means that the parent is gone |
| stdout | JSON lines to the parent: `{"log": [level, text]}`, `{"ready": {...}}`, `{"error": text, "by_user": bool}` |
| stderr | whatever TensorFlow and the user's module print |
| a Unix socket | to each client its rows of each global batch, see `Hub` |

This file imports TensorFlow nowhere but in `seqio_tasks`, which only the worker process loads.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import select
import shutil
import signal
import socket
import struct
import sys
import threading
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from lm_experiments_tools.errors import UserError

PADDING = -100  # in the rows that are sent: no token id, so that a real id 0 is not mistaken for it
SOCKET, VALIDATION = "socket", "validation.int32"  # files in the job's folder
FRAME = struct.Struct("<?I")  # is it a batch (else an error, as on stdout); bytes that follow


@dataclass(frozen=True, kw_only=True)
class Job:
    """What the worker is asked for.

    Attributes:
        task: span_corruption or prefix_lm over `data_path`, or module:name.
        inputs_length, targets_length: seqio's `task_feature_lengths`.
        quarantine: file for unusable lines of text.
        validation: make the examples of the task's validation split, at most `valid_samples`, before training.
        threads: of TensorFlow.
        clients: training processes on this machine.
        folder: private to this worker and its clients; the worker removes it when it ends.
        parent: process id; the worker ends when that process does.
    """

    task: str
    data_path: list[str]
    text_key: str
    max_bad_lines: int
    quarantine: str
    vocab_path: str
    inputs_length: int
    targets_length: int
    noise_density: float
    mean_noise_span_length: float
    seed: int
    validation: bool
    valid_samples: int | None
    threads: int
    clients: int
    folder: str
    parent: int


class Hub:
    """The worker's side of all channels.

    A client connects once for each position it wants to start from and sends one line of JSON: `start` (a global
    sample number), `rows` (of a step, per worker), `rank`, `world_size`. When all clients of the machine have asked,
    and for the same, each gets batch after batch: a `FRAME`, then int32[rows, inputs_length + targets_length], padded
    with `PADDING`. Row k of rank r is row k * world_size + r of the global batch. A client that hangs up has sought
    another position; then all of them are expected to come again.
    """

    def __init__(self) -> None:
        self._control = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)  # from here on a print of the user's module goes where TensorFlow's messages go
        self._lock = threading.Lock()
        self._clients: list[tuple[socket.socket, dict[str, int]]] = []
        self._listener: socket.socket | None = None

    def tell(self, **message: Any) -> None:
        """One line to the parent; any thread may call it."""
        with self._lock:
            self._control.write(json.dumps(message) + "\n")
            self._control.flush()

    def log(self, level: int, text: str) -> None:
        """A line for the run's log."""
        self.tell(log=[level, text])

    def fail(self, text: str, by_user: bool) -> None:
        """Why the worker ends, to everyone."""
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
        """Wait until that many clients have asked, and return the request they agree on (the rank is each one's)."""
        self.hang_up()
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
        """To each client its rows; raises ConnectionError where one has hung up."""
        for client, request in self._clients:
            rows = np.ascontiguousarray(batch[request["rank"] :: request["world_size"]])
            client.sendall(FRAME.pack(True, rows.nbytes))
            client.sendall(rows.data)

    def hang_up(self) -> None:
        for client, _ in self._clients:
            client.close()
        self._clients = []


def end_with_parent(parent: int, folder: str) -> None:
    """Return never; end this process, whatever it is doing, when its parent is gone.

    The end of stdin says so at once. A child that the parent had forked keeps stdin open, hence the second look.
    """
    while os.getppid() == parent and not select.select([0], [], [], 1.0)[0]:
        continue
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def import_triton() -> None:
    """Load triton before TensorFlow: loaded after it, as a module of the user may, it aborts the process.

    One that is broken, or built for another system, is not needed here.
    """
    if not importlib.util.find_spec("triton"):
        return
    try:
        import triton  # noqa: F401
    except (ImportError, OSError) as error:
        print(f"triton is not loaded: {one_line(error)}", file=sys.stderr)


def serve(job: Job, hub: Hub) -> None:
    """Make the task, then batches for ever."""
    import_triton()
    from lm_experiments_tools.data.seqio.tasks import TaskExamples, limit_threads

    limit_threads(job.threads)
    examples = TaskExamples(job, hub.log)
    validation = None
    if job.validation:
        validation = write_validation(examples, Path(job.folder) / VALIDATION)
    hub.listen(os.path.join(job.folder, SOCKET), job.clients)
    hub.tell(ready={"fingerprint": examples.fingerprint(), "title": examples.title, "validation": validation})
    first = True
    while True:
        request = hub.accept(job.clients)
        try:
            for batch in examples.batches(request["start"], request["rows"] * request["world_size"]):
                hub.send(batch)
                if first:
                    hub.log(logging.INFO, f"seqio worker: {resident_mebibytes():,} MiB")
                    first = False
        except ConnectionError:
            continue  # they have sought another position, and ask again


def write_validation(examples: Any, path: Path) -> int:
    """Write the validation split as int32[n, inputs_length + targets_length]; returns n."""
    rows = 0
    with open(path, "wb") as file:
        for batch in examples.validation():
            file.write(np.ascontiguousarray(batch).data)
            rows += len(batch)
    return rows


def resident_mebibytes() -> int:
    import psutil

    return psutil.Process().memory_info().rss >> 20


def one_line(error: BaseException) -> str:
    """The type of an exception and the first line of its message, without TensorFlow's name of the failing node."""
    lines = [line for line in str(error).strip().splitlines() if line.strip()] or ["no message"]
    first = lines[0]
    if first.startswith("{{") and "}}" in first:
        first = first.partition("}}")[2].strip() or first
    return f"{type(error).__name__}: {first}"


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # meant for the run, which may still want batches while it stops
    hub = Hub()
    job = Job(**json.loads(sys.stdin.readline()))
    threading.Thread(target=end_with_parent, args=(job.parent, job.folder), daemon=True).start()

    def report_crash(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        traceback.print_exception(kind, error, trace)
        hub.fail(one_line(error), by_user=False)

    sys.excepthook = report_crash
    try:
        serve(job, hub)
    except UserError as error:
        hub.fail(str(error), by_user=True)
        sys.exit(2)


if __name__ == "__main__":
    main()

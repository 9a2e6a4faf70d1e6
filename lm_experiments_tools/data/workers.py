"""Worker subprocesses that answer requests and end with their parent.

    parent                                 worker process
    Worker(prepare, settings)              answer = prepare(settings)
    worker.ask(request)       -- pickle -> answer(request)

Unlike `multiprocessing.Process`, a worker does not import the parent's main script (and with it torch), and does not
survive a killed parent.
"""

import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, BinaryIO

from lm_experiments_tools.config.exits import STOP_SIGNALS
from lm_experiments_tools.errors import UserError

Prepare = Callable[[Any], Callable[[Any], Any]]

_GRACE = 5.0  # seconds that a worker has left for the work in hand when its parent is gone
_SECONDS_TO_END = 10.0  # from a closed connection or a signal to the end of the process
_GONE = object()  # the last message
_ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "false"}  # there is a process for each core
_PACKAGE_ROOT = str(Path(__file__).resolve().parents[2])


def available_cores() -> int:
    """Return the number of CPUs that this process may use; all CPUs if the system does not tell (macOS)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class WorkerEnded(Exception):
    """Raised if a worker process ended before it answered a request.

    Attributes:
        returncode: exit code of the process; None if it still runs but has closed its connection.
    """

    def __init__(self, returncode: int | None, request: Any):
        super().__init__(f"ended with exit code {returncode} (-9: killed, often for lack of memory)")
        self.returncode, self.request = returncode, request


class Worker:
    """Handle by which a parent process starts, asks and ends one worker process.

    Args:
        prepare: function of a module that the worker process calls with `settings`; it returns the function that
            answers requests.
        log: file for the worker's output; None for the parent's stderr.
    """

    def __init__(
        self,
        prepare: Prepare,
        settings: Any,
        *,
        environment: Mapping[str, str] | None = None,
        log: BinaryIO | None = None,
    ):
        self._connection, theirs = Pipe()
        self._asking = threading.Lock()
        self._end: Exception | None = None
        with theirs:
            descriptor = theirs.fileno()
            # The parent handles signals to the group. The import path is copied: `python -c` puts the current folder
            # first.
            script = (
                f"import signal, sys; [signal.signal(n, signal.SIG_IGN) for n in {[*map(int, STOP_SIGNALS)]}]; "
                f"sys.path[:] = {[*sys.path, _PACKAGE_ROOT]!r}; "
                f"from {__name__} import serve; from {prepare.__module__} import {prepare.__qualname__} as prepare; "
                f"serve(prepare, {descriptor}, {os.getpid()})"
            )
            self.process = subprocess.Popen(
                [sys.executable, "-c", script],
                stdin=subprocess.DEVNULL,
                stdout=log or 2,
                stderr=log,
                pass_fds=[descriptor],
                env={**os.environ, **_ENVIRONMENT, **(environment or {})},
            )
        with suppress(ConnectionError):  # the first request finds out why
            self._connection.send(settings)

    def ask(self, request: Any) -> Any:
        """Send a request to the worker and return its answer, in one thread at a time.

        Raises a UserError or OSError of the worker, and WorkerEnded if it has died. Either ends the worker; later
        requests raise the same error.
        """
        with self._asking:
            if self._end is None:
                try:
                    with suppress(ConnectionError):
                        self._connection.send(request)
                    answer = self._connection.recv()
                except (EOFError, OSError):
                    self._end = WorkerEnded(self._returncode(), request)
                else:
                    if not isinstance(answer, Exception):
                        return answer
                    self._end = answer
            raise self._end

    def _returncode(self) -> int | None:
        try:
            return self.process.wait(_SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        self.process.kill()

    def close(self) -> None:
        """Kill the process and disconnect from it. No thread may wait for an answer."""
        self.kill()
        self._returncode()
        self._connection.close()


class WorkerPool:
    """Several worker processes with the same function and settings, which share the requests."""

    def __init__(self, prepare: Prepare, settings: Any, num_workers: int):
        self._workers = [Worker(prepare, settings) for _ in range(num_workers)]
        self._idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(num_workers)

    def submit(self, request: Any) -> "Future[Any]":
        """Send a request to the next idle worker; return a future of the answer or of the errors of `Worker.ask`."""
        return self._threads.submit(self._ask, request)

    def _ask(self, request: Any) -> Any:
        worker = self._idle.get()
        try:
            return worker.ask(request)
        finally:
            self._idle.put(worker)

    def close(self) -> None:
        """Kill the workers, and wait until they have ended."""
        for worker in self._workers:
            worker.kill()
        self._threads.shutdown(cancel_futures=True)
        for worker in self._workers:
            worker.close()


def serve(prepare: Prepare, descriptor: int, parent: int) -> None:
    """Run a worker process: answer the parent's requests by `prepare(settings)(request)` until the parent has ended.

    A UserError or OSError is sent to the parent and ends the worker process.
    """
    connection = Connection(descriptor)
    messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(connection, messages, parent), daemon=True).start()
    if (settings := messages.get()) is _GONE:
        os._exit(1)
    try:
        answer = prepare(settings)
        while (request := messages.get()) is not _GONE:
            _reply(connection, answer(request))
    except UserError as error:
        _reply(connection, UserError(str(error)))
    except OSError as error:  # anew: one of a library's own classes may not be known to the parent
        numbered = error.errno is not None
        copy = OSError(error.errno, error.strerror, error.filename) if numbered else OSError(str(error))
        _reply(connection, copy)


def _listen(connection: Connection, messages: "queue.SimpleQueue[Any]", parent: int) -> None:
    try:
        with suppress(EOFError, OSError):
            while os.getppid() == parent:
                if connection.poll(1.0):
                    messages.put(connection.recv())
    finally:  # also where a message cannot be unpickled here
        messages.put(_GONE)
    time.sleep(_GRACE)
    os._exit(1)  # the main thread hangs in a download or a long piece of work


def _reply(connection: Connection, reply: Any) -> None:
    try:
        connection.send(reply)
    except ConnectionError:  # nobody waits for it any more
        os._exit(1)

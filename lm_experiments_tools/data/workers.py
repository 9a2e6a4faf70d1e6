"""Worker subprocesses that answer requests and end with their parent.

    parent                              worker process
    Worker(work, settings)              work(caller), which calls caller.serve(prepare)
    worker.ask(request)    -- pickle -> prepare(settings)(request)

Unlike `multiprocessing.Process`, a worker does not import the parent's main script (and with it torch), and does not
survive a killed parent.
"""

import logging
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from lm_experiments_tools.config.exits import STOP_SIGNALS
from lm_experiments_tools.errors import UserError

logger = logging.getLogger(__name__)

_GRACE = 5.0  # seconds that a worker has left for the work in hand when its caller is gone
_SECONDS_TO_END = 10.0  # from a closed connection to the end of the process
_GONE = object()  # the last message
_ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "false"}  # there is a process for each core
_PACKAGE_ROOT = str(Path(__file__).resolve().parents[2])


def available_cores() -> int:
    """Return the number of CPUs that this process may use; all CPUs if the system does not tell (macOS)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class LogLine(NamedTuple):
    """A line for the log of the parent, which a worker may send before its answer."""

    level: int
    text: str


class WorkerEnded(Exception):
    """Raised if a worker process ended before it answered a request.

    Attributes:
        returncode: exit code of the process; None if it still runs but has closed its connection.
    """

    def __init__(self, returncode: int | None, request: Any = None):
        super().__init__(f"exit code {returncode}")
        self.returncode, self.request = returncode, request


class Worker:
    """Handle by which a parent process starts, asks and ends one worker process.

    Args:
        work: function that the worker process runs. It is defined at module level and gets a `Caller`, the connection
            to the parent.
        log: file for the worker's output; None for the parent's stderr.
    """

    def __init__(
        self,
        work: Callable[["Caller"], None],
        settings: Any = None,
        *,
        environment: Mapping[str, str] | None = None,
        log: BinaryIO | None = None,
    ):
        self._connection, theirs = Pipe()
        self._asking = threading.Lock()
        self._end: Exception | None = None
        with theirs:
            descriptor = theirs.fileno()
            # The caller handles signals to the group. The import path is copied: `python -c` puts the current folder
            # first.
            script = (
                f"import signal, sys; [signal.signal(n, signal.SIG_IGN) for n in {[*map(int, STOP_SIGNALS)]}]; "
                f"sys.path[:] = {[*sys.path, _PACKAGE_ROOT]!r}; "
                f"from {__name__} import Caller; from {work.__module__} import {work.__qualname__} as work; "
                f"work(Caller({descriptor}, {os.getpid()}))"
            )
            self.process = subprocess.Popen(
                [sys.executable, "-c", script],
                stdin=subprocess.DEVNULL,
                stdout=log or 2,
                stderr=log,
                pass_fds=[descriptor],
                env={**os.environ, **_ENVIRONMENT, **(environment or {})},
            )
        self._send(settings)

    def _send(self, message: Any) -> None:
        with suppress(ConnectionError):  # `receive` finds out why
            self._connection.send(message)

    def receive(self) -> Any:
        """Wait for the worker's next message and return it.

        Raises a UserError or OSError of the worker, and WorkerEnded if it has died.
        """
        try:
            while isinstance(message := self._connection.recv(), LogLine):
                logger.log(*message)
        except (EOFError, OSError):
            try:
                returncode = self.process.wait(_SECONDS_TO_END)
            except subprocess.TimeoutExpired:
                returncode = None
            raise WorkerEnded(returncode) from None
        if isinstance(message, Exception):
            raise message
        return message

    def ask(self, request: Any) -> Any:
        """Send a request to the worker and return its answer, in one thread at a time.

        Raises the same errors as `receive`, with any of which the worker ends; then the first one each time.
        """
        with self._asking:
            if self._end is None:
                self._send(request)
                try:
                    return self.receive()
                except WorkerEnded as end:
                    self._end = WorkerEnded(end.returncode, request)
                except (UserError, OSError) as error:
                    self._end = error
            raise self._end

    def kill(self) -> None:
        self.process.kill()

    def close(self) -> None:
        """Disconnect from the worker and wait until its process ends. It is killed after some seconds."""
        self._connection.close()
        for patience in (_SECONDS_TO_END, _SECONDS_TO_END):
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(patience)
                return
            self.kill()

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.kill()
        self.close()


class WorkerPool:
    """Several worker processes with the same function and settings, which share the requests.

    The pool is a context manager. An exception in its `with` block kills the workers.
    """

    def __init__(self, work: Callable[["Caller"], None], settings: Any, num_workers: int):
        self._workers = [Worker(work, settings) for _ in range(num_workers)]
        self._idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(num_workers)
        self._death: Exception | None = None  # of the first worker, raised by all later requests

    def submit(self, request: Any) -> "Future[Any]":
        """Send a request to the next idle worker; return a future of the answer or of the errors of `Worker.ask`."""
        return self._threads.submit(self._ask, request)

    def _ask(self, request: Any) -> Any:
        worker = self._idle.get()
        try:
            if self._death is None:
                return worker.ask(request)
        except (WorkerEnded, UserError, OSError) as end:  # with any of them its process has ended
            self._death = self._death or end
        finally:
            self._idle.put(worker)
        raise self._death

    def __enter__(self) -> "WorkerPool":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(kill=kind is not None)

    def close(self, kill: bool = False) -> None:
        """End the workers, by a signal if `kill`, and wait until they have ended."""
        for worker in self._workers if kill else ():
            worker.kill()
        self._threads.shutdown(cancel_futures=True)
        for worker in self._workers:
            worker.close()


class Caller:
    """Handle by which a worker process talks to the parent process that started it.

    Iteration yields the parent's messages until the parent has ended. The worker process then exits within some
    seconds.
    """

    def __init__(self, descriptor: int, parent: int):
        self._connection = Connection(descriptor)
        self._messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._sending = threading.Lock()
        threading.Thread(target=self._listen, args=(parent,), daemon=True).start()
        self.settings = self._messages.get()
        if self.settings is _GONE:
            os._exit(1)

    def _listen(self, parent: int) -> None:
        try:
            with suppress(EOFError, OSError):
                while os.getppid() == parent:
                    if self._connection.poll(1.0):
                        self._messages.put(self._connection.recv())
        finally:  # also where a message cannot be unpickled here
            self._messages.put(_GONE)
        time.sleep(_GRACE)
        os._exit(1)  # the main thread hangs in a download or a long piece of work

    def __iter__(self) -> Iterator[Any]:
        return iter(self._messages.get, _GONE)

    def send(self, message: Any) -> None:
        """Send a message from the worker to its parent. Raises ConnectionError if the parent has ended."""
        with self._sending:
            self._connection.send(message)

    def log(self, level: int, text: str) -> None:
        """Send a line to the log of the parent, which shows it when it waits for an answer."""
        with suppress(ConnectionError):
            self.send(LogLine(level, text))

    def serve(self, prepare: Callable[[Any], Callable[[Any], Any]]) -> None:
        """Answer all requests of the parent process until it ends.

        An answer is `prepare(settings)(request)`. A UserError or OSError is sent to the parent and ends the loop.
        """
        try:
            answer = prepare(self.settings)
            for request in self:
                self._reply(answer(request))
        except UserError as error:
            self._reply(UserError(str(error)))
        except OSError as error:  # anew: one of a library's own classes may not be known to the caller
            numbered = error.errno is not None
            self._reply(OSError(error.errno, error.strerror, error.filename) if numbered else OSError(str(error)))

    def _reply(self, reply: Any) -> None:
        try:
            self.send(reply)
        except ConnectionError:  # nobody waits for it any more
            os._exit(1)

"""Worker subprocesses that answer one JSON line on stdout for each on stdin.

Not multiprocessing: it would import the caller's main script, and with it torch, into every worker, and would leave
workers behind when the caller is killed. These end with their stdin. They are modules run by `python -m`; standard
library only, because some of them need nothing else.
"""

import io
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lm_experiments_tools.errors import UserError

_GRACE = 5.0  # seconds that a worker has left for the work in hand when its caller is gone


class WorkerEnded(Exception):
    """The process is gone, with this exit code (negative: the signal that ended it)."""

    def __init__(self, returncode: int):
        super().__init__(f"exit code {returncode}")
        self.returncode = returncode


def start_worker(module: str) -> subprocess.Popen:
    """Run `python -m module`, which calls `serve`."""
    package_root = str(Path(__file__).parents[3])  # also where the package is used from a folder, not installed
    path = os.pathsep.join(filter(None, [package_root, os.environ.get("PYTHONPATH")]))
    process = subprocess.Popen(
        [sys.executable, "-m", module],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,  # nothing may be left to flush into the pipe of a worker that died
        env={**os.environ, "PYTHONPATH": path},
    )
    process.stdout = io.BufferedReader(process.stdout)
    return process


def ask(process: subprocess.Popen, request: Any) -> Any:
    """The worker's answer to `request`.

    Raises:
        UserError, OSError: as they were raised in the worker.
        WorkerEnded: it has died.
    """
    content = memoryview(json.dumps(request).encode() + b"\n")
    try:
        while content:
            content = content[process.stdin.write(content) :]
        line = process.stdout.readline()
    except BrokenPipeError:
        line = b""
    if not line.endswith(b"\n"):
        raise WorkerEnded(process.wait())
    answer = json.loads(line)
    if isinstance(answer, dict) and "user_error" in answer:
        raise UserError(answer["user_error"])
    if isinstance(answer, dict) and "os_error" in answer:
        raise OSError(*answer["os_error"])
    return answer


def serve(answer: Callable[[Any], Any]) -> None:
    """The worker's side: `answer` each request until stdin ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the caller decides
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # a library that prints must not break the protocol
    requests: queue.SimpleQueue = queue.SimpleQueue()
    threading.Thread(target=_read_requests, args=(requests,), daemon=True).start()
    for line in iter(requests.get, ""):
        try:
            reply = answer(json.loads(line))
        except UserError as error:
            reply = {"user_error": str(error)}
        except OSError as error:
            numbered = error.errno is not None
            reply = {"os_error": [error.errno, error.strerror, error.filename] if numbered else [str(error)]}
        try:
            answers.write(json.dumps(reply) + "\n")
            answers.flush()
        except BrokenPipeError:  # nobody waits for it any more
            os._exit(1)


def _read_requests(requests: queue.SimpleQueue) -> None:
    for line in iter(sys.stdin.readline, ""):
        requests.put(line)
    requests.put("")
    time.sleep(_GRACE)
    os._exit(1)  # the caller is gone, and the main thread hangs in a download or a long piece of work

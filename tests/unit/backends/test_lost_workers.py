"""What a worker does when a collective fails because another worker is lost."""

import os
import platform
import signal
import subprocess
import sys
import time

import psutil
import pytest

from lm_experiments_tools.backends.process_groups import end_suspended, lost_worker
from lm_experiments_tools.errors import LostWorkerError, RunError

LATE = "[third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 6000ms for recv operation"


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(LATE),
        RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:35536"),
        RuntimeError("Horovod has been shut down. This was caused by an exception on one of the ranks"),
    ],
)
def test_a_collective_that_fails_for_a_lost_worker_is_one_sentence(error):
    lost = lost_worker(error)
    assert type(lost) is LostWorkerError and str(error).splitlines()[0].rstrip(".") in str(lost)


@pytest.mark.parametrize(
    "error", [ValueError(LATE), RunError(LATE), RuntimeError("size mismatch"), RuntimeError("connection timed out")]
)
def test_an_error_of_this_worker_is_not_a_lost_worker(error):
    assert lost_worker(error) is None


def test_only_suspended_workers_of_this_machine_are_killed():
    processes = [subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) for _ in range(3)]
    try:
        for process in processes[:2]:
            os.kill(process.pid, signal.SIGSTOP)
            while psutil.Process(process.pid).status() != psutil.STATUS_STOPPED:
                time.sleep(0.01)
        here = platform.node()
        hosts = (here, "elsewhere", here)
        end_suspended([(host, process.pid) for host, process in zip(hosts, processes, strict=True)])
        assert processes[0].wait(60) == -signal.SIGKILL
        assert [process.poll() for process in processes[1:]] == [None, None]
    finally:
        for process in processes:
            process.kill()
            process.wait()
            process.stdin.close()

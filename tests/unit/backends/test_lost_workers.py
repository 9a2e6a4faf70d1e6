"""What a worker does when a collective fails because another worker is lost."""

import os
import platform
import signal
import subprocess
import sys
import time
from dataclasses import replace

import psutil
import pytest
from torch.utils.data import DataLoader

from lm_experiments_tools.backends.process_groups import end_suspended, lost_worker
from lm_experiments_tools.errors import LostWorkerError, RunError
from tests.distributed.launch import forked
from tests.helpers.loops import make_loop
from tests.helpers.toys import RaggedPairs

LATE = "[third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 6000ms for recv operation"


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(LATE),
        RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:35536"),
        RuntimeError("[gloo/transport/tcp/pair.cc:589] Read error [10.0.0.2]:4711: No route to host"),
        RuntimeError("[gloo/transport/tcp/pair.cc:456] writev [10.0.0.2]:4711: Network is unreachable"),
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


LIMITS = """
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from accelerate import Accelerator

from lm_experiments_tools.backends.accelerate import AccelerateBackend
from lm_experiments_tools.config.training import TrainerArgs
from tests.helpers.toys import TinyLabeller


def limit():
    group = dist.distributed_c10d._get_default_group()
    return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()


store = dist.FileStore(sys.argv[1], 1)
dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timedelta(seconds=99))
theirs = AccelerateBackend.from_accelerator(Accelerator(cpu=True), TrainerArgs(iters=1))
theirs.limit_waiting()
found = [limit()]
ours = AccelerateBackend.from_accelerator(Accelerator(cpu=True), TrainerArgs(iters=1, stall_timeout=20))
found.append(limit())
ours.limit_waiting()
found.append(limit())
ours.setup(TinyLabeller(), None)
ours.release(forget=True)  # as between two phases
found.append(limit())
print(found)
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_workers_wait_a_day_until_limited_and_a_users_accelerator_keeps_its_timeouts(tmp_path):
    (tmp_path / "limits.py").write_text(LIMITS)
    job = forked([sys.executable], tmp_path / "limits.py", tmp_path / "store")
    assert job.output.splitlines()[-1] == "[99.0, 86400.0, 20.0, 86400.0]"


@pytest.mark.parametrize("validate_only", [False, True])
def test_waiting_is_limited_once_after_the_first_step_or_validation_batch(validate_only):
    loop, found = make_loop(iters=3, log_interval=3), []
    loop.args = loop.step.args = replace(loop.args, validate_only=validate_only)
    loop.backend.limit_waiting = lambda: found.append(loop.state.step)
    if validate_only:
        loop.validate(DataLoader(RaggedPairs(8), batch_size=4))
    else:
        loop.train()
    assert found == [0 if validate_only else 1]

"""A stopped worker is ended by the process beside it; one that runs, or is stopped for a moment, is not."""

import os
import signal
import subprocess
import sys
import time

import pytest

from lm_experiments_tools.backends import guard

PROGRAM = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-I", "-S", sys.argv[1], str(__import__("os").getpid()), "1", "3", sys.argv[2]])
print("ready", flush=True)
time.sleep(float(sys.argv[3]))
"""


@pytest.fixture
def worker(tmp_path):
    """A function that starts a process with a guard that waits for a second; it ends by itself after some."""
    started = []

    def start(seconds, log=tmp_path / "rank3.log"):
        command = [sys.executable, "-c", PROGRAM, guard.__file__, str(log), str(seconds)]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        assert started[-1].stdout.readline() == "ready\n"
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()


def test_a_stopped_worker_is_ended_with_a_sentence_in_its_log(worker, tmp_path):
    (tmp_path / "rank3.log").write_text("the run so far\n")
    process = worker(60)
    os.kill(process.pid, signal.SIGSTOP)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == -signal.SIGKILL
    sentence = (
        f"error: rank 3: this worker (process {process.pid} on {os.uname().nodename}) has been stopped by a signal"
    )
    assert errors.startswith(sentence)
    first, last = (tmp_path / "rank3.log").read_text().splitlines()
    assert first == "the run so far" and sentence in last


def test_a_stopped_worker_is_ended_where_its_sentence_cannot_be_written(worker):
    process = worker(60, log="/dev/full")
    process.stderr.close()
    os.kill(process.pid, signal.SIGSTOP)
    assert process.wait(timeout=30) == -signal.SIGKILL


def test_a_worker_that_goes_on_in_time_ends_by_itself_and_its_guard_with_it(worker, tmp_path):
    process = worker(4)
    for _ in range(2):
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(0.7)
        os.kill(process.pid, signal.SIGCONT)
        time.sleep(0.6)
    _, errors = process.communicate(timeout=30)  # until the guard has closed them too
    assert (process.returncode, errors) == (0, "")
    assert not (tmp_path / "rank3.log").exists()

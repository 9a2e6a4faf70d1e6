"""A stopped worker is ended by the process beside it; one that runs, or is stopped for a moment, is not."""

import os
import signal
import subprocess
import sys

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
    _, errors = process.communicate(timeout=60)
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
    assert process.wait(timeout=60) == -signal.SIGKILL


@pytest.mark.parametrize(("looks", "is_ended"), [([8, 8], False), ([9], True)])
def test_a_worker_is_ended_by_the_number_of_looks_at_which_it_was_stopped_in_a_row(monkeypatch, looks, is_ended):
    """With a limit of 1 s, 1 s of grace and a look each quarter of a second, 8 are borne."""
    states = [state for number in looks for state in [*[True] * number, False]]
    killed = []
    monkeypatch.setattr(guard.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(guard.os, "getppid", lambda: 77 if states else 1)  # its worker ends when no state is left
    monkeypatch.setattr(guard.os, "kill", lambda process, number: killed.append((process, number)))
    monkeypatch.setattr(guard, "_is_stopped", lambda process: states.pop(0))
    guard.guard(77, 1.0, 3, "")
    assert killed == ([(77, signal.SIGKILL)] if is_ended else [])


def test_a_guard_ends_with_its_worker(worker, tmp_path):
    process = worker(0)
    _, errors = process.communicate(timeout=60)  # until the guard has closed them too
    assert (process.returncode, errors) == (0, "")
    assert not (tmp_path / "rank3.log").exists()

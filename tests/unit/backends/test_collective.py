"""Work on all workers: who is done first waits for the others however long they take, and outside a collective."""

import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from lm_experiments_tools.backends import collective
from lm_experiments_tools.backends.backend import LocalBackend
from lm_experiments_tools.backends.collective import on_all, on_main
from lm_experiments_tools.checkpoint.saving import Saver
from lm_experiments_tools.checkpoint.writer import CheckpointWriter
from lm_experiments_tools.errors import RunError, UserError

LIMIT = 1.0  # seconds that a worker may wait in a collective, as NCCL's 1,800


class OneOfTwo(LocalBackend):
    """A worker of two, in threads; a collective ends with an error where one waits too long for the other."""

    world_size = 2

    def __init__(self, rank, barrier, values):
        super().__init__()
        self.rank, self._barrier, self._values = rank, barrier, values

    def gather(self, value):
        self._values[self.rank] = value
        try:
            self._barrier.wait(LIMIT)
            found = list(self._values)
            self._barrier.wait(LIMIT)
        except threading.BrokenBarrierError:
            raise RuntimeError("gloo: Timed out waiting") from None
        return found

    def sum(self, values):
        return sum(self.gather(values))

    def broadcast(self, value):
        return self.gather(value)[0]


def on_both(function):
    """[function(backend) of either worker], an exception in place of a value."""
    barrier, values = threading.Barrier(2), [None, None]

    def run(rank):
        try:
            return function(OneOfTwo(rank, barrier, values))
        except Exception as error:
            return error

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run, range(2)))


def slow(backend, value="done", rank=1):
    time.sleep(1.6 * LIMIT if backend.rank == rank else 0)
    return value


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(collective, "_BEAT", 0.1 * LIMIT)


def test_workers_wait_for_slow_ones_longer_than_a_collective_may_take(caplog):
    caplog.set_level(logging.INFO)
    assert on_both(lambda backend: on_all(backend, lambda: slow(backend), takes_long=True)) == ["done"] * 2
    assert 1 < caplog.messages.count("waiting for 1 of 2 workers") < 6
    assert all("Timed out" in str(e) for e in on_both(lambda backend: on_all(backend, lambda: slow(backend))))


def test_workers_wait_for_the_first_one():
    assert on_both(lambda b: on_main(b, lambda: slow(b, b.rank, rank=0), takes_long=True)) == [0, 0]


def test_workers_wait_for_a_checkpoint_longer_than_a_collective_may_take(tmp_path):
    def save(backend):
        saver = Saver(backend, CheckpointWriter(tmp_path, 1, rank=backend.rank))
        if backend.is_main:
            saver._writing = saver._thread.submit(time.sleep, 1.6 * LIMIT)
        saver.wait()

    assert on_both(save) == [None, None]


@pytest.mark.parametrize("error", [UserError("no text"), RunError("gone")])
def test_an_error_of_slow_work_reaches_all(error):
    def fail(backend):
        slow(backend)
        if backend.rank == 1:
            raise error

    found = on_both(lambda backend: on_all(backend, lambda: fail(backend), takes_long=True))
    assert [(type(e), str(e)) for e in found] == [(type(error), str(error))] * 2


def test_a_worker_that_is_lost_meanwhile_is_the_error():
    def die(backend):
        if backend.rank == 1:
            raise KeyError("a bug, with which this worker ends")

    other, lost = on_both(lambda backend: on_all(backend, lambda: die(backend), takes_long=True))
    assert type(lost) is KeyError and "Timed out" in str(other)

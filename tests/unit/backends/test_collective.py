"""Work on all workers: who is done first waits for the others however long they take, and outside a collective."""

import logging
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from lm_experiments_tools.backends import collective
from lm_experiments_tools.backends.backend import LocalBackend
from lm_experiments_tools.backends.collective import on_all, on_main
from lm_experiments_tools.checkpoint.saving import Saver
from lm_experiments_tools.checkpoint.writer import CheckpointWriter
from lm_experiments_tools.errors import RunError, UserError

LONG, SHORT = 60.0, 0.2  # seconds that a worker may wait in a collective, as NCCL's 1,800
BEATS = 6  # collectives that the other worker takes part in before a slow one is done


class OneOfTwo(LocalBackend):
    """A worker of two, in threads; a collective ends with an error where one waits too long for the other.

    A slow worker is slow in collectives, not in seconds: it waits for so many, or for the other's error.
    """

    world_size = 2

    def __init__(self, rank, barrier, values, limit):
        super().__init__()
        self.rank, self._barrier, self._values, self._limit = rank, barrier, values, limit
        self.beaten = threading.Semaphore(0)  # once for each collective, and without end after an error

    def gather(self, value):
        self._values[self.rank] = value
        try:
            self._barrier.wait(self._limit)
            found = list(self._values)
            self._barrier.wait(self._limit)
        except threading.BrokenBarrierError:
            raise RuntimeError("gloo: Timed out waiting") from None
        self.beaten.release()
        return found

    def be_slow(self):
        for _ in range(BEATS):
            while not self.beaten.acquire(timeout=0.01) and not self._barrier.broken:
                pass

    def sum(self, values):
        return sum(self.gather(values))

    def broadcast(self, value):
        return self.gather(value)[0]


def on_both(function, limit=LONG):
    """[function(backend) of either worker], an exception in place of a value."""
    barrier, values = threading.Barrier(2), [None, None]

    def run(rank):
        try:
            return function(OneOfTwo(rank, barrier, values, limit))
        except Exception as error:
            return error

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run, range(2)))


def slow(backend, value="done", rank=1):
    if backend.rank == rank:
        backend.be_slow()
    return value


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(collective, "_BEAT", 0.01)


def test_workers_wait_for_slow_ones_longer_than_a_collective_may_take(caplog):
    caplog.set_level(logging.INFO)

    def until_told_twice(backend):
        while backend.rank == 1 and caplog.messages.count("waiting for 1 of 2 workers") < 2:
            backend.be_slow()
        return "done"

    assert on_both(lambda backend: on_all(backend, lambda: until_told_twice(backend), takes_long=True)) == ["done"] * 2
    without = on_both(lambda backend: on_all(backend, lambda: slow(backend)), limit=SHORT)
    assert all("Timed out" in str(error) for error in without)


def test_workers_wait_for_the_first_one():
    assert on_both(lambda b: on_main(b, lambda: slow(b, b.rank, rank=0), takes_long=True)) == [0, 0]


def test_workers_wait_for_a_checkpoint_longer_than_a_collective_may_take(tmp_path):
    def save(backend):
        saver = Saver(backend, CheckpointWriter(tmp_path, 1))
        if backend.is_main:
            saver._writing = saver._thread.submit(backend.be_slow)
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

    other, lost = on_both(lambda backend: on_all(backend, lambda: die(backend), takes_long=True), limit=SHORT)
    assert type(lost) is KeyError and "Timed out" in str(other)

"""Errors of one worker reach all; a checkpoint may take longer to write than a collective may wait."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from lm_experiments_tools.backends.backend import LocalBackend
from lm_experiments_tools.backends.collective import on_all
from lm_experiments_tools.checkpoint import saving
from lm_experiments_tools.checkpoint.saving import Saver
from lm_experiments_tools.checkpoint.writer import CheckpointWriter
from lm_experiments_tools.errors import RunError, UserError

LIMIT = 60.0  # seconds that a worker may wait in a collective
COLLECTIVES = 6  # that the other worker takes part in before a slow one is done


class OneOfTwo(LocalBackend):
    """A worker of two, in threads."""

    world_size = 2

    def __init__(self, rank, barrier, values):
        super().__init__()
        self.rank, self._barrier, self._values = rank, barrier, values
        self.num_collectives = 0
        self.has_waited = threading.Event()

    def gather(self, value):
        self.num_collectives += 1
        if self.num_collectives == COLLECTIVES:
            self.has_waited.set()
        self._values[self.rank] = value
        self._barrier.wait(LIMIT)
        found = list(self._values)
        self._barrier.wait(LIMIT)
        return found

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


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    wait = saving.wait
    monkeypatch.setattr(saving, "wait", lambda futures, timeout: wait(futures, timeout=timeout / 100))


def test_workers_wait_for_a_checkpoint_in_short_collectives(tmp_path):
    """Rank 0 writes until the workers have met a number of times, so no single collective lasts as long as writing."""

    def save(backend):
        saver = Saver(backend, CheckpointWriter(tmp_path, 1))
        if backend.is_main:
            saver._writing = saver._thread.submit(backend.has_waited.wait, LIMIT)
        saver.wait()
        return backend.num_collectives >= COLLECTIVES

    assert on_both(save) == [True, True]


def test_a_checkpoint_that_cannot_be_written_is_an_error_of_all_workers(tmp_path):
    def fail():
        raise RunError("the disk is full")

    def save(backend):
        saver = Saver(backend, CheckpointWriter(tmp_path, 1))
        if backend.is_main:
            saver._writing = saver._thread.submit(fail)
        saver.wait()

    assert [(type(error), str(error)) for error in on_both(save)] == [(RunError, "the disk is full")] * 2


@pytest.mark.parametrize("error", [UserError("no text"), RunError("gone")])
def test_an_error_of_one_worker_reaches_all(error):
    def fail(backend):
        if backend.rank == 1:
            raise error

    found = on_both(lambda backend: on_all(backend, lambda: fail(backend)))
    assert [(type(e), str(e)) for e in found] == [(type(error), str(error))] * 2

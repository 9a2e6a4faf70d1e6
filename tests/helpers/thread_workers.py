"""Two workers or more in one process, for tests of their collectives."""

import ast
import threading
from unittest import mock

import torch

from lm_experiments_tools.backends.backend import Backend

_parse, _parsing = ast.parse, threading.Lock()


def _parse_alone(*arguments, **options):
    """`ast.parse` in one thread at a time: CPython 3.11 counts the depth of its recursion for all threads together."""
    with _parsing:
        return _parse(*arguments, **options)


class ThreadBackend(Backend):
    """One of several workers that are threads of this process."""

    name = "threads"

    def __init__(self, rank, barrier, slots):
        super().__init__()
        self.rank, self.world_size, self.barrier, self.slots = rank, len(slots), barrier, slots

    def gather(self, value):
        self.slots[self.rank] = value
        self.barrier.wait()
        values = list(self.slots)
        self.barrier.wait()
        return values

    def broadcast(self, value):
        return self.gather(value)[0]

    def sum(self, values):
        return torch.stack(self.gather(values.clone())).sum(0)

    def broadcast_tensors(self, tensors):
        with torch.no_grad():
            for own, sent in zip(tensors, self.gather(tensors)[0], strict=True):
                own.copy_(sent)
        self.gather(None)


class Workers:
    """Runs functions on several `ThreadBackend`s at the same time."""

    def __init__(self, number):
        self.barrier, self.slots = threading.Barrier(number, timeout=60), [None] * number

    def run(self, work):
        """Call work(backend) for every worker at the same time; its results, in rank order."""
        results = {}

        def call(rank):
            results[rank] = work(ThreadBackend(rank, self.barrier, self.slots))

        ranks = range(len(self.slots))
        threads = [threading.Thread(target=call, args=(rank,), name=f"rank_{rank}") for rank in ranks]
        with mock.patch.object(ast, "parse", _parse_alone):
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        torch.compiler.set_stance("default")  # one for the process: threads that set it restore each other's
        return [results[rank] for rank in ranks]

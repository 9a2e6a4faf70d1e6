"""Two workers or more in one process, for what needs their collectives and no gradients."""

import threading

import torch

from lm_experiments_tools.backends.backend import LocalBackend


class Workers:
    """Backends of workers that are threads of this process."""

    def __init__(self, number):
        self.barrier, self.slots = threading.Barrier(number, timeout=60), [None] * number

    def backend(self, rank):
        backend = LocalBackend()
        backend.rank, backend.world_size = rank, len(self.slots)

        def gather(value):
            self.slots[rank] = value
            self.barrier.wait()
            found = list(self.slots)
            self.barrier.wait()
            return found

        backend.gather, backend.broadcast = gather, lambda value: gather(value)[0]
        backend.sum = lambda values: torch.stack(gather(values)).sum(0)
        return backend

    def run(self, work):
        """Call work(backend) for every worker at the same time; its results, in rank order."""
        results = {}

        def call(rank):
            results[rank] = work(self.backend(rank))

        threads = [threading.Thread(target=call, args=(rank,)) for rank in range(len(self.slots))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [results[rank] for rank in range(len(self.slots))]

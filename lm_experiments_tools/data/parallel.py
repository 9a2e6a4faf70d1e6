"""Examples made by several worker processes, for objectives that take longer than their share of a training step."""

from __future__ import annotations

from typing import Any

import numpy as np

from lm_experiments_tools.data.dataset import Batch, Dataset, joined
from lm_experiments_tools.data.workers import Caller, WorkerEnded, WorkerPool
from lm_experiments_tools.errors import RunError


class ParallelDataset(Dataset):
    """A dataset whose batches are made by worker processes, each of which makes some of the samples."""

    def __init__(self, dataset: Dataset, num_workers: int) -> None:
        super().__init__(dataset.members, dataset.mixture, dataset.masking)
        self.num_workers, self._pool = num_workers, WorkerPool(work, dataset, num_workers)

    def batch(self, samples: np.ndarray) -> Batch:
        return joined(self._parts("batch", self._arranged(samples)), len(samples), "examples of --task")

    def lengths(self, samples: np.ndarray) -> np.ndarray:
        return np.concatenate([lengths for _, lengths in self._parts("lengths", samples)], axis=1)

    def _parts(self, method: str, samples: np.ndarray) -> list[tuple[np.ndarray, Any]]:
        """Indices of some samples and a worker's answer for them. Raises RunError if a worker has died."""
        places = np.array_split(np.arange(len(samples)), min(self.num_workers, len(samples)))
        futures = [self._pool.submit((method, samples[here])) for here in places]
        try:
            return [(here, future.result()) for here, future in zip(places, futures, strict=True)]
        except WorkerEnded as end:
            how = "was killed, often for lack of memory" if end.returncode == -9 else "ended by the error above"
            raise RunError(f"a process that makes examples (--data_n_workers) {how}") from None

    def close(self) -> None:
        self._pool.close(kill=True)


def work(caller: Caller) -> None:
    """Run a worker process, which answers (name of a method, samples)."""
    caller.serve(lambda dataset: lambda request: getattr(dataset, request[0])(request[1]))

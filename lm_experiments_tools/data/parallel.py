"""Examples made by several worker processes, for objectives that take longer than their share of a training step."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np

from lm_experiments_tools.data.dataset import Batch, Dataset, joined
from lm_experiments_tools.data.workers import WorkerEnded, WorkerPool
from lm_experiments_tools.errors import RunError, UserError


class ParallelDataset(Dataset):
    """A dataset whose batches are made by worker processes, each of which makes some of the samples."""

    def __init__(self, dataset: Dataset, num_workers: int) -> None:
        super().__init__(dataset.members, dataset.mixture, dataset.masking)
        self.num_workers = num_workers
        try:
            pickle.dumps(dataset)
        except (AttributeError, TypeError, pickle.PicklingError) as error:
            raise UserError(f"--data_n_workers: the objective cannot be sent to processes ({error}).") from None
        self._pool = WorkerPool(prepare, dataset, num_workers)

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
            raise RunError(f"a process that makes examples (--data_n_workers) {end}") from None

    def close(self) -> None:
        self._pool.close()


def prepare(dataset: Dataset) -> Callable[[tuple[str, np.ndarray]], Batch | np.ndarray]:
    """Return the function by which a worker process answers (name of a method, samples)."""
    return lambda request: getattr(dataset, request[0])(request[1])

"""Examples made by several worker processes, for objectives that take longer than their share of a training step."""

from __future__ import annotations

import pickle
from collections.abc import Callable

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
        places = np.array_split(np.arange(len(samples)), self._num_parts(samples))
        return joined(
            zip(places, self._answers("batch", self._arranged(samples)), strict=True),
            len(samples),
            "examples of --task",
        )

    def lengths(self, samples: np.ndarray) -> np.ndarray:
        return np.concatenate(self._answers("lengths", samples), axis=1)

    def _num_parts(self, samples: np.ndarray) -> int:
        return min(self.num_workers, len(samples))

    def _answers(self, method: str, samples: np.ndarray) -> list:
        """What the workers return for equal parts of the samples. Raises RunError if one of them has died."""
        parts = np.array_split(samples, self._num_parts(samples))
        futures = [self._pool.submit((method, part)) for part in parts]
        try:
            return [future.result() for future in futures]
        except WorkerEnded as end:
            raise RunError(f"a process that makes examples (--data_n_workers) {end}") from None

    def close(self) -> None:
        self._pool.close()


def prepare(dataset: Dataset) -> Callable[[tuple[str, np.ndarray]], Batch | np.ndarray]:
    """Return the function by which a worker process answers (name of a method, samples)."""
    return lambda request: getattr(dataset, request[0])(request[1])

"""A worker's batches out of a dataset of numbered samples; the position is one number, the samples consumed by all.

Row k of rank r in a global batch is global row k * world_size + r. Ranks that cut their rows into micro-batches of b
therefore share micro-batch m = global rows [m * b * world_size, (m + 1) * b * world_size): each step holds the same
samples for 8 x 1, 4 x 2 and 2 workers x (2 x 2), and so does each micro-batch of the last two.
"""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from math import ceil
from typing import Protocol

import numpy as np
import torch

from lm_experiments_tools.errors import UserError
from lm_experiments_tools.labels import IGNORED_LABEL

_ROWS_AT_ONCE, _CELLS_AT_ONCE = 256, 1 << 20  # 8 MiB
# the entries of a batch that a loss is a mean over, and the number of an example that is to be predicted
LABELS = frozenset({"labels", "next_sentence_label", "example"})


class SampleDataset(Protocol):
    """What is needed of a `SpanCorruptionDataset`: examples by global sample number, epoch after epoch."""

    @property
    def fingerprint(self) -> str: ...

    def __len__(self) -> int: ...

    def batch(self, samples: np.ndarray) -> dict[str, np.ndarray]: ...

    def describe(self) -> str: ...


class TrainSource(Protocol):
    """What the loop and the scripts need of a `TrainLoader`: endless batches of this worker, at a known position.

    `samples_per_epoch` is None where nobody knows before the end.
    """

    @property
    def fingerprint(self) -> str: ...

    @property
    def samples_per_epoch(self) -> int | None: ...

    @property
    def consumed_samples(self) -> int: ...

    def seek(self, consumed_samples: int) -> None: ...

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]: ...

    def close(self) -> None: ...


class ValidSource(Protocol):
    """What is needed of a `ValidLoader`: the same finite batches at every pass, as many on each rank."""

    @property
    def fingerprint(self) -> str: ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]: ...


def _check_rank(rows: int, rank: int, world_size: int) -> None:
    if rows < 1:
        raise UserError(f"a batch of {rows} rows was asked for: the batch size must be at least 1.")
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is not in a world of {world_size}")


def _to_torch(batch: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(values) for name, values in batch.items()}


def make_steps(
    dataset: SampleDataset, position: int, num_steps: int, rows_per_worker: int, rank: int, world_size: int
) -> list[dict[str, np.ndarray]]:
    """A worker's rows of `num_steps` steps from a position on, by one call of the dataset; the first step last."""
    end = position + num_steps * rows_per_worker * world_size
    rows = dataset.batch(np.arange(position + rank, end, world_size, dtype=np.int64))
    ends = range(num_steps * rows_per_worker, 0, -rows_per_worker)
    return [{name: values[k - rows_per_worker : k] for name, values in rows.items()} for k in ends]


class TrainLoader:
    """Endless training batches of one worker: an iterator that knows its place and can be put anywhere.

    Args:
        dataset: samples by global number.
        rows_per_worker: rows of one step on this worker (micro-batch size x accumulation steps).
        rank, world_size: which rows of the global batch are this worker's.
        consumed_samples: global position to start from.
        prefetch: make the next batch in one background thread. Changes neither what is yielded nor `consumed_samples`,
            which counts what has been yielded, not what has been prepared.
    """

    def __init__(
        self,
        dataset: SampleDataset,
        rows_per_worker: int,
        rank: int = 0,
        world_size: int = 1,
        consumed_samples: int = 0,
        prefetch: bool = True,
    ) -> None:
        _check_rank(rows_per_worker, rank, world_size)
        self.dataset, self.rank, self.world_size = dataset, rank, world_size
        self.rows_per_worker = rows_per_worker
        # One thread makes every batch, so that no two are ever made at once.
        self._executor = ThreadPoolExecutor(1, "data-prefetch") if prefetch else None
        self._following: Future | None = None
        self._steps_at_once = 1  # until the size of a batch is known
        self.seek(consumed_samples)

    @property
    def global_batch(self) -> int:
        """Samples of one step over all workers."""
        return self.rows_per_worker * self.world_size

    @property
    def samples_per_epoch(self) -> int:
        return len(self.dataset)

    @property
    def fingerprint(self) -> str:
        """Identifies data, objective and seed, but not the number of workers: a run may resume on another number."""
        return self.dataset.fingerprint

    @property
    def consumed_samples(self) -> int:
        """Samples of the batches yielded so far, over all workers."""
        return self._consumed

    def seek(self, consumed_samples: int) -> None:
        """Continue as if `consumed_samples` had been yielded; takes no time, whatever the distance."""
        if consumed_samples < 0:
            raise ValueError(f"consumed_samples must not be negative, got {consumed_samples}")
        self._consumed = consumed_samples
        self._ready: list[dict[str, np.ndarray]] = []  # steps made, the next one last
        self._following = None

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return self

    def __next__(self) -> dict[str, torch.Tensor]:
        """Tensors int64[rows_per_worker, length] of this worker's part of the next global batch."""
        if not self._ready:
            self._ready = self._next_steps()
        self._consumed += self.global_batch
        return _to_torch(self._ready.pop())

    def _next_steps(self) -> list[dict[str, np.ndarray]]:
        """What `_make` gives from here on; with a background thread, what comes after it is then on its way."""
        if self._executor is None:
            steps = self._make(self._consumed, self._steps_at_once)
        else:
            here = self._following or self._executor.submit(self._make, self._consumed, self._steps_at_once)
            steps = here.result()
        self._steps_at_once = self._how_many_at_once(steps[-1])
        if self._executor is not None:
            after = self._consumed + len(steps) * self.global_batch
            self._following = self._executor.submit(self._make, after, self._steps_at_once)
        return steps

    def _make(self, position: int, num_steps: int) -> list[dict[str, np.ndarray]]:
        return make_steps(self.dataset, position, num_steps, self.rows_per_worker, self.rank, self.world_size)

    def _how_many_at_once(self, batch: dict[str, np.ndarray]) -> int:
        """Steps made by one call, which costs nearly the same for 8 rows as for 64."""
        cells = sum(values.size for values in batch.values())
        return max(1, min(_ROWS_AT_ONCE // self.rows_per_worker, _CELLS_AT_ONCE // cells))

    def close(self) -> None:
        """Stop the background thread. Batches can still be asked for, and are then made on the spot."""
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)
            self._executor = self._following = None


class ValidLoader:
    """Each validation sample exactly once over all workers, the same samples with the same noise at every pass.

    All ranks yield the same number of batches. A rank without a sample in the last one yields one row with labels that
    are all -100, and `example` -100 too: it weighs nothing in a token-weighted loss, and is nothing to predict.

    Args:
        dataset: samples by global number; epoch 0 is read.
        rows_per_batch: rows of one batch on this worker.
        rank, world_size: which rows are this worker's.
        num_samples: validate on that many samples, a fixed random subset; None, or more than there are, takes all.
    """

    def __init__(
        self,
        dataset: SampleDataset,
        rows_per_batch: int,
        rank: int = 0,
        world_size: int = 1,
        num_samples: int | None = None,
    ) -> None:
        _check_rank(rows_per_batch, rank, world_size)
        if num_samples is not None and num_samples < 1:
            raise UserError(f"validation on {num_samples} samples was asked for: it needs at least 1.")
        self.dataset, self.rows_per_batch, self.rank, self.world_size = dataset, rows_per_batch, rank, world_size
        self.num_samples = min(len(dataset), num_samples or len(dataset))

    @property
    def fingerprint(self) -> str:
        return self.dataset.fingerprint

    def __len__(self) -> int:
        return ceil(self.num_samples / (self.rows_per_batch * self.world_size))

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        """Tensors int64[rows_per_batch, length], fewer rows in the last batch."""
        for number in range(len(self)):
            rows = number * self.rows_per_batch + np.arange(self.rows_per_batch, dtype=np.int64)
            samples = rows * self.world_size + self.rank
            real = samples[samples < self.num_samples]
            batch = self.dataset.batch(real if real.size else np.array([self.num_samples - 1]))
            if not real.size:
                for name in LABELS & batch.keys():
                    batch[name][:] = IGNORED_LABEL
            yield _to_torch(batch)

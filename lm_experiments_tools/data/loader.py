"""A worker's batches out of a dataset of numbered samples; the position is one number, the samples consumed by all.

Row k of rank r in a global batch is global row k * world_size + r. Ranks that cut their rows into micro-batches of b
therefore share micro-batch m = global rows [m * b * world_size, (m + 1) * b * world_size): each step holds the same
samples for 8 x 1, 4 x 2 and 2 workers x (2 x 2), and so does each micro-batch of the last two.
"""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from math import ceil
from typing import Any, Protocol

import numpy as np
import torch

from lm_experiments_tools.errors import UserError
from lm_experiments_tools.labels import IGNORED_LABEL

_ROWS_AT_ONCE, _CELLS_AT_ONCE = 256, 1 << 20  # 8 MiB
# the entries of a batch that a loss is a mean over, and the number of an example that is to be predicted
LABELS = frozenset({"labels", "next_sentence_label", "example"})


class SampleDataset(Protocol):
    """Examples by global sample number, epoch after epoch; a `SpanCorruptionDataset` is one."""

    @property
    def fingerprint(self) -> str: ...

    def __len__(self) -> int: ...

    def batch(self, samples: np.ndarray) -> dict[str, np.ndarray]: ...

    def describe(self) -> str: ...

    def will_need(self, samples: np.ndarray) -> None:
        """Begin to read from the disk what `batch` will be asked for soon; only for data that is read from there."""


class ValidSource(Protocol):
    """The same finite batches at every pass, as many on each rank; a `ValidLoader` is one."""

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


def in_background(function: Callable[..., Any], *args: Any) -> Future[Any]:
    """Run in a daemon thread, which unlike an executor's does not keep the process alive.

    The future gets every exception. SystemExit or a Rust panic, which are no `Exception`, become a RuntimeError.
    """
    future: Future[Any] = Future()

    def run() -> None:
        try:
            result = function(*args)
        except BaseException as error:  # a thread that died without a result would leave the caller waiting forever
            if not isinstance(error, Exception):
                error, cause = RuntimeError(f"the data raised {type(error).__name__}: {error}"), error
                error.__cause__ = cause
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=run, name="data-background", daemon=True).start()
    return future


class TrainSource:
    """Endless training batches of one worker at a known position; a subclass makes them.

    Attributes:
        fingerprint: of data, objective and seed, but not the number of workers: a run may resume on another number.
        samples_per_epoch: None where it is not known before the end.

    Args:
        rows_per_worker: rows of one step on this worker (micro-batch size x accumulation steps).
        rank, world_size: which rows of the global batch are this worker's.
    """

    fingerprint: str
    samples_per_epoch: int | None = None

    def __init__(self, rows_per_worker: int, rank: int = 0, world_size: int = 1) -> None:
        _check_rank(rows_per_worker, rank, world_size)
        self.rows_per_worker, self.rank, self.world_size = rows_per_worker, rank, world_size
        self._consumed = 0

    @property
    def global_batch(self) -> int:
        """Samples of one step over all workers."""
        return self.rows_per_worker * self.world_size

    @property
    def consumed_samples(self) -> int:
        """Samples of the batches yielded so far, over all workers."""
        return self._consumed

    def seek(self, consumed_samples: int) -> None:
        """Continue as if `consumed_samples` had been yielded."""
        if consumed_samples < 0:
            raise ValueError(f"consumed_samples must not be negative, got {consumed_samples}")
        self._consumed = consumed_samples

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return self

    def __next__(self) -> dict[str, torch.Tensor]:
        """Tensors int64[rows_per_worker, length] of this worker's part of the next global batch."""
        batch = self._next_batch()
        self._consumed += self.global_batch
        return _to_torch(batch)

    def _next_batch(self) -> dict[str, np.ndarray]:
        """The rows at `consumed_samples`."""
        raise NotImplementedError

    def close(self) -> None:
        """End what makes batches in the background."""


class TrainLoader(TrainSource):
    """Batches of a dataset of numbered samples; a seek takes no time, whatever the distance.

    Args:
        dataset: samples by global number.
        rows_per_worker, rank, world_size: as for `TrainSource`.
        consumed_samples: global position to start from.
        prefetch: make the next batches in the background. Changes neither what is yielded nor `consumed_samples`,
            which counts what has been yielded, not what has been prepared.
        ahead: announce to the dataset (`will_need`) what comes after the batches that are being made: 256 rows, or a
            step where it has more.
    """

    def __init__(
        self,
        dataset: SampleDataset,
        rows_per_worker: int,
        rank: int = 0,
        world_size: int = 1,
        consumed_samples: int = 0,
        prefetch: bool = True,
        ahead: bool = False,
    ) -> None:
        super().__init__(rows_per_worker, rank, world_size)
        self.dataset, self._prefetch, self._ahead = dataset, prefetch, ahead
        self._following: Future[Any] | None = None
        self.seek(consumed_samples)

    @property
    def fingerprint(self) -> str:
        return self.dataset.fingerprint

    @property
    def samples_per_epoch(self) -> int | None:
        return len(self.dataset)

    def seek(self, consumed_samples: int) -> None:
        super().seek(consumed_samples)
        self._ready: list[dict[str, np.ndarray]] = []  # steps made, the next one last
        self._steps_at_once = 1  # so that the first batch is soon there; and its size is not known yet
        self._abandoned, self._following = self._following, None
        self._told = 0  # what comes before that was announced

    def _next_batch(self) -> dict[str, np.ndarray]:
        if not self._ready:
            self._ready = self._next_steps()
        return self._ready.pop()

    def _next_steps(self) -> list[dict[str, np.ndarray]]:
        """The steps from here on; with `prefetch` those after them are then on their way."""
        if self._following is None and self._abandoned is not None:
            self._abandoned.exception()  # on its way at a seek: no two batches are ever made at once
        if self._following is not None:
            steps = self._following.result()
        else:
            steps = self._make(self._consumed, self._steps_at_once)
        self._steps_at_once = self._how_many_at_once(steps[-1])
        if self._prefetch:
            after = self._consumed + len(steps) * self.global_batch
            self._following = in_background(self._make, after, self._steps_at_once)
        return steps

    def _make(self, position: int, num_steps: int) -> list[dict[str, np.ndarray]]:
        """This worker's rows of `num_steps` steps from a position on, by one call; the first step last."""
        end, rows = position + num_steps * self.global_batch, self.rows_per_worker
        samples = np.arange(position + self.rank, end, self.world_size, dtype=np.int64)
        if self._ahead:
            first, self._told = max(position, self._told), 2 * end - position
            self.dataset.will_need(np.arange(first + self.rank, self._told, self.world_size, dtype=np.int64))
        batch = self.dataset.batch(samples)
        ends = range(num_steps * rows, 0, -rows)
        return [{name: values[k - rows : k] for name, values in batch.items()} for k in ends]

    def _how_many_at_once(self, batch: dict[str, np.ndarray]) -> int:
        """Steps made by one call, which costs nearly the same for 8 rows as for 64."""
        cells = sum(values.size for values in batch.values())
        return max(1, min(_ROWS_AT_ONCE // self.rows_per_worker, _CELLS_AT_ONCE // cells))

    def close(self) -> None:
        """Make no further batch in the background. Batches can still be asked for, and are then made on the spot."""
        self._prefetch = False
        self.seek(self._consumed)
        if self._abandoned is not None:
            self._abandoned.exception()


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
        """Tensors int64[rows_per_batch, length], fewer rows in the last batch; made while the one before is used."""
        following = in_background(self._make, 0)
        try:
            for number in range(1, len(self) + 1):
                batch = following.result()
                if number < len(self):
                    following = in_background(self._make, number)
                yield _to_torch(batch)
        finally:
            following.exception()  # on its way where a pass is given up: no two batches are ever made at once

    def _make(self, number: int) -> dict[str, np.ndarray]:
        """This worker's rows of batch `number`."""
        rows = number * self.rows_per_batch + np.arange(self.rows_per_batch, dtype=np.int64)
        samples = rows * self.world_size + self.rank
        real = samples[samples < self.num_samples]
        batch = self.dataset.batch(real if real.size else np.array([self.num_samples - 1]))
        if not real.size:
            for name in LABELS & batch.keys():
                batch[name][:] = IGNORED_LABEL
        return batch

"""Data loaders: the batches of each worker, made from a dataset of numbered samples.

A worker is one training process, and its rank is its number. Row k of the worker with rank r is row k * world_size + r
of the global batch. A step thus has the same samples for any number of workers and accumulation steps with the same
product.
"""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from math import ceil
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch

from lm_experiments_tools.data.dataset import SampleDataset
from lm_experiments_tools.labels import IGNORED_LABEL

# the entries of a batch that a loss is a mean over, and the number of an example that is to be predicted
LABELS = frozenset({"labels", "next_sentence_label", "example"})


class Background:
    """A daemon thread that runs functions one after the other. It keeps no process alive, and ends with this object.

    To wait for a new thread for each batch, while it takes the interpreter's lock, would cost a millisecond.
    """

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        threading.Thread(target=_run, args=(self._jobs,), name="data-background", daemon=True).start()

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """Run `function(*args)` after what was submitted before; return a future of its result."""
        future: Future[Any] = Future()

        def job() -> None:
            try:
                result = function(*args)
            except BaseException as error:  # also SystemExit and panics of Rust, or the caller would wait forever
                if not isinstance(error, Exception):
                    error, cause = RuntimeError(f"the data raised {type(error).__name__}: {error}"), error
                    error.__cause__ = cause
                future.set_exception(error)
            else:
                future.set_result(result)

        self._jobs.put(job)
        return future

    def __del__(self) -> None:
        self._jobs.put(None)


def _run(jobs: SimpleQueue[Callable[[], None] | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
        # It would keep its loader and the data alive while the thread waits.
        del job


class TrainLoader:
    """Endless training batches of a `SampleDataset`. Seeking to any position takes constant time, but for seqio.

    Args:
        rows_per_worker: rows per step on this worker (micro-batch size x accumulation steps).
        prefetch: make the next batch in a background thread.

    Attributes:
        global_batch: number of samples per step over all workers.
        consumed_samples: number of samples in all batches so far, over all workers, which a checkpoint records.
    """

    def __init__(
        self,
        dataset: SampleDataset,
        rows_per_worker: int,
        rank: int = 0,
        world_size: int = 1,
        prefetch: bool = True,
    ) -> None:
        self.dataset, self._prefetch = dataset, prefetch
        self.rows_per_worker, self.rank, self.world_size = rows_per_worker, rank, world_size
        self.global_batch = rows_per_worker * world_size
        self._background: Background | None = None
        self._last: Future[Any] | None = None  # what the thread runs last
        self.seek(0)

    @property
    def fingerprint(self) -> str:
        return self.dataset.fingerprint

    @property
    def samples_per_epoch(self) -> int | None:
        return self.dataset.samples_per_epoch

    def seek(self, consumed_samples: int) -> None:
        """Move the loader to a position, so that a resumed run continues after the samples it has seen."""
        self.consumed_samples = consumed_samples
        self._following: Future[Any] | None = None

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return self

    def __next__(self) -> dict[str, torch.Tensor]:
        """Tensors int64[rows_per_worker, length] of this worker's part of the next global batch."""
        batch = self._next_batch()
        self.consumed_samples += self.global_batch
        return {name: torch.from_numpy(values) for name, values in batch.items()}

    def _next_batch(self) -> dict[str, np.ndarray]:
        if not self._prefetch:
            return self._make(self.consumed_samples)
        # One thread makes all batches, so they are never made concurrently, also after a seek.
        batch = (self._following or self._submit(self.consumed_samples)).result()
        self._following = self._submit(self.consumed_samples + self.global_batch)
        return batch

    def _submit(self, position: int) -> Future[Any]:
        self._background = self._background or Background()
        self._last = self._background.submit(self._make, position)
        return self._last

    def _make(self, position: int) -> dict[str, np.ndarray]:
        end = position + self.global_batch
        return self.dataset.batch(np.arange(position + self.rank, end, self.world_size, dtype=np.int64))

    def close(self) -> None:
        """Stop the background thread of this loader, and the processes of its dataset.

        Later batches of a dataset without processes are made synchronously.
        """
        self._prefetch, self._background = False, None
        # First, because it ends what the thread may be waiting for.
        self.dataset.close()
        if self._last is not None:
            self._last.exception()
        self.seek(self.consumed_samples)


class ValidLoader:
    """Validation batches: each sample exactly once over all workers, with the same noise in every iteration.

    All ranks (workers) yield the same number of batches. A rank without samples in the last batch yields one row whose
    labels and `example` (the number of the example) are -100.

    Args:
        dataset: the samples; only epoch 0 is read.
        num_samples: size of a fixed random subset; None uses all samples.
    """

    def __init__(
        self,
        dataset: SampleDataset,
        rows_per_batch: int,
        rank: int = 0,
        world_size: int = 1,
        num_samples: int | None = None,
    ) -> None:
        self.dataset, self.rows_per_batch, self.rank, self.world_size = dataset, rows_per_batch, rank, world_size
        self.num_samples = min(dataset.samples_per_epoch, num_samples or dataset.samples_per_epoch)

    def __len__(self) -> int:
        return ceil(self.num_samples / (self.rows_per_batch * self.world_size))

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        """Tensors int64[rows_per_batch, length], fewer rows in the last batch; made while the one before is used."""
        background = Background()
        following = background.submit(self._make, 0)
        try:
            for number in range(1, len(self) + 1):
                batch = following.result()
                if number < len(self):
                    following = background.submit(self._make, number)
                yield {name: torch.from_numpy(values) for name, values in batch.items()}
        finally:
            following.exception()  # wait: batches are never made concurrently

    def _make(self, number: int) -> dict[str, np.ndarray]:
        rows = number * self.rows_per_batch + np.arange(self.rows_per_batch, dtype=np.int64)
        samples = rows * self.world_size + self.rank
        real = samples[samples < self.num_samples]
        batch = self.dataset.batch(real if real.size else np.array([self.num_samples - 1]))
        if not real.size:
            for name in LABELS & batch.keys():
                batch[name][:] = IGNORED_LABEL
        return batch

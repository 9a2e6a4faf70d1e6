"""Length grouping: batches of samples with similar lengths have less padding.

`BucketedDataset` sorts each window (a range of consecutive samples) by length, cuts it into buckets of equal size, and
shuffles the buckets. Example with a window of 8 samples and buckets of 2:

    samples     0  1  2  3  4  5  6  7
    lengths     5  9  2  7  1  8  3  6
    by length   4  2 | 6  0 | 7  3 | 5  1        buckets 0 to 3
    result      7  3   4  2   5  1   6  0        buckets in the random order 2 0 3 1

`MixedSteps` builds each training step from buckets of all lengths, sorted by length. All steps then have similar total
lengths, and the rows of each micro-batch have similar lengths. The same window in steps of 4 samples, each with 2
buckets:

    halves      4  2  6  0 | 7  3  5  1      shorter half, longer half
    steps       6  0  7  3   4  2  5  1      one random bucket of each half per step

A window ends where an epoch ends. The new order depends only on the seed and on the size of a bucket or step.
"""

from __future__ import annotations

from functools import lru_cache
from math import gcd, lcm
from typing import Protocol

import numpy as np

from lm_experiments_tools.data.loader import SampleDataset
from lm_experiments_tools.data.order import draw_integers, stream_key

_BUCKETS = 32  # in a window: the lengths in a bucket then differ by about 1/32 of their range
_PARTS = 8  # of the range of lengths that each step of `MixedSteps` has a bucket of
_STEPS = 32  # of `MixedSteps` in a window
_32 = np.uint64(32)


class SizedDataset(SampleDataset, Protocol):
    """A `SampleDataset` that can return the lengths of its samples without making the samples."""

    def lengths(self, samples: np.ndarray) -> np.ndarray: ...


class BucketedDataset:
    """A dataset reordered so that samples of similar length are adjacent, which reduces the padding of batches.

    Samples are sorted within windows of consecutive samples, and each sorted window is cut into buckets. The buckets
    of a window are then shuffled.

    Args:
        dataset: the samples. Its `lengths` method returns the numbers of input and target tokens, int64[2, n].
        bucket_rows: samples per bucket. Best is the number of samples of a step, or of a micro-batch over all workers.
        seed: determines the order of the buckets.
        target_step: samples are sorted by target length, rounded down to a multiple of this, and then by input length.
            Use more than 1 if target lengths say little about input lengths; otherwise inputs are hardly sorted.
        least_window: minimum number of samples per window.
    """

    def __init__(
        self,
        dataset: SizedDataset,
        bucket_rows: int,
        seed: int,
        target_step: int = 1,
        least_window: int = 0,
    ) -> None:
        self.dataset, self.bucket_rows, self.target_step = dataset, bucket_rows, target_step
        self.window = max(_BUCKETS, -(-least_window // bucket_rows)) * bucket_rows
        self._key = stream_key(seed, "buckets")
        self._arranged = lru_cache(maxsize=8)(self._arrange)

    def __len__(self) -> int:
        return len(self.dataset)

    @property
    def fingerprint(self) -> str:
        """Text that identifies the samples and their order: the dataset's fingerprint and the bucket size."""
        return f"{self.dataset.fingerprint}/bucket_rows={self.bucket_rows}"

    def describe(self) -> str:
        """Return a description for the log: the dataset, and the number of samples per bucket."""
        return f"{self.dataset.describe()}; buckets of {self.bucket_rows} rows"

    def batch(self, samples: np.ndarray) -> dict[str, np.ndarray]:
        """Return a batch of the samples with the given numbers int64[n], which count in the reordered dataset."""
        return self.dataset.batch(self.arranged(samples))

    def will_need(self, samples: np.ndarray) -> None:
        """Prefetch the samples with the given numbers from the disk."""
        self.dataset.will_need(self.arranged(samples))

    def arranged(self, samples: np.ndarray) -> np.ndarray:
        """Convert sample numbers int64[n] of the reordered dataset to sample numbers of the original dataset."""
        samples = np.asarray(samples, np.int64)
        begins = np.maximum(samples // len(self) * len(self), samples // self.window * self.window)
        numbers = np.empty_like(samples)
        for begin in np.unique(begins).tolist():
            here = begins == begin
            numbers[here] = self._arranged(begin)[samples[here] - begin]
        return numbers

    def _arrange(self, begin: int) -> np.ndarray:
        """The samples from `begin` up to the end of the window or of the epoch."""
        end = min((begin // len(self) + 1) * len(self), (begin // self.window + 1) * self.window)
        samples = np.arange(begin, end)
        inputs, targets = self.dataset.lengths(samples)
        arranged = np.empty_like(samples)
        arranged[self._positions(begin, end)] = samples[np.lexsort((inputs, targets // self.target_step))]
        return arranged

    def _positions(self, begin: int, end: int) -> np.ndarray:
        """The positions int64[end - begin], from `begin`, of samples sorted by length."""
        grid = np.arange(begin // self.bucket_rows + 1, -(-end // self.bucket_rows)) * self.bucket_rows
        bounds = np.concatenate([[begin], grid, [end]])
        low, high = draw_integers(self._key, np.zeros(len(bounds) - 1), bounds[:-1], 2)
        order = np.argsort(high << _32 | low).tolist()
        return np.concatenate([np.arange(bounds[k], bounds[k + 1]) for k in order]) - begin


class MixedSteps(BucketedDataset):
    """A dataset reordered so that each training step has samples of all lengths, sorted by length.

    Steps then take similar time, and similar lengths share a micro-batch. A window of consecutive samples is sorted by
    length and cut into eight parts; each step takes one random bucket from every part. The number of micro-batches per
    step does not change the samples of a step.

    Args:
        dataset, seed: see `BucketedDataset`.
        step_rows: samples per step over all workers.
        stream, num_streams: for `--streaming`, where a dataset has only the samples whose number modulo `num_streams`
            is `stream`. All streams are reordered in the same way.
    """

    def __init__(
        self,
        dataset: SizedDataset,
        step_rows: int,
        seed: int,
        stream: int = 0,
        num_streams: int = 1,
    ) -> None:
        super().__init__(dataset, -(-step_rows // _PARTS), seed)
        self.step_rows, self.stream, self.num_streams = step_rows, stream, num_streams
        # A whole number of steps, so that the windows of all streams hold the same ones.
        whole = lcm(step_rows, num_streams) // num_streams
        self.window = -(-_STEPS * -(-step_rows // num_streams) // whole) * whole

    @property
    def fingerprint(self) -> str:
        return f"{self.dataset.fingerprint}/mix_rows={self.step_rows}"

    def describe(self) -> str:
        return f"{self.dataset.describe()}; all lengths in each {self.step_rows} rows"

    def _positions(self, begin: int, end: int) -> np.ndarray:
        steps, rows = np.divmod(np.arange(begin, end) * self.num_streams + self.stream, self.step_rows)
        buckets = rows * _PARTS // self.step_rows
        # Of a step shorter than eight rows of a stream, a stream has fewer parts; its buckets are then of any place.
        parts = min(_PARTS, self.step_rows // gcd(self.step_rows, self.num_streams))
        low, high = draw_integers(self._key, np.zeros(len(steps)), steps * _PARTS + buckets, 2)
        return np.lexsort((high << _32 | low, rows * parts // self.step_rows))


class SortedSamples:
    """The samples of the first epoch, longest first, so that an out-of-memory error occurs in the first step.

    Args:
        dataset: the samples to sort.
        num_samples: number of samples to use, counted from the first; None uses all.
        target_step: samples are sorted by target length, rounded down to a multiple of this, and then by input length.
    """

    def __init__(self, dataset: SizedDataset, num_samples: int | None = None, target_step: int = 1) -> None:
        self.dataset = dataset
        samples = np.arange(min(len(dataset), num_samples or len(dataset)))
        inputs, targets = dataset.lengths(samples)
        self._samples = samples[np.lexsort((inputs, targets // target_step))[::-1]]

    def __len__(self) -> int:
        return len(self._samples)

    @property
    def fingerprint(self) -> str:
        return f"{self.dataset.fingerprint}/sorted={len(self)}"

    def describe(self) -> str:
        return f"{self.dataset.describe()}; {len(self):,} samples, the longest first"

    def batch(self, samples: np.ndarray) -> dict[str, np.ndarray]:
        """Return a batch of the samples at the given positions int64[n] of the sorted order."""
        return self.dataset.batch(self._samples[samples])

"""Length grouping: samples of similar length next to each other, so that micro-batches have little padding.

The samples of a window (32 buckets or more) are sorted by length and cut into buckets of `bucket_rows`; the buckets
are then shuffled. One worked example, a window of 8 samples, buckets of 2, lengths below:

    samples     0  1  2  3  4  5  6  7
    lengths     5  9  2  7  1  8  3  6
    by length   4  2 | 6  0 | 7  3 | 5  1
    buckets 2 0 3 1 in this order:   7 3   4 2   5 1   6 0

`MixedSteps` makes each step of several buckets, one of each part of the window's range, in order of length: steps are
alike, and micro-batches still have rows of similar length. The same window in steps of 4 rows, 2 buckets each:

    parts       4  2  6  0 | 7  3  5  1      shorter half, longer half
    steps       6  0  7  3   4  2  5  1      each a bucket of each half, drawn at random

Windows, steps and buckets lie on the grid of global sample numbers and are cut where an epoch ends. The arrangement is
a pure function of (seed, sample) and of the rows of a bucket or step, which the fingerprint names.
"""

from __future__ import annotations

from functools import lru_cache
from math import gcd, lcm
from typing import Protocol

import numpy as np

from lm_experiments_tools.data.loader import SampleDataset
from lm_experiments_tools.data.order import sample_words, stream_key

_BUCKETS = 32  # in a window: the lengths in a bucket then differ by about 1/32 of their range
_PARTS = 8  # of the range of lengths that each step of `MixedSteps` has a bucket of
_STEPS = 32  # of `MixedSteps` in a window
_32 = np.uint64(32)


class SizedDataset(SampleDataset, Protocol):
    """A dataset that knows the lengths of its samples."""

    def lengths(self, samples: np.ndarray) -> np.ndarray: ...


class BucketedDataset:
    """A dataset reordered so that samples of similar length are adjacent.

    Args:
        dataset: its `lengths` are int64[2, n], tokens of inputs and of targets.
        bucket_rows: rows of a bucket, best those of a step or of a micro-batch over all workers.
        seed: fixes the order of buckets.
        target_step: targets whose lengths differ by less count as equally long. 1 hardly sorts inputs whose lengths
            say little of those of targets.
        least_window: minimum number of rows that are sorted together.
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
        """The dataset's fingerprint plus the bucket size, which an error message can then report."""
        return f"{self.dataset.fingerprint}/bucket_rows={self.bucket_rows}"

    def describe(self) -> str:
        """Log text: the dataset and the size of the buckets."""
        return f"{self.dataset.describe()}; buckets of {self.bucket_rows} rows"

    def batch(self, samples: np.ndarray) -> dict[str, np.ndarray]:
        """Samples by global number int64[n], in any order and from any epoch, in the dataset's format."""
        return self.dataset.batch(self.arranged(samples))

    def will_need(self, samples: np.ndarray) -> None:
        """See `SampleDataset.will_need`."""
        self.dataset.will_need(self.arranged(samples))

    def arranged(self, samples: np.ndarray) -> np.ndarray:
        """Map sample numbers int64[n] of this order to those of the dataset."""
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
        low, high = sample_words(self._key, np.zeros(len(bounds) - 1), bounds[:-1], 2)
        order = np.argsort(high << _32 | low).tolist()
        return np.concatenate([np.arange(bounds[k], bounds[k + 1]) for k in order]) - begin


class MixedSteps(BucketedDataset):
    """A dataset reordered so that each step has samples of all lengths in proportion, sorted by length.

    A step takes one bucket from each eighth of the window's length range, however it is split into micro-batches.

    Args:
        dataset, seed: as of `BucketedDataset`.
        step_rows: rows of a step over all workers.
        stream, num_streams: the dataset has only the samples `stream` modulo `num_streams`, as one stream of
            data/streaming. All streams are arranged alike.
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
        low, high = sample_words(self._key, np.zeros(len(steps)), steps * _PARTS + buckets, 2)
        return np.lexsort((high << _32 | low, rows * parts // self.step_rows))


class SortedSamples:
    """Samples of the first epoch, longest first, so that out-of-memory errors occur immediately.

    Args:
        num_samples: number of samples; None, or more than there are, takes all.
        target_step: as `BucketedDataset`.
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
        """Samples by their rank in this order int64[n], in the dataset's format."""
        return self.dataset.batch(self._samples[samples])

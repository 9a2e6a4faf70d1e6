"""Orders by length: micro-batches of samples with similar lengths have less padding.

`Buckets` sorts each window (a range of consecutive samples) by length, cuts it into buckets of equal size, and
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

from collections.abc import Callable
from functools import lru_cache

import numpy as np

from lm_experiments_tools.data.order import draw_integers, stream_key

Lengths = Callable[[np.ndarray], np.ndarray]  # samples int64[n] -> numbers of input and target tokens int64[2, n]

_BUCKETS = 32  # in a window: the lengths in a bucket then differ by about 1/32 of their range
_PARTS = 8  # of the range of lengths that each step of `MixedSteps` has a bucket of
_STEPS = 32  # of `MixedSteps` in a window
_32 = np.uint64(32)


class Buckets:
    """An order in which samples of similar length are adjacent: windows sorted by length, in shuffled buckets.

    An order is a function from places to samples, a permutation of each epoch. Its name is a part of the fingerprint.

    Args:
        bucket_rows: samples per bucket. Best is the number of samples of a step, or of a micro-batch over all workers.
        target_step: samples are sorted by target length, rounded down to a multiple of this, and then by input length.
            Use more than 1 if target lengths say little about input lengths; otherwise inputs are hardly sorted.
    """

    def __init__(
        self,
        lengths: Lengths,
        num_samples: int,
        bucket_rows: int,
        seed: int,
        target_step: int = 1,
        least_window: int = 0,
    ) -> None:
        self.lengths, self.num_samples, self.bucket_rows = lengths, num_samples, bucket_rows
        self.target_step, self.name = target_step, f"bucket_rows={bucket_rows}"
        self.window = max(_BUCKETS, -(-least_window // bucket_rows)) * bucket_rows
        self._key = stream_key(seed, "buckets")
        self._samples_of_window = lru_cache(maxsize=8)(self._arrange)

    def __len__(self) -> int:
        return self.num_samples

    def describe(self) -> str:
        return f"buckets of {self.bucket_rows} rows"

    def __call__(self, places: np.ndarray) -> np.ndarray:
        """Return the samples int64[n] that are read at places int64[n]."""
        begins = np.maximum(places // len(self) * len(self), places // self.window * self.window)
        samples = np.empty_like(places)
        for begin in np.unique(begins).tolist():
            here = begins == begin
            samples[here] = self._samples_of_window(begin)[places[here] - begin]
        return samples

    def _arrange(self, begin: int) -> np.ndarray:
        """The samples from `begin` up to the end of the window or of the epoch."""
        end = min((begin // len(self) + 1) * len(self), (begin // self.window + 1) * self.window)
        samples = np.arange(begin, end)
        arranged = np.empty_like(samples)
        arranged[self._places(begin, end)] = samples[by_length(self.lengths(samples), self.target_step)]
        return arranged

    def _places(self, begin: int, end: int) -> np.ndarray:
        """The places int64[end - begin], from `begin`, of samples sorted by length."""
        grid = np.arange(begin // self.bucket_rows + 1, -(-end // self.bucket_rows)) * self.bucket_rows
        bounds = np.concatenate([[begin], grid, [end]])
        low, high = draw_integers(self._key, np.zeros(len(bounds) - 1), bounds[:-1], 2)
        order = np.argsort(high << _32 | low).tolist()
        return np.concatenate([np.arange(bounds[k], bounds[k + 1]) for k in order]) - begin


class MixedSteps(Buckets):
    """An order in which each training step has samples of all lengths, sorted by length.

    The number of micro-batches per step does not change the samples of a step.
    """

    def __init__(self, lengths: Lengths, num_samples: int, step_rows: int, seed: int) -> None:
        super().__init__(lengths, num_samples, -(-step_rows // _PARTS), seed)
        self.step_rows, self.name, self.window = step_rows, f"mix_rows={step_rows}", _STEPS * step_rows

    def describe(self) -> str:
        return f"all lengths in each {self.step_rows} rows"

    def _places(self, begin: int, end: int) -> np.ndarray:
        steps, rows = np.divmod(np.arange(begin, end), self.step_rows)
        parts = rows * min(_PARTS, self.step_rows) // self.step_rows
        low, high = draw_integers(self._key, np.zeros(len(steps)), steps * _PARTS + rows * _PARTS // self.step_rows, 2)
        return np.lexsort((high << _32 | low, parts))


class LongestFirst:
    """The samples of the first epoch, longest first, so that an out-of-memory error occurs in the first step."""

    def __init__(self, lengths: Lengths, num_samples: int, target_step: int = 1) -> None:
        self.name = f"sorted={num_samples}"
        self._samples = by_length(lengths(np.arange(num_samples)), target_step)[::-1]

    def __len__(self) -> int:
        return len(self._samples)

    def describe(self) -> str:
        return f"{len(self):,} samples, the longest first"

    def __call__(self, places: np.ndarray) -> np.ndarray:
        return self._samples[places]


def by_length(lengths: np.ndarray, target_step: int) -> np.ndarray:
    """Return the indices int64[n] that sort lengths int64[2, n], by targets (in steps) and then by inputs."""
    inputs, targets = lengths
    return np.lexsort((inputs, targets // target_step))

"""Shuffling and random numbers as pure functions of (seed, epoch, sample), so that a run has no random state to save.

Random numbers come from Philox4x32-10, a counter-based generator (Salmon, Moraes, Dror, Shaw, "Parallel Random
Numbers: As Easy as 1, 2, 3", SC 2011). The n-th number is a function of (key, n), so samples do not depend on batches
or workers.
"""

from collections.abc import Callable, Iterator
from functools import lru_cache
from hashlib import blake2b
from math import isqrt

import numpy as np
from numpy.random import Generator, Philox

_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL = 0x9E3779B9, 0xBB67AE85
_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)

# Constants of MurmurHash3's finalizer (fmix64, public domain); Feistel rounds add a fresh 64-bit key before each use.
_MIX = np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53)
_FEISTEL_ROUNDS = 8
# Smaller networks reach too few permutations: on 2 x 4 values, pairs of images are visibly not uniform.
_FEISTEL_MIN_SIDE = 8

Lengths = Callable[[np.ndarray], np.ndarray]  # samples int64[n] -> numbers of input and target tokens int64[2, n]

_BUCKETS = 32  # in a window: the lengths in a bucket then differ by about 1/32 of their range
_PARTS = 8  # of the range of lengths that each step of `MixedSteps` has a bucket of
_STEPS = 32  # of `MixedSteps` in a window


@lru_cache(maxsize=64)
def stream_key(seed: int, purpose: str) -> int:
    """Derive a 64-bit key for a random number generator from a seed and the purpose of the numbers."""
    return int.from_bytes(blake2b(f"{int(seed)}/{purpose}".encode(), digest_size=8).digest(), "little")


def philox_4x32(counter: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray], key: int) -> np.ndarray:
    """Compute four random numbers for each counter with the generator Philox4x32-10.

    Args:
        counter: the counters as four uint64 arrays of the same shape. Each holds 32 bits of every 128-bit counter,
            least significant first.
        key: 64-bit key, which selects one sequence of random numbers.

    Returns:
        uint64[4, *shape], uniform on [0, 2**32), where `shape` is the shape of the four arrays.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key & 0xFFFFFFFF, key >> 32
    for _ in range(10):
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c2 = (p1 >> _32) ^ c1 ^ np.uint64(k0), (p0 >> _32) ^ c3 ^ np.uint64(k1)
        c1, c3 = p1 & _LOW, p0 & _LOW
        k0, k1 = (k0 + _WEYL[0]) & 0xFFFFFFFF, (k1 + _WEYL[1]) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3])


def draw_integers(key: int, epochs: np.ndarray, samples: np.ndarray, num_integers: int) -> np.ndarray:
    """Draw `num_integers` random 32-bit integers for each sample, independent of batches and workers.

    An integer depends only on the key, the epoch, the sample and its index among the sample's integers.

    Args:
        epochs: int64[n], the epoch of each sample, below 2**32.
        samples: int64[n], numbers of the samples.

    Returns:
        uint64[num_integers, n], uniform on [0, 2**32).
    """
    num_blocks = -(-num_integers // 4)
    shape = (num_blocks, len(samples))
    samples = np.asarray(samples).astype(np.uint64)
    counter = (
        np.broadcast_to(np.arange(num_blocks, dtype=np.uint64)[:, None], shape),
        np.broadcast_to(samples & _LOW, shape),
        np.broadcast_to(samples >> _32, shape),
        np.broadcast_to(np.asarray(epochs).astype(np.uint64), shape),
    )
    words = philox_4x32(counter, key)  # [4, blocks, n]
    return words.swapaxes(0, 1).reshape(4 * num_blocks, len(samples))[:num_integers]


def row_generators(key: int, epochs: np.ndarray, rows: np.ndarray) -> Iterator[Generator]:
    """Iterate over the random generators of rows: Philox with the 128-bit key (`key`, epoch << 40 | row) for each.

    The yielded object is always the same one, set to the row's key, which is ten times as fast as a new one. It is
    valid until the next one is taken.

    Args:
        epochs, rows: int64[n], epoch and number of each row, below 2**24 and 2**40.
    """
    bits = Philox(key=0)
    generator, state = Generator(bits), bits.state
    # Lists of Python's integers, which the state is set from twice as fast as from arrays.
    state["state"]["counter"], state["buffer"] = [0] * 4, [0] * 4
    for epoch, row in zip(epochs.tolist(), rows.tolist(), strict=True):
        state["state"]["key"] = [key, epoch << 40 | row]
        bits.state = state
        yield generator


@lru_cache(maxsize=4096)
def epoch_shift(seed: int, epoch: int, bound: int) -> int:
    """Draw the index of the token at which an epoch starts, uniform on [0, bound)."""
    low, high = draw_integers(stream_key(seed, "shift"), np.array([epoch]), np.array([0]), 2)[:, 0].tolist()
    return (high << 32 | low) % bound


def permute(indices: np.ndarray, size: int, seed: int, epochs: np.ndarray) -> np.ndarray:
    """Shuffle the samples of an epoch: map index i to the i-th number of a random order of 0, ..., size - 1.

    The order is a permutation that depends on (seed, epoch). It is computed by a generalized Feistel network (Black
    and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002), which needs no memory, and maps any index in
    constant time.

    Args:
        indices: int64[n] in [0, size).
        size: number of samples per epoch, below 2**62.
        seed: seed of the run.
        epochs: int64[n], the epoch of each index.

    Returns:
        int64[n] in [0, size).
    """
    indices, epochs = np.asarray(indices), np.asarray(epochs)
    unique, which = np.unique(epochs, return_inverse=True)
    keys = np.stack([_round_keys(seed, epoch) for epoch in unique.tolist()], axis=1)[:, which]  # [rounds, n]
    a = max(_FEISTEL_MIN_SIDE, isqrt(size - 1) + 1)
    b = max(_FEISTEL_MIN_SIDE, -(-size // a))
    images = _feistel(indices.astype(np.uint64), a, b, keys)
    outside = np.flatnonzero(images >= size)
    while outside.size:
        images[outside] = _feistel(images[outside], a, b, keys[:, outside])
        outside = outside[images[outside] >= size]
    return images.astype(np.int64)


@lru_cache(maxsize=4096)
def _round_keys(seed: int, epoch: int) -> np.ndarray:
    words = draw_integers(stream_key(seed, "order"), np.array([epoch]), np.array([0]), 2 * _FEISTEL_ROUNDS)[:, 0]
    return words[0::2] << _32 | words[1::2]


def _feistel(values: np.ndarray, a: int, b: int, keys: np.ndarray) -> np.ndarray:
    """One pass of the network: uint64[n] below a * b -> the same range, a bijection for each key."""
    left, right = np.divmod(values, np.uint64(b))
    for number, key in enumerate(keys):
        mixed = ((left if number % 2 else right) + key) * _MIX[0]
        mixed ^= mixed >> _32
        mixed *= _MIX[1]
        mixed >>= _32
        if number % 2:
            right = (right + mixed) % np.uint64(b)
        else:
            left = (left + mixed) % np.uint64(a)
    return left * np.uint64(b) + right


# ---- orders by length ----


class Buckets:
    """An order in which samples of similar length are adjacent, so that micro-batches have less padding.

    It sorts each window (a range of consecutive samples, up to the end of an epoch) by length, cuts it into buckets
    of equal size, and shuffles the buckets. Example with a window of 8 samples and buckets of 2:

        samples     0  1  2  3  4  5  6  7
        lengths     5  9  2  7  1  8  3  6
        by length   4  2 | 6  0 | 7  3 | 5  1        buckets 0 to 3
        result      7  3   4  2   5  1   6  0        buckets in the random order 2 0 3 1

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

    All steps then have similar total lengths, and the rows of each micro-batch have similar lengths. The number of
    micro-batches per step does not change the samples of a step. The window of `Buckets` in steps of 4 samples:

        halves      4  2  6  0 | 7  3  5  1      shorter half, longer half
        steps       6  0  7  3   4  2  5  1      one random bucket of each half per step
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

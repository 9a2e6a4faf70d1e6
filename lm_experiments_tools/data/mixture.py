"""Mix several datasets by weight, with random access by sample number.

There are two rules for the numbers of samples per epoch, given weights w_i and dataset sizes l_i:

    proportional     ceil(w_i * l_i) samples of dataset i
    megatron         about w_i / sum(w) * sum(l) samples of dataset i

Example with sizes 2 and 4 and weights 1 and 1: `proportional` reads from datasets 1 0 1 0 1 1, every sample once.
`megatron` reads from 0 1 0 1 0 1, so one sample of dataset 0 twice. T5's examples-proportional and temperature-scaled
mixing are `proportional` with `maximum` and `temperature` (`mixing_rates`).

In the next epoch, each dataset continues where it stopped. The mixture itself is not random.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite, isqrt
from typing import Any, Literal

import numpy as np

from lm_experiments_tools.errors import UserError

_VERSION = 1  # of the mapping sample -> (member, sample of the member); part of the fingerprint
_BLOCK = 512  # positions between two stored counts
_WARM_UP = 64  # steps after which the greedy rule has forgotten where it started


def blending_order(weights: np.ndarray, size: int, quotas: np.ndarray | None = None) -> np.ndarray:
    """Choose the dataset of each sample of a mixture: always the one furthest below its weight, as in Megatron.

    Sample t goes to the first dataset i with the largest weights[i] * max(t, 1) - (samples of dataset i so far). The
    result equals `build_blending_indices` and, with quotas, `build_exhaustive_blending_indices` of
    megatron/core/datasets/helpers.cpp.

    Args:
        weights: float64[number of datasets], summing to 1.
        quotas: int64[number of datasets], maximum number of samples per dataset, with a sum of at least `size`; None
            for no limit.

    Returns:
        The index of the dataset of each sample, uint8[size] (uint16 for more than 255 datasets); [0, 1, 0, 1, 0, 0]
        for weights [.6, .4] and size 6.
    """
    # sqrt(size) segments advance in parallel, from approximate counts some steps earlier, which the rule soon forgets.
    # A segment that began with wrong counts is computed again.
    length = isqrt(max(size - 1, 0)) + 1
    starts = np.arange(0, size, length, dtype=np.float64)
    limits = np.full(len(weights), np.inf) if quotas is None else quotas.astype(np.float64)
    early = np.maximum(starts - _WARM_UP, 0)
    begins = _rounded_shares(weights, early, limits)
    begins[:, 1:] = _advance(weights, limits, early[1:], begins[:, 1:], (starts - early)[1:])[0]
    order = np.empty((len(starts), length), _member_dtype(len(weights)))
    ends = np.empty_like(begins)
    stale = np.arange(len(starts))
    while stale.size:
        steps = np.full(stale.size, length)
        ends[:, stale], order[stale] = _advance(weights, limits, starts[stale], begins[:, stale], steps)
        stale = 1 + np.flatnonzero((ends[:, :-1] != begins[:, 1:]).any(axis=0))
        begins[:, stale] = ends[:, stale - 1]
    return order.reshape(-1)[:size]


def _member_dtype(count: int) -> type[np.unsignedinteger]:
    """The type of `count` members' numbers, and of `count` itself."""
    return np.uint8 if count <= np.iinfo(np.uint8).max else np.uint16


def _rounded_shares(weights: np.ndarray, positions: np.ndarray, limits: np.ndarray) -> np.ndarray:
    """Counts float64[k, n] that sum to `positions`, near weights * positions (largest remainders are rounded up)."""
    exact = weights[:, None] * positions
    counts = np.minimum(np.floor(exact), limits[:, None])
    rank = (counts - exact).argsort(axis=0, kind="stable").argsort(axis=0, kind="stable")
    return counts + (rank < positions - counts.sum(axis=0))


def _advance(
    weights: np.ndarray, limits: np.ndarray, positions: np.ndarray, counts: np.ndarray, steps: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """`steps[r]` times the rule from (positions[r], counts[:, r]): counts [k, n], choices [n, max steps]."""
    counts, rows = counts.copy(), np.arange(len(positions))
    choices = np.empty((len(positions), int(steps.max(initial=0))), _member_dtype(len(weights)))
    for step in range(choices.shape[1]):
        deficits = weights[:, None] * np.maximum(positions + step, 1.0) - counts
        deficits[counts >= limits[:, None]] = -np.inf
        chosen = deficits.argmax(axis=0)
        counts[chosen, rows] += step < steps
        choices[:, step] = chosen
    return counts, choices


def mixing_rates(
    sizes: Sequence[int], weights: Sequence[float], maximum: float | None = None, temperature: float = 1.0
) -> np.ndarray:
    """Compute T5's mixing rates: min(weight * size, maximum) ** (1 / temperature), rescaled to the same sum.

    They are proportional to seqio's `mixing_rate_num_examples` (Raffel et al., 2020, section 3.5.2). A temperature of
    1 keeps the proportions, larger values make them more equal.

    Returns:
        float64[k], samples per epoch of each dataset; near [2, 2] for sizes [1, 3] and a high temperature.
    """
    limited = np.minimum(np.asarray(sizes, np.float64) * np.asarray(weights, np.float64), maximum or np.inf)
    if temperature == 1.0:
        return limited
    rates = (limited / limited.max()) ** (1.0 / temperature)  # at most 1: a low temperature overflows otherwise
    return rates * (limited.sum() / rates.sum())


class Mixture:
    """The order of a weighted mixture: which data set each sample comes from, and which of its samples it is.

    Memory: one byte per sample of an epoch (two for more than 255 data sets), and 1/64 byte per sample and data set.

    Args:
        sizes: samples per epoch of each data set, at least 1; at most 65,535 data sets.
        weights: a positive weight per data set; None for equal weights.
        blending: "proportional" takes ceil(weight * size) samples of each data set per epoch. "megatron" takes
            sum(sizes) samples in all, in proportion to the weights.
        maximum, temperature: see `mixing_rates`; only with "proportional".

    Attributes:
        taken: int64[k], samples of each data set in an epoch.

    Raises UserError: a weight is missing or not above 0, or a data set has no samples.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        weights: Sequence[float] | None = None,
        blending: Literal["proportional", "megatron"] = "proportional",
        maximum: float | None = None,
        temperature: float = 1.0,
    ) -> None:
        self.sizes, self.blending = np.array(sizes, np.int64), blending
        self.maximum, self.temperature = maximum, temperature
        self.weights = [1.0] * len(self.sizes) if weights is None else [float(weight) for weight in weights]
        fit = len(self.weights) == len(self.sizes) and all(isfinite(weight) and weight > 0 for weight in self.weights)
        if not fit or 0 in self.sizes:
            raise UserError(
                f"A mixture of {sizes} samples has weights {self.weights}: one above 0 each, and no 0 samples."
            )
        if blending == "proportional":
            quotas = np.maximum(np.ceil(mixing_rates(self.sizes, self.weights, maximum, temperature)), 1)
            quotas = quotas.astype(np.int64)
            size = int(quotas.sum())
            fractions = quotas / size
        else:
            quotas, size = None, int(self.sizes.sum())
            fractions = np.array(self.weights) / sum(self.weights)
        order = blending_order(fractions, size, quotas)
        count = len(self.sizes)
        self._order = np.pad(order, (0, -size % _BLOCK), constant_values=count).reshape(-1, _BLOCK)
        given = np.stack([np.count_nonzero(self._order == member, axis=1) for member in range(count)], axis=1)
        # int64[blocks + 1, k]: samples that each data set has given before each block, and in the whole epoch
        self._counts = np.concatenate([np.zeros((1, count), np.int64), np.cumsum(given, axis=0)])
        self.taken, self._num_samples = self._counts[-1], size

    def _limits(self) -> dict[str, float]:
        given = {"maximum": self.maximum, "temperature": None if self.temperature == 1.0 else self.temperature}
        return {name: value for name, value in given.items() if value is not None}

    def __len__(self) -> int:
        """Samples in an epoch, the same in each."""
        return self._num_samples

    def describe(self, members: Sequence[str]) -> str:
        """Describe the mixture of data sets that are described by `members`, for the log."""
        parts = [
            f"{taken:,} of {size:,} samples (weight {weight:g}) of {described}"
            for taken, size, weight, described in zip(
                self.taken.tolist(), self.sizes.tolist(), self.weights, members, strict=True
            )
        ]
        limits = "".join(f", {name} {value:,g}" for name, value in self._limits().items())
        return f"{self.blending} mixture of {len(parts)}{limits}, an epoch takes " + "; ".join(parts)

    def settings(self) -> dict[str, Any]:
        """Return what determines the order but for the sizes, as JSON values, for a fingerprint."""
        return {"version": _VERSION, "weights": self.weights, "blending": self.blending, **self._limits()}

    def locate(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Find the data sets that samples of the mixture come from.

        Returns:
            For each sample, the index of its data set int64[n] and its sample number in that data set int64[n].
        """
        epochs, positions = np.divmod(np.asarray(samples, np.int64), self._num_samples)
        blocks, offsets = np.divmod(positions, _BLOCK)
        members = self._order[blocks, offsets].astype(np.int64)
        earlier = (self._order[blocks] == members[:, None]) & (np.arange(_BLOCK) < offsets[:, None])
        in_epoch = self._counts[blocks, members] + np.count_nonzero(earlier, axis=1)
        return members, epochs * self.taken[members] + in_epoch

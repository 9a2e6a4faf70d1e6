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
from typing import TYPE_CHECKING, Literal

import numpy as np

from lm_experiments_tools.errors import UserError
from lm_experiments_tools.files import json_sha256
from lm_experiments_tools.labels import IGNORED_LABEL

if TYPE_CHECKING:  # the processes that tokenize import no torch
    from lm_experiments_tools.data.loader import SampleDataset

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
        size: number of samples.
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

    They are proportional to seqio's `mixing_rate_num_examples` (Raffel et al., 2020, section 3.5.2).

    Args:
        sizes: samples of each dataset.
        weights: weight of each dataset.
        maximum: limit of weight * size; None for no limit.
        temperature: 1 keeps the proportions, larger values make them more equal.

    Returns:
        float64[k], samples per epoch of each dataset; near [2, 2] for sizes [1, 3] and a high temperature.
    """
    limited = np.minimum(np.asarray(sizes, np.float64) * np.asarray(weights, np.float64), maximum or np.inf)
    if temperature == 1.0:
        return limited
    rates = (limited / limited.max()) ** (1.0 / temperature)  # at most 1: a low temperature overflows otherwise
    return rates * (limited.sum() / rates.sum())


class MixtureDataset:
    """A weighted mixture of datasets, itself a `SampleDataset`.

    Memory: one byte per sample of an epoch (two for more than 255 datasets), and 1/64 byte per sample and dataset.

    Args:
        datasets: at most 65,535; their batches have the same keys.
        weights: a positive weight per dataset; None for equal weights.
        blending: "proportional" takes ceil(weight * len) samples of each dataset per epoch. "megatron" takes sum(len)
            samples in all, in proportion to the weights.
        maximum, temperature: see `mixing_rates`; only with "proportional".
        pad_id: padding of `input_ids` if lengths differ (labels are padded with -100, other keys with 0).

    Raises:
        UserError: a dataset is empty, the weights are invalid, or batches have different keys.
    """

    def __init__(
        self,
        datasets: Sequence[SampleDataset],
        weights: Sequence[float] | None = None,
        blending: Literal["proportional", "megatron"] = "proportional",
        pad_id: int = 0,
        maximum: float | None = None,
        temperature: float = 1.0,
    ) -> None:
        self.datasets, self.blending, self.pad_id = list(datasets), blending, pad_id
        self.maximum, self.temperature = maximum, temperature
        self.weights = [1.0] * len(self.datasets) if weights is None else [float(weight) for weight in weights]
        self._check_members()
        lengths = np.array([len(dataset) for dataset in self.datasets], np.int64)
        if blending == "proportional":
            quotas = np.maximum(np.ceil(mixing_rates(lengths, self.weights, maximum, temperature)), 1).astype(np.int64)
            size = int(quotas.sum())
            fractions = quotas / size
        else:
            quotas, size = None, int(lengths.sum())
            fractions = np.array(self.weights) / sum(self.weights)
            if self._limits():
                raise UserError("Blending megatron takes neither a maximum nor a temperature.")
        order = blending_order(fractions, size, quotas)
        self._order = np.pad(order, (0, -size % _BLOCK), constant_values=len(self.datasets)).reshape(-1, _BLOCK)
        self._counts = self._counts_before_blocks()
        self.samples_per_epoch = self._counts[-1]  # of each member
        self._num_samples = size
        self._shapes = self._common_shapes()

    def _limits(self) -> dict[str, float]:
        """Maximum and temperature, where there are any."""
        given = {"maximum": self.maximum, "temperature": None if self.temperature == 1.0 else self.temperature}
        return {name: value for name, value in given.items() if value is not None}

    def _check_members(self) -> None:
        count = len(self.datasets)
        if len(self.weights) != count:
            raise UserError(f"There are {len(self.weights)} weights for {count} datasets: give one for each, or none.")
        for name, value in self._limits().items():
            if not (value > 0 and isfinite(value)):
                raise UserError(f"The {name} of the mixture is {value}: it must be above 0 and finite.")
        for number, (weight, dataset) in enumerate(zip(self.weights, self.datasets, strict=True)):
            if not (weight > 0 and isfinite(weight)):
                raise UserError(f"The weight of dataset {number} is {weight}: it must be above 0 and finite.")
            if len(dataset) == 0:
                raise UserError(f"Dataset {number} of the mixture has no samples: leave it out.")

    def _counts_before_blocks(self) -> np.ndarray:
        """int64[blocks + 1, k]: samples that each member has given before each block, and in the whole epoch."""
        given = [np.count_nonzero(self._order == member, axis=1) for member in range(len(self.datasets))]
        return np.concatenate([np.zeros((1, len(given)), np.int64), np.cumsum(np.stack(given, axis=1), axis=0)])

    def _common_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of a sample under each name: the largest of the members', read off one sample of each."""
        first, *others = ({k: v.shape[1:] for k, v in d.batch(np.zeros(1, np.int64)).items()} for d in self.datasets)
        for number, shapes in enumerate(others, 1):
            if shapes.keys() != first.keys():
                raise UserError(f"Dataset 0 of the mixture has {', '.join(first)}, {number} {', '.join(shapes)}.")
            first = {name: _larger(first[name], shapes[name]) for name in first}
        return first

    def __len__(self) -> int:
        """Samples in an epoch, the same in each."""
        return self._num_samples

    def describe(self) -> str:
        """Describe the datasets and their fractions of an epoch, for the log."""
        members = [
            f"{taken:,} of {len(dataset):,} samples (weight {weight:g}) of {dataset.describe()}"
            for taken, dataset, weight in zip(
                self.samples_per_epoch.tolist(), self.datasets, self.weights, strict=True
            )
        ]
        limits = "".join(f", {name} {value:,g}" for name, value in self._limits().items())
        return f"{self.blending} mixture of {len(members)}{limits}, an epoch takes " + "; ".join(members)

    @property
    def fingerprint(self) -> str:
        """sha256 over the datasets' fingerprints and the mixture's settings; equal fingerprints mean equal samples."""
        return self._digest([dataset.fingerprint for dataset in self.datasets])

    @property
    def order(self) -> str | None:
        """Hash of the order in which the mixture reads its data, before random noise such as masks.

        It covers the `order` of each dataset and the settings of the mixture. None if a dataset has no `order`.
        """
        orders = [getattr(dataset, "order", None) for dataset in self.datasets]
        return None if None in orders else self._digest(orders)

    def _digest(self, members: list[str]) -> str:
        parts = {
            "version": _VERSION,
            "members": members,
            "weights": self.weights,
            "blending": self.blending,
            "pad_id": self.pad_id,
            **self._limits(),
        }
        return json_sha256(parts)

    def locate(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Find the datasets that samples of the mixture come from.

        Args:
            samples: int64[n], sample numbers of the mixture.

        Returns:
            For each sample, the index of its dataset int64[n] and its sample number in that dataset int64[n].
        """
        epochs, positions = np.divmod(np.asarray(samples, np.int64), self._num_samples)
        blocks, offsets = np.divmod(positions, _BLOCK)
        members = self._order[blocks, offsets].astype(np.int64)
        earlier = (self._order[blocks] == members[:, None]) & (np.arange(_BLOCK) < offsets[:, None])
        in_epoch = self._counts[blocks, members] + np.count_nonzero(earlier, axis=1)
        return members, epochs * self.samples_per_epoch[members] + in_epoch

    def lengths(self, samples: np.ndarray) -> np.ndarray:
        """Return the lengths of the given samples, int64[2, n]: numbers of input tokens and of target tokens.

        Args:
            samples: int64[n], sample numbers of the mixture.
        """
        members, numbers = self.locate(samples)
        lengths = np.empty((2, len(members)), np.int64)
        for member in np.unique(members).tolist():
            here = members == member
            lengths[:, here] = self.datasets[member].lengths(numbers[here])
        return lengths

    def will_need(self, samples: np.ndarray) -> None:
        """Prefetch the samples with the given numbers from the disk."""
        members, numbers = self.locate(samples)
        for member in np.unique(members).tolist():
            self.datasets[member].will_need(numbers[members == member])

    def batch(self, samples: np.ndarray) -> dict[str, np.ndarray]:
        """Return a batch of samples of the mixture, padded to the longest of its datasets.

        Args:
            samples: int64[n], sample numbers of the mixture.
        """
        members, numbers = self.locate(samples)
        parts = [(rows, self.datasets[m].batch(numbers[rows])) for m in np.unique(members) for rows in [members == m]]
        batch = {}
        fills = {"labels": IGNORED_LABEL, "input_ids": self.pad_id}
        for name, shape in self._shapes.items():
            for _, part in parts:
                shape = _larger(shape, part[name].shape[1:])
            values = np.full((len(members), *shape), fills.get(name, 0), np.int64)
            for rows, part in parts:
                values[(rows, *map(slice, part[name].shape[1:]))] = part[name]
            batch[name] = values
        return batch


def _larger(first: tuple[int, ...], second: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(max(pair) for pair in zip(first, second, strict=True))

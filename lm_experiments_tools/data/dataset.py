"""Samples by number: the rows of one or several data sets, in the order in which a run reads them.

A sample number counts over all epochs. It becomes an example by functions without state:

    sample --arrangement--> sample --mixture--> (member, its sample) --shuffle--> (epoch, row) --member--> example

Only the last arrow differs between kinds of data, see `Rows`. Example with two members of 3 rows, mixed in turn and
shuffled, without an arrangement:

    sample          0     1     2     3     4     5   |   6     7   ...
    member          0     1     0     1     0     1   |   0     1
    its sample      0     0     1     1     2     2   |   3     3
    epoch, row     0 2   0 0   0 0   0 2   0 1   0 1  |  1 1   1 0
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from typing import Any, Protocol, TypeVar

import numpy as np

from lm_experiments_tools.data.mixture import Mixture
from lm_experiments_tools.data.order import Buckets, LongestFirst, permute, stream_key
from lm_experiments_tools.data.workers import WorkerEnded, WorkerPool
from lm_experiments_tools.errors import RunError, UserError
from lm_experiments_tools.files import json_sha256

Batch = dict[str, np.ndarray]
Source = TypeVar("Source")


class Rows(Protocol):
    """Interface of data that is trained on: numbered rows, and the example made of each in an epoch.

    `data.objectives.token_rows.TokenRows`, `data.objectives.document_rows.DocumentRows`,
    `data.examples.dataset.ExampleRows` and `megatron.bert_dataset.BertDataset` are such.

    Attributes:
        seed: seed of the order of the rows, and of their noise.
        fingerprint: sha256 over data, settings and seed; equal fingerprints mean equal examples.
        order: sha256 over what determines the tokens of a row before noise such as masks.
    """

    seed: int

    @property
    def fingerprint(self) -> str: ...

    @property
    def order(self) -> str | None: ...

    def __len__(self) -> int: ...

    def batch(self, epochs: np.ndarray, rows: np.ndarray) -> Batch:
        """Make the examples of rows int64[n] in epochs int64[n]: name -> array whose first dimension is n."""

    def lengths(self, epochs: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Return the numbers of input and target tokens of the same examples, int64[2, n]; for arrangements only."""

    def describe(self) -> str:
        """Describe the examples and the size of the data, for the log."""


def joined(parts: Iterable[tuple[np.ndarray, Batch]], num_samples: int, what: str) -> Batch:
    """Put batches of some samples each together to one of all samples.

    Args:
        parts: indices of the samples, int64, and the batch of these samples.

    Raises:
        UserError: parts have different entries.
    """
    batch: Batch = {}
    for here, part in parts:
        if len(here) == num_samples:
            return part
        if not batch:
            batch = {name: np.empty((num_samples, *v.shape[1:]), v.dtype) for name, v in part.items()}
        if part.keys() != batch.keys():
            raise UserError(f"Some {what} have {', '.join(batch)}, others {', '.join(part)}.")
        for name, values in part.items():
            batch[name][here] = values
    return batch


class SampleDataset:
    """Base class of datasets that loaders read: samples by number, in any order.

    Numbers count over all epochs. A subclass defines `fingerprint`, `samples_per_epoch` and `batch`.

    Attributes:
        fingerprint: hash of everything that determines the samples.
        samples_per_epoch: samples after which the data begins again; None if unknown.
        order: hash of the order of the rows before noise; None if unknown.
    """

    fingerprint: str
    samples_per_epoch: int | None
    order: str | None = None

    def batch(self, samples: np.ndarray) -> Batch:
        """Make a batch of the samples with the given numbers int64[n]: name -> array whose first dimension is n."""
        raise NotImplementedError

    def close(self) -> None:
        """End the processes that make samples."""


class Dataset(SampleDataset):
    """Samples by number, over all epochs: shuffled rows of one or several data sets."""

    def __init__(self, members: Rows | Sequence[Rows], mixture: Mixture | None = None) -> None:
        self.members: list[Rows] = list(members) if isinstance(members, Sequence) else [members]
        self.mixture = mixture
        self.arrangement: Buckets | LongestFirst | None = None

    @classmethod
    def mixed(
        cls,
        sources: Sequence[Source],
        make: Callable[[Source, int], Rows],
        seed: int,
        mixing: Mapping[str, Any],
    ) -> Dataset:
        """Mix the rows of several sources, such as token files. A single one is read alone."""
        if len(sources) == 1:
            return cls(make(sources[0], seed))
        # A seed for each: equal ones would give members of equal size the same order and noise.
        members = [make(source, stream_key(seed, f"member {number}")) for number, source in enumerate(sources)]
        return cls(members, Mixture([len(member) for member in members], **mixing))

    def arranged(self, arrangement: Buckets | LongestFirst) -> Dataset:
        """Return the same samples in another order, such as one by length."""
        other = copy(self)
        other.arrangement = arrangement
        return other

    def __len__(self) -> int:
        """Samples in an epoch."""
        return len(self.arrangement or self.mixture or self.members[0])

    @property
    def samples_per_epoch(self) -> int:
        return len(self)

    @property
    def fingerprint(self) -> str:
        found = self._digest([member.fingerprint for member in self.members])
        return found if self.arrangement is None else f"{found}/{self.arrangement.name}"

    @property
    def order(self) -> str | None:
        orders = [member.order for member in self.members]
        return None if None in orders or self.arrangement is not None else self._digest(orders)

    def _digest(self, members: list[str]) -> str:
        return members[0] if self.mixture is None else json_sha256([members, self.mixture.settings()])

    def describe(self) -> str:
        """Describe the data, its mixture and its order, for the log."""
        described = [member.describe() for member in self.members]
        found = described[0] if self.mixture is None else self.mixture.describe(described)
        return found if self.arrangement is None else f"{found}; {self.arrangement.describe()}"

    def batch(self, samples: np.ndarray) -> Batch:
        """Make a batch of the samples with the given numbers int64[n].

        Raises UserError: members have different entries, or an example cannot be made.
        """
        found = self._rows_of(self._arranged(samples))
        parts = ((here, member.batch(epochs, rows)) for here, member, epochs, rows in found)
        return joined(parts, len(samples), "data of the mixture")

    def lengths(self, samples: np.ndarray) -> np.ndarray:
        """Return the numbers of input and target tokens, int64[2, n], of samples counted without an arrangement."""
        lengths = np.empty((2, len(samples)), np.int64)
        for here, member, epochs, rows in self._rows_of(samples):
            lengths[:, here] = member.lengths(epochs, rows)
        return lengths

    def _arranged(self, samples: np.ndarray) -> np.ndarray:
        samples = np.asarray(samples, np.int64)
        return samples if self.arrangement is None else self.arrangement(samples)

    def _rows_of(self, samples: np.ndarray) -> Iterator[tuple[np.ndarray, Rows, np.ndarray, np.ndarray]]:
        """For each member with some of the samples: their indices, the member, their epochs and rows."""
        samples = np.asarray(samples, np.int64)
        members = np.zeros_like(samples)
        if self.mixture is not None:
            members, samples = self.mixture.locate(samples)
        for number in np.unique(members).tolist():
            here, member = np.flatnonzero(members == number), self.members[number]
            epochs, indices = np.divmod(samples[here], len(member))
            yield here, member, epochs, permute(indices, len(member), member.seed, epochs)


class ParallelDataset(Dataset):
    """A dataset whose batches are made by worker processes, each of which makes some of the samples."""

    def __init__(self, dataset: Dataset, num_workers: int) -> None:
        super().__init__(dataset.members, dataset.mixture)
        self.num_workers = num_workers
        try:
            pickle.dumps(dataset)
        except (AttributeError, TypeError, pickle.PicklingError) as error:
            raise UserError(f"--data_n_workers: the objective cannot be sent to processes ({error}).") from None
        self._pool = WorkerPool(prepare, dataset, num_workers)

    def batch(self, samples: np.ndarray) -> Batch:
        return joined(self._parts("batch", self._arranged(samples)), len(samples), "examples of --task")

    def lengths(self, samples: np.ndarray) -> np.ndarray:
        return np.concatenate([lengths for _, lengths in self._parts("lengths", samples)], axis=1)

    def _parts(self, method: str, samples: np.ndarray) -> list[tuple[np.ndarray, Any]]:
        """Indices of some samples and a worker's answer for them. Raises RunError if a worker has died."""
        places = np.array_split(np.arange(len(samples)), min(self.num_workers, len(samples)))
        futures = [self._pool.submit((method, samples[here])) for here in places]
        try:
            return [(here, future.result()) for here, future in zip(places, futures, strict=True)]
        except WorkerEnded as end:
            raise RunError(f"a process that makes examples (--data_n_workers) {end}") from None

    def close(self) -> None:
        self._pool.close()


def prepare(dataset: Dataset) -> Callable[[tuple[str, np.ndarray]], Batch | np.ndarray]:
    """Return the function by which a worker process answers (name of a method, samples)."""
    return lambda request: getattr(dataset, request[0])(request[1])

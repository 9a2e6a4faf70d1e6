"""Checks of a user's loader by its first batches: workers read rows of their own, and a batch is a whole step's."""

from __future__ import annotations

import hashlib
import logging
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lm_experiments_tools.errors import UserError
from lm_experiments_tools.training.micro_batches import BatchStream

if TYPE_CHECKING:
    from lm_experiments_tools.backends.backend import Backend
    from lm_experiments_tools.config.training import TrainerArgs

logger = logging.getLogger(__name__)

_SURE_BITS = 20.0  # equal rows are by accident in less than one of 2^20 runs


def checked(
    timed: Iterator[tuple[Any, float]], stream: BatchStream, backend: Backend, args: TrainerArgs
) -> Iterator[tuple[Any, float]]:
    """Batches with their times, of which the first are looked at; loaders with `seek` know their worker.

    Raises:
        UserError: two workers read the same rows.
    """
    seen, epoch, looking = _Rows(), stream.epoch, not hasattr(stream.loader, "seek")
    for number, (batch, seconds) in enumerate(timed):
        if looking and number == 0:
            _check_size(batch, backend, args)
        if looking and backend.world_size > 1:
            seen.add(batch)
            looking = _may_be_equal(backend, seen, ended=stream.epoch != epoch)
        yield batch, seconds


def _check_size(batch: Any, backend: Backend, args: TrainerArgs) -> None:
    rows, wanted = len(_rows(batch)), args.rows_per_worker()
    if backend.is_main and rows != wanted:
        logger.warning(
            "the training data gives %d rows a batch, but a step takes one batch of batch_size %d x "
            "gradient_accumulation_steps %d = %d rows: make the loader with batch_size=args.rows_per_worker()",
            rows, args.batch_size, args.gradient_accumulation_steps, wanted,
        )  # fmt: skip


def _may_be_equal(backend: Backend, seen: _Rows, ended: bool) -> bool:
    """True if two workers have read equal rows that are too few to tell; one small collective.

    Rows that are equal in all of the data, as in a toy, tell nothing; neither does an epoch smaller than the workers'
    number, to which samplers add rows.
    """
    told = backend.gather((seen.digest() if seen.count else None, seen.bits(), ended))
    if any(ended for _, _, ended in told):
        return False
    first: dict[str, int] = {}
    rows = [(rank, digest, bits) for rank, (digest, bits, _) in enumerate(told) if digest is not None]
    repeated = [(first[d], rank, bits) for rank, d, bits in rows if first.setdefault(d, rank) != rank]
    for one, other, bits in repeated:
        if bits >= _SURE_BITS:
            raise UserError(
                f"workers {one} and {other} train on the same rows: give the DataLoader a "
                "torch.utils.data.DistributedSampler(dataset, num_replicas=world_size, rank=rank, shuffle=True, "
                "seed=seed), and the trainer the same as train_sampler"
            )
    return bool(repeated)


class _Rows:
    """Hashes of the rows that a worker has read."""

    def __init__(self) -> None:
        self._all, self._counts, self.count = hashlib.blake2b(digest_size=16), Counter(), 0

    def add(self, batch: Any) -> None:
        for row in _rows(batch):
            self._all.update(row)
            self._counts[row] += 1
            self.count += 1

    def digest(self) -> str:
        return self._all.hexdigest()

    def bits(self) -> float:
        """Minus the log2 of the chance that as many rows, drawn from those seen, are the same in the same order."""
        if not self.count:
            return 0.0
        return -self.count * math.log2(sum((n / self.count) ** 2 for n in self._counts.values()))


def rows_digest(batch: Any) -> str:
    """A hash of all rows of a batch."""
    rows = _Rows()
    rows.add(batch)
    return rows.digest()


def _rows(batch: Any) -> list[bytes]:
    """A hash of each row of a batch: of its tensors that have as many rows as the first one."""
    values = [batch[name] for name in sorted(batch)] if isinstance(batch, Mapping) else batch
    values = values if isinstance(values, (list, tuple)) else [values]
    tensors = [v.detach().cpu().contiguous() for v in values if isinstance(v, Tensor) and v.dim() and v.numel()]
    count = len(tensors[0]) if tensors else 0
    columns = [t.view(count, -1).view(torch.uint8).numpy() for t in tensors if len(t) == count]
    return [hashlib.blake2b(b"".join(c[i].tobytes() for c in columns), digest_size=8).digest() for i in range(count)]


def same_on_all(fingerprint: str | None, backend: Backend) -> str | None:
    """The training data's fingerprint. Raises UserError where workers read copies of their own that differ."""
    fingerprints = backend.gather(fingerprint)
    if len(set(fingerprints)) > 1:
        other = next(rank for rank, f in enumerate(fingerprints) if f != fingerprints[0])
        raise UserError(
            f"worker {other} reads other training data than worker 0: copy the same files to every machine, or "
            "train from a shared folder"
        )
    return fingerprint

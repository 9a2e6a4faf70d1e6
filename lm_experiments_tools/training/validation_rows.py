"""Batches of an evaluation, in which each row of the data counts once, whatever a sampler repeats.

Samplers repeat rows to give every worker equally many. Those rows are computed, as collectives want, and not counted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any

from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from lm_experiments_tools.errors import UserError
from lm_experiments_tools.training.first_batches import rows_digest
from lm_experiments_tools.training.micro_batches import MicroBatch, num_rows_of

if TYPE_CHECKING:
    from lm_experiments_tools.backends.backend import Backend
    from lm_experiments_tools.training.step import Loop

logger = logging.getLogger(__name__)

NumCounted = Callable[[int], int]


def aligned(loop: Loop, dataloader: Iterable, split: str) -> Iterator[MicroBatch]:
    """Micro-batches of each batch; workers whose part has ended continue with padding micro-batches of weight 0.

    Raises:
        UserError: no worker has a batch, or one has none at all.
    """
    backend, last = loop.backend, None
    compares = backend.world_size > 1 and split not in loop.compared_splits
    loop.compared_splits.add(split)
    batches = counted(dataloader, backend, compares_workers=compares)
    while True:
        batch, num_counted = next(batches, (None, None))
        part = loop.split(batch, loop.args.valid_batch_size(), num_counted)
        _, rows, _, number = loop.agree(part)
        if loop.signals.agreed or (rows == 0 and last is not None):
            return
        if rows == 0:
            raise UserError(f"the {split} data gave no batch to evaluate; check its path")
        last = part.micro_batches[-1] if part.micro_batches else last
        if last is None:
            raise UserError(
                f"worker {backend.rank} has no validation batch while others have: the validation set is "
                f"smaller than the number of workers ({backend.world_size})"
            )
        spare = [last.without_weight()] * (number - len(part.micro_batches))
        yield from [m.computable() for m in part.micro_batches] + spare


def counted(
    dataloader: Iterable, backend: Backend, *, compares_workers: bool = False
) -> Iterator[tuple[Any, NumCounted]]:
    """Batches, each with f(rows of the batch) -> how many of them, the first ones, count.

    Known repetitions are those of torch's `DistributedSampler` and of loaders that Accelerate has prepared. Batches of
    other loaders count as they are.

    Args:
        compares_workers: warn where workers begin with the same rows; collective.
    """
    sampler = getattr(getattr(dataloader, "batch_sampler", None), "sampler", getattr(dataloader, "sampler", None))
    if hasattr(dataloader, "end_of_dataloader"):
        yield from _of_accelerate(dataloader, backend.rank)
    elif isinstance(sampler, DistributedSampler):
        yield from _of_sampler(dataloader, sampler)
    else:
        batches = iter(dataloader)
        first = next(batches, None)
        if compares_workers:
            _warn_of_equal_rows(first, backend)
        if first is not None:
            yield from ((batch, _all) for batch in chain([first], batches))


def _all(rows: int) -> int:
    return rows


def _warn_of_equal_rows(batch: Any, backend: Backend) -> None:
    digests = backend.gather(None if batch is None else rows_digest(batch))
    if backend.is_main and digests[0] is not None and len(set(digests)) == 1:
        logger.warning(
            "all %d workers evaluate the same rows, as the first batch shows: give the DataLoader a "
            "DistributedSampler(dataset, shuffle=False), so that each evaluates a part",
            backend.world_size,
        )


def _of_accelerate(dataloader: Any, rank: int) -> Iterator[tuple[Any, NumCounted]]:
    """The last batches of all workers, joined by rank, have `remainder` rows of the data, as `gather_for_metrics`
    assumes."""
    fills_up = getattr(dataloader.batch_sampler, "even_batches", True)
    is_stream = isinstance(dataloader.dataset, IterableDataset) and hasattr(dataloader.dataset, "process_index")
    remainder_of = _remainder_of_stream if is_stream else lambda dataloader: dataloader.remainder
    for batch in dataloader:
        remainder = remainder_of(dataloader) if dataloader.end_of_dataloader and fills_up else 0
        if remainder > 0:
            yield batch, lambda rows, remainder=remainder: min(max(remainder - rank * rows, 0), rows)
        else:
            yield batch, _all


def _remainder_of_stream(dataloader: Any) -> int:
    """Rows of an `IterableDataset` in the last batches, which Accelerate fills up (`IterableDatasetShard`)."""
    shard = dataloader.dataset
    if shard.drop_last:
        return 0
    num_rows = num_rows_of(shard.dataset)
    if num_rows is None:
        logger.warning(
            "the last evaluated batches may repeat rows, as the %s has no length: give it a __len__, or read it by "
            "DataLoaderConfiguration(dispatch_batches=True)",
            type(shard.dataset).__name__,
        )
        return 0
    return num_rows % (shard.batch_size * (1 if shard.split_batches else shard.num_processes))


def _of_sampler(dataloader: Any, sampler: DistributedSampler) -> Iterator[tuple[Any, NumCounted]]:
    """Worker r of n reads samples r, r + n, ...; beyond the end of the dataset they start again."""
    total, batches = len(sampler), dataloader.batch_sampler
    real = min(total, len(range(sampler.rank, len(sampler.dataset), sampler.num_replicas)))
    size = 1 if batches is None else batches.batch_size if type(batches) is BatchSampler else None
    standard = (dataloader, DataLoader), (sampler, DistributedSampler)
    if not size or any(type(thing).__iter__ is not cls.__iter__ for thing, cls in standard):
        if real < total:
            name = type(sampler).__name__
            logger.warning("%d evaluated samples may be read by another worker too (%s)", total - real, name)
        size, real = total, total
    for number, batch in enumerate(dataloader):
        samples = min(size, total - number * size)
        left = min(max(real - number * size, 0), samples)
        yield batch, _all if left == samples else lambda rows, left=left, samples=samples: rows * left // samples

"""Validation over all workers, in which every row counts once, and text generation for metrics.

Samplers repeat rows so that all workers have equally many. The model reads repeated rows, but metrics leave them out.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import length_hint
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

from lm_experiments_tools.errors import UserError
from lm_experiments_tools.tracking.progress import make_bar
from lm_experiments_tools.training.batches import is_split, sampler_of
from lm_experiments_tools.training.generators import preserved_random_state, seed_all
from lm_experiments_tools.training.metrics import Collector, MetricSums
from lm_experiments_tools.training.micro_batches import MicroBatch
from lm_experiments_tools.training.step import Step

if TYPE_CHECKING:
    from lm_experiments_tools.backends.backend import Backend

logger = logging.getLogger(__name__)

NumCounted = Callable[[int], int]
_LENGTHS = {"max_length", "max_new_tokens"}


def validate(
    step: Step, dataloader: Iterable, split: str, collector: Collector, generate_kwargs: Mapping[str, Any]
) -> dict[str, float] | None:
    """Compute metrics over this worker's batches on all workers; None if a signal stopped the validation."""
    backend, loss, args = step.backend, step.loss, step.args
    backend.model.eval()
    is_exact = backend.reduction.is_exact
    sums, seed = MetricSums(exact=is_exact), args.seed if is_exact else None
    with torch.no_grad(), preserved_random_state():
        for micro_batch in evaluation_micro_batches(step, dataloader, split):
            with backend.autocast():
                texts = None
                if args.use_generate_on_valid:
                    synced = backend.state.shards_weights
                    texts = generate(backend.unwrap(), micro_batch, generate_kwargs, synced=synced, seed=seed)
                outputs = backend.model(**micro_batch.inputs, **step.forward_kwargs)
            if texts is not None:
                outputs["generation_outputs"] = texts
            step.add_metrics(micro_batch, loss.means(micro_batch.inputs, outputs), outputs, sums, collector)
            # Logits would otherwise live on while the next texts are generated.
            del outputs
    if step.signals.agreed:
        return None
    return loss.with_total({**sums.reduce(backend), **collector.reduce(backend)})


def evaluation_micro_batches(step: Step, dataloader: Iterable, split: str) -> Iterator[MicroBatch]:
    """Yield the micro-batches of each validation batch. UserError if a worker has no batch at all.

    A worker whose data has ended yields padding micro-batches of weight 0.
    """
    backend, last = step.backend, None
    total = length_hint(dataloader) or None
    bar = make_bar(counted(dataloader, backend), desc=split, total=total, leave=False, show=backend.is_main)
    batches = iter(bar)
    while True:
        batch, num_counted = next(batches, (None, None))
        micro_batches = step.split(batch, step.args.valid_batch_size(), num_counted)
        counts = step.count(micro_batches)
        if last is None and step.args.validate_only:
            backend.limit_waiting()
        # The counts are those of all workers, so all of them leave the loop at the same batch.
        if step.signals.agreed or (counts.samples == 0 and last is not None):
            return
        if counts.samples == 0:
            raise UserError(f"the {split} data gave no batch to evaluate; check its path")
        # Padding micro-batches copy the last real one, whose shapes the model has already seen.
        last = micro_batches[-1] if micro_batches else last
        if last is None:
            raise UserError(
                f"worker {backend.rank} has no validation batch while others have: the validation set is "
                f"smaller than the number of workers ({backend.world_size})"
            )
        yield from micro_batches
        # Sharded models need equally many forward passes on every worker.
        yield from (last.as_padding() for _ in range(counts.num_micro_batches - len(micro_batches)))


def warn_of_unsplit_validation(dataloader: Iterable, split: str, backend: Backend) -> None:
    """Warn if each of several workers reads the whole validation data, of which the rows of rank 0 count."""
    if backend.is_main and backend.world_size > 1 and not is_split(dataloader):
        logger.warning(
            "each of the %d workers reads all %s data, of which the rows of rank 0 count: give the DataLoader a "
            "DistributedSampler(dataset, shuffle=False), so that each evaluates a part. If the workers' loaders yield "
            "different parts, give them an attribute world_size, and the rows of all count.",
            backend.world_size, split,
        )  # fmt: skip


def counted(dataloader: Iterable, backend: Backend) -> Iterator[tuple[Any, NumCounted]]:
    """Yield the batches of a data loader, each with a function: rows in the batch -> leading rows that count.

    Rows that torch's `DistributedSampler` or Accelerate's loaders repeat do not count. Of a loader that is not split
    over the workers (`is_split`) only rank 0's rows count.
    """
    sampler = sampler_of(dataloader)
    if hasattr(dataloader, "end_of_dataloader"):
        yield from _of_accelerate(dataloader, backend.rank)
    elif isinstance(sampler, DistributedSampler) and type(sampler).__iter__ is DistributedSampler.__iter__:
        yield from _of_sampler(dataloader, sampler)
    else:
        num_counted = _all if backend.is_main or is_split(dataloader) else _none
        yield from ((batch, num_counted) for batch in dataloader)


def _all(rows: int) -> int:
    return rows


def _none(rows: int) -> int:
    return 0


def _of_accelerate(dataloader: Any, rank: int) -> Iterator[tuple[Any, NumCounted]]:
    """The last batches of all workers, joined by rank, have `remainder` rows of the data, as `gather_for_metrics`
    assumes."""
    # Of the shards of a stream, whose length Accelerate does not know, repeated rows of the last batches count too.
    is_shard = hasattr(dataloader.dataset, "process_index")
    fills_up = not is_shard and getattr(dataloader.batch_sampler, "even_batches", True)
    for batch in dataloader:
        remainder = dataloader.remainder if dataloader.end_of_dataloader and fills_up else 0
        if remainder > 0:
            yield batch, lambda rows, remainder=remainder: min(max(remainder - rank * rows, 0), rows)
        else:
            yield batch, _all


def _of_sampler(dataloader: DataLoader, sampler: DistributedSampler) -> Iterator[tuple[Any, NumCounted]]:
    """Worker r of n reads samples r, r + n, ...; beyond the end of the dataset they start again."""
    total, size = len(sampler), getattr(dataloader.batch_sampler, "batch_size", 1)
    real = min(total, len(range(sampler.rank, len(sampler.dataset), sampler.num_replicas)))
    for number, batch in enumerate(dataloader):
        samples = min(size, total - number * size)
        left = min(max(real - number * size, 0), samples)
        yield batch, _all if left == samples else lambda rows, left=left, samples=samples: rows * left // samples


def generate(
    model: nn.Module, part: MicroBatch, options: Mapping[str, Any], *, synced: bool = False, seed: int | None = None
) -> Tensor:
    """Generate tokens for each row with `model.generate`, int64 [rows, length].

    An encoder-decoder reads `input_ids`. A decoder reads `prompt_ids` and `prompt_mask` if the batch has them, padded
    on the left, and only its new tokens are returned. Columns that are padding in all rows are removed first, so that
    results do not depend on the batch. The names of t5-experiments are accepted too: `input_ids_generate` and
    `attention_mask_generate`, for which all tokens are returned. The default length is that of the labels plus one.

    With `synced` every worker generates until the last one is done, because forward passes are collective. With a
    `seed` sampled tokens depend on it and the rows only.
    """
    device = next(iter(part.inputs.values())).device
    inputs, options = part.inputs, dict(options)
    prompt = part.batch.get("prompt_ids")
    if prompt is not None:
        mask = part.batch["prompt_mask"]
        first = int(mask.bool().any(dim=0).int().argmax())
        prompt, mask = prompt[:, first:], mask[:, first:]
        read = {"input_ids": prompt.to(device), "attention_mask": mask.to(device)}
    else:
        names = ("input_ids", "attention_mask", "global_attention_mask")
        read = {name: inputs[name] for name in names if name in inputs}
        if "input_ids_generate" in part.batch:
            read = {n: part.batch[f"{n}_generate"].to(device) for n in names if f"{n}_generate" in part.batch}
        if "labels" in inputs and not _LENGTHS & set(options):
            # The generated text has one special token more than the labels.
            options["max_length"] = inputs["labels"].shape[-1] + 1
    if seed is not None:
        seed_all(seed, int(read["input_ids"].sum()))
    with torch.no_grad():
        written = model.generate(**read, synced_gpus=synced, **options)
    return written if prompt is None else written[:, prompt.shape[1] :]

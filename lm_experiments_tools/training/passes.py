"""The forward and backward passes of one step, over this worker's micro-batches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lm_experiments_tools.errors import UserError
from lm_experiments_tools.training.generators import seed_all
from lm_experiments_tools.training.metrics import MetricSums

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from lm_experiments_tools.config.training import TrainerArgs
    from lm_experiments_tools.training.metrics import Collector
    from lm_experiments_tools.training.micro_batches import BatchStream, MicroBatch
    from lm_experiments_tools.training.step import Loop


def make_gradients(loop: Loop, micro_batches: Sequence[MicroBatch], weights: Mapping[str, int]) -> MetricSums:
    """Leave the gradient of the step's loss in the parameters, summed over all workers' micro-batches.

    Args:
        weights: valid entries of the global step, by label name.

    Returns:
        Losses and metrics of this worker's micro-batches.
    """
    while True:
        kept = {name: list(values) for name, values in loop.kept.data.items()}
        sums = _passes(loop, micro_batches, weights)
        if not loop.backend.must_repeat():
            return sums
        loop.kept.data = kept


def _passes(loop: Loop, micro_batches: Sequence[MicroBatch], weights: Mapping[str, int]) -> MetricSums:
    backend, sums = loop.backend, MetricSums(exact=loop.backend.exact is not None)
    for i, micro_batch in enumerate(micro_batches):
        seed_noise(loop, loop.state.consumed_samples, i)
        with backend.accumulate(sync=i == len(micro_batches) - 1):
            with backend.autocast():
                outputs = backend.model(**micro_batch.inputs, **loop.forward_kwargs)
            means = loop.loss.means(micro_batch.inputs, outputs)
            measure(loop, micro_batch, means, outputs, sums, loop.kept)
            loss = loop.loss.part(means, micro_batch.weights, weights) * backend.averaged_over
            del outputs, means  # logits would otherwise live on through the backward pass and the update
            backend.backward(loss)
    return sums


def seed_noise(loop: Loop, position: int, i: int) -> None:
    """With `--reproducible`, key what this worker's i-th micro-batch draws by its place in the data and the step.

    Args:
        position: samples consumed over all workers before the step.
    """
    if loop.backend.exact is not None:
        seed_all(loop.args.seed, position, number_in_step(loop, i))


def measure(
    loop: Loop, part: MicroBatch, means: Mapping[str, Tensor], outputs: Any, sums: MetricSums, kept: Collector
) -> None:
    """Add a micro-batch's losses and metrics to `sums`, and its outputs to `kept`, unless it only fills up."""
    if part.counts():
        values = loop.batch_metrics_fn(part.batch, outputs)
        for term in loop.loss.labels.keys() - values.keys():
            sums.add({term: means[term]}, part.weights[loop.loss.labels[term]])
        sums.add(values, part.weight)
        kept.add(part.batch, outputs)


def number_in_step(loop: Loop, i: int) -> int:
    """Number of this worker's i-th micro-batch among those of the step, whoever computes them.

    A worker's shares are the virtual ranks `rank`, `rank` + workers, ...; each has `gradient_accumulation_steps`.
    """
    accumulated = loop.args.gradient_accumulation_steps
    share, k = divmod(i, accumulated)
    return (share * loop.backend.world_size + loop.backend.rank) * accumulated + k


def check_source(args: TrainerArgs, stream: BatchStream | None) -> None:
    """An elastic run needs a loader that finds its place for any number of workers.

    Raises:
        UserError: it cannot.
    """
    if args.reproducible == "elastic" and stream is not None and not hasattr(stream.loader, "seek"):
        raise UserError(
            "--reproducible elastic needs a training data loader with seek(), as data.loader.TrainLoader has, whose "
            f"rows are the same for any number of workers; {type(stream.loader).__name__} has none."
        )

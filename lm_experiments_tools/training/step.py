"""One optimizer step on a worker: micro-batches, counts over all workers, forward and backward passes::

loss = sum of the losses of all workers' valid target tokens / number of their valid target tokens
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lm_experiments_tools.errors import UserError
from lm_experiments_tools.labels import IGNORED_LABEL
from lm_experiments_tools.training.checks import check_loss
from lm_experiments_tools.training.generators import seed_all
from lm_experiments_tools.training.losses import BYTES_PER_TOKEN, Loss, loss_for
from lm_experiments_tools.training.metrics import AccumulatedOutputs, Collector, MetricSums
from lm_experiments_tools.training.micro_batches import BatchSplitter, GlobalCounts, MicroBatch
from lm_experiments_tools.training.signals import StopSignals

if TYPE_CHECKING:
    from lm_experiments_tools.backends.backend import Backend
    from lm_experiments_tools.config.training import TrainerArgs

_MAX_EMPTY = 10  # first steps of a run that may have no targets


class Step:
    """Forward and backward passes over this worker's micro-batches of an optimizer step, or of a validation.

    Attributes:
        split: makes micro-batches of a batch.
        signals: signals that stop the run; all workers learn of them with the counts of a step.
    """

    def __init__(
        self,
        args: TrainerArgs,
        backend: Backend,
        model: nn.Module,
        loss: Loss,
        transform: Callable | None,
        batch_metrics_fn: Callable,
        forward_kwargs: Mapping[str, Any],
    ) -> None:
        self.args, self.backend, self.batch_metrics_fn = args, backend, batch_metrics_fn
        self.targets = loss.targets(model)
        self.loss = loss_for(model, self.targets, loss)
        check_loss(args, backend, model, self.targets)
        self.split = BatchSplitter(args, backend, model, self.loss, self.targets, transform)
        self.forward_kwargs = dict(forward_kwargs)
        # Otherwise keys and values of every layer would live to the step's end, unused.
        if "use_cache" in self.split.names:
            self.forward_kwargs.setdefault("use_cache", False)
        self.signals, self._names = StopSignals(saves=bool(args.model_path)), self.loss.label_names()
        self._num_empty: int | None = 0  # steps without targets so far; None after a step with targets

    def count(self, micro_batches: Sequence[MicroBatch], failed: bool = False, save: bool = False) -> GlobalCounts:
        """Add up the counts of a step and the pending signals over all workers.

        This is the only collective of a step besides those of its gradients. `failed`: this worker could not write a
        checkpoint. `save`: it is time for a checkpoint; True on one worker at most.
        """
        rank, world_size = self.backend.rank, self.backend.world_size
        weights = [sum(micro_batch.weights[name] for micro_batch in micro_batches) for name in self._names]
        samples, tokens = sum(m.rows for m in micro_batches), sum(m.tokens for m in micro_batches)
        # The sum of these lists over the workers is a gather of their lengths.
        lengths = [len(micro_batches) if worker == rank else 0 for worker in range(world_size)]
        local = [samples, tokens, failed, save, *weights, *lengths, *self.signals.pending]
        samples, tokens, failed, save, *totals = self.backend.sum(torch.tensor(local)).tolist()
        weights, lengths = totals[: len(weights)], totals[len(weights) : len(weights) + world_size]
        if any(events := totals[len(weights) + world_size :]):
            self.signals.agree(events)
        return GlobalCounts(dict(zip(self._names, weights, strict=True)), samples, tokens, max(lengths), failed, save)

    def forward_backward(
        self, micro_batches: Sequence[MicroBatch], counts: GlobalCounts, collector: AccumulatedOutputs, position: int
    ) -> MetricSums:
        """Leave the gradient of the step's loss in the parameters, summed over all workers' micro-batches.

        `position`, the samples consumed before this step, seeds dropout under `--reproducible`. Returns losses and
        metrics of this worker's micro-batches.
        """
        backend, loss, weights, is_exact = self.backend, self.loss, counts.weights, self.backend.reduction.is_exact
        if self._num_empty is not None:
            self._check_targets(weights)
        metrics = MetricSums(exact=is_exact)
        before = collector.copy() if is_exact else None
        for i, micro_batch in enumerate(micro_batches):
            if is_exact:
                self._seed_noise(position, i)
            is_last = i == len(micro_batches) - 1
            with backend.reduction.passes(is_last):
                with backend.autocast():
                    outputs = backend.model(**micro_batch.inputs, **self.forward_kwargs)
                means = loss.means(micro_batch.inputs, outputs)
                self.add_metrics(micro_batch, means, outputs, metrics, collector)
                part = loss.part(means, micro_batch.weights, weights)
                # Logits would otherwise live on through the backward pass and the update.
                del outputs, means
                backend.backward(part, is_last)
        # A gradient was too large for the grid of its exact sum. The grid is coarser now, and the passes are repeated.
        if is_exact and backend.reduction.must_repeat():
            collector.data = before
            return self.forward_backward(micro_batches, counts, collector, position)
        return metrics

    def _check_targets(self, weights: Mapping[str, int]) -> None:
        """Raise UserError if the first steps of a run have no targets over all workers: it would learn nothing."""
        if not weights or weights.get("labels", sum(weights.values())):
            self._num_empty = None
            return
        self._num_empty += 1
        if self._num_empty == min(_MAX_EMPTY, self.args.iters):
            raise UserError(
                f"the first {self._num_empty} steps have nothing to predict: all their labels are ignored "
                f"({IGNORED_LABEL}). Look at the data by `lmtools inspect`; are all of its tokens unknown?"
            )

    def add_metrics(
        self, part: MicroBatch, means: Mapping[str, Tensor], outputs: Any, sums: MetricSums, collector: Collector
    ) -> None:
        """Add a micro-batch's losses and metrics to `sums` and its outputs to `collector`, unless it is padding."""
        if not any(part.weights.values()) and part.is_padding():
            return
        values = self.batch_metrics_fn(part.batch, outputs)
        for term in self.loss.labels.keys() - values.keys():
            if weight := part.weights[self.loss.labels[term]]:
                sums.add({term: means[term]}, weight)
        # Means over the micro-batch are weighted by the labels of the first term.
        sums.add(values, next(iter(part.weights.values())))
        if self.loss.token_bytes is not None:
            sums.add({BYTES_PER_TOKEN: (part.num_bytes, part.weights["labels"])}, 0)
        collector.add(part.batch, outputs)

    def _seed_noise(self, position: int, i: int) -> None:
        """Seed dropout for this worker's i-th micro-batch by its position in the data, for `--reproducible`."""
        # the virtual ranks of a worker are `rank`, `rank` + workers, ...; each has `accumulated` micro-batches
        accumulated = self.args.gradient_accumulation_steps
        virtual, k = divmod(i, accumulated)
        number = (virtual * self.backend.world_size + self.backend.rank) * accumulated + k
        seed_all(self.args.seed, position, number)

"""Batches of a loader to one model's micro-batches."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lm_experiments_tools.errors import UserError
from lm_experiments_tools.modules.inspection import forward_names
from lm_experiments_tools.training.generators import preserved_random_state
from lm_experiments_tools.training.micro_batches import StepBatch, first_rows, in_shares, split_batch
from lm_experiments_tools.training.targets import Targets, find_targets

if TYPE_CHECKING:
    from lm_experiments_tools.backends.backend import Backend
    from lm_experiments_tools.config.training import TrainerArgs
    from lm_experiments_tools.training.losses import Loss

logger = logging.getLogger(__name__)

READ_ELSEWHERE = {"example", "prompt_ids", "prompt_mask", "input_ids_generate", "attention_mask_generate"}


class Splitter:
    """Renames, cuts and counts batches.

    Args:
        transform: f(batch) -> batch with the model's argument names.
        forward_kwargs: passed to every forward pass.

    Attributes:
        names: arguments of the model's forward.
        targets: how valid targets are counted; None until the first batch has shown it.
    """

    def __init__(
        self, args: TrainerArgs, backend: Backend, model: nn.Module, loss: Loss, transform: Callable | None,
        forward_kwargs: Mapping[str, Any],
    ) -> None:  # fmt: skip
        self.args, self.backend, self.loss, self.transform = args, backend, loss, transform
        self.names, self.forward_kwargs, self.model_name = forward_names(model), forward_kwargs, type(model).__name__
        self.has_decoder = bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))
        is_known = self.has_decoder or tuple(loss.labels) != ("loss",)
        self.targets: Targets | None = Targets() if is_known else None
        self._warned: set[str] = set()

    def __call__(self, batch: Any, batch_size: int, num_counted: Callable[[int], int] | None = None) -> StepBatch:
        """Micro-batches of this worker's batch; collective until `targets` are known.

        Args:
            batch: None where this worker has no more.
            batch_size: rows of a micro-batch at most.
            num_counted: f(rows) -> first rows that count; the others repeat rows of another worker.
        """
        batch = batch if batch is None else self._named(batch)
        if self.targets is None:
            self._find_targets(batch, batch_size)
        if batch is None:
            return StepBatch.nothing(self.loss.label_names())
        if num_counted is not None:
            rows = next((len(v) for k, v in batch.items() if k in self.names and isinstance(v, Tensor)), 0)
            counted = num_counted(rows)
            if rows and counted == 0:
                return self._split(batch, batch_size).without_weight()
            batch = first_rows(batch, rows, counted)
        return self._split(batch, batch_size)

    def _split(self, batch: Mapping[str, Any], batch_size: int) -> StepBatch:
        how = (batch_size, self.names, self.backend.device, self.has_decoder, self.loss.label_names())
        trim_to, targets = self.args.trim_to(), self.targets or Targets()
        part = in_shares(batch, self.backend.shares, lambda share: split_batch(share, *how, trim_to, targets))
        return part if self.loss.most_labels is None else part.with_labels_alone(self.loss.most_labels)

    def _named(self, batch: Any) -> Mapping[str, Any]:
        batch = self.transform(batch) if self.transform else batch
        if not isinstance(batch, Mapping):
            raise UserError(
                f"a batch is a {type(batch).__name__}, but must be a dict of the arguments of the model's forward: "
                "return one from the data loader's collate_fn, or from batch_transform_fn"
            )
        unread = {k for k, v in batch.items() if isinstance(v, Tensor)} - self.names - READ_ELSEWHERE - self._warned
        if unread and self.names & batch.keys():
            self._warned |= unread
            if self.backend.is_main:
                logger.warning(
                    "batch entries that %s.forward does not take, and that only metrics functions see: %s",
                    self.model_name, ", ".join(sorted(unread)),
                )  # fmt: skip
        return batch

    def _find_targets(self, batch: Mapping[str, Any] | None, batch_size: int) -> None:
        """Try rank 0's first micro-batch on all workers: forward passes of a sharded model are collective."""
        inputs = self._split(batch, batch_size).micro_batches[0].inputs if batch is not None else None
        if self.backend.world_size > 1:
            sent = inputs and {k: v.cpu() if isinstance(v, Tensor) else v for k, v in inputs.items()}
            inputs = self.backend.broadcast(sent if self.backend.is_main else None)
        if inputs is None:
            return
        device, labels = self.backend.device, inputs.get("labels")
        inputs = {name: v.to(device) if isinstance(v, Tensor) else v for name, v in inputs.items()}
        if labels is None or labels.dim() != 2 or labels.is_floating_point() or not _are_of_tokens(labels, inputs):
            self.targets = Targets()
        elif labels.shape[1] > 1:
            self.targets = self._find_by_trying(inputs)

    def _find_by_trying(self, inputs: Mapping[str, Any]) -> Targets:
        model = self.backend.model
        was_training = model.training
        model.eval()

        def loss_of(inputs: Mapping[str, Any]) -> float:
            with self.backend.autocast():
                outputs = model(**inputs, **self.forward_kwargs)
            return float(self.loss.means(inputs, outputs)["loss"])

        with torch.no_grad(), preserved_random_state(), torch.compiler.set_stance("force_eager"):
            targets = find_targets(loss_of, inputs)
        model.train(was_training)
        return targets


def _are_of_tokens(labels: Tensor, inputs: Mapping[str, Any]) -> bool:
    """True if there is a label for each input token."""
    return any(
        name != "labels" and isinstance(v, Tensor) and v.shape[:2] == labels.shape for name, v in inputs.items()
    )

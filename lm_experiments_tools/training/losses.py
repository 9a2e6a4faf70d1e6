"""The loss of a training step: a sum of terms, each a mean over the valid entries of its labels.

T5 has one term, over target tokens. BERT has two, over masked tokens and over sentence pairs. Each term is weighted by
its own count over all micro-batches and workers, so the split into micro-batches does not change the result::

    loss = sum over terms of (sum of the term over its valid labels / number of its valid labels)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lm_experiments_tools.errors import UserError
from lm_experiments_tools.modules.inspection import base_of, forward_names
from lm_experiments_tools.modules.losses import mean_loss
from lm_experiments_tools.training.targets import SPANS, Targets, targets_of

_SPAN_TERMS = ("loss_start", "loss_end")
BYTES_PER_TOKEN = "bytes_per_token"  # of valid labels, a metric until `Loss.with_total` divides by it


@dataclass(frozen=True)
class Loss:
    """The definition of a training loss: its terms, their labels and their weights.

    Attributes:
        labels: {term: name of the batch entry with its labels}. The term is a mean over labels other than -100.
        means: f(model inputs, model outputs) -> {term: mean over the micro-batch}. A single term may be (sum, number
            of labels) where only the model knows that number.
        most_labels: f(number of rows) -> maximum number of labels per micro-batch, for models that take
            `label_positions` and compute logits only there; None for no limit.
        token_bytes: int64 [vocabulary], UTF-8 bytes of each token, to measure bits per byte; None does not measure
            them.
        scales: {term: weight in the loss}, default 1.
    """

    labels: Mapping[str, str]
    means: Callable[[Mapping[str, Any], Any], dict[str, Any]]
    most_labels: Callable[[int], int] | None = None
    token_bytes: Tensor | None = None
    scales: Mapping[str, float] = field(default_factory=dict)

    def targets(self, model: nn.Module) -> Targets:
        """Targets of a model under this loss: those of its class for the model's own loss, otherwise labels."""
        found = targets_of(model)
        return found if self.means is _model_loss else replace(found, mean_over="labels", is_declared=True)

    def label_names(self) -> tuple[str, ...]:
        """Names of the batch entries that hold labels, such as "labels"."""
        return tuple(self.labels.values())

    def part(self, means: Mapping[str, Any], weights: Mapping[str, int], totals: Mapping[str, int]) -> Tensor:
        """Compute what one micro-batch contributes to the loss of the whole optimizer step.

        A term (sum, number of labels) is divided by its total in `totals`, which is not yet the step's number of
        labels: the trainer scales the gradients.

        Args:
            means: {term: mean over the micro-batch}.
            weights: {label entry: number of valid labels in the micro-batch}.
            totals: {label entry: number of valid labels in the whole step, over all workers}.
        """
        scale = self.scales.get
        if (term := next((term for term in self.labels if isinstance(means[term], tuple)), None)) is not None:
            if len(self.labels) > 1:
                raise UserError("a model that returns loss_sum and num_labels can have no second loss term")
            name = self.labels[term]
            return means[term][0] * ((weights[name] > 0) / max(totals[name], 1))
        return sum(
            means[term] * (scale(term, 1.0) * weights[name] / max(totals[name], 1))
            for term, name in self.labels.items()
        )

    def with_total(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Add the total `loss` to the metrics of a split if all terms had labels.

        With `token_bytes` the result also has `bits_per_byte` = nats of all valid labels / (ln 2 * UTF-8 bytes of
        their text). For a causal model this is the compression of the text. For span corruption it bounds the bits of
        the masked text given the rest: sentinels add nats but no bytes. A masked language model predicts each masked
        token on its own.

        Args:
            metrics: {name: value} of "train", "valid" or another split, with the mean of each term.
        """
        values = dict(metrics)
        num_bytes = values.pop(BYTES_PER_TOKEN, 0.0)
        if not values.keys() >= self.labels.keys():
            return values
        values = {"loss": sum(values[term] * self.scales.get(term, 1.0) for term in self.labels), **values}
        if num_bytes:
            nats = next(values[term] for term, name in self.labels.items() if name == "labels")
            values["bits_per_byte"] = nats / (math.log(2) * num_bytes)
        return values


@dataclass(frozen=True)
class LanguageModelLoss(Loss):
    """Mean cross-entropy over tokens in nats, with its perplexity."""

    def with_total(self, metrics: Mapping[str, float]) -> dict[str, float]:
        values = super().with_total(metrics)
        return {**values, "perplexity": math.exp(min(values["loss"], 709.0))} if "loss" in values else values


def loss_of(outputs: Any) -> Tensor:
    """Find the loss in a model's outputs. Raises UserError unless there is one scalar."""
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else None
    if loss is None:
        raise UserError(
            "the model's forward gave no loss: a model to train takes labels and returns a mapping with the key loss, "
            "as transformers' ...ForConditionalGeneration classes do (--model_cls)"
        )
    if loss.numel() != 1:
        raise UserError(
            f"the model's loss has the shape {list(loss.shape)}, but must be one number: return its mean over the "
            "valid labels"
        )
    return loss


def _model_loss(inputs: Mapping[str, Any], outputs: Any) -> dict[str, Any]:
    if isinstance(outputs, Mapping) and outputs.get("loss_sum") is not None and "num_labels" in outputs:
        return {"loss": (loss_of({"loss": outputs["loss_sum"]}), torch.as_tensor(outputs["num_labels"]))}
    return {"loss": loss_of(outputs)}


MODEL_LOSS = Loss({"loss": "labels"}, _model_loss)

LANGUAGE_MODEL_LOSS = LanguageModelLoss(MODEL_LOSS.labels, MODEL_LOSS.means)


def loss_for(model: nn.Module, targets: Targets, loss: Loss) -> Loss:
    """The loss of a model in terms with one divisor each, instead of the model's own sum of them.

    Args:
        targets: result of `targets_of`.
        loss: returned unchanged unless it is the model's own.
    """
    if loss.means is not MODEL_LOSS.means:
        return loss
    if targets.mean_over == "spans":
        return Loss(dict(zip(_SPAN_TERMS, SPANS, strict=True)), _span_means, scales=dict.fromkeys(_SPAN_TERMS, 0.5))
    if "next_sentence_label" in forward_names(model) and type(base_of(model)).__name__.endswith("ForPreTraining"):
        return bert_loss(use_nsp=True)
    return loss


def _span_means(inputs: Mapping[str, Any], outputs: Any) -> dict[str, Tensor]:
    """Cross-entropy of an answer's first and of its last token; answers beyond the text do not count."""
    means = {}
    for term, name in zip(_SPAN_TERMS, SPANS, strict=True):
        logits = outputs[name.replace("positions", "logits")]
        length = logits.shape[1]
        means[term] = mean_loss(logits, inputs[name].clamp(0, length), ignored=length)
    return means


def with_bytes(loss: Loss, token_bytes: np.ndarray | None, model: nn.Module) -> Loss:
    """Make a loss also measure bits per byte.

    Models that add other terms to their cross-entropy are left out: their loss is returned unchanged.

    Args:
        token_bytes: int64 [vocabulary], UTF-8 bytes of each token; None returns `loss` unchanged.
    """
    config = getattr(model, "config", None)
    if token_bytes is None or any(getattr(config, name, 0) for name in ("z_loss", "label_smoothing")):
        return loss
    size = max(len(token_bytes), getattr(config, "vocab_size", 0))  # padded embeddings have more IDs
    return replace(loss, token_bytes=torch.from_numpy(np.pad(token_bytes, (0, size - len(token_bytes)))))


def bert_loss(use_nsp: bool, most_labels: Callable[[int], int] | None = None) -> Loss:
    """Create BERT's loss: mean over masked tokens plus, with `use_nsp`, mean over sentence pairs.

    The model outputs `loss_mlm` and `loss_nsp` (or `mlm_loss`, `nsp_loss`), or is one of transformers'
    ...ForPreTraining classes, whose summed `loss` is split with the help of their logits.

    Args:
        most_labels: f(number of rows) -> maximum number of labels per micro-batch, for models that compute logits only
            at labels; None for no limit.
    """
    labels = {"loss_mlm": "labels", "loss_nsp": "next_sentence_label"}
    if not use_nsp:
        return Loss({"loss_mlm": "labels"}, _masked_tokens, most_labels)
    return Loss(labels, _BothTasks(), most_labels)


def _masked_tokens(inputs: Mapping[str, Any], outputs: Any) -> dict[str, Tensor]:
    mlm = _first(outputs, "loss_mlm", "mlm_loss", "loss")
    if mlm is None and "prediction_logits" in outputs:
        mlm = cross_entropy(outputs["prediction_logits"].float().flatten(0, -2), inputs["labels"].flatten())
    if mlm is None:
        mlm = loss_of(outputs)
    if "seq_relationship_logits" in outputs:  # zero gradients for the unused head: DDP waits for them
        mlm = mlm + 0.0 * outputs["seq_relationship_logits"].float().sum()
    return {"loss_mlm": mlm}


class _BothTasks:
    def __init__(self) -> None:
        self._checked = False

    def __call__(self, inputs: Mapping[str, Any], outputs: Any) -> dict[str, Tensor]:
        mlm, nsp = _first(outputs, "loss_mlm", "mlm_loss"), _first(outputs, "loss_nsp", "nsp_loss")
        if mlm is not None and nsp is not None:
            self._check_sum(outputs, mlm + nsp)
            return {"loss_mlm": mlm, "loss_nsp": nsp}
        total = loss_of(outputs)
        if mlm is not None:
            nsp = total - mlm
        elif nsp is None:
            if "seq_relationship_logits" not in outputs:
                raise UserError(
                    "the model's forward gives one loss for its two tasks, which cannot be weighted right for masked "
                    "tokens and for sentence pairs at once: return loss_mlm and loss_nsp beside it, or train without "
                    "pairs (--use_nsp 0)"
                )
            logits, label = outputs["seq_relationship_logits"], inputs["next_sentence_label"]
            nsp = cross_entropy(logits.float().flatten(0, -2), label.flatten())
        return {"loss_mlm": total - nsp if mlm is None else mlm, "loss_nsp": nsp}

    def _check_sum(self, outputs: Any, total: Tensor) -> None:
        """Refuse, at the first batch, a loss with another term, which would be left out silently."""
        if self._checked or outputs.get("loss") is None:
            return
        whole, total = outputs["loss"].item(), total.item()
        if not math.isclose(whole, total, rel_tol=1e-2):
            raise UserError(
                f"the model's loss is {whole:.4f}, but its loss_mlm and loss_nsp add up to {total:.4f}: training "
                "minimises the sum of the two, so whatever else is in the loss would be left out; return them scaled "
                "so that they add up to it"
            )
        self._checked = True


def _first(outputs: Any, *names: str) -> Tensor | None:
    return next((outputs[name] for name in names if outputs.get(name) is not None), None)

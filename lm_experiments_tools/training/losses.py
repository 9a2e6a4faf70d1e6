"""The loss of a training step: a sum of terms, each a mean over the valid entries of its labels.

T5 has one term, over target tokens. BERT has two, over masked tokens and over sentence pairs. Each term is weighted by
its own count over all micro-batches and workers, so the split into micro-batches does not change the result::

    loss = sum over terms of (sum of the term over its valid labels / number of its valid labels)

What a model's own loss is a mean over, its class declares; classes of transformers are known by name (`targets_of`)::

    class MyModel(nn.Module):
        shifts_labels = True     # token j - 1 predicts label j, so the first label of a row has no prediction
        loss_mean_over = "rows"  # default: "labels"

| `loss_mean_over` | the loss is |
|---|---|
| labels | a mean over labels other than -100 |
| rows | a mean over rows |
| spans | (start + end) / 2, of means over answers whose first or last token is in the text |
| batch | no mean: it compares the rows of a batch, as contrastive losses with in-batch negatives do |

A loss with another divisor, such as the sum of class weights, needs a model that takes `num_items_in_batch`, the
number of labels, and divides its sum by it.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lm_experiments_tools.errors import UserError
from lm_experiments_tools.labels import IGNORED_LABEL
from lm_experiments_tools.modules.inspection import base_of, forward_names
from lm_experiments_tools.modules.losses import mean_loss
from lm_experiments_tools.names import is_of_user

LABELS_MASK = "labels_mask"
NUM_ITEMS = "num_items_in_batch"
SPANS = ("start_positions", "end_positions")
_KINDS = ("labels", "rows", "spans", "batch")
_MEANS = re.compile(
    r"(For(CausalLM|MaskedLM|ConditionalGeneration|(Sequence|Token|Image|Video|Audio)Classification|MultipleChoice|"
    r"NextSentencePrediction)|LMHeadModel)$"
)
# Decoders of transformers whose labels are the tokens after their inputs: the caller shifts them.
_UNSHIFTED = {
    "BartForCausalLM", "BigBirdPegasusForCausalLM", "BlenderbotForCausalLM", "BlenderbotSmallForCausalLM",
    "MBartForCausalLM", "MarianForCausalLM", "MvpForCausalLM", "PLBartForCausalLM", "PegasusForCausalLM",
    "ProphetNetForCausalLM", "TrOCRForCausalLM", "WhisperForCausalLM", "XLMWithLMHeadModel", "XLNetLMHeadModel",
}  # fmt: skip
_SPAN_TERMS = ("loss_start", "loss_end")
BYTES_PER_TOKEN = "bytes_per_token"  # of valid labels, a metric until `Loss.with_total` divides by it


@dataclass(frozen=True)
class Targets:
    """Divisor of a model's loss: what it is a mean over.

    Attributes:
        shifts_labels: the first label of a row is not predicted.
        mean_over: "labels", "rows", "spans" or "batch".
        takes_count: the model takes `num_items_in_batch`.
        is_declared: False if the other values are assumed.
    """

    shifts_labels: bool = False
    mean_over: str = "labels"
    takes_count: bool = False
    is_declared: bool = True

    def valid(self, labels: Tensor, mask: Tensor | None = None, segment_ids: Tensor | None = None) -> Tensor:
        """Bool mask of the labels that count, of the shape of `labels`, or of `mask` if `labels` have classes.

        Args:
            labels: [rows], [rows, columns], or [rows, columns, classes].
            mask: `labels_mask`, nonzero where a label counts; ignored if the shapes differ.
            segment_ids: document numbers of packed rows, [rows, columns].
        """
        valid = labels != IGNORED_LABEL
        if mask is not None and mask.shape == valid.shape[: mask.dim()]:
            valid = mask.bool() & (valid.flatten(mask.dim()).any(-1) if valid.dim() > mask.dim() else valid)
        if self.shifts_labels and valid.dim() > 1:
            valid = valid.clone()
            valid[:, 0] = False
            if segment_ids is not None:
                valid[:, 1:] &= segment_ids[:, 1:] == segment_ids[:, :-1]
        return valid

    def count(
        self,
        labels: Mapping[str, Any],
        rows: int,
        inputs: Mapping[str, Any],
        host: Mapping[str, Tensor],
        token_bytes: Tensor | None = None,
    ) -> tuple[dict[str, int], int]:
        """Count the valid labels of a micro-batch.

        Args:
            labels: {name: entry of the batch; None if it lacks the entry}.
            inputs: arguments of the model's forward; answers (`SPANS`) beyond their width do not count.
            host: the same on the host, with `labels_mask` and `segment_ids`.

        Returns:
            {name: number of valid labels, or of rows where a label is absent}, and the bytes of the valid `labels`.
        """
        weights, num_bytes = dict.fromkeys(labels, rows), 0
        if self.mean_over in ("rows", "batch"):
            return weights, 0
        for name, values in labels.items():
            if values is None:
                continue
            if name == "labels":
                valid = self.valid(values, host.get(LABELS_MASK), host.get("segment_ids"))
                num_bytes = 0 if token_bytes is None else int(token_bytes[values[valid].cpu()].sum())
            elif name in SPANS:
                texts = (v for k in ("input_ids", "inputs_embeds") if isinstance(v := inputs.get(k), Tensor))
                valid = values < next((text.shape[:2][-1] for text in texts), 0)
            else:
                valid = values != IGNORED_LABEL
            weights[name] = int(valid.sum())
        return weights, num_bytes


@dataclass(frozen=True)
class Loss:
    """The definition of a training loss: its terms, their labels and their weights.

    Attributes:
        labels: {term: name of the batch entry with its labels}. The term is a mean over labels other than -100.
        means: f(model inputs, model outputs) -> {term: mean over the micro-batch}.
        most_labels: f(number of rows) -> maximum number of labels per micro-batch, for models that take
            `label_positions` and compute logits only there; None for no limit.
        token_bytes: int64 [vocabulary], UTF-8 bytes of each token, to measure bits per byte; None does not measure
            them.
        scales: {term: weight in the loss}, default 1.
    """

    labels: Mapping[str, str]
    means: Callable[[Mapping[str, Any], Any], dict[str, Tensor]]
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

    def part(self, means: Mapping[str, Tensor], weights: Mapping[str, int], totals: Mapping[str, int]) -> Tensor:
        """Compute what one micro-batch contributes to the loss of the whole optimizer step.

        Args:
            means: {term: mean over the micro-batch}.
            weights: {label entry: number of valid labels in the micro-batch}.
            totals: {label entry: number of valid labels in the whole step, over all workers}.
        """
        return sum(
            means[term] * (self.scales.get(term, 1.0) * weights[name] / max(totals[name], 1))
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


def _model_loss(inputs: Mapping[str, Any], outputs: Any) -> dict[str, Tensor]:
    return {"loss": loss_of(outputs)}


MODEL_LOSS = Loss({"loss": "labels"}, _model_loss)

LANGUAGE_MODEL_LOSS = LanguageModelLoss(MODEL_LOSS.labels, MODEL_LOSS.means)


def loss_for(model: nn.Module, targets: Targets, loss: Loss) -> Loss:
    """The loss of a model in terms with one divisor each, instead of the model's own sum of them.

    Args:
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
    """
    config = getattr(model, "config", None)
    if token_bytes is None or any(getattr(config, name, 0) for name in ("z_loss", "label_smoothing")):
        return loss
    # Padded embeddings have more IDs than the vocabulary.
    size = max(len(token_bytes), getattr(config, "vocab_size", 0))
    return replace(loss, token_bytes=torch.from_numpy(np.pad(token_bytes, (0, size - len(token_bytes)))))


def bert_loss(use_nsp: bool, most_labels: Callable[[int], int] | None = None) -> Loss:
    """Create BERT's loss: mean over masked tokens plus, with `use_nsp`, mean over sentence pairs.

    The model outputs `loss_mlm` and `loss_nsp` (or `mlm_loss`, `nsp_loss`), or is one of transformers'
    ...ForPreTraining classes, whose summed `loss` is split with the help of their logits.
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
    # DDP waits for a gradient of every parameter, so the unused head gets zeros.
    if "seq_relationship_logits" in outputs:
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


# ---- what a model's own loss is a mean over ----------------------------------------------------------------------
def targets_of(model: nn.Module) -> Targets:
    """Targets of a model: declared by its class, or known for classes of transformers. Raises UserError."""
    inner = base_of(model)
    classes, names = type(inner).__mro__, forward_names(inner)
    computes = next(cls for cls in classes if "forward" in vars(cls))
    declared = {name for cls in classes[: classes.index(computes) + 1] for name in vars(cls)} | vars(inner).keys()
    found = _known_by_name(inner, [cls.__name__ for cls in classes if not is_of_user(cls)], names)
    own = computes.forward if is_of_user(computes) else getattr(inner, "_loss_function", None)
    if own is not None:
        counts = NUM_ITEMS in inspect.signature(own).parameters
        counts |= "accepts_loss_kwargs" in declared and bool(inner.accepts_loss_kwargs)
        found = replace(found, is_declared=counts, takes_count=counts)
    if "loss_mean_over" in declared:
        found = replace(found, mean_over=inner.loss_mean_over, is_declared=True)
    if found.mean_over not in _KINDS:
        raise UserError(f"{type(inner).__name__}.loss_mean_over is {found.mean_over!r}, not one of {_KINDS}")
    shifts = getattr(inner, "shifts_labels", found.shifts_labels)
    return replace(found, shifts_labels=bool(shifts) and not _is_soft_prompt(model))


def _known_by_name(model: nn.Module, names: list[str], forward: set[str]) -> Targets:
    """Targets of a class of transformers or of this project.

    Args:
        names: the model's classes, without a user's own.
    """
    config = getattr(model, "config", None)
    is_causal = getattr(model, "loss_type", None) in ("ForCausalLM", "ForConditionalGeneration")
    if not is_causal and any(cls.__module__.startswith("transformers.") for cls in type(model).__mro__):
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        is_causal = not set(names).isdisjoint(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    shifts = is_causal and not getattr(config, "is_encoder_decoder", False) and _UNSHIFTED.isdisjoint(names)
    if "return_loss" in forward:
        return Targets(mean_over="batch")
    if set(SPANS) <= forward and "start_n_top" not in forward and any("QuestionAnswering" in name for name in names):
        return Targets(mean_over="spans")
    is_mean = any(map(_MEANS.search, names)) or "next_sentence_label" in forward
    is_mean &= not getattr(config, "output_router_logits", False)
    return Targets(shifts_labels=shifts, is_declared=is_mean)


def _is_soft_prompt(model: nn.Module) -> bool:
    """True for PEFT's learned tokens before the input, the last of which predicts a row's first label."""
    config = getattr(model, "active_peft_config", None)
    kind = str(getattr(config, "peft_type", "")).rpartition(".")[2]
    return getattr(config, "is_prompt_learning", False) and kind not in ("PREFIX_TUNING", "CARTRIDGE")

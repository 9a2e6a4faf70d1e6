"""Knowledge distillation (arXiv 1503.02531): a frozen teacher's predictions as a second term of the loss.

The teacher predicts the student's labels. A teacher of the student's kind reads the student's batch. A decoder reads
inputs and labels as one text, here for two input tokens, one padding token and three labels:

    encoder-decoder    inputs 5 6 _   labels 7 8 9        teacher reads  5 6 _ 7 8    predictions at 6 7 8
    encoder            inputs 5 M 7   labels - 6 -        teacher reads  5 6 7        prediction at 5
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lm_experiments_tools.errors import UserError
from lm_experiments_tools.labels import IGNORED_LABEL
from lm_experiments_tools.modules.inspection import forward_names
from lm_experiments_tools.training.losses import Loss

DISTILLATION = "loss_distillation"
_PACKED = "--distill_from reads rows of one document, and these are packed: leave packing out."
Predict = Callable[[Mapping[str, Tensor]], Tensor]


def distilled(
    loss: Loss, predict: Predict, weight: float, autocast: Callable[[], AbstractContextManager] = torch.no_grad
) -> Loss:
    """Add distillation to a loss: (1 - weight) * token loss + weight * mean KL(teacher || student), in nats.

    Args:
        loss: its first term is the token loss (`loss` becomes `loss_lm`); other terms do not change.
        predict: result of `predictor`: f(inputs) -> the teacher's logits [batch, labels, vocabulary].
        autocast: context of the teacher's forward pass.
    """
    (first, name), *others = loss.labels.items()
    renamed = "loss_lm" if first == "loss" else first

    def means(inputs: Mapping[str, Any], outputs: Any) -> dict[str, Tensor]:
        values = loss.means(inputs, outputs)
        with torch.no_grad(), autocast():
            logits = predict(inputs)
        divergence = divergence_from(logits, logits_of(outputs), inputs[name])
        return {renamed: values.pop(first), **values, DISTILLATION: divergence}

    labels = {renamed: name, **dict(others), DISTILLATION: name}
    return replace(loss, labels=labels, means=means, scales={renamed: 1.0 - weight, DISTILLATION: weight})


def divergence_from(teacher: Tensor, student: Tensor, labels: Tensor) -> Tensor:
    """Mean KL(teacher || student) over labels [batch, labels] other than -100; a label where it is NaN counts as 0.

    Both logits are [batch, labels, vocabulary].
    """
    valid = labels != IGNORED_LABEL
    known = valid & ~teacher[..., 0].isnan()
    expected = teacher[known].float().log_softmax(-1)
    found = student[known].float().log_softmax(-1)
    return (expected.exp() * (expected - found)).sum() / valid.sum().clamp(min=1)


def logits_of(outputs: Mapping[str, Any]) -> Tensor:
    """Find the token logits [rows, length, vocabulary] in a model's outputs."""
    return outputs["prediction_logits" if "prediction_logits" in outputs else "logits"]


def predictor(teacher: nn.Module, teacher_kind: str | None, student_kind: str) -> Predict:
    """Build the function that predicts the student's labels with the teacher. Raises UserError.

    Kinds are "encoder", "decoder" and "encoder-decoder".
    """
    if teacher_kind == student_kind != "decoder":
        names = forward_names(teacher) - ({"labels"} if student_kind == "encoder" else set())
        return lambda inputs: _read_same_batch(teacher, inputs, names)
    if teacher_kind == "decoder" and student_kind in _READINGS:
        return lambda inputs: _READINGS[student_kind](teacher, inputs)
    raise UserError(
        f"--distill_from is of kind {teacher_kind}, the model of kind {student_kind}: encoders and encoder-decoders "
        "learn from decoders and from their own kind."
    )


def _read_same_batch(teacher: nn.Module, inputs: Mapping[str, Tensor], names: set[str]) -> Tensor:
    if "segment_ids" in inputs and "segment_ids" not in names:
        raise UserError(_PACKED)
    return logits_of(teacher(**{name: inputs[name] for name in names & inputs.keys()}))


def _read_text_and_labels(teacher: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
    if "segment_ids" in inputs:
        raise UserError(_PACKED)
    ids, labels = inputs["input_ids"], inputs["labels"]
    mask = inputs.get("attention_mask")
    mask = torch.ones_like(ids) if mask is None else mask.to(ids.dtype)
    is_target = labels[:, :-1] != IGNORED_LABEL
    whole = torch.cat([ids, labels[:, :-1].where(is_target, 0)], 1)
    read = torch.cat([mask, is_target.to(ids.dtype)], 1)
    # Padding goes to the end, because a sliding window would count it.
    order = read.argsort(dim=1, descending=True, stable=True)
    logits = teacher(input_ids=whole.gather(1, order), attention_mask=read.gather(1, order), use_cache=False)["logits"]
    # The text's last token predicts the first target.
    last = mask.sum(1, keepdim=True).clamp(min=1) - 1
    places = last + torch.arange(labels.shape[1], device=ids.device)
    return logits[torch.arange(len(ids), device=ids.device)[:, None], places]


def _read_restored_text(teacher: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
    if "segment_ids" in inputs:
        raise UserError(_PACKED)
    labels = inputs["labels"]
    text = labels.where(labels != IGNORED_LABEL, inputs["input_ids"])
    logits = teacher(input_ids=text, attention_mask=inputs.get("attention_mask"), use_cache=False)["logits"]
    # Nothing precedes the first target, so nothing predicts it.
    return torch.cat([torch.full_like(logits[:, :1], float("nan")), logits[:, :-1]], 1)


_READINGS = {"encoder-decoder": _read_text_and_labels, "encoder": _read_restored_text}

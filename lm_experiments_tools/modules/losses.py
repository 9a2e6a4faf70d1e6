"""Losses of classification heads, in float32 or higher."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss

from lm_experiments_tools.labels import IGNORED_LABEL

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def exact(logits: Tensor) -> Tensor:
    """The logits in float32 at least, in which losses are computed."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def mean_loss(logits: Tensor, labels: Tensor, ignored: int = IGNORED_LABEL) -> Tensor:
    """Cross-entropy of logits [..., classes], mean over the labels [...] that are not `ignored`; 0 if all are."""
    labels = labels.flatten()
    total = cross_entropy(exact(logits.flatten(0, -2)), labels, ignore_index=ignored, reduction="sum")
    return total / (labels != ignored).sum().clamp(min=1)


def classification_loss(config: PreTrainedConfig, logits: Tensor, labels: Tensor, is_packed: bool = False) -> Tensor:
    """Loss of a classification head by `config.problem_type`. As in transformers, the first labels set a missing type.

    Args:
        logits: [..., num_labels].
        labels: classes [...] with -100 where there is none, or numbers [..., num_labels].
        is_packed: numbers of -100 are missing labels.
    """
    if config.problem_type is None:
        is_class = labels.dtype in (torch.long, torch.int)
        several = "single_label_classification" if is_class else "multi_label_classification"
        config.problem_type = "regression" if config.num_labels == 1 else several
    if config.problem_type == "single_label_classification":
        return mean_loss(logits, labels)
    logits, is_regression = exact(logits), config.problem_type == "regression"
    labels = labels.to(logits.dtype)
    labels = labels.reshape(logits.shape) if is_regression else labels
    distance = mse_loss if is_regression else binary_cross_entropy_with_logits
    if not is_packed:
        return distance(logits, labels)
    valid = labels != IGNORED_LABEL
    return (distance(logits, labels, reduction="none") * valid).sum() / valid.sum().clamp(min=1)

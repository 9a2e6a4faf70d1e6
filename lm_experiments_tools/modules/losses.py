"""Losses of classification heads, computed in float32 or higher precision."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss

from lm_experiments_tools.labels import IGNORED_LABEL

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def exact(logits: Tensor) -> Tensor:
    """Convert logits to the dtype in which losses are computed: float32, or float64 for float64 logits."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def mean_loss(logits: Tensor, labels: Tensor, ignored: int = IGNORED_LABEL) -> Tensor:
    """Mean cross-entropy of logits [..., classes] over the labels [...] that are not `ignored`.

    It is 0 if all labels are ignored.
    """
    labels = labels.flatten()
    total = cross_entropy(exact(logits.flatten(0, -2)), labels, ignore_index=ignored, reduction="sum")
    return total / (labels != ignored).sum().clamp(min=1)


def classification_loss(config: PreTrainedConfig, logits: Tensor, labels: Tensor, is_packed: bool = False) -> Tensor:
    """Compute the loss of a classification head: cross-entropy or squared error, by `config.problem_type`.

    As in transformers, the first labels set a missing type.

    Args:
        logits: [..., num_labels].
        labels: classes [...] with -100 where there is none, or numbers [..., num_labels].
        is_packed: True for packed rows (several documents each), where a number of -100 is a missing label.
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

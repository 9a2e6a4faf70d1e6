"""Valid targets are the labels over which a model's loss is a mean; they are found by calling the model.

A causal model shifts its labels, so the first label of a row is no target. Some models also take a `labels_mask` and
score only the tokens that it selects.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lm_experiments_tools.labels import IGNORED_LABEL

LABELS_MASK = "labels_mask"


@dataclass(frozen=True)
class Targets:
    """Rule for which labels are valid targets.

    Attributes:
        first: first column with targets; 1 for models that shift their labels.
        masks_logits: column j of `labels_mask` selects the logits of token j, which predict label j + 1.
    """

    first: int = 0
    masks_logits: bool = False

    def valid(self, labels: Tensor, mask: Tensor | None = None) -> Tensor:
        """Bool mask of the valid targets, of the shape of `labels`, or of `mask` if `labels` have a class dimension.

        Args:
            labels: [rows], [rows, columns], or [rows, columns, classes].
            mask: `labels_mask`, nonzero where a label is scored; ignored if the shapes differ.
        """
        valid = labels != IGNORED_LABEL
        if mask is not None and mask.shape == valid.shape[: mask.dim()]:
            mask = mask.bool().roll(1, dims=-1) if self.masks_logits else mask.bool()
            valid = mask & (valid.flatten(mask.dim()).any(-1) if valid.dim() > mask.dim() else valid)
        if self.first and valid.dim() > 1:
            valid = valid.clone()
            valid[:, : self.first] = False
        return valid


def find_targets(loss_of: Callable[[Mapping[str, Any]], float], inputs: Mapping[str, Any]) -> Targets:
    """Find which labels a model's loss counts, by changing labels of one batch and observing the loss.

    Args:
        loss_of: f(model inputs) -> loss in evaluation mode.
        inputs: a micro-batch with `labels` [rows, at least 2 columns].
    """
    labels = inputs["labels"]
    blank, mark = _two_labels(labels)
    masked = inputs.get(LABELS_MASK) is not None

    def is_scored(column: int, first_mask: int = 1) -> bool:
        mask = {}
        if masked:
            mask = {LABELS_MASK: torch.ones_like(inputs[LABELS_MASK])}
            mask[LABELS_MASK][:, 0] = first_mask
        without = torch.full_like(labels, blank)
        marked = without.clone()
        marked[:, column] = mark
        one, other = (loss_of({**inputs, **mask, "labels": changed}) for changed in (without, marked))
        return one != other and not (math.isnan(one) and math.isnan(other))

    if is_scored(0):
        return Targets()
    return Targets(1, masks_logits=masked and not is_scored(1, first_mask=0))


def _two_labels(labels: Tensor) -> tuple[int, int]:
    """Labels to compare: -100 and a class if the batch has -100, which a model may not know, else two classes."""
    classes = labels[labels != IGNORED_LABEL].unique().tolist() or [0]
    if (labels == IGNORED_LABEL).any():
        return IGNORED_LABEL, classes[0]
    return classes[0], classes[-1] if len(classes) > 1 else int(not classes[0])

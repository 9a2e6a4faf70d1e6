"""Losses of the heads, in float32 or higher."""

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from lm_experiments_tools.labels import IGNORED_LABEL


def exact(logits: Tensor) -> Tensor:
    """Cast logits to float32, unless they are float64."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def mean_loss(logits: Tensor, labels: Tensor, ignored: int = IGNORED_LABEL) -> Tensor:
    """Cross-entropy of logits [..., classes], mean over the labels [...] that are not `ignored`; 0 if all are."""
    labels = labels.flatten()
    total = cross_entropy(exact(logits.flatten(0, -2)), labels, ignore_index=ignored, reduction="sum")
    return total / (labels != ignored).sum().clamp(min=1)


def place_loss(scores: Tensor, positions: Tensor) -> Tensor:
    """Cross-entropy over the positions of a text, scores [B, L]; positions beyond the text are ignored."""
    length = scores.shape[1]
    return mean_loss(scores, positions.clamp(0, length), ignored=length)


def words_loss(logits: Tensor, labels: Tensor, segment_ids: Tensor | None, is_decoder: bool) -> Tensor:
    """Cross-entropy of logits [B, L, V] and labels [B, L]: of a token's own position, or for a decoder of the position
    before it, except for the first token of a document of packed rows [B, L]."""
    if is_decoder:
        logits, labels = logits[:, :-1], labels[:, 1:]
        if segment_ids is not None:
            labels = labels.masked_fill(segment_ids[:, 1:] != segment_ids[:, :-1], IGNORED_LABEL)
    return mean_loss(logits, labels)

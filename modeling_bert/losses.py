"""Losses of BERT's masked language modeling and question answering."""

from torch import Tensor

from lm_experiments_tools.labels import IGNORED_LABEL
from lm_experiments_tools.modules.losses import mean_loss


def place_loss(scores: Tensor, positions: Tensor) -> Tensor:
    """Cross-entropy over the positions of a text, scores [B, L]; positions beyond the text are ignored."""
    length = scores.shape[1]
    return mean_loss(scores, positions.clamp(0, length), ignored=length)


def words_loss(logits: Tensor, labels: Tensor, segment_ids: Tensor | None, is_decoder: bool) -> Tensor:
    """Cross-entropy of logits [B, L, V] and labels [B, L].

    A decoder predicts the next token, but not across documents of packed rows (`segment_ids` [B, L]).
    """
    if is_decoder:
        logits, labels = logits[:, :-1], labels[:, 1:]
        if segment_ids is not None:
            labels = labels.masked_fill(segment_ids[:, 1:] != segment_ids[:, :-1], IGNORED_LABEL)
    return mean_loss(logits, labels)

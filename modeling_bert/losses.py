"""Losses of BERT's masked language modeling and question answering."""

from torch import Tensor

from lm_experiments_tools.labels import IGNORED_LABEL
from lm_experiments_tools.modules.losses import mean_loss


def place_loss(scores: Tensor, positions: Tensor) -> Tensor:
    """Cross-entropy for one position in a text, such as an answer's first token, with scores [batch, length].

    Labels beyond the text are ignored.

    Args:
        positions: the correct positions, [batch].
    """
    length = scores.shape[1]
    return mean_loss(scores, positions.clamp(0, length), ignored=length)


def words_loss(logits: Tensor, labels: Tensor, segment_ids: Tensor | None, is_decoder: bool) -> Tensor:
    """Cross-entropy of predicted tokens, with logits [batch, length, vocabulary] and labels [batch, length].

    Args:
        segment_ids: document IDs of packed rows, [batch, length]; None if rows are not packed.
        is_decoder: compare each token's logits with the next token, but not across documents.
    """
    if is_decoder:
        logits, labels = logits[:, :-1], labels[:, 1:]
        if segment_ids is not None:
            labels = labels.masked_fill(segment_ids[:, 1:] != segment_ids[:, :-1], IGNORED_LABEL)
    return mean_loss(logits, labels)

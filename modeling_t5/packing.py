"""Packed rows for T5: a row holds several examples that do not attend to each other.

Results equal those of separate rows, because T5's positions are distances between tokens. One worked example: two
pairs of input and target, in an encoder row of 5 tokens and a decoder row of 4. 0 is padding::

    segment_ids          1 1 2 2 0        an encoder token attends to tokens of the same number
    decoder_segment_ids  1 1 2 0          a decoder token to these, and to earlier decoder tokens of its number
    labels               7 1 8 -100
    decoder's input      0 7 0 0          each example begins with the start token (0)
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from modeling_t5.losses import IGNORED


class Segments(NamedTuple):
    """Example IDs of queries and keys in packed rows: attention stays within tokens of the same ID.

    `queries` are int64 [batch, number of queries] and `keys` [batch, number of keys], from 1 on, 0 for padding.
    Padding attends to padding. If no key is padding, padding attends to all keys (`mask`) or none; its output is not
    used.
    """

    queries: Tensor
    keys: Tensor

    def mask(self, causal: bool = False) -> Tensor:
        """Attention mask of packed rows, bool [batch, 1, queries, keys], in which every query has a key.

        Args:
            causal: leave out later keys, as in a decoder.
        """
        same = self.queries[:, None, :, None] == self.keys[:, None, None, :]
        return same.tril() if causal else same | ~same.any(-1, keepdim=True)

    def added_to(self, bias: Tensor | None, causal: bool = False) -> Tensor:
        """Add -inf to a position bias wherever packed rows allow no attention: [batch, 1 or heads, queries, keys].

        Args:
            bias: [1, heads, queries, keys]; None for zeros.
            causal: leave out later keys, as in a decoder.
        """
        return torch.where(self.mask(causal), 0.0 if bias is None else bias, -torch.inf)


def masked(segment_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Set the segment IDs of packed rows to 0 (padding) where an attention mask is 0.

    Args:
        segment_ids: example ID of each token, int64 [batch, length].
        attention_mask: [batch, length]; None masks nothing.

    Raises:
        ValueError: the mask has another number of dimensions.
    """
    if attention_mask is None:
        return segment_ids
    if attention_mask.dim() != 2:
        raise ValueError("segment_ids and an attention_mask of more than [batch, length]: give one of the two.")
    return segment_ids.masked_fill(attention_mask == 0, 0)


def shift_right_in_segments(labels: Tensor, decoder_segment_ids: Tensor, start: int, padding: int) -> Tensor:
    """Shift the labels of packed rows right, to make the decoder's input; each example begins with the start token.

    Args:
        labels: int64 [batch, target length].
        decoder_segment_ids: example ID of each label, in the same shape.
        start: ID of the start token.
        padding: token ID that replaces missing labels (-100).
    """
    before = labels.roll(1, -1).masked_fill(labels.roll(1, -1) == IGNORED, padding)
    begins = decoder_segment_ids != decoder_segment_ids.roll(1, -1)
    begins[..., 0] = True
    return torch.where(begins, start, before)

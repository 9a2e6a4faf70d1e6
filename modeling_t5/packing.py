"""Packed rows: several isolated examples in one row. Exact for T5, whose positions are distances between tokens.

One worked example, two pairs in a row of 5 and 4; 0 is padding::

    segment_ids          1 1 2 2 0        the encoder's tokens see those of their own number,
    decoder_segment_ids  1 1 2 0          the decoder's those and what comes before them in their own
    labels               7 1 8 -100
    decoder's input      0 7 0 0          each example begins with the start token (0)
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from modeling_t5.losses import IGNORED


class Segments(NamedTuple):
    """Example IDs of queries int64[B, Q] and keys [B, K], from 1 on, 0 for padding: attention stays within an example.

    Padding attends to padding. If no key is padding, it attends to all keys (`mask`) or none; its output is not used.
    """

    queries: Tensor
    keys: Tensor

    def mask(self, causal: bool = False) -> Tensor:
        """Attention mask, bool [B, 1, Q, K], in which every query has a key."""
        same = self.queries[:, None, :, None] == self.keys[:, None, None, :]
        return same.tril() if causal else same | ~same.any(-1, keepdim=True)

    def added_to(self, bias: Tensor | None, causal: bool = False) -> Tensor:
        """Add -inf to a bias [1, H, Q, K] wherever attention is not allowed: [B, 1 or H, Q, K]."""
        return torch.where(self.mask(causal), 0.0 if bias is None else bias, -torch.inf)


def masked(segment_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Segment IDs int64[B, L], set to 0 (padding) where an attention mask [B, L] is 0.

    Raises:
        ValueError: a mask of another shape.
    """
    if attention_mask is None:
        return segment_ids
    if attention_mask.dim() != 2:
        raise ValueError("segment_ids and an attention_mask of more than [batch, length]: give one of the two.")
    return segment_ids.masked_fill(attention_mask == 0, 0)


def shift_right_in_segments(labels: Tensor, decoder_segment_ids: Tensor, start: int, padding: int) -> Tensor:
    """Shift labels int64[B, T] of packed rows right; each example begins with the start token."""
    before = labels.roll(1, -1).masked_fill(labels.roll(1, -1) == IGNORED, padding)
    begins = decoder_segment_ids != decoder_segment_ids.roll(1, -1)
    begins[..., 0] = True
    return torch.where(begins, start, before)

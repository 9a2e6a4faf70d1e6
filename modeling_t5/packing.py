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
    """The examples of queries int64[B, Q] and keys [B, K], from 1 on, 0 for padding: attention stays within each.

    Padding sees padding. A decoder's padding has no source padding to look at where the row is full; in a mask it then
    sees all of the source, without one nothing, and nothing learns from either.
    """

    queries: Tensor
    keys: Tensor

    def mask(self, causal: bool = False) -> Tensor:
        """True where allowed, bool [B, 1, Q, K], with no empty row."""
        same = self.queries[:, None, :, None] == self.keys[:, None, None, :]
        return same.tril() if causal else same | ~same.any(-1, keepdim=True)

    def added_to(self, bias: Tensor | None, causal: bool = False) -> Tensor:
        """A bias [1, H, Q, K] that is -inf where the mask is False, [B, 1 or H, Q, K]."""
        return torch.where(self.mask(causal), 0.0 if bias is None else bias, -torch.inf)


def masked(segment_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Segment IDs int64[B, L], set to 0 (padding) for tokens outside of a mask [B, L].

    Raises:
        ValueError: a mask of more than tokens.
    """
    if attention_mask is None:
        return segment_ids
    if attention_mask.dim() != 2:
        raise ValueError("segment_ids and an attention_mask of more than [batch, length]: give one of the two.")
    return segment_ids.masked_fill(attention_mask == 0, 0)


def shift_right_in_segments(labels: Tensor, decoder_segment_ids: Tensor, start: int, padding: int) -> Tensor:
    """The decoder's input for labels int64[B, T]: those before each, and the start token where an example begins."""
    before = labels.roll(1, -1).masked_fill(labels.roll(1, -1) == IGNORED, padding)
    begins = decoder_segment_ids != decoder_segment_ids.roll(1, -1)
    begins[..., 0] = True
    return torch.where(begins, start, before)

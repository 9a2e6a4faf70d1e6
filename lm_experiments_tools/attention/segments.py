"""Packed rows: a row holds several documents or examples (segments) that do not attend to each other.

Outputs equal those of separate rows. One worked example, segments of 3 and 2 tokens in a row of 6; 0 is padding::

    segment_ids     1 1 1 2 2 0     tokens attend to the same number, padding to padding
    position_ids    0 1 2 0 1 0     restart with every segment
    starts          0 3             indices of the segments' first tokens
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Segments(NamedTuple):
    """Segment IDs of queries and keys: attention stays within tokens of the same ID.

    `queries` are int64 [batch, number of queries] and `keys` [batch, number of keys], from 1 on, 0 for padding.
    Padding attends to padding. If no key is padding, padding attends to all keys (`mask`) or none; its output is not
    used.
    """

    queries: Tensor
    keys: Tensor

    def mask(self, causal: bool = False) -> Tensor:
        """Attention mask of packed rows, bool [batch, 1, queries, keys], in which every query has a key."""
        same = self.queries[:, None, :, None] == self.keys[:, None, None, :]
        return same.tril() if causal else same | ~same.any(-1, keepdim=True)

    def added_to(self, bias: Tensor | None, causal: bool = False) -> Tensor:
        """Add -inf to a position bias [1, heads, queries, keys] (None: zeros) where packed rows allow no attention."""
        return torch.where(self.mask(causal), 0.0 if bias is None else bias, -torch.inf)


def without_padding(segment_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Set segment IDs [batch, length] to 0 (padding) where an attention mask [batch, length] is 0."""
    if attention_mask is None:
        return segment_ids
    if attention_mask.dim() != 2:
        raise ValueError("segment_ids and an attention_mask of more than [batch, length]: give one of the two.")
    return segment_ids.masked_fill(attention_mask == 0, 0)


def begins_of(segment_ids: Tensor) -> Tensor:
    """Return True for the first token of each segment, bool [batch, length]."""
    begins = segment_ids != segment_ids.roll(1, -1)
    begins[..., 0] = True
    return begins


def positions_of(segment_ids: Tensor) -> Tensor:
    """Compute the position of each token in its segment: int64 [batch, length]."""
    places = torch.arange(segment_ids.shape[1], device=segment_ids.device).expand_as(segment_ids)
    return places - places.where(begins_of(segment_ids), 0).cummax(-1).values


def starts_of(segment_ids: Tensor, num_segments: int) -> Tensor:
    """Index of each segment's first token, int64 [batch, num_segments]; 0 for segments that a row lacks."""
    numbers = torch.arange(1, num_segments + 1, device=segment_ids.device)
    return (segment_ids[:, None] == numbers[:, None]).byte().argmax(-1)

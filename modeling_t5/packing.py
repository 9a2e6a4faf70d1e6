"""Several examples in one row, none of which sees another: exact for T5, whose positions are distances between tokens.

One worked example, two pairs in a row of 5 and 4; 0 is padding::

    segment_ids          1 1 2 2 0        the encoder's tokens see those of their own number,
    decoder_segment_ids  1 1 2 0          the decoder's those and what comes before them in their own
    labels               7 1 8 -100
    decoder's input      0 7 0 0          each example begins with the start token (0)
"""

from __future__ import annotations

import torch
from torch import Tensor

from modeling_t5.losses import IGNORED


def segment_masks(segment_ids: Tensor, decoder_segment_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Masks, True where allowed: bool [B, 1, L, L] of the encoder, [B, 1, T, T] of the decoder, [B, 1, T, L] across.

    Padding sees padding, so that no row of a mask is empty. A decoder's padding has no source padding to look at where
    the row is full; it then sees all of the source, which nothing learns from.

    Args:
        segment_ids, decoder_segment_ids: int64[B, L] and [B, T], the number of the example from 1 on, 0 for padding.
    """
    encoder = segment_ids[:, None, :, None] == segment_ids[:, None, None, :]
    decoder = (decoder_segment_ids[:, None, :, None] == decoder_segment_ids[:, None, None, :]).tril()
    cross = decoder_segment_ids[:, None, :, None] == segment_ids[:, None, None, :]
    return encoder, decoder, cross | ~cross.any(-1, keepdim=True)


def shift_right_in_segments(labels: Tensor, decoder_segment_ids: Tensor, start: int, padding: int) -> Tensor:
    """The decoder's input for labels int64[B, T]: those before each, and the start token where an example begins."""
    before = labels.roll(1, -1).masked_fill(labels.roll(1, -1) == IGNORED, padding)
    begins = decoder_segment_ids != decoder_segment_ids.roll(1, -1)
    begins[..., 0] = True
    return torch.where(begins, start, before)

"""Attention masks as transformers' T5 receives them, and packed rows, converted to attention settings of this package.

A packed row holds several examples that do not attend to each other. Results equal those of separate rows, because
T5's positions are distances between tokens. One worked example: two pairs of input and target, in an encoder row of
5 tokens and a decoder row of 4. 0 is padding::

    segment_ids          1 1 2 2 0        an encoder token attends to tokens of the same number
    decoder_segment_ids  1 1 2 0          a decoder token to these, and to earlier decoder tokens of its number
    labels               7 1 8 -100
    decoder's input      0 7 0 0          each example begins with the start token (0)
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lm_experiments_tools.attention.kernels.call import AttentionSpec
from lm_experiments_tools.attention.segments import Segments, begins_of
from modeling_t5.losses import IGNORED


def shift_right_in_segments(labels: Tensor, decoder_segment_ids: Tensor, start: int, padding: int) -> Tensor:
    """Shift the labels of packed rows right, to make the decoder's input; each example begins with the start token.

    Args:
        labels: int64 [batch, target length].
        decoder_segment_ids: example ID of each label, in the same shape.
        start: ID of the start token.
        padding: token ID that replaces missing labels (-100).
    """
    before = labels.roll(1, -1).masked_fill(labels.roll(1, -1) == IGNORED, padding)
    return torch.where(begins_of(decoder_segment_ids), start, before)


def spec_of(attention_mask: Tensor | Segments | None, causal: bool = False) -> AttentionSpec:
    """Convert an attention mask as in transformers to attention settings, with T5's unscaled scores.

    Args:
        attention_mask: for B sequences, Q queries and K keys one of the following. [B, K] of 1 and 0; bool or integers
            [B, Q, K] or [B, 1 or heads, Q, K]; floats [B, 1 or heads, Q, K], which are added to the scores, and whose
            lowest number masks a key; or `Segments` of packed rows. None masks nothing.
        causal: a query attends only to itself and earlier tokens.
    """
    if isinstance(attention_mask, Segments):
        return AttentionSpec(segment_ids=attention_mask, causal=causal, scale=1.0)
    if attention_mask is None or attention_mask.dim() == 2:
        padding = None if attention_mask is None else attention_mask != 0
        return AttentionSpec(key_padding_mask=padding, causal=causal, scale=1.0)
    if not attention_mask.is_floating_point():
        mask = (attention_mask[:, None] if attention_mask.dim() == 3 else attention_mask) != 0
        return AttentionSpec(mask=mask, scale=1.0)
    if attention_mask.dim() != 4:
        raise ValueError(
            f"attention_mask is {attention_mask.dtype} {list(attention_mask.shape)}: one that is added to scores has "
            "4 dimensions, [batch, heads or 1, queries, keys], and one of 0 and 1 must be bool or integer."
        )
    allowed = attention_mask > torch.finfo(attention_mask.dtype).min / 2
    return AttentionSpec(mask=allowed, bias=attention_mask.masked_fill(~allowed, 0.0), scale=1.0)


def with_cache(
    spec: AttentionSpec, query_length: int, key_length: int, offset: int | Tensor, device: torch.device
) -> AttentionSpec:
    """Extend a decoder's attention settings to cached tokens; unchanged if nothing is cached or they have a mask.

    Args:
        spec: settings for the new tokens.
        query_length: number of new tokens.
        key_length: number of new and cached tokens.
        offset: number of cached tokens.
    """
    if spec.mask is not None or (isinstance(offset, int) and offset == 0 and query_length == key_length):
        return spec
    queries = torch.arange(query_length, device=device) + offset
    mask = (torch.arange(key_length, device=device) <= queries[:, None])[None, None]
    padding = spec.key_padding_mask
    if padding is not None:  # positions of a static cache that are not filled yet are in the future
        mask = mask & nn.functional.pad(padding, (0, key_length - padding.shape[1]), value=True)[:, None, None]
    return AttentionSpec(mask=mask, scale=spec.scale)


def with_window(
    spec: AttentionSpec,
    window: tuple[int, int],
    lengths: tuple[int, int],
    offset: int | Tensor,
    device: torch.device,
) -> AttentionSpec:
    """Restrict attention settings to a local window: a query attends only to nearby tokens.

    Args:
        window: number of tokens before and after a query that it attends to.
        lengths: number of queries and of keys.
        offset: number of cached tokens, which come before the queries.
    """
    before, after = window
    distance = torch.arange(lengths[0], device=device)[:, None] + offset - torch.arange(lengths[1], device=device)
    near = (distance <= before) & (distance >= -after)
    return spec._replace(mask=near[None, None] if spec.mask is None else spec.mask & near)

"""Positional encodings of BERT, created by the name in its configuration (`position_embedding_type`)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lm_experiments_tools.attention.kernels.bias import T5Bias, diagonals
from lm_experiments_tools.attention.layouts import LocalSlidingWindowSparsityConfig, SparsityConfig
from lm_experiments_tools.attention.positions import NoPosition, PositionScheme, RotaryPosition, named_position
from modeling_bert.configuration_bert import BertConfig


def shared_position(config: BertConfig) -> PositionScheme:
    """Create the positional encoding that all layers of BERT share.

    It is `NoPosition` if the configuration says "none", "absolute" (in the embeddings) or relative keys (in each
    layer).
    """
    return named_position(
        config,
        not config.is_decoder,
        head_dim=config.hidden_size // config.num_attention_heads,
        max_distance=config.relative_last_bucket_distance,
        rotary_base=config.rotary_base,
    )


def local_position(config: BertConfig) -> PositionScheme | None:
    """Create the positional encoding of layers with sliding-window attention; None if there are no such layers."""
    if config.local_attention is None:
        return None
    base = config.rotary_base if config.local_rotary_base is None else config.local_rotary_base
    if config.position_embedding_type != "rotary":
        return NoPosition()
    return RotaryPosition(config.hidden_size // config.num_attention_heads, config.rotary_dim, base)


def window_bias(config: BertConfig, is_checked: bool, like: Tensor) -> T5Bias:
    """Sliding window of attention as a bias to add to scores.

    The bias is 0 up to a distance of `local_attention` // 2 tokens, and -inf beyond it.

    Args:
        is_checked: repeat the bias for each head, which block-sparse backends require.
        like: tensor with the device and dtype of the bias.
    """
    reach = config.local_attention // 2
    heads = config.num_attention_heads if is_checked else 1
    num_buckets = 4 * (reach + 1)  # half for each direction; half of those hold one distance each: 0 to reach
    column = torch.full((num_buckets // 2,), -torch.inf, dtype=like.dtype, device=like.device)
    column[: reach + 1] = 0.0
    return T5Bias(column.repeat(2)[:, None].repeat(1, heads), True, num_buckets, reach + 2)


def window_layout(config: BertConfig) -> SparsityConfig | None:
    """Block-sparse layout whose blocks contain every sliding window; None without sliding-window layers."""
    if config.local_attention is None:
        return None
    reach = config.local_attention // 2
    block = min(64, max(16, 1 << (reach - 1).bit_length()))
    return LocalSlidingWindowSparsityConfig(
        config.num_attention_heads,
        block,
        num_sliding_window_blocks=2 * -(-reach // block) + 1,
        attention="bidirectional",
    )


def content_position(config: BertConfig) -> RelativeKeyPosition | None:
    """Create one layer's relative positions for "relative_key" and "relative_key_query"; None for other encodings."""
    schemes = {"relative_key": RelativeKeyPosition, "relative_key_query": RelativeKeyQueryPosition}
    scheme = schemes.get(config.position_embedding_type)
    head_dim = config.hidden_size // config.num_attention_heads
    return scheme and scheme(config.max_position_embeddings, head_dim)


class RelativeKeyPosition(nn.Module):
    """Relative positions in keys: each query is also multiplied by an embedding of its distance to the key.

    It is equation 5 of Shaw et al. 2018, arXiv 1803.02155. The product is a bias of the scores. `weight` [2 *
    max_length - 1, head_dim] is named and ordered as in transformers 4: the embedding of a distance query position -
    key position is in row distance + max_length - 1.
    """

    def __init__(self, max_length: int, head_dim: int) -> None:
        super().__init__()
        self.max_length = max_length
        self.weight = nn.Parameter(torch.empty(2 * max_length - 1, head_dim))
        nn.init.normal_(self.weight)

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        """Compute the bias to add to scaled scores, [batch, heads, length, length].

        Args:
            q, k: queries and keys, [batch, heads, length, head_dim].
        """
        return self.by_query(q) * q.shape[-1] ** -0.5

    def by_query(self, q: Tensor) -> Tensor:
        """Multiply each query i by the embedding of its distance i - j to key j: [batch, heads, length, length]."""
        return diagonals(q @ self._embeddings(q.shape[2]).flip(0).t(), q.shape[2])

    def _embeddings(self, length: int) -> Tensor:
        """Vectors of distances -(L - 1)..L - 1, [2 L - 1, d]."""
        return self.weight[self.max_length - length : self.max_length + length - 1]


class RelativeKeyQueryPosition(RelativeKeyPosition):
    """Relative positions in keys and queries: both are multiplied by an embedding of the distance between them.

    It is method 4 of Huang et al. 2020, arXiv 2009.13658.
    """

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        return (self.by_query(q) + self.by_key(k)) * q.shape[-1] ** -0.5

    def by_key(self, k: Tensor) -> Tensor:
        """Multiply each key j by the embedding of its distance i - j to query i: [batch, heads, length, length]."""
        return diagonals(k @ self._embeddings(k.shape[2]).t(), k.shape[2]).transpose(-1, -2)

"""Positional encodings of attention layers. They rotate queries and keys, or add a bias to the scores.

A model calls two methods of an encoding: `rotate`, before keys enter the cache, and `bias`. A user-defined encoding
overrides one of the two.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from lm_experiments_tools.attention.kernels.bias import AlibiBias, DistanceBias, T5Bias, alibi_slopes, t5_bucket
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.names import resolve_configured

Device = torch.device | str | None


class PositionScheme(nn.Module):
    """Base class of positional encodings; by itself it encodes nothing. Subclasses override `rotate` or `bias`."""

    def rotate(self, q: Tensor, k: Tensor, offset: int | Tensor = 0) -> tuple[Tensor, Tensor]:
        """Rotate queries and keys by their positions; the base class returns them unchanged.

        Args:
            q, k: [batch, heads, length, head_dim], tokens at positions offset, offset + 1, ...
            offset: position of the first token, which is the number of cached tokens. For packed rows, the difference
                between each token's position and its index, [batch, 1, length].
        """
        return q, k

    def bias(
        self, query_length: int, key_length: int, offset: int | Tensor = 0, device: Device = None
    ) -> DistanceBias | Tensor | None:
        """Compute the position bias to add to attention scores; None for encodings without a bias.

        Args:
            offset: number of cached tokens, which come before the queries.

        Returns:
            A `DistanceBias` if queries and keys are the same tokens, otherwise a matrix [1, heads, query_length,
            key_length].
        """
        return None


def rotates(position: PositionScheme) -> bool:
    """True if an encoding may change queries and keys."""
    return type(position).rotate is not PositionScheme.rotate


class NoPosition(PositionScheme):
    """No positional encoding. A decoder still learns the order from its causal mask."""


class RotaryPosition(PositionScheme):
    """Rotary position embedding (Su et al. 2021, arXiv 2104.09864): pairs of features rotate by a token's position.

    Features i and i + rotary_dim / 2 are a pair, as in transformers' Llama and GPT-NeoX (`rotate_half`). GPT-J and the
    paper pair neighbours instead.

    Args:
        rotary_dim: number of rotated features, the first ones (GPT-NeoX's partial rotary); all if None.
        base: sets the rotation's speed: the slowest pair rotates once in about 2 pi * base tokens. Raises UserError.
    """

    def __init__(self, head_dim: int, rotary_dim: int | None = None, base: float = 10000.0) -> None:
        super().__init__()
        self.rotary_dim = head_dim if rotary_dim is None else rotary_dim
        self.base = base
        if not 2 <= self.rotary_dim <= head_dim or self.rotary_dim % 2:
            raise UserError(f"rotary_dim={self.rotary_dim} must be an even number from 2 to head_dim={head_dim}.")
        if not base > 1:
            raise UserError(f"rotary_base={base} must be above 1 (10000 is usual).")

    def rotate(self, q: Tensor, k: Tensor, offset: int | Tensor = 0) -> tuple[Tensor, Tensor]:
        exact = torch.promote_types(q.dtype, torch.float32)
        pairs = torch.arange(0, self.rotary_dim, 2, device=q.device, dtype=exact)
        positions = torch.arange(q.shape[2], device=q.device) + offset
        angles = positions[..., None] * self.base ** (-pairs / self.rotary_dim)  # [(batch, 1,) length, rotary_dim / 2]
        return self._rotated(q, angles.cos(), angles.sin()), self._rotated(k, angles.cos(), angles.sin())

    def _rotated(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first, second, rest = x.tensor_split((self.rotary_dim // 2, self.rotary_dim), dim=-1)
        rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
        return torch.cat([rotated.to(x.dtype), rest], dim=-1)


class AlibiPosition(PositionScheme):
    """Attention with linear biases (Press et al. 2022, arXiv 2108.12409): -slope * |distance|, with fixed slopes."""

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads

    def bias(
        self, query_length: int, key_length: int, offset: int | Tensor = 0, device: Device = None
    ) -> DistanceBias | Tensor:
        slopes = _slopes(self.num_heads, torch.get_default_device() if device is None else torch.device(device))
        if _is_self_attention(query_length, key_length, offset):
            return AlibiBias(slopes)
        distance = _distances(query_length, key_length, offset, device).abs()
        return (-slopes[:, None, None] * distance)[None]


class RelativeBiasPosition(PositionScheme):
    """T5's relative attention bias: a learned number per head and bucket of distances, added to scores.

    It is described in Raffel et al. 2020, arXiv 1910.10683, section 2.1. Its parameter is `weight` [num_buckets,
    num_heads], as in transformers' state dicts; the arguments are those of `T5Bias`. Raises UserError.
    """

    def __init__(self, num_buckets: int, max_distance: int, num_heads: int, bidirectional: bool) -> None:
        super().__init__()
        self.num_buckets, self.max_distance, self.bidirectional = num_buckets, max_distance, bidirectional
        self.weight = nn.Parameter(torch.empty(num_buckets, num_heads))
        nn.init.normal_(self.weight)
        T5Bias(self.weight, bidirectional, num_buckets, max_distance)  # checks the arguments

    def bias(
        self, query_length: int, key_length: int, offset: int | Tensor = 0, device: Device = None
    ) -> DistanceBias | Tensor:
        if _is_self_attention(query_length, key_length, offset):
            # A copy, because FSDP frees the parameter before the next layer.
            return T5Bias(self.weight.clone(), self.bidirectional, self.num_buckets, self.max_distance)
        distances = _distances(query_length, key_length, offset, device)
        buckets = t5_bucket(distances, self.bidirectional, self.num_buckets, self.max_distance)
        return nn.functional.embedding(buckets, self.weight).permute(2, 0, 1)[None]


def named_position(
    config: Any, bidirectional: bool, *, head_dim: int, max_distance: int, rotary_base: float
) -> PositionScheme:
    """Create the positional encoding that a model configuration names in `position_embedding_type`. Raises UserError.

    The names are "rotary", "relative_attention_bias", "alibi" and `module:Class` of a user's own encoding. All other
    names give `NoPosition`.
    """
    name, num_heads = config.position_embedding_type, config.num_attention_heads
    if ":" in name:
        cls = resolve_configured(name, PositionScheme, f"position_embedding_type={name!r}")
        return cls(config, bidirectional)
    if name == "rotary":
        return RotaryPosition(head_dim, config.rotary_dim, rotary_base)
    if name == "relative_attention_bias":
        return RelativeBiasPosition(config.relative_attention_num_buckets, max_distance, num_heads, bidirectional)
    return AlibiPosition(num_heads) if name == "alibi" else NoPosition()


def _slopes(num_heads: int, device: torch.device) -> Tensor:
    """Slopes, cached by device; FakeTensors of an export are not cached."""
    return (alibi_slopes if torch.compiler.is_exporting() else _cached_slopes)(num_heads, device)


@lru_cache(maxsize=64)
@torch.inference_mode(False)  # cached for training too
def _cached_slopes(num_heads: int, device: torch.device) -> Tensor:
    return alibi_slopes(num_heads, device)


def _is_self_attention(query_length: int, key_length: int, offset: int | Tensor) -> bool:
    return isinstance(offset, int) and offset == 0 and query_length == key_length


def _distances(query_length: int, key_length: int, offset: int | Tensor, device: Device) -> Tensor:
    """Key position - query position, int64 [query_length, key_length]."""
    queries = torch.arange(query_length, device=device) + offset
    return torch.arange(key_length, device=device) - queries[:, None]

"""Attention as its definition says, dense and in float64: what every other backend is compared with."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lm_experiments_tools.attention.kernels.bias import DistanceBias
from lm_experiments_tools.attention.kernels.plan import Layout, SparsityConfig, resolve_layout
from lm_experiments_tools.attention.kernels.request import Request, Segments, check


def attend_mask(
    batch: int,
    num_heads: int,
    query_length: int,
    key_length: int,
    layout: SparsityConfig | Layout | Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    segment_ids: Segments | None = None,
    causal: bool = False,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Which keys each query may attend to: bool, broadcastable to [batch, num_heads, query_length, key_length].

    Args are those of `block_sparse_attention`.
    """
    mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)
    if layout is not None:
        resolved = resolve_layout(layout, num_heads, query_length, key_length)
        blocks = resolved.blocks.to(device)
        tokens = blocks.repeat_interleave(resolved.block, 1).repeat_interleave(resolved.block, 2)
        mask = tokens[None, :, :query_length, :key_length]
    if causal:
        mask = mask & torch.ones(query_length, key_length, dtype=torch.bool, device=device).tril()
    if key_padding_mask is not None:
        mask = mask & key_padding_mask[:, None, None, :]
    if segment_ids is not None:
        queries, keys = segment_ids if isinstance(segment_ids, tuple) else (segment_ids, segment_ids)
        mask = mask & (queries[:, None, :, None] == keys[:, None, None, :])
    return mask


def attention_probabilities(
    q: Tensor,
    k: Tensor,
    layout: SparsityConfig | Layout | Tensor | None = None,
    bias: DistanceBias | Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    segment_ids: Segments | None = None,
    causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """The attention map: softmax of scores, float64 [batch, heads, query_length, key_length].

    Args are those of `block_sparse_attention`. Rows of queries that may attend to nothing are zero.

    Raises:
        UserError: arguments that do not fit each other.
    """
    return _probabilities(check(q, k, k, layout, bias, key_padding_mask, segment_ids, causal, scale, 0.0))


def _probabilities(request: Request) -> Tensor:
    q, k, bias = request.q, request.k, request.bias
    scores = torch.einsum("bhqd,bhkd->bhqk", q.double(), k.double()) * request.scale
    if isinstance(bias, Tensor):
        scores = scores + bias.double()
    elif bias is not None:
        scores = scores + _matrix(bias, *request.scores_shape[2:])
    mask = attend_mask(
        *request.scores_shape,
        *(request.layout, request.key_padding_mask, request.segment_ids, request.causal, q.device),
    )
    mask = mask & ~scores.isneginf()
    # Finite, so that a row of nothing else has finite gradients; those of masked places are zero either way.
    probabilities = scores.masked_fill(~mask, torch.finfo(torch.float64).min / 2).softmax(-1)
    return probabilities.masked_fill(~mask, 0.0)


def _matrix(bias: DistanceBias, query_length: int, key_length: int) -> Tensor:
    """The bias looked up element by element, the plain way: [heads, query_length, key_length]."""
    table = bias.table(max(query_length, key_length)).double()
    saturation = table.shape[1] // 2
    positions = torch.arange(max(query_length, key_length), device=table.device)
    distances = positions[None, :key_length] - positions[:query_length, None]
    return table[:, distances.clamp(-saturation, saturation) + saturation]


def reference_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: SparsityConfig | Layout | Tensor | None = None,
    bias: DistanceBias | Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    segment_ids: Segments | None = None,
    causal: bool = False,
    scale: float | None = None,
    dropout_mask: Tensor | None = None,
) -> Tensor:
    """softmax(q k^T * scale + bias) v over the keys allowed, computed in float64, gradients by autograd.

    Args:
        q, k, v, layout, bias, key_padding_mask, segment_ids, causal, scale: as of `block_sparse_attention`.
        dropout_mask: what probabilities are multiplied with, [batch, heads, query_length, key_length]: 0 where dropped
            and 1 / (1 - p) where kept; None drops nothing.

    Returns:
        [batch, heads, query_length, v's head_dim] in the dtype of q.

    Raises:
        UserError: arguments that do not fit each other.
    """
    request = check(q, k, v, layout, bias, key_padding_mask, segment_ids, causal, scale, 0.0)
    return _attend(request, dropout_mask)


def _attend(request: Request, dropout_mask: Tensor | None) -> Tensor:
    probabilities = _probabilities(request)
    if dropout_mask is not None:
        probabilities = probabilities * dropout_mask
    return torch.einsum("bhqk,bhkd->bhqd", probabilities, request.v.double()).to(request.q.dtype)


def refusal(request: Request) -> str | None:
    """Why this backend cannot serve a request; None if it can."""
    return None


def cost(request: Request) -> tuple[float, int]:
    """(fraction of the score matrix computed, bytes beside inputs, output and their gradients)."""
    return 1.0, 4 * 8 * math.prod(request.scores_shape)


def attend(request: Request, seed: int) -> Tensor:
    """`block_sparse_attention` of a checked request."""
    dropout_mask = None
    if request.dropout_p:
        generator = torch.Generator(request.q.device).manual_seed(seed)
        drawn = torch.rand(request.scores_shape, generator=generator, dtype=torch.float64, device=request.q.device)
        dropout_mask = (drawn >= request.dropout_p) / (1 - request.dropout_p)
    return _attend(request, dropout_mask)

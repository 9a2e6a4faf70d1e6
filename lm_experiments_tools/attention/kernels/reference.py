"""Attention as its definition says, dense and in float64: what every other backend is compared with."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lm_experiments_tools.attention.kernels.bias import Bias, DistanceBias
from lm_experiments_tools.attention.kernels.plan import AnyLayout
from lm_experiments_tools.attention.kernels.request import Request, Segments, check


def allowed_keys(request: Request) -> Tensor:
    """Keys that each query may attend to: bool, broadcastable to [batch, heads, query_length, key_length]."""
    (_, _, query_length, key_length), device = request.scores_shape, request.q.device
    mask = request.layout.tokens(device)[..., :query_length, :key_length]
    if request.causal:
        mask = mask & torch.ones(query_length, key_length, dtype=torch.bool, device=device).tril()
    if request.key_padding_mask is not None:
        mask = mask & request.key_padding_mask[:, None, None, :]
    return mask if request.segment_ids is None else mask & request.same_segments


def attention_probabilities(
    q: Tensor,
    k: Tensor,
    layout: AnyLayout = None,
    bias: Bias | None = None,
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
    return _probabilities(check(Request(q, k, k, layout, bias, key_padding_mask, segment_ids, causal, scale)))


def _probabilities(request: Request) -> Tensor:
    q, k, bias = request.q, request.k, request.bias
    scores = torch.einsum("bhqd,bhkd->bhqk", q.double(), k.double()) * request.scale
    if isinstance(bias, Tensor):
        scores = scores + bias.double()
    elif bias is not None:
        scores = scores + _matrix(bias, *request.scores_shape[2:])
    mask = allowed_keys(request) & ~scores.isneginf()
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


def refusal(request: Request) -> str | None:
    """Why this backend cannot serve a request; None if it can."""
    return None


def cost(request: Request) -> tuple[float, int]:
    """(fraction of the score matrix computed, bytes beside inputs, output and their gradients)."""
    return 1.0, 4 * 8 * math.prod(request.scores_shape)


def attend(request: Request, seed: int) -> Tensor:
    """`block_sparse_attention` of a checked request, gradients by autograd."""
    weights = _probabilities(request)
    if request.dropout_p:
        generator = torch.Generator(request.q.device).manual_seed(seed)
        drawn = torch.rand(weights.shape, generator=generator, dtype=torch.float64, device=request.q.device)
        weights = weights * ((drawn >= request.dropout_p) / (1 - request.dropout_p))
    return torch.einsum("bhqk,bhkd->bhqd", weights, request.v.double()).to(request.q.dtype)

"""Attention as its definition says, dense and in float64: what every other backend is compared with."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lm_experiments_tools.attention.kernels.bias import Bias, DistanceBias
from lm_experiments_tools.attention.kernels.plan import AnyLayout
from lm_experiments_tools.attention.kernels.spec import AttentionInputs, AttentionSpec, Segments, validate


def _allowed(inputs: AttentionInputs) -> Tensor:
    """Keys that each query may attend to, by code of its own: other backends are compared with this one."""
    (_, _, query_length, key_length), device, spec = inputs.scores_shape, inputs.q.device, inputs.spec
    mask = spec.layout.tokens(device)[..., :query_length, :key_length]
    if spec.mask is not None:
        mask = mask & spec.mask
    if spec.causal:
        mask = mask & torch.ones(query_length, key_length, dtype=torch.bool, device=device).tril()
    if spec.key_padding_mask is not None:
        mask = mask & spec.key_padding_mask[:, None, None, :]
    if spec.segment_ids is not None:
        queries, keys = spec.segment_ids
        mask = mask & (queries[:, None, :, None] == keys[:, None, None, :])
    return mask


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
    spec = AttentionSpec(None, key_padding_mask, segment_ids, bias, layout, causal, scale)
    return _probabilities(validate(AttentionInputs(q, k, k, spec)))


def _probabilities(inputs: AttentionInputs) -> Tensor:
    q, k, bias = inputs.q, inputs.k, inputs.spec.bias
    scores = torch.einsum("bhqd,bhkd->bhqk", q.double(), k.double()) * inputs.spec.scale
    if isinstance(bias, Tensor):
        scores = scores + bias.double()
    elif bias is not None:
        scores = scores + _matrix(bias, *inputs.scores_shape[2:])
    mask = _allowed(inputs) & ~scores.isneginf()
    # Finite, so that a row of nothing else has finite gradients; those of masked positions are zero either way.
    probabilities = scores.masked_fill(~mask, torch.finfo(torch.float64).min / 2).softmax(-1)
    return probabilities.masked_fill(~mask, 0.0)


def _matrix(bias: DistanceBias, query_length: int, key_length: int) -> Tensor:
    """The bias looked up element by element, the plain way: [heads, query_length, key_length]."""
    table = bias.table(max(query_length, key_length)).double()
    saturation = table.shape[1] // 2
    positions = torch.arange(max(query_length, key_length), device=table.device)
    distances = positions[None, :key_length] - positions[:query_length, None]
    return table[:, distances.clamp(-saturation, saturation) + saturation]


def refusal(inputs: AttentionInputs) -> str | None:
    """Why this backend cannot compute these inputs; None if it can."""
    return None


def cost(inputs: AttentionInputs) -> tuple[float, int]:
    """(fraction of the score matrix computed, bytes in addition to inputs, output and their gradients)."""
    return 1.0, 4 * 8 * math.prod(inputs.scores_shape)


def attend(inputs: AttentionInputs, seed: int) -> Tensor:
    """Attention output, gradients by autograd."""
    weights = _probabilities(inputs)
    if inputs.spec.dropout_p:
        generator = torch.Generator(inputs.q.device).manual_seed(seed)
        drawn = torch.rand(weights.shape, generator=generator, dtype=torch.float64, device=inputs.q.device)
        weights = weights * ((drawn >= inputs.spec.dropout_p) / (1 - inputs.spec.dropout_p))
    return torch.einsum("bhqk,bhkd->bhqd", weights, inputs.v.double()).to(inputs.q.dtype)

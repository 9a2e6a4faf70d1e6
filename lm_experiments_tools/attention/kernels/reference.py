"""The attention backend "reference": dense and in float64, written as the definition reads.

Tests compare the other backends with it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lm_experiments_tools.attention.kernels.bias import Bias, dense_bias
from lm_experiments_tools.attention.kernels.layout_cache import AnyLayout
from lm_experiments_tools.attention.kernels.spec import AttentionInputs, AttentionSpec, Segments, validate


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
    """Compute the attention weights (after softmax) in float64, [batch, heads, query_length, key_length].

    The arguments are those of `block_sparse_attention`. Queries without an allowed key have rows of zeros.

    Raises:
        UserError: arguments do not fit each other.
    """
    spec = AttentionSpec(None, key_padding_mask, segment_ids, bias, layout, causal, scale)
    return _probabilities(validate(AttentionInputs(q, k, k, spec)))


def _probabilities(inputs: AttentionInputs) -> Tensor:
    q, k, bias = inputs.q, inputs.k, inputs.spec.bias
    scores = torch.einsum("bhqd,bhkd->bhqk", q.double(), k.double()) * inputs.spec.scale
    if inputs.spec.softcap is not None:
        scores = inputs.spec.softcap * (scores / inputs.spec.softcap).tanh()
    if bias is not None:
        scores = scores + (bias if isinstance(bias, Tensor) else dense_bias(bias, *inputs.scores_shape[2:])).double()
    allowed, finite = inputs.allowed(), ~scores.isneginf()
    mask = finite if allowed is None else finite & allowed
    # The lowest number is finite, so that a row without keys has finite gradients.
    probabilities = scores.masked_fill(~mask, torch.finfo(torch.float64).min / 2).softmax(-1)
    return probabilities.masked_fill(~mask, 0.0)


def attend(inputs: AttentionInputs, seed: int) -> Tensor:
    """Compute attention by its definition in float64; autograd gives the gradients.

    Args:
        seed: seed of dropout, unused if there is none.
    """
    weights = _probabilities(inputs)
    if inputs.spec.dropout_p:
        generator = torch.Generator(inputs.q.device).manual_seed(seed)
        drawn = torch.rand(weights.shape, generator=generator, dtype=torch.float64, device=inputs.q.device)
        weights = weights * ((drawn >= inputs.spec.dropout_p) / (1 - inputs.spec.dropout_p))
    return torch.einsum("bhqk,bhkd->bhqd", weights, inputs.v.double()).to(inputs.q.dtype)

"""Attention weights in float64, written as the definition reads; tests compare the backends with them."""

from __future__ import annotations

import torch
from torch import Tensor

from lm_experiments_tools.attention.kernels.bias import Bias, dense_bias
from lm_experiments_tools.attention.kernels.call import AttentionInputs, AttentionSpec, validate
from lm_experiments_tools.attention.kernels.layout_cache import AnyLayout
from lm_experiments_tools.attention.segments import Segments


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
    """Weights after softmax, [batch, heads, query_length, key_length]; zeros for queries without an allowed key.

    The arguments are those of `block_sparse_attention`.
    """
    spec = AttentionSpec(None, key_padding_mask, segment_ids, bias, layout, causal, scale)
    inputs = validate(AttentionInputs(q, k, k, spec))
    scores = torch.einsum("bhqd,bhkd->bhqk", q.double(), k.double()) * inputs.spec.scale
    if bias is not None:
        scores = scores + (bias if isinstance(bias, Tensor) else dense_bias(bias, *inputs.scores_shape[2:])).double()
    allowed, finite = inputs.allowed(), ~scores.isneginf()
    mask = finite if allowed is None else finite & allowed
    # The lowest number is finite, so that a row without keys has finite gradients.
    probabilities = scores.masked_fill(~mask, torch.finfo(torch.float64).min / 2).softmax(-1)
    return probabilities.masked_fill(~mask, 0.0)

"""The attention backend "eager": plain matrix products with softmax in float32.

It is the one backend that can return attention weights. Its variant for dense training on a CPU is faster there than
PyTorch's own attention.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lm_experiments_tools.attention.kernels.bias import dense_bias
from lm_experiments_tools.attention.kernels.call import AttentionInputs, limit_float16
from lm_experiments_tools.modules.fast_step import dropped

DRAWS_FROM_DEVICE = True  # dropout ignores the seed


def attend(inputs: AttentionInputs, seed: Tensor | None = None) -> Tensor:
    """Compute attention by plain matrix products; dropout ignores the seed."""
    weights, empty = _weights(inputs)
    output = weights @ inputs.v
    return output if empty is None else output.masked_fill(empty, 0.0)


def attend_with_weights(inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
    """Compute attention; returns the output, and the weights after dropout [batch, heads, queries, keys]."""
    weights, empty = _weights(inputs)
    weights = weights if empty is None else weights.masked_fill(empty, 0.0)
    return weights @ inputs.v, weights


def has_fast(inputs: AttentionInputs) -> bool:
    """True if `attend_fast` can compute these inputs: dense on a CPU, masked by padding and bias only."""
    spec = inputs.spec
    masks = spec.mask, spec.segment_ids, spec.layout
    return inputs.q.is_cpu and inputs.q.dtype != torch.float16 and not spec.causal and all(x is None for x in masks)


def attend_fast(inputs: AttentionInputs) -> Tensor:
    """Compute attention for training on a CPU; softmax reads and writes the dtype of q, and computes in float32.

    Queries without an allowed key give zeros; a bias must not be -inf for all keys of a query.
    """
    q, k, v, spec = inputs
    scale = q.shape[-1] ** -0.5 if spec.scale is None else spec.scale
    scores = (q if scale == 1.0 else q * scale) @ k.transpose(-1, -2)
    bias, mask = spec.bias, spec.key_padding_mask
    if bias is not None:
        matrix = bias if isinstance(bias, Tensor) else dense_bias(bias, q.shape[2], k.shape[2])
        scores = scores + matrix.to(scores.dtype)
    if mask is not None:
        scores = scores.masked_fill(~mask[:, None, None], torch.finfo(scores.dtype).min)
    out = dropped(scores.softmax(-1), spec.dropout_p) @ v
    return out if mask is None else out.masked_fill(~mask.any(-1)[:, None, None, None], 0.0)


def _weights(inputs: AttentionInputs) -> tuple[Tensor, Tensor | None]:
    """Weights after dropout, and the rows without any key, which have uniform weights here."""
    q, k, _, spec = inputs
    bias, allowed = spec.bias, inputs.allowed()
    scale = q.shape[-1] ** -0.5 if spec.scale is None else spec.scale
    scores = limit_float16(q @ k.transpose(-1, -2) * scale)
    if spec.softcap is not None:
        scores = spec.softcap * (scores / spec.softcap).tanh()
    empty = None
    if bias is not None:
        matrix = bias if isinstance(bias, Tensor) else dense_bias(bias, q.shape[2], k.shape[2])
        if allowed is None:  # a matrix may be shared by the batch, which makes this cheaper than masking scores
            empty = matrix.detach().amax(-1, keepdim=True) == -torch.inf
            matrix = matrix.masked_fill(empty, 0.0)
        else:
            allowed = allowed & (matrix > -torch.inf)
        scores = limit_float16(scores + matrix)
    if allowed is not None:
        scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
        empty = ~allowed.any(-1, keepdim=True)
    weights = F.softmax(scores, dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(q.dtype)
    return F.dropout(weights, spec.dropout_p), empty

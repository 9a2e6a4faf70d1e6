"""The attention backend "products": matrix products for training on a CPU.

It is faster there than PyTorch's own attention.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lm_experiments_tools.attention.kernels.bias import dense_bias
from lm_experiments_tools.attention.kernels.spec import AttentionInputs
from lm_experiments_tools.modules.fast_step import dropped

DRAWS_FROM_DEVICE = True  # dropout ignores the seed


def refusal(inputs: AttentionInputs) -> str | None:
    """Reason why the backend "products" cannot compute these inputs; None if it can."""
    q, _, _, spec = inputs
    if not q.is_cpu or q.dtype == torch.float16:
        return "it is for CPUs, and not for float16"
    if spec.mask is not None or spec.segment_ids is not None or spec.causal or not inputs.is_dense:
        return "its only masks are key_padding_mask and the bias"
    return None


def attend(inputs: AttentionInputs, seed: int = 0) -> Tensor:
    """Compute attention by the backend "products". Queries without an allowed key give zeros.

    Softmax reads and writes the dtype of q, and computes in float32.

    Args:
        seed: ignored; dropout uses the default random generator.
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
    if mask is not None:
        out = out.masked_fill(~mask.any(-1)[:, None, None, None], 0.0)
    return out

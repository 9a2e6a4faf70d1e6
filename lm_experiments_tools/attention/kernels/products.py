"""Attention by matrix products, and dropout with fewer random bits, for training on a CPU.

Both are faster there than PyTorch's own.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from lm_experiments_tools.attention.kernels.bias import dense_bias
from lm_experiments_tools.attention.kernels.spec import AttentionInputs

DRAWS_FROM_DEVICE = True  # dropout ignores the seed


def refusal(inputs: AttentionInputs) -> str | None:
    """Why this backend cannot compute these inputs; None if it can."""
    q, _, _, spec = inputs
    if not q.is_cpu or q.dtype == torch.float16:
        return "it is for CPUs, and not for float16"
    if spec.mask is not None or spec.segment_ids is not None or spec.causal or not inputs.is_dense:
        return "its only masks are key_padding_mask and the bias"
    return None


def attend(inputs: AttentionInputs, seed: int = 0) -> Tensor:
    """Attention output; dropout draws from the default generator, not from `seed`.

    Softmax reads and writes the dtype of q, and computes in float32. A row without any key gives zeros.
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


_INTEGERS = {2: (torch.int16, 15), 4: (torch.int32, 31)}  # bytes of a value -> integers of that width, bits compared


def dropped(x: Tensor, probability: float) -> Tensor:
    """Dropout that draws 16 (bfloat16) or 32 random bits per value on a CPU, where torch draws 64.

    The probability is rounded to a multiple of 2^-15 (bfloat16) or 2^-31, and values are scaled accordingly.
    """
    if not x.is_cpu or x.element_size() not in _INTEGERS or torch.compiler.is_compiling() or not 0 < probability < 1:
        return F.dropout(x, probability)
    return _Masked.apply(x, *_random_mask(x, probability))


def _random_mask(x: Tensor, probability: float) -> tuple[Tensor, float]:
    """Bit mask for x in integers of its width, all ones where x survives; and the scale of what survives."""
    dtype, bits = _INTEGERS[x.element_size()]
    steps = 1 << bits
    surviving = min(max(round((1 - probability) * steps), 1), steps - 1)
    random = torch.empty(math.ceil(x.numel() * x.element_size() / 8), dtype=torch.int64).random_(-(2**63), None)
    mask = random.view(dtype)[: x.numel()].view(x.shape).bitwise_right_shift_(1)  # -steps / 2 .. steps / 2 - 1
    return mask.sub_(surviving - steps // 2).bitwise_right_shift_(bits), steps / surviving


class _Masked(torch.autograd.Function):
    """Product of x, masked by bits, with a number; differentiable to any order."""

    @staticmethod
    def setup_context(ctx: torch.autograd.function.FunctionCtx, inputs: tuple, output: Tensor) -> None:
        _, mask, ctx.scale = inputs
        ctx.save_for_backward(mask)

    @staticmethod
    def forward(x: Tensor, mask: Tensor, scale: float) -> Tensor:
        return (x.contiguous().view(mask.dtype) & mask).view(x.dtype).mul_(scale)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _Masked.apply(gradient, *ctx.saved_tensors, ctx.scale), None, None

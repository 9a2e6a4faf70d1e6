"""Shortcuts of a training step: `use_fast_step` of a model has its layers ask here.

In float32 the answers are those of the modules to rounding. Under autocast to bfloat16 the sum that layers add to is
kept in bfloat16, while norms and softmax compute in float32.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

_WORDS = {2: (torch.int16, 15), 4: (torch.int32, 31)}  # bytes of a value -> integers as wide, random bits looked at


def stream_dtype(x: Tensor) -> torch.dtype:
    """The dtype of the sum that layers add to: bfloat16 under autocast to it, else that of x."""
    kind = x.device.type
    if x.dtype == torch.float32 and torch.is_autocast_enabled(kind):
        return torch.bfloat16 if torch.get_autocast_dtype(kind) == torch.bfloat16 else x.dtype
    return x.dtype


def is_whole(parameter: Tensor) -> bool:
    """True if it may be read outside its module's forward: not sharded (FSDP2, DeepSpeed), not quantized."""
    return parameter.is_floating_point() and not hasattr(parameter, "to_local") and not hasattr(parameter, "ds_id")


def is_plain(module: nn.Module, cls: type[nn.Module]) -> bool:
    """True if calling the module does what its class does with a whole weight: no adapter, hook or own forward."""
    if type(module) is not cls:
        return False
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    is_own = not hooks and "forward" not in vars(module) and not _has_any_global_hook()
    return is_own and module.weight is not None and is_whole(module.weight)


def joined(x: Tensor, *linears: nn.Module) -> tuple[Tensor, ...]:
    """Products `linear(x)` of each, by one with all weights if they are plain: x and its gradient are made once."""
    biases = [getattr(linear, "bias", None) for linear in linears]
    if not all(is_plain(linear, nn.Linear) for linear in linears) or len({bias is None for bias in biases}) > 1:
        return tuple(linear(x) for linear in linears)
    weights = [linear.weight for linear in linears]
    kind = x.device.type
    if torch.is_autocast_enabled(kind) and x.dtype != torch.float64:
        weights = [weight.to(torch.get_autocast_dtype(kind)) for weight in weights]
    bias = None if biases[0] is None else torch.cat(biases)
    return F.linear(x, torch.cat(weights), bias).split([len(weight) for weight in weights], dim=-1)


def normed(norm: nn.Module, x: Tensor) -> Tensor:
    """`norm(x)` of a layer norm, computed in float32; of bfloat16 in bfloat16, which autocast would leave wide."""
    if x.dtype != torch.bfloat16 or not is_plain(norm, nn.LayerNorm):
        return norm(x)
    wide = x if x.is_cpu else x.float()  # the CPU's kernel does so itself
    return F.layer_norm(wide, norm.normalized_shape, norm.weight, norm.bias, norm.eps).to(x.dtype)


def dropped(x: Tensor, probability: float) -> Tensor:
    """Dropout. On a CPU with four or two random numbers from each 64 bits, where torch makes each of another 64.

    The probability is then a multiple of 2^-15 (of bfloat16) or 2^-31, and what is kept is divided by that one's rest.
    """
    if not x.is_cpu or x.element_size() not in _WORDS or torch.compiler.is_compiling() or not 0 < probability < 1:
        return F.dropout(x, probability)
    return _Masked.apply(x, *_random_mask(x, probability))


class Dropout(nn.Dropout):
    """torch's, or with `is_fast` `dropped`."""

    is_fast = False

    def forward(self, x: Tensor) -> Tensor:
        return dropped(x, self.p) if self.is_fast and self.training else super().forward(x)


def _random_mask(x: Tensor, probability: float) -> tuple[Tensor, float]:
    """Mask of x in integers as wide, all bits where x is kept, else none; and the factor of what is kept."""
    dtype, bits = _WORDS[x.element_size()]
    steps = 1 << bits
    kept = min(max(round((1 - probability) * steps), 1), steps - 1)
    random = torch.empty(math.ceil(x.numel() * x.element_size() / 8), dtype=torch.int64).random_(-(2**63), None)
    mask = random.view(dtype)[: x.numel()].view(x.shape).bitwise_right_shift_(1)  # -steps / 2 .. steps / 2 - 1
    return mask.sub_(kept - steps // 2).bitwise_right_shift_(bits), steps / kept


class _Masked(torch.autograd.Function):
    """Product of x, masked by bits, with a number; its gradient is the same of the gradient, to any order."""

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


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_padding_mask: Tensor | None,
    dropout_p: float,
    bias: Tensor | None = None,
) -> Tensor:
    """Unscaled attention [B, H, Q, d] by plain products, on a CPU quicker than its fused kernels, biased or not.

    Softmax reads and writes the dtype of q, and computes in float32. A row without any key gets zeros.

    Args:
        key_padding_mask: [B, K], False for padding.
        bias: added to scores, [1 or B, 1 or H, Q, K].
    """
    scores = q @ k.transpose(-1, -2)
    if bias is not None:
        scores = scores + bias.to(scores.dtype)
    if key_padding_mask is not None:
        scores = scores.masked_fill(~key_padding_mask[:, None, None], torch.finfo(scores.dtype).min)
    out = dropped(scores.softmax(-1), dropout_p) @ v
    if key_padding_mask is not None:
        out = out.masked_fill(~key_padding_mask.any(-1)[:, None, None, None], 0.0)
    return out

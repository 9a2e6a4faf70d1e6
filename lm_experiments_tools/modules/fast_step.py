"""Fused operations that make a training step faster; a model's method `use_fast_step` turns them on.

In float32, results equal those of the plain operations up to rounding. Under autocast to bfloat16, hidden states
between the layers are bfloat16, while norms and softmax compute in float32.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

_INTEGERS = {2: (torch.int16, 15), 4: (torch.int32, 31)}  # bytes of a value -> integers of that width, bits compared


def stream_dtype(x: Tensor) -> torch.dtype:
    """Dtype of the hidden states between layers: bfloat16 under autocast to bfloat16, otherwise that of x."""
    kind = x.device.type
    if x.dtype == torch.float32 and torch.is_autocast_enabled(kind):
        return torch.bfloat16 if torch.get_autocast_dtype(kind) == torch.bfloat16 else x.dtype
    return x.dtype


def is_whole(parameter: Tensor) -> bool:
    """True if a parameter is neither sharded (FSDP2, DeepSpeed) nor quantized."""
    return parameter.is_floating_point() and not hasattr(parameter, "to_local") and not hasattr(parameter, "ds_id")


def is_unwrapped(module: nn.Module, cls: type[nn.Module]) -> bool:
    """True if a module is of this class and computes only what the class does.

    It must have a full weight (not sharded, not quantized), and no adapter, hook or forward of its own.
    """
    if type(module) is not cls or "forward" in vars(module):
        return False
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    return not hooks and module.weight is not None and is_whole(module.weight)


def is_plain(module: nn.Module, cls: type[nn.Module]) -> bool:
    """True if a fused operation may replace a module: it passes `is_unwrapped`, and torch has no global module hooks.

    A fused operation would skip such hooks.
    """
    return is_unwrapped(module, cls) and not _has_any_global_hook()


def joined(x: Tensor, *linears: nn.Module) -> tuple[Tensor, ...]:
    """Compute the outputs of several linear layers on x, by one matrix product if all are plain (`is_plain`)."""
    product = joint_product(x, *linears)
    if product is None:
        return tuple(linear(x) for linear in linears)
    return product.split([len(linear.weight) for linear in linears], dim=-1)


def joint_product(x: Tensor, *linears: nn.Module) -> Tensor | None:
    """Outputs of several linear layers on x side by side, [..., features of all]; None unless all are plain."""
    biases = [getattr(linear, "bias", None) for linear in linears]
    if not all(is_plain(linear, nn.Linear) for linear in linears) or len({bias is None for bias in biases}) > 1:
        return None
    weights = [linear.weight for linear in linears]
    kind = x.device.type
    if torch.is_autocast_enabled(kind) and x.dtype != torch.float64:
        weights = [weight.to(torch.get_autocast_dtype(kind)) for weight in weights]
    bias = None if biases[0] is None else torch.cat(biases)
    return F.linear(x, torch.cat(weights), bias)


def normed(norm: nn.Module, x: Tensor) -> Tensor:
    """Apply a layer norm or RMSNorm in float32. The output has the dtype of x, also under autocast."""
    if x.dtype != torch.bfloat16:
        return norm(x)
    if is_plain(norm, nn.RMSNorm):
        return F.rms_norm(x.float(), norm.normalized_shape, norm.weight, norm.eps).to(x.dtype)
    if not is_plain(norm, nn.LayerNorm):
        return norm(x)
    wide = x if x.is_cpu else x.float()  # the CPU's kernel computes in float32
    return F.layer_norm(wide, norm.normalized_shape, norm.weight, norm.bias, norm.eps).to(x.dtype)


class Dropout(nn.Dropout):
    """Dropout that can be faster on a CPU: with `is_fast` it draws fewer random bits (see `dropped`)."""

    is_fast = False

    def forward(self, x: Tensor) -> Tensor:
        return dropped(x, self.p) if self.is_fast and self.training else super().forward(x)


def dropped(x: Tensor, probability: float) -> Tensor:
    """Apply dropout with fewer random bits on a CPU: 16 (bfloat16) or 32 per value, where torch draws 64.

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

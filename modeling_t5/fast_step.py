"""The parts of T5's training step that `use_fast_step` changes; in float32 all compute what the plain ones do.

Under autocast to bfloat16 the sum that layers add to is kept in bfloat16, while norms and softmax compute in float32
and the position bias, with its gradient, stays in float32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from transformers.activations import NewGELUActivation

LOSS_CHUNK = 2048  # target tokens whose logits are held at once where nobody asks for logits


def stream_dtype(x: Tensor) -> torch.dtype:
    """The dtype of the sum that layers add to: bfloat16 under autocast to it, else that of x."""
    kind = x.device.type
    if x.dtype == torch.float32 and torch.is_autocast_enabled(kind):
        return torch.bfloat16 if torch.get_autocast_dtype(kind) == torch.bfloat16 else x.dtype
    return x.dtype


def is_whole(parameter: Tensor) -> bool:
    """True for a parameter that may be read outside its module's forward: neither sharded (FSDP2, DeepSpeed) nor
    quantized to integers."""
    return parameter.is_floating_point() and not hasattr(parameter, "to_local") and not hasattr(parameter, "ds_id")


def is_plain(module: nn.Module, cls: type[nn.Module]) -> bool:
    """True if calling the module does what its class does: no adapter, hook, or forward of its own."""
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    is_own = type(module) is cls and not hooks and "forward" not in vars(module)
    return is_own and not _has_any_global_hook() and is_whole(module.weight)


def joined(x: Tensor, *linears: nn.Module) -> tuple[Tensor, ...]:
    """`linear(x)` of each, by one product with all weights if they are plain: x and its gradient are made once."""
    if not all(is_plain(linear, nn.Linear) and linear.bias is None for linear in linears):
        return tuple(linear(x) for linear in linears)
    weights = [linear.weight for linear in linears]
    kind = x.device.type
    if torch.is_autocast_enabled(kind) and x.dtype != torch.float64:
        weights = [weight.to(torch.get_autocast_dtype(kind)) for weight in weights]
    return F.linear(x, torch.cat(weights)).split([len(weight) for weight in weights], dim=-1)


def activate(activation: nn.Module, x: Tensor) -> Tensor:
    """The activation; transformers' gelu_new, eight passes over memory, is the same formula as torch's in one."""
    return F.gelu(x, approximate="tanh") if type(activation) is NewGELUActivation else activation(x)


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """T5's norm, computed in float32 and returned in the dtype of x."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


def dense_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, key_padding_mask: Tensor | None, dropout_p: float
) -> Tensor:
    """Unscaled attention [B, H, Q, d] on a CPU, whose fused kernels have none for a trained bias and are slower.

    Softmax reads and writes the dtype of q, and computes in float32.
    """
    scores = q @ k.transpose(-1, -2)
    if bias is not None:
        scores = scores + bias.to(scores.dtype)
    if key_padding_mask is not None:
        scores = scores.masked_fill(~key_padding_mask[:, None, None], torch.finfo(scores.dtype).min)
    out = F.dropout(scores.softmax(-1), dropout_p) @ v
    if key_padding_mask is not None:  # a row of padding alone
        out = out.masked_fill(~key_padding_mask.any(-1)[:, None, None, None], 0.0)
    return out


def embed_both(first: nn.Embedding, second: nn.Embedding, ids: Tensor, others: Tensor) -> tuple[Tensor, Tensor] | None:
    """Rows of one table for two tensors of ids, with one gradient [vocabulary, features]; None if it is not one."""
    if first.weight is not second.weight or not all(is_plain(table, nn.Embedding) for table in (first, second)):
        return None
    if any(getattr(first, name) for name in ("padding_idx", "max_norm", "scale_grad_by_freq", "sparse")):
        return None
    rows = F.embedding(torch.cat([ids.flatten(), others.flatten()]), first.weight)
    made, more = rows.split([ids.numel(), others.numel()])
    made, more = made.unflatten(0, ids.shape), more.unflatten(0, others.shape)
    # Copies, as the first layer would be compiled anew for views.
    return made.to(stream_dtype(rows), copy=True), more.to(stream_dtype(rows), copy=True)

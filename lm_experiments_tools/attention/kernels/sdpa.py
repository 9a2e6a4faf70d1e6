"""The attention backend "sdpa": PyTorch's scaled_dot_product_attention, dense.

Layout, masks and bias are combined to one matrix, unless PyTorch needs none.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from lm_experiments_tools.attention.kernels.bias import dense_bias
from lm_experiments_tools.attention.kernels.call import AttentionInputs

DRAWS_FROM_DEVICE = True  # dropout ignores the seed


def needs_matrix(inputs: AttentionInputs) -> bool:
    """True if PyTorch's attention needs this call's masks or bias as one matrix in memory."""
    mask, key_padding_mask, segment_ids, bias, *_ = inputs.spec
    return not inputs.is_dense or any(x is not None for x in (mask, key_padding_mask, segment_ids, bias))


def attend(inputs: AttentionInputs, seed: Tensor | None = None) -> Tensor:
    """Compute attention by PyTorch's scaled_dot_product_attention; dropout ignores the seed."""
    q, k, v, spec = inputs
    # An operation on the smallest tensor takes a tenth of the time of a short call: avoid every one.
    mask, key_padding_mask, segment_ids, bias, layout, causal, scale, dropout_p, *_ = spec
    on_cpu, dtype = q.is_cpu, q.dtype
    device = "cpu" if on_cpu else q.device.type
    if torch.is_autocast_enabled(device) and dtype == k.dtype == v.dtype:
        with torch.autocast(device, enabled=False):
            return attend(inputs)
    if on_cpu and dtype.itemsize == 2 and _half_is_slow(inputs):
        q, k, v = q.float(), k.float(), v.float()
    if bias is not None:
        bias = bias if isinstance(bias, Tensor) else dense_bias(bias, q.shape[2], k.shape[2], q.dtype)
        bias = bias if bias.dtype == q.dtype else bias.to(q.dtype)
    opens_rows = not on_cpu or torch.compiler.is_compiling()
    is_full = key_padding_mask is None
    if not (is_full or opens_rows) and (causal or bias is not None):  # else its one row costs nothing
        is_full = bool(key_padding_mask.all())
    is_plain = is_full and mask is None and segment_ids is None and (layout is None or inputs.is_dense)
    if is_plain and not (causal and bias is not None):
        out = scaled_dot_product_attention(q, k, v, bias, dropout_p, causal, scale=scale)
    elif opens_rows:
        out = masked(q, k, v, bias, inputs.allowed(), scale, dropout_p)
    else:
        mask = inputs.allowed(ignores_padding=is_full)
        if bias is not None:  # a sum, because its gradient needs no computation
            mask = bias + torch.where(mask, 0.0, -torch.inf).to(q.dtype)
        out = scaled_dot_product_attention(q, k, v, mask, dropout_p, scale=scale)
    return out if out.dtype == dtype else out.to(dtype)


def masked(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, allowed: Tensor, scale: float | None, dropout_p: float
) -> Tensor:
    """Call PyTorch's attention with a mask so that queries without an allowed key give zeros and zero gradients.

    Args:
        bias: added to the scores; keys with a bias of -inf are masked too.
        allowed: bool, True where a query may attend to a key.
    """
    # PyTorch's CPU kernels give these zeros. GPU kernels and exported graphs do not, so such rows are unmasked first.
    if bias is not None:
        allowed = allowed & ~bias.isneginf()
    dead = ~allowed.any(-1, keepdim=True)
    mask = allowed | dead
    if bias is not None:
        mask = torch.where(allowed, bias.to(q.dtype), torch.where(dead, 0.0, -torch.inf).to(q.dtype))
    return scaled_dot_product_attention(q, k, v, mask, dropout_p, scale=scale).masked_fill(dead, 0.0)


def _half_is_slow(inputs: AttentionInputs) -> bool:
    """True if 16-bit floats are better computed in float32."""
    # PyTorch's fused backward pass takes three to six times as long where the CPU has no 16-bit instructions. Its
    # forward pass and the unfused loop of a trained bias do not.
    if "AVX512" in torch.backends.cpu.get_cpu_capability():
        return False
    return inputs.trains and not inputs.trains_bias

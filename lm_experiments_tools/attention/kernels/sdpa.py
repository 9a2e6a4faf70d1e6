"""Dense attention by PyTorch's scaled_dot_product_attention, with layout, masks and bias as one matrix."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from lm_experiments_tools.attention.kernels.bias import AlibiBias, Bias, T5Bias, dense_bias, wants_gradient
from lm_experiments_tools.attention.kernels.plan import cached
from lm_experiments_tools.attention.kernels.request import Request

_KEPT = 1 << 22  # bytes of a layout's or causal mask up to which it is kept for the next layer


def refusal(request: Request) -> str | None:
    """Why this backend cannot serve a request; None if it can."""
    return None


def needs_matrix(request: Request) -> bool:
    """True if a mask or bias matrix has to be written out."""
    masks = request.key_padding_mask, request.segment_ids, request.bias
    return not request.is_dense or any(mask is not None for mask in masks)


def matrix_shape(request: Request) -> tuple[int, int, int, int]:
    """Of the mask and bias matrix."""
    batch, num_heads, query_length, key_length = request.scores_shape
    by_batch = request.key_padding_mask is not None or request.segment_ids is not None
    by_head = request.layout.blocks.shape[0] > 1 or not isinstance(request.bias, Tensor | None)
    if isinstance(request.bias, Tensor):
        by_batch, by_head = by_batch or request.bias.shape[0] > 1, by_head or request.bias.shape[1] > 1
    return batch if by_batch else 1, num_heads if by_head else 1, query_length, key_length


def cost(request: Request) -> tuple[float, int]:
    """(fraction of the score matrix computed, bytes beside inputs, output and their gradients)."""
    batch, num_heads, query_length, key_length = request.scores_shape
    scores = query_length * key_length * request.compute_dtype.itemsize
    size = scores * matrix_shape(request)[0] * matrix_shape(request)[1] if needs_matrix(request) else 0
    if request.trains_bias:  # scores, probabilities and their gradients are kept whole
        size += 4 * batch * num_heads * scores
    return 1.0, size


def attend(request: Request, seed: int) -> Tensor:
    """`block_sparse_attention` of a checked request; dropout draws from the device's generator, not from `seed`."""
    allowed = None
    if not request.is_dense:
        allowed = _allowed_by_layout(request)
    if request.segment_ids is not None:
        allowed = request.same_segments if allowed is None else allowed & request.same_segments
    return attend_dense(request, allowed)


def attend_dense(request: Request, allowed: Tensor | None = None) -> Tensor:
    """The same whatever the layout and the segments, for keys `allowed`, bool broadcastable to the scores.

    Short calls take tens of microseconds, as long as ten operations on the smallest tensors: none is wasted here.
    """
    q, k, v, _, bias, key_padding_mask, _, causal, scale, dropout_p = request
    on_cpu, dtype = q.is_cpu, q.dtype
    device = "cpu" if on_cpu else q.device.type
    if torch.is_autocast_enabled(device):
        with torch.autocast(device, enabled=False):
            return attend_dense(request, allowed)
    if on_cpu and dtype.itemsize == 2 and _half_is_slow(q, k, v, bias):
        q, k, v = q.float(), k.float(), v.float()
    if bias is not None:
        may_block = not on_cpu and not isinstance(bias, T5Bias | AlibiBias)
        bias = bias if isinstance(bias, Tensor) else dense_bias(bias, q.shape[2], k.shape[2], q.dtype)
        bias = bias if bias.dtype == q.dtype else bias.to(q.dtype)
        if may_block:  # and leave a query without any key
            reached = bias != -torch.inf
            allowed = reached if allowed is None else allowed & reached
    if key_padding_mask is not None:
        alone = bias is None and allowed is None and not causal  # a mask of one row, which costs next to nothing
        if alone or not on_cpu or not key_padding_mask.all():  # looking would make a GPU wait
            keys = key_padding_mask.view(q.shape[0], 1, 1, -1)  # a third of the time of indexing by None
            allowed = keys if allowed is None else allowed & keys
    if causal and (allowed is not None or bias is not None):
        causal, past = False, _past(q.shape[2], k.shape[2], q.device)
        allowed = past if allowed is None else allowed & past
    if allowed is not None and not on_cpu:
        return masked(q, k, v, bias, allowed, scale, dropout_p).to(dtype)
    mask = bias if allowed is None else allowed
    if bias is not None and allowed is not None:  # added, because a sum has no gradient to compute
        mask = bias + torch.where(allowed, 0.0, -torch.inf).to(q.dtype)
    out = scaled_dot_product_attention(q, k, v, mask, dropout_p, causal, scale=scale)
    return out if q.dtype == dtype else out.to(dtype)


def masked(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, allowed: Tensor, scale: float | None, dropout_p: float
) -> Tensor:
    """PyTorch's attention to keys `allowed`, where `bias` is finite; queries without any give zeros, get no gradient.

    PyTorch's CPU kernels promise so much for queries without keys. Of the GPU's several kernels and of exported graphs
    it is not known, so here these rows are opened and then zeroed.
    """
    dead = ~allowed.any(-1, keepdim=True)
    mask = allowed | dead
    if bias is not None:
        mask = torch.where(allowed, bias.to(q.dtype), torch.where(dead, 0.0, -torch.inf).to(q.dtype))
    return scaled_dot_product_attention(q, k, v, mask, dropout_p, scale=scale).masked_fill(dead, 0.0)


def _half_is_slow(q: Tensor, k: Tensor, v: Tensor, bias: Bias | None) -> bool:
    """True if 16-bit floats are better computed in float32: PyTorch's fused backward pass takes three to six
    times as long where the CPU has no instructions for them. Its forward pass and the unfused loop of a trained bias
    do not."""
    if "AVX512" in torch.backends.cpu.get_cpu_capability() or not torch.is_grad_enabled():
        return False
    return (q.requires_grad or k.requires_grad or v.requires_grad) and not wants_gradient(bias)


def _allowed_by_layout(request: Request) -> Tensor:
    """Keys that the layout allows, bool [1, 1 or heads, query_length, key_length]; kept for all layers if short."""

    @torch.inference_mode(False)  # what is kept serves training too, whoever asks first
    def make() -> Tensor:
        return layout.tokens(request.q.device)  # one mask serves all lengths that fill the blocks

    layout, (query_length, key_length) = request.layout, request.scores_shape[2:]
    keeps = layout.blocks.numel() * layout.block**2 <= _KEPT
    mask = cached(layout, ("allowed", request.q.device), make) if keeps else make()
    return mask[..., :query_length, :key_length]


def _past(query_length: int, key_length: int, device: torch.device) -> Tensor:
    """Keys 0..i of query i, bool [query_length, key_length]."""
    make = _kept_past if query_length * key_length <= _KEPT else _kept_past.__wrapped__
    return make(query_length, key_length, device)


@lru_cache(maxsize=8)
@torch.inference_mode(False)
def _kept_past(query_length: int, key_length: int, device: torch.device) -> Tensor:
    return torch.ones(query_length, key_length, dtype=torch.bool, device=device).tril()

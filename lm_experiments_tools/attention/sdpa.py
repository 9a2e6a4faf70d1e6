"""Dense attention by PyTorch's scaled_dot_product_attention, with layout, masks and bias as one matrix."""

from __future__ import annotations

import torch
from torch import Tensor

from lm_experiments_tools.attention.bias import dense_bias
from lm_experiments_tools.attention.reference import attend_mask
from lm_experiments_tools.attention.request import Request


def refusal(request: Request) -> str | None:
    """Why this backend cannot serve a request; None if it can."""
    return None


def needs_matrix(request: Request) -> bool:
    """Whether a mask or bias matrix has to be written out."""
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
    q, k, v = request.q, request.k, request.v
    if q.device.type == "cpu" and q.dtype.itemsize == 2 and "AVX512" not in torch.backends.cpu.get_cpu_capability():
        # Without instructions for them, products of 16-bit floats take six times as long as those of float32.
        q, k, v = q.float(), k.float(), v.float()
    mask, dead = None, None
    if needs_matrix(request):
        mask, dead = _matrix(request, q.dtype)
    with torch.autocast(q.device.type, enabled=False):
        out = torch.nn.functional.scaled_dot_product_attention(
            *(q, k, v),
            attn_mask=mask,
            dropout_p=request.dropout_p,
            is_causal=request.causal and mask is None,
            scale=request.scale,
        )
    if dead is not None:
        out = out.masked_fill(dead, 0.0)
    return out.to(request.q.dtype)


def _matrix(request: Request, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """(bias with -inf where nothing may be attended to, queries that may attend to nothing [..., query_length, 1])."""
    bias = request.bias
    if bias is not None:
        bias = bias if isinstance(bias, Tensor) else dense_bias(bias, *request.scores_shape[2:], dtype=dtype)
        bias = bias.to(dtype)
    if request.is_dense and not request.causal and request.key_padding_mask is None and request.segment_ids is None:
        return bias, None
    allowed = attend_mask(
        *request.scores_shape,
        None if request.is_dense else request.layout,
        *(request.key_padding_mask, request.segment_ids, request.causal, request.q.device),
    )
    dead = ~allowed.any(-1, keepdim=True)
    if dead.device.type == "cpu" and not dead.any():  # looking would make a GPU wait
        dead = None
    else:
        allowed = allowed | dead  # softmax over nothing has no gradient; these rows are zeroed afterwards
    return allowed if bias is None else bias.masked_fill(~allowed, -torch.inf), dead

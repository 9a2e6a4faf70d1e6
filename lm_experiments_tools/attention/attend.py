"""softmax(q k^T * scale + bias) v for the models of this project: one function, three ways to compute it."""

from __future__ import annotations

import functools
import operator

import torch
import torch.nn.functional as F
from torch import Tensor

from lm_experiments_tools.attention.kernels.bias import Bias, dense_bias
from lm_experiments_tools.attention.kernels.dispatch import block_sparse_attention, shares_matrix
from lm_experiments_tools.attention.kernels.plan import AnyLayout, resolve_layout
from lm_experiments_tools.attention.kernels.request import Request
from lm_experiments_tools.attention.kernels.sdpa import masked
from lm_experiments_tools.errors import UserError

IMPLEMENTATIONS = ("eager", "sdpa", "block_sparse")


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    implementation: str = "sdpa",
    layout: AnyLayout = None,
    bias: Bias | None = None,
    key_padding_mask: Tensor | None = None,
    segment_ids: tuple[Tensor, Tensor] | None = None,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
    output_attentions: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Attention of queries to the keys that masks and layout leave; a query left without any gets zeros.

    Args:
        q: [batch, heads, query_length, head_dim].
        k, v: [batch, heads, key_length, head_dim].
        implementation: "eager" (plain matrices, softmax in float32 at least), "sdpa" (PyTorch's
            scaled_dot_product_attention), or "block_sparse" (`block_sparse_attention`, which skips blocks and keeps a
            distance bias short; under a `mask` it is dense, within the layout). All agree to rounding.
        layout: the blocks of self-attention, for "block_sparse" alone; None for all.
        bias: a distance bias, or a matrix [1 or batch, 1 or heads, query_length, key_length]. Added after scaling.
        key_padding_mask: bool [batch, key_length], True where keys are attended to.
        segment_ids: of queries and keys, integers [batch, length]: attention stays within equal ones.
        mask: bool [1 or batch, 1 or heads, query_length, key_length], True where allowed: of a cache, or a user's.
        causal: query i attends to keys 0..i; not with a cache, whose mask says it.
        scale: head_dim ** -0.5 if None; T5 takes 1.0.
        dropout_p: probability of dropping an attention weight; 0 outside training.
        output_attentions: return the weights too, computed the eager way.

    Returns:
        [batch, heads, query_length, head_dim], and the weights [batch, heads, query_length, key_length] or None.

    Raises:
        UserError: an unknown implementation, a layout for a dense one, or arguments that do not fit each other.
    """
    if implementation not in IMPLEMENTATIONS:
        raise UserError(f"attn_implementation={implementation!r} is none of {', '.join(IMPLEMENTATIONS)}.")
    if layout is not None and implementation != "block_sparse":
        raise UserError(f'a sparse layout needs attn_implementation="block_sparse", not {implementation!r}.')
    if implementation == "block_sparse" and mask is None and not output_attentions:
        output = block_sparse_attention(q, k, v, layout, bias, key_padding_mask, segment_ids, causal, scale, dropout_p)
        return output, None
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    bias = shared_bias(bias, q.shape[2], k.shape[2], "eager")
    request = Request(q, k, v, layout, bias, key_padding_mask, segment_ids, causal, scale, dropout_p)
    if output_attentions or implementation == "eager":
        return _eager(request, _allowed(request, mask), output_attentions)
    only_causal = causal and all(x is None for x in (bias, key_padding_mask, segment_ids, mask, layout))
    allowed = None if only_causal else _allowed(request, mask)
    if allowed is not None:
        return masked(q, k, v, bias, allowed, scale, dropout_p), None
    attn_mask = None if bias is None else bias.to(q.dtype)
    output = F.scaled_dot_product_attention(q, k, v, attn_mask, dropout_p, is_causal=only_causal, scale=scale)
    return output, None


def shared_bias(
    bias: Bias | None,
    query_length: int,
    key_length: int,
    implementation: str,
    device: torch.device | None = None,
    is_dense: bool = False,
    training: bool = True,
) -> Bias | None:
    """The bias in the form that layers share: its matrix, made once, or itself for "block_sparse" and long inputs.

    Args:
        device: of the model, for "block_sparse"; None keeps the bias itself.
        is_dense: no layer has a layout.
        training: of the model, which may have checkpoints.
    """
    if bias is None or isinstance(bias, Tensor):
        return bias
    if implementation == "block_sparse":
        if device is None or not shares_matrix(bias, query_length, key_length, device, is_dense, training):
            return bias
    return dense_bias(bias, query_length, key_length)


def limit_float16(x: Tensor) -> Tensor:
    """`x` with infinities of float16 brought back to its range, so that no sum or softmax turns them into NaN.

    T5's activations outgrow float16; other dtypes are returned as they are. Gradients of what was cut are zero.
    """
    if x.dtype != torch.float16:
        return x
    limit = torch.finfo(torch.float16).max - 1000  # the room that transformers' T5 leaves
    return x.clamp(-limit, limit)


def _allowed(request: Request, mask: Tensor | None) -> Tensor | None:
    """Keys each query may attend to, bool broadcastable to [batch, heads, query_length, key_length]; None for all."""
    (_, num_heads, query_length, key_length), device = request.scores_shape, request.q.device
    masks = [] if mask is None else [mask]
    if request.layout is not None:  # queries are the last of the keys, as with a cache
        tokens = resolve_layout(request.layout, num_heads, key_length, key_length).tokens(device)
        masks.append(tokens[:, :, key_length - query_length : key_length, :key_length])
    if request.causal:
        masks.append(torch.ones(query_length, key_length, dtype=torch.bool, device=device).tril()[None, None])
    if request.key_padding_mask is not None:
        masks.append(request.key_padding_mask[:, None, None, :])
    if request.segment_ids is not None:
        masks.append(request.same_segments)
    return functools.reduce(operator.and_, masks) if masks else None


def _eager(request: Request, allowed: Tensor | None, output_attentions: bool) -> tuple[Tensor, Tensor | None]:
    q, v, bias = request.q, request.v, request.bias
    scores = limit_float16(q @ request.k.transpose(-1, -2) * request.scale)
    if bias is not None:
        scores = limit_float16(scores + bias)
    if allowed is not None:
        scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
    weights = F.softmax(scores, dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(q.dtype)
    weights = F.dropout(weights, request.dropout_p)
    empty = None if allowed is None else ~allowed.any(-1, keepdim=True)  # rows that have been given equal weights
    if output_attentions:  # the very weights of the output, so that they have a gradient
        weights = weights if empty is None else weights.masked_fill(empty, 0.0)
        return weights @ v, weights
    output = weights @ v
    return output if empty is None else output.masked_fill(empty, 0.0), None

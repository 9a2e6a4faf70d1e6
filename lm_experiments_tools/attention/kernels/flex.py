"""PyTorch's FlexAttention with a block mask made from the layout, for frozen biases.

It is compiled for the GPU it runs on, and compiled again for other lengths. A bias that is trained is refused: its
gradient would be added up by atomics, a different sum each time, and slowly (pytorch#137452); the Triton backend is
there for that. On a CPU it runs uncompiled and forward only, which serves tests.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from lm_experiments_tools.attention.kernels.plan import cached, num_blocks
from lm_experiments_tools.attention.kernels.spec import AttentionInputs

_BLOCK = 128  # of FlexAttention's mask, which its kernels' tiles have to divide


def refusal(inputs: AttentionInputs) -> str | None:
    """Why this backend cannot compute these inputs; None if it can."""
    block, head_dims = inputs.spec.layout.block, (inputs.q.shape[3], inputs.v.shape[3])
    if inputs.spec.mask is not None:
        return "the mask is a matrix"
    if inputs.trains_bias:
        return "the bias is trained, which FlexAttention does by atomics"
    if inputs.spec.dropout_p:
        return "FlexAttention has no dropout"
    if inputs.q.dtype == torch.float64:
        return "it computes in float32, not in float64"
    if inputs.q.device.type != "cuda" and inputs.trains:
        return "FlexAttention has a backward pass on GPUs only"
    if any(size < 16 or size & (size - 1) for size in head_dims):
        return f"head dimensions {head_dims} are not powers of two from 16 up"
    if block & (block - 1):
        return f"the layout's block {block} is not a power of two"
    return None


def cost(inputs: AttentionInputs) -> tuple[float, int]:
    """(scores computed per score of the full matrix, bytes in addition to inputs, output and their gradients)."""
    batch, num_heads, query_length, key_length = inputs.scores_shape
    met, _ = _coarse(inputs)
    computed = met.float().mean().item() * met[0].numel() * _BLOCK**2 / (query_length * key_length)
    return computed, 8 * batch * num_heads * query_length + 4 * 4 * met.numel()


def _coarse(inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
    """Blocks of the mask that hold anything, and those that hold everything: bool [layout heads, rows, columns]."""
    layout, (query_length, key_length) = inputs.spec.layout, inputs.scores_shape[2:]
    part = min(layout.block, _BLOCK)
    repeat, merge = layout.block // part, _BLOCK // part
    parts = layout.blocks.repeat_interleave(repeat, 1).repeat_interleave(repeat, 2)
    parts = parts[:, : num_blocks(query_length, part), : num_blocks(key_length, part)]
    rows, columns = num_blocks(query_length, _BLOCK), num_blocks(key_length, _BLOCK)
    padding = (0, columns * merge - parts.shape[2], 0, rows * merge - parts.shape[1])
    parts = torch.nn.functional.pad(parts, padding).unflatten(2, (columns, merge)).unflatten(1, (rows, merge))
    met, full = parts.any(4).any(2), parts.all(4).all(2)
    if inputs.spec.causal:
        met, full = met.tril(), full.tril(-1)
    if inputs.spec.key_padding_mask is not None or inputs.spec.segment_ids is not None:
        full = torch.zeros_like(full)
    return met, full


def _lists(blocks: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """(how many, which columns first) of each row, int32 with a batch dimension."""
    which = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[None].to(device), which.int()[None].to(device)


def _mask(inputs: AttentionInputs) -> BlockMask:
    device, layout, causal = inputs.q.device, inputs.spec.layout, inputs.spec.causal
    padding, segments = inputs.spec.key_padding_mask, inputs.spec.segment_ids

    def make() -> tuple[Tensor, ...]:
        met, full = _coarse(inputs)
        return (*_lists(met & ~full, device), *_lists(full, device), layout.blocks.to(device))

    by_position = padding is None and segments is None
    lengths = inputs.scores_shape[2:]
    *lists, blocks = cached(layout, ("flex", lengths, causal, by_position, device), make)
    heads, block = blocks.shape[0], layout.block

    def attends(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        keep = blocks[head % heads, query // block, key // block]
        if causal:
            keep = keep & (key <= query)
        if padding is not None:
            keep = keep & padding[batch, key]
        if segments is not None:
            keep = keep & (segments[0][batch, query] == segments[1][batch, key])
        return keep

    return BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=_BLOCK, mask_mod=attends, seq_lengths=lengths)


def _score_mod(inputs: AttentionInputs) -> Callable[..., Tensor] | None:
    if inputs.spec.bias is None:
        return None
    if isinstance(inputs.spec.bias, Tensor):
        matrix = inputs.spec.bias.detach()
        batch_size, heads = matrix.shape[:2]
        return lambda score, batch, head, query, key: score + matrix[batch % batch_size, head % heads, query, key]
    table = inputs.spec.bias.table(max(inputs.scores_shape[2:])).detach()
    saturation = table.shape[1] // 2

    def add(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return score + table[head, (key - query).clamp(-saturation, saturation) + saturation]

    return add


@lru_cache(maxsize=1)
def _compiled() -> Callable[..., Tensor]:
    return torch.compile(flex_attention, dynamic=False)


def attend(inputs: AttentionInputs, seed: int) -> Tensor:
    """Attention output."""
    call = _compiled() if inputs.q.device.type == "cuda" else flex_attention
    with torch.autocast(inputs.q.device.type, enabled=False):
        return call(
            inputs.q,
            inputs.k,
            inputs.v,
            score_mod=_score_mod(inputs),
            block_mask=_mask(inputs),
            scale=inputs.spec.scale,
        )

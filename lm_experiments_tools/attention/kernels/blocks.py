"""The attention backend "blocks": block-sparse on a CPU, each block of queries over copies of its keys.

Memory grows linearly with the length: forward and backward pass work on a few blocks of queries at a time (a chunk),
whose scores fit in the CPU's caches, and the backward pass computes the attention weights again. PyTorch's SDPA would
take longer, because it computes them twice in a backward pass (benchmarks/attention.md).

A position bias by distance becomes a few matrices (tiles) of block x block values per head; see `bias.distance_tiles`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lm_experiments_tools.attention.kernels.bias import Bias, dense_bias, distance_tiles
from lm_experiments_tools.attention.kernels.call import AttentionInputs
from lm_experiments_tools.attention.kernels.layout_cache import Layout, cached
from lm_experiments_tools.attention.kernels.operator import KernelAttention

_CHUNK_SCORES = 1 << 18  # 1 MiB in float32


class Chunk(NamedTuple):
    """Query blocks with equally many key blocks, whose attention is computed by one batched matrix product."""

    number: int  # of the chunk within the call
    batch: Tensor  # of each query block, int64 [parts, 1]
    head: Tensor  # [parts, 1]
    row: Tensor  # query block, [parts, 1]
    column: Tensor  # key blocks of each query block, [parts, keys]


@dataclass
class Call:
    """Settings of one attention call, used by its forward and backward pass."""

    layout: Layout
    device: torch.device
    batch: int
    num_heads: int
    scale: float
    causal: bool
    dropout_p: float
    seed: int
    tiles_of: tuple[int, int, int | None]  # tiles per batch element and head; distance of the last tile, or None
    key_mask: Tensor | None  # bool [batch, key blocks, block], True = attend
    segments: tuple[Tensor, Tensor] | None  # of queries and keys, int [batch, blocks, block]
    has_infinite_bias: bool  # the bias may leave a query without keys

    def chunks(self) -> Iterator[Chunk]:
        """Split the call into sets of blocks whose scores fit in the CPU's caches."""
        number = 0
        for head, row, column in _lists(self.layout, self.num_heads, self.causal, self.device):
            parts, step = len(row), max(1, _CHUNK_SCORES // (column.shape[1] * self.layout.block**2))
            for begin in range(0, self.batch * parts, step):
                chosen = torch.arange(begin, min(begin + step, self.batch * parts), device=self.device)
                part = chosen % parts
                yield Chunk(number, (chosen // parts)[:, None], head[part], row[part], column[part])
                number += 1

    def indices(self, chunk: Chunk) -> tuple[Tensor, Tensor]:
        """Numbers of a chunk's blocks in tensors [batch * heads * blocks, ...]: of queries, and of keys."""
        sequence, (_, rows, columns) = chunk.batch * self.num_heads + chunk.head, self.layout.blocks.shape
        return (sequence * rows + chunk.row).flatten(), (sequence * columns + chunk.column).flatten()

    def tiles(self, chunk: Chunk) -> Tensor:
        """Numbers of the bias tiles of a chunk: [parts * keys]."""
        by_batch, by_head, reach = self.tiles_of
        if reach is None:
            place = chunk.row * self.layout.blocks.shape[2] + chunk.column
        else:
            place = (chunk.column - chunk.row).clamp(-reach, reach) + reach
        return (chunk.batch * by_batch + chunk.head * by_head + place).flatten()

    def hidden(self, chunk: Chunk) -> Tensor | None:
        """Padding and other documents, bool [parts, 1 or block, keys * block]; None if nothing is masked."""
        hidden = None
        if self.key_mask is not None and not (attended := self.key_mask[chunk.batch, chunk.column]).all():
            hidden = ~attended.flatten(1)[:, None]
        if self.segments is not None:
            queries, keys = self.segments[0][chunk.batch, chunk.row], self.segments[1][chunk.batch, chunk.column]
            differ = keys.flatten(1)[:, None] != queries.flatten(1)[..., None]
            hidden = differ if hidden is None else hidden | differ
        return hidden

    def weights(self, chunk: Chunk, q: Tensor, k: Tensor, tiles: Tensor | None) -> Tensor:
        """Attention weights of a chunk [parts, block, keys * block]; zeros for queries without an allowed key.

        Scaled queries are [parts, block, head_dim], keys [parts, keys * block, head_dim], `tiles` from `kernel_bias`.
        """
        block = self.layout.block
        if tiles is None:
            scores = torch.bmm(q, k.mT)
        else:
            chosen = tiles.index_select(0, self.tiles(chunk)).unflatten(0, chunk.column.shape)
            scores = chosen.transpose(1, 2).flatten(2).baddbmm_(q, k.mT)
        if self.causal:  # the layout's lower triangle leaves only the blocks on the diagonal to mask
            by_block, diagonal = scores.unflatten(2, (-1, block)).transpose(1, 2), chunk.column == chunk.row
            future = torch.ones(block, block, dtype=torch.bool, device=self.device).triu(1)
            by_block[diagonal] = by_block[diagonal].masked_fill(future, -torch.inf)
        hidden = self.hidden(chunk)
        if hidden is not None:
            scores.masked_fill_(hidden, -torch.inf)
        elif not self.has_infinite_bias:
            return scores.softmax(-1)
        return scores.softmax(-1).masked_fill_(scores.amax(-1, keepdim=True) == -torch.inf, 0.0)

    def dropout(self, chunk: Chunk, weights: Tensor) -> Tensor | None:
        """Factors of the attention weights: 0 or 1 / (1 - p), the same in both passes; None without dropout."""
        if self.dropout_p == 0.0:
            return None
        generator = torch.Generator(weights.device).manual_seed(self.seed + chunk.number)
        # Four 16-bit numbers from 64 bits: drawing a float per score costs as much as three matrix products.
        bits = torch.empty(-(-weights.numel() // 4), dtype=torch.int64, device=weights.device)
        bits.random_(-(2**63), None, generator=generator)
        dropped = min(round(self.dropout_p * 65536), 65535)
        keep = bits.view(torch.int16)[: weights.numel()].view(weights.shape) >= dropped - 32768
        return keep.to(weights.dtype).mul_(65536 / (65536 - dropped))


def _lists(layout: Layout, num_heads: int, causal: bool, device: torch.device) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Heads, query blocks and key blocks as in `Chunk`, one entry for each number of key blocks."""

    def make() -> list[tuple[Tensor, Tensor, Tensor]]:
        blocks = (layout.blocks.tril() if causal else layout.blocks).expand(num_heads, -1, -1)
        counts = blocks.sum(-1)
        found = []
        for count in counts.unique().tolist():
            if count:
                head, row = (counts == count).nonzero(as_tuple=True)
                column = blocks[head, row].nonzero()[:, 1].view(-1, count)
                found.append((head[:, None].to(device), row[:, None].to(device), column.to(device)))
        return found

    return cached(layout, ("chunks", num_heads, causal, device), make)


def attend(inputs: AttentionInputs, seed: Tensor | None) -> Tensor:
    """Compute attention block by block; scores and sums are in float32, for float64 inputs in float64."""
    call, *tensors = prepare(inputs, seed)
    return KernelAttention.apply(*tensors, call, sys.modules[__name__])


def kernel_bias(inputs: AttentionInputs, bias: Bias | None) -> Tensor | None:
    """Cut a position bias into tiles [tiles, block, block] by differentiable operations; `Call.tiles` numbers them."""
    block, (query_length, key_length), dtype = inputs.spec.layout.block, inputs.scores_shape[2:], inputs.compute_dtype
    if inputs.spec.mask is not None:
        whole = bias if isinstance(bias, Tensor | None) else dense_bias(bias, query_length, key_length)
        bias = torch.where(inputs.spec.mask, 0.0 if whole is None else whole, -torch.inf)
    if isinstance(bias, Tensor):
        padded = F.pad(bias.to(dtype), (0, -key_length % block, 0, -query_length % block))
        return padded.unflatten(3, (-1, block)).unflatten(2, (-1, block)).transpose(3, 4).reshape(-1, block, block)
    if bias is None:
        return None
    return distance_tiles(bias.table(max(query_length, key_length)).to(dtype), block).flatten(0, 1)


def prepare(inputs: AttentionInputs, seed: Tensor | None) -> tuple[Call, Tensor, Tensor, Tensor, Tensor | None]:
    """Prepare an attention call: settings, then q, k, v and bias tiles (`kernel_bias`)."""
    spec, layout, (batch, num_heads, _, key_length) = inputs.spec, inputs.spec.layout, inputs.scores_shape
    (rows, columns), block, tiles = layout.blocks.shape[1:], layout.block, kernel_bias(inputs, spec.bias)
    tiles_of = 0, 0, None
    matrices = [x.shape[:2] for x in (spec.mask, spec.bias) if isinstance(x, Tensor)]
    if matrices:
        own_heads = [] if isinstance(spec.bias, Tensor | None) else [(1, num_heads)]
        rows_of_batch, heads = torch.broadcast_shapes(*matrices, *own_heads)
        tiles_of = (rows_of_batch > 1) * heads * rows * columns, (heads > 1) * rows * columns, None
    elif tiles is not None:
        tiles_of = 0, len(tiles) // num_heads, len(tiles) // num_heads // 2
    key_mask, segments = spec.key_padding_mask, spec.segment_ids
    if key_mask is None and key_length % block:
        key_mask = torch.ones(batch, key_length, dtype=torch.bool, device=inputs.q.device)
    if segments is not None:
        segments = _padded_copy(segments[0], block), _padded_copy(segments[1], block)
    key_mask = None if key_mask is None else _padded_copy(key_mask, block)
    settings = spec.scale, spec.causal, spec.dropout_p, 0 if seed is None else int(seed)
    infinite = tiles is not None and bool(tiles.detach().amin() == -torch.inf)
    call = Call(layout, inputs.q.device, batch, num_heads, *settings, tiles_of, key_mask, segments, infinite)
    return call, *inputs[:3], tiles


def _padded_copy(x: Tensor, block: int) -> Tensor:
    """x [batch, length] in blocks, copied because the caller may overwrite it before the backward pass."""
    return F.pad(x, (0, -x.shape[1] % block)).clone(memory_format=torch.contiguous_format).unflatten(1, (-1, block))


def _as_blocks(x: Tensor, block: int, scale: float = 1.0) -> Tensor:
    """[batch, heads, length, d] -> [batch * heads * blocks, block, d] times a scale, float32 unless float64."""
    x = x if x.dtype == torch.float64 else x.float()
    return F.pad(x if scale == 1.0 else x * scale, (0, 0, 0, -x.shape[2] % block)).reshape(-1, block, x.shape[3])


def _from_blocks(blocks: Tensor, like: Tensor) -> Tensor:
    """The inverse of `_as_blocks`, in the shape and dtype of `like`."""
    return blocks.view(*like.shape[:2], -1, blocks.shape[-1])[:, :, : like.shape[2]].to(like.dtype)


def run_forward(call: Call, q: Tensor, k: Tensor, v: Tensor, tiles: Tensor | None) -> tuple[Tensor, None]:
    """Compute the attention output; None replaces other backends' log-sum-exp."""
    block = call.layout.block
    qs, ks, vs = _as_blocks(q, block, call.scale), _as_blocks(k, block), _as_blocks(v, block)
    out = vs.new_zeros(*qs.shape[:2], vs.shape[2])
    with torch.autocast(q.device.type, enabled=False):
        for chunk in call.chunks():
            rows, keys = call.indices(chunk)
            k_c, v_c = (x.index_select(0, keys).view(len(rows), -1, x.shape[2]) for x in (ks, vs))
            weights = call.weights(chunk, qs.index_select(0, rows), k_c, tiles)
            factors = call.dropout(chunk, weights)
            out.index_copy_(0, rows, (weights if factors is None else weights.mul_(factors)) @ v_c)
    return _from_blocks(out, q), None


def run_backward(
    call: Call,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tiles: Tensor | None,
    output: Tensor | None,
    lse: Tensor | None,
    grad: Tensor,
    trains_tiles: bool,
    gradients: Sequence[Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Compute the gradients of q, k, v and the bias tiles (None unless `trains_tiles`); `output`, `lse` are unused.

    The first three are written to `gradients` if they are given.
    """
    block = call.layout.block
    qs, ks, vs, gs = _as_blocks(q, block, call.scale), *(_as_blocks(x, block) for x in (k, v, grad))
    dq, dk, dv = torch.zeros_like(qs), torch.zeros_like(ks), torch.zeros_like(vs)
    d_tiles = torch.zeros_like(tiles) if trains_tiles else None
    with torch.autocast(q.device.type, enabled=False):
        for chunk in call.chunks():
            rows, keys = call.indices(chunk)
            q_c, g_c = qs.index_select(0, rows), gs.index_select(0, rows)
            k_c, v_c = (x.index_select(0, keys).view(len(rows), -1, x.shape[2]) for x in (ks, vs))
            weights = call.weights(chunk, q_c, k_c, tiles)
            d_weights, factors = g_c @ v_c.mT, call.dropout(chunk, weights)
            dropped = weights if factors is None else weights * factors
            dv.index_add_(0, keys, (dropped.mT @ g_c).view(-1, *dv.shape[1:]))
            d_weights = d_weights if factors is None else d_weights.mul_(factors)
            d_scores = torch._softmax_backward_data(d_weights, weights, -1, weights.dtype)
            dq.index_copy_(0, rows, d_scores @ k_c)
            dk.index_add_(0, keys, (d_scores.mT @ q_c).view(-1, *dk.shape[1:]))
            if d_tiles is not None:
                by_tile = d_scores.unflatten(2, (-1, block)).transpose(1, 2).reshape(-1, block, block)
                d_tiles.index_add_(0, call.tiles(chunk), by_tile)
    found = _from_blocks(dq.mul_(call.scale), q), _from_blocks(dk, k), _from_blocks(dv, v)
    if gradients is not None:
        found = [written.copy_(x) for written, x in zip(gradients, found, strict=True)]
    return *found, d_tiles

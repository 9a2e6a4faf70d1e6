"""The attention backend "gather": block-sparse in plain PyTorch, for any device and float type.

Memory grows linearly with the length. Blocks of queries that attend to equally many blocks of keys are computed by one
batched matrix product over copies of these keys. The backward pass recomputes the probabilities from q, k and v. Both
passes work on a few blocks at a time, so that their scores fit in the CPU's caches.

A position bias by distance becomes a few small matrices (tiles) of block x block values per head, which are added to
the scores. See `bias.distance_tiles`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lm_experiments_tools.attention.kernels.autograd import KernelAttention
from lm_experiments_tools.attention.kernels.bias import Bias, distance_tiles
from lm_experiments_tools.attention.kernels.layout_cache import Layout, cached, num_blocks
from lm_experiments_tools.attention.kernels.spec import AttentionInputs

_CHUNK_SCORES = 1 << 18  # scores computed at once: 1 MiB in float32
_MAX_QUERIES = 256  # rows that share one gathered list of keys


class Group(NamedTuple):
    """Blocks of queries and keys that one batched matrix product computes.

    In element g of that batch, all query blocks rows[g] attend to all key blocks keys[g].
    """

    rows: Tensor  # int64 [parts, query blocks of a part], as head * query_blocks + query block
    keys: Tensor  # int64 [parts, key blocks of a part], as head * key_blocks + key block


def groups_of(layout: Layout, num_heads: int, causal: bool, device: torch.device) -> list[Group]:
    """Group the query blocks of a layout by their number of key blocks; the result is cached with the layout.

    Each group is computed by one batched matrix product. Query blocks without keys are left out.
    """
    return cached(layout, ("gather", num_heads, causal, device), lambda: _groups_of(layout, num_heads, causal, device))


def _groups_of(layout: Layout, num_heads: int, causal: bool, device: torch.device) -> list[Group]:
    blocks = layout.blocks.tril() if causal else layout.blocks
    heads, query_blocks, key_blocks = blocks.shape
    lists = blocks.reshape(-1, key_blocks).numpy()  # one a row: head * query_blocks + query block
    parts: dict[tuple[int, int], list[tuple[np.ndarray, np.ndarray]]] = {}
    head_of = np.arange(heads).repeat(query_blocks)
    packed = np.concatenate([head_of.astype(">u4").view(np.uint8).reshape(-1, 4), np.packbits(lists, axis=1)], axis=1)
    _, which = np.unique(packed, axis=0, return_inverse=True)
    order = np.argsort(which.ravel(), kind="stable")
    for rows in np.split(order, np.flatnonzero(np.diff(which.ravel()[order])) + 1):
        keys = np.flatnonzero(lists[rows[0]])
        if keys.size:
            fitting = _CHUNK_SCORES // (keys.size * layout.block**2)
            size = max(1, min(_MAX_QUERIES // layout.block, fitting))
            for begin in range(0, rows.size, size):
                part = rows[begin : begin + size]
                parts.setdefault((part.size, keys.size), []).append((part, keys + head_of[rows[0]] * key_blocks))
    groups = []
    for members in parts.values():
        rows, keys = (torch.from_numpy(np.stack(column)).to(device) for column in zip(*members, strict=True))
        if heads < num_heads:  # one layout for all
            head = torch.arange(num_heads, device=device)[:, None, None]
            rows, keys = (rows + head * query_blocks).flatten(0, 1), (keys + head * key_blocks).flatten(0, 1)
        groups.append(Group(rows, keys))
    return groups


class Position(NamedTuple):
    """Indices that say where blocks of attention scores belong: batch, head, query block and key block.

    Each is int64 and broadcastable to [elements of a batched product, query blocks, key blocks].
    """

    batch: Tensor
    head: Tensor
    row: Tensor  # query block
    column: Tensor  # key block


def kernel_bias(inputs: AttentionInputs, bias: Bias | None) -> Tensor | None:
    """Cut a position bias and the causal mask into tiles, which are added to blocks of scores: [tiles, block, block].

    None if there is neither. The operations are differentiable. `_tile_index` says which tile a block of queries and a
    block of keys use.
    """
    block, causal, (query_length, key_length) = inputs.spec.layout.block, inputs.spec.causal, inputs.scores_shape[2:]
    device, dtype = inputs.q.device, inputs.compute_dtype
    future = torch.ones(block, block, dtype=torch.bool, device=device).triu(1)
    if isinstance(bias, Tensor):
        rows, columns = num_blocks(query_length, block), num_blocks(key_length, block)
        missing = 0, columns * block - key_length, 0, rows * block - query_length
        padded = torch.nn.functional.pad(bias.to(dtype), missing)
        tiles = padded.unflatten(3, (columns, block)).unflatten(2, (rows, block)).transpose(3, 4)
        if causal:
            diagonal = torch.eye(rows, columns, dtype=torch.bool, device=device)[:, :, None, None]
            tiles = tiles.masked_fill(diagonal & future, -torch.inf)
        return tiles.reshape(-1, block, block)
    if bias is not None:
        tiles = distance_tiles(bias.table(max(query_length, key_length)).to(device, dtype), block)
        if causal:
            reach = tiles.shape[1] // 2
            on_diagonal = torch.arange(-reach, reach + 1, device=device) == 0
            tiles = tiles.masked_fill(on_diagonal[:, None, None] & future, -torch.inf)
        return tiles.flatten(0, 1)
    if causal:
        empty = torch.zeros(block, block, dtype=dtype, device=device)
        return torch.stack([empty, empty.masked_fill(future, -torch.inf)])
    return None


def _tile_index(inputs: AttentionInputs, tiles: Tensor) -> Callable[[Position], Tensor]:
    """The function from positions to indices of the tiles of `kernel_bias`."""
    bias, (rows, columns) = inputs.spec.bias, inputs.spec.layout.blocks.shape[1:]
    if isinstance(bias, Tensor):
        batch, heads = bias.shape[:2]
        return lambda at: ((at.batch % batch * heads + at.head % heads) * rows + at.row) * columns + at.column
    if bias is None:
        return lambda at: (at.row == at.column).long()
    width = tiles.shape[0] // inputs.q.shape[1]
    reach = width // 2
    return lambda at: at.head * width + (at.column - at.row).clamp(-reach, reach) + reach


@dataclass
class Call:
    """Settings of one attention call of the backend "gather", used by its forward and backward pass."""

    layout: Layout
    groups: list[Group]
    batch: int
    num_heads: int
    scale: float
    tile_index: Callable[[Position], Tensor] | None
    key_mask: Tensor | None  # bool [batch * key_blocks, block], True = attend
    segments: list[Tensor] | None  # of queries and keys, int [batch * query_blocks or key_blocks, block]
    dropout_p: float
    seed: int
    blocking_bias: bool = False  # True if the bias may be -inf for all keys of a query

    @property
    def query_blocks(self) -> int:
        return self.layout.blocks.shape[1]

    @property
    def key_blocks(self) -> int:
        return self.layout.blocks.shape[2]


class Chunk(NamedTuple):
    """Blocks of queries and keys whose attention is computed at a time, to fit in the CPU's caches.

    They are stored as indices into tensors whose batch, heads and blocks are one dimension.
    """

    number: int  # of the chunk within the call
    rows: Tensor  # [parts, query blocks]: batch * heads * query_blocks + ...
    keys: Tensor  # [parts, key blocks]
    position: Position


def chunks(call: Call) -> Iterator[Chunk]:
    """Split an attention call into sets of blocks (`Chunk`) whose scores fit in the CPU's caches."""
    number = 0
    for group in call.groups:
        parts, size = group.rows.shape
        width = group.keys.shape[1]
        step = max(1, _CHUNK_SCORES // (size * width * call.layout.block**2))
        device = group.rows.device
        for begin in range(0, call.batch * parts, step):
            pair = torch.arange(begin, min(begin + step, call.batch * parts), device=device)
            batch, part = pair // parts, pair % parts
            rows, keys = group.rows[part], group.keys[part]
            position = Position(
                batch[:, None, None],
                (keys[:, :1] // call.key_blocks)[:, :, None],
                (rows % call.query_blocks)[:, :, None],
                (keys % call.key_blocks)[:, None, :],
            )
            of_batch = (batch * call.num_heads)[:, None]
            yield Chunk(number, rows + of_batch * call.query_blocks, keys + of_batch * call.key_blocks, position)
            number += 1


class Workspace:
    """Named buffers for intermediate results of attention, allocated once and reused for every `Chunk` of blocks."""

    def __init__(self, like: Tensor) -> None:
        self.like = like
        self.buffers: dict[str, Tensor] = {}

    def __call__(self, name: str, *shape: int) -> Tensor:
        """Buffer of this shape, with undefined contents; another call with the same name overwrites it."""
        size = math.prod(shape)
        if name not in self.buffers or self.buffers[name].numel() < size:
            self.buffers[name] = self.like.new_empty(size)
        return self.buffers[name][:size].view(shape)

    def blocks(self, name: str, blocks: Tensor, index: Tensor) -> Tensor:
        """Copy the chosen blocks of queries, keys or values into the buffer `name`.

        Args:
            blocks: all blocks, [number of blocks, block, head_dim].
            index: m block numbers for each row, int64 [rows, m].

        Returns:
            The m blocks of each row one after the other, [rows, m * block, head_dim].
        """
        _, block, head_dim = blocks.shape
        chosen = self(name, index.numel(), block, head_dim)
        torch.index_select(blocks, 0, index.flatten(), out=chosen)
        return chosen.view(index.shape[0], index.shape[1] * block, head_dim)

    def matmul(self, name: str, a: Tensor, b: Tensor) -> Tensor:
        """Compute the batched matrix product a @ b in the buffer `name`, without a new allocation."""
        return torch.bmm(a, b, out=self(name, a.shape[0], a.shape[1], b.shape[2]))


def add_rows(total: Tensor, index: Tensor, rows: Tensor) -> None:
    """Add each of `rows` to the row of `total` that `index` gives, in a deterministic order.

    On a GPU `index_add_` would use atomics, whose order varies.
    """
    if total.device.type == "cpu":
        total.index_add_(0, index, rows)
    else:
        total.index_put_((index,), rows, accumulate=True)


def probabilities(call: Call, chunk: Chunk, q: Tensor, k: Tensor, tiles: Tensor | None, work: Workspace) -> Tensor:
    """Compute the attention weights of a set of blocks (`Chunk`), [elements of a batched product, queries, keys].

    Queries without an allowed key get rows of zeros.

    Args:
        q, k: blocks of queries and keys of this chunk.
        tiles: result of `kernel_bias`; None without bias and causal mask.
        work: buffers, also of the result: the next call overwrites it.
    """
    (parts, size), width, block = chunk.rows.shape, chunk.keys.shape[1], call.layout.block
    scores = work("scores", parts, size * block, width * block)
    if tiles is not None:
        chosen = work.blocks("tiles", tiles, call.tile_index(chunk.position).view(1, -1))
        chosen = chosen.view(parts, size, width, block, block).transpose(2, 3)
        scores.view(parts, size, block, width, block).copy_(chosen)
    scores.baddbmm_(q, k.transpose(1, 2), beta=0.0 if tiles is None else 1.0, alpha=call.scale)
    masked = call.blocking_bias
    column = (chunk.position.batch * call.key_blocks + chunk.position.column).flatten(1)
    if call.key_mask is not None:
        keep = call.key_mask[column].flatten(1)
        if keep.device.type != "cpu" or not keep.all():
            scores.masked_fill_(~keep[:, None, :], -torch.inf)
            masked = True
    if call.segments is not None:
        row = (chunk.position.batch * call.query_blocks + chunk.position.row).flatten(1)
        queries, keys = call.segments[0][row].flatten(1), call.segments[1][column].flatten(1)
        scores.masked_fill_(queries[:, :, None] != keys[:, None, :], -torch.inf)
        masked = True
    result = torch.softmax(scores, -1, out=work("probabilities", *scores.shape))
    if masked:
        result.masked_fill_(scores.amax(-1, keepdim=True) == -torch.inf, 0.0)
    return result


def dropout_mask(call: Call, chunk: Chunk, like: Tensor) -> Tensor | None:
    """Draw the dropout factors of a set of blocks (`Chunk`): 0 or 1 / (1 - p) for dropout probability p.

    Forward and backward pass get equal factors. None without dropout.

    Args:
        like: tensor with the shape, device and dtype of the factors.
    """
    if call.dropout_p == 0.0:
        return None
    generator = torch.Generator(like.device).manual_seed(call.seed + chunk.number)
    # Four 16-bit numbers from 64 bits: drawing a float per score costs as much as three matrix products.
    random_bits = torch.empty(-(-like.numel() // 4), dtype=torch.int64, device=like.device)
    random_bits.random_(-(2**63), None, generator=generator)
    dropped = min(round(call.dropout_p * 65536), 65535)
    keep = random_bits.view(torch.int16)[: like.numel()].view(like.shape) >= dropped - 32768
    return keep.to(like.dtype).mul_(65536 / (65536 - dropped))


def run_forward(call: Call, q: Tensor, k: Tensor, v: Tensor, tiles: Tensor | None) -> tuple[Tensor, None]:
    """Compute the attention output of the backend "gather".

    Args:
        tiles: result of `kernel_bias`; None without bias and causal mask.

    Returns:
        The output, and None: other backends return the log-sum-exp, which this backward pass does not need.
    """
    qs, ks, vs = _as_blocks(call, q, call.query_blocks), *(_as_blocks(call, x, call.key_blocks) for x in (k, v))
    out = vs.new_zeros(qs.shape[0], qs.shape[1], vs.shape[2])
    work = Workspace(qs)
    with torch.autocast(q.device.type, enabled=False):
        for chunk in chunks(call):
            q_c, k_c = work.blocks("q", qs, chunk.rows), work.blocks("k", ks, chunk.keys)
            p = probabilities(call, chunk, q_c, k_c, tiles, work)
            keep = dropout_mask(call, chunk, p)
            if keep is not None:
                p.mul_(keep)
            result = work.matmul("out", p, work.blocks("v", vs, chunk.keys))
            out.index_copy_(0, chunk.rows.flatten(), result.view(-1, *out.shape[1:]))
    return _from_blocks(out, q).to(q.dtype), None


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
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Compute the gradients of q, k, v and the bias tiles for the backend "gather".

    Args:
        tiles: result of `kernel_bias`; None without bias and causal mask.
        output, lse: results of other backends' forward pass; unused here.
        grad: gradient of the output.
        trains_tiles: False returns None for the tiles.
    """
    block = call.layout.block
    qs, gs = (_as_blocks(call, x, call.query_blocks) for x in (q, grad))
    ks, vs = (_as_blocks(call, x, call.key_blocks) for x in (k, v))
    dq, dk, dv = torch.zeros_like(qs), torch.zeros_like(ks), torch.zeros_like(vs)
    d_tiles = torch.zeros_like(tiles) if trains_tiles else None
    work = Workspace(qs)
    with torch.autocast(q.device.type, enabled=False):
        for chunk in chunks(call):
            rows, keys = chunk.rows.flatten(), chunk.keys.flatten()
            q_c, k_c = work.blocks("q", qs, chunk.rows), work.blocks("k", ks, chunk.keys)
            v_c, g_c = work.blocks("v", vs, chunk.keys), work.blocks("grad", gs, chunk.rows)
            p = probabilities(call, chunk, q_c, k_c, tiles, work)
            dp = work.matmul("dp", g_c, v_c.transpose(1, 2))
            keep = dropout_mask(call, chunk, p)
            dropped = p if keep is None else p * keep
            add_rows(dv, keys, work.matmul("dv", dropped.transpose(1, 2), g_c).view(-1, *dv.shape[1:]))
            if keep is not None:
                dp.mul_(keep)
            ds = work("scores", *p.shape)
            torch.ops.aten._softmax_backward_data.out(dp, p, -1, p.dtype, grad_input=ds)
            dq.index_copy_(0, rows, work.matmul("dq", ds, k_c).view(-1, *dq.shape[1:]))
            add_rows(dk, keys, work.matmul("dk", ds.transpose(1, 2), q_c).view(-1, *dk.shape[1:]))
            if d_tiles is not None:
                parts, size, width = *chunk.rows.shape, chunk.keys.shape[1]
                by_tile = work("tiles", parts, size, width, block, block)
                by_tile.copy_(ds.view(parts, size, block, width, block).transpose(2, 3))
                add_rows(d_tiles, call.tile_index(chunk.position).flatten(), by_tile.view(-1, block, block))
    dq, dk = dq.mul_(call.scale), dk.mul_(call.scale)
    return *(_from_blocks(d, x).to(x.dtype) for d, x in ((dq, q), (dk, k), (dv, v))), d_tiles


def _as_blocks(call: Call, x: Tensor, blocks: int) -> Tensor:
    """[batch, heads, length, d] -> [batch * heads * blocks, block, d], float32 unless float64."""
    dtype, block = torch.float64 if x.dtype == torch.float64 else torch.float32, call.layout.block
    return _pad(x.to(dtype), blocks * block, dim=2).reshape(-1, block, x.shape[-1])


def _from_blocks(blocks: Tensor, like: Tensor) -> Tensor:
    """The inverse of `_as_blocks`, for a tensor of the length of `like`."""
    batch, heads, length, _ = like.shape
    return blocks.view(batch, heads, -1, blocks.shape[-1])[:, :, :length]


def refusal(inputs: AttentionInputs) -> str | None:
    """Reason why the backend "gather" cannot compute these inputs; None if it can."""
    return None if inputs.spec.mask is None else "the mask is a matrix"


def attend(inputs: AttentionInputs, seed: int) -> Tensor:
    """Compute attention by the backend "gather"; scores and sums are in float32, for float64 inputs in float64."""
    call, *tensors = prepare(inputs, seed)
    return KernelAttention.apply(*tensors, call, sys.modules[__name__])


def prepare(inputs: AttentionInputs, seed: int) -> tuple[Call, Tensor, Tensor, Tensor, Tensor | None]:
    """Prepare an attention call of the backend "gather": settings, then q, k, v and bias tiles (`kernel_bias`)."""
    spec, layout, (batch, num_heads, _, key_length) = inputs.spec, inputs.spec.layout, inputs.scores_shape
    (rows, columns), block, device = layout.blocks.shape[1:], layout.block, inputs.q.device
    tiles = kernel_bias(inputs, spec.bias)
    key_mask = spec.key_padding_mask
    if key_mask is None and key_length % block:
        key_mask = torch.ones(1, key_length, dtype=torch.bool, device=device).expand(batch, -1)
    lengths = rows * block, columns * block
    segments = None
    if spec.segment_ids is not None:
        segments = [_padded_copy(ids, n).view(-1, block) for ids, n in zip(spec.segment_ids, lengths, strict=True)]
    call = Call(
        layout,
        groups_of(layout, num_heads, spec.causal, device),
        batch,
        num_heads,
        spec.scale,
        tile_index=None if tiles is None else _tile_index(inputs, tiles),
        key_mask=None if key_mask is None else _padded_copy(key_mask, lengths[1]).view(-1, block),
        segments=segments,
        dropout_p=spec.dropout_p,
        seed=seed,
        blocking_bias=_may_block(inputs),
    )
    return call, *inputs[:3], tiles


def _may_block(inputs: AttentionInputs) -> bool:
    """True if the bias has -inf anywhere; on a GPU, where looking would synchronize, if there is a bias."""
    bias = inputs.spec.bias
    if bias is None:
        return False
    if inputs.q.device.type != "cpu":
        return True
    values = bias if isinstance(bias, Tensor) else bias.table(max(inputs.scores_shape[2:]))
    return bool(values.detach().amin() == -torch.inf)


def _padded_copy(x: Tensor, length: int) -> Tensor:
    """x padded to `length`, copied because the caller may overwrite it before the backward pass."""
    return _pad(x, length).clone(memory_format=torch.contiguous_format)


def _pad(x: Tensor, length: int, dim: int = 1) -> Tensor:
    """x with zeros (False) appended up to `length`."""
    missing = length - x.shape[dim]
    return torch.nn.functional.pad(x, (0, 0) * (x.dim() - 1 - dim) + (0, missing)) if missing else x

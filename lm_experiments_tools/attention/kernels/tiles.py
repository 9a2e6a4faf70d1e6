"""Tiles of the attention score matrix for the Triton kernels: sizes, and lists of tiles to compute.

A tile is a rectangle of queries x keys that one loop step of a kernel computes. A tile counts as near the diagonal if
its distances key - query have different position biases, or if the diagonal of causal attention passes through it. All
other tiles count as far: one bias value holds for the whole tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lm_experiments_tools.attention.kernels.call import AttentionInputs
from lm_experiments_tools.attention.kernels.layout_cache import num_blocks
from lm_experiments_tools.modules.devices import Card


class Tile(NamedTuple):
    """Number of queries and keys that a Triton kernel computes at a time, and the kernel's compile options."""

    queries: int
    keys: int
    num_warps: int
    num_stages: int


# By kernel and by the larger head dimension, up to. For 16-bit inputs; float32 takes half the tile (`tile_of`).
TILES: dict[tuple[str, int], Tile] = {
    ("forward", 64): Tile(128, 64, 4, 3),
    ("forward", 128): Tile(128, 64, 8, 3),
    ("forward", 256): Tile(64, 64, 8, 2),
    ("query_gradient", 64): Tile(128, 64, 8, 3),
    ("query_gradient", 128): Tile(64, 64, 4, 2),
    ("query_gradient", 256): Tile(64, 32, 8, 1),
    ("key_gradient", 64): Tile(64, 128, 8, 3),
    ("key_gradient", 128): Tile(64, 64, 4, 2),
    ("key_gradient", 256): Tile(32, 64, 8, 1),
}
KERNELS = "forward", "query_gradient", "key_gradient"
# Measured tiles, by compute capability and bytes of an input. `python benchmarks/gpu.py --parts tiles` reports lines
# for this table, for 16-bit inputs and head dimension 64.
MEASURED: dict[tuple[tuple[int, int], int], dict[tuple[str, int], Tile]] = {
    ((9, 0), 2): {
        ("forward", 64): Tile(128, 32, 4, 3),
        ("query_gradient", 64): Tile(64, 32, 4, 3),
        ("key_gradient", 64): Tile(64, 64, 4, 2),
    },
}
SUM_ROWS = 64  # diagonals of the bias gradient that are summed at a time: rows of a product on the tensor cores
_MERGED = 64  # layouts of smaller blocks are computed in tiles of this many tokens, with the rest masked
_UNEVEN = 4  # lists this much longer than the average are started first


def tile_of(kernel: str, head_dim: int, block: int | None, itemsize: int, card: Card | None = None) -> Tile:
    """Choose how many queries and keys a Triton kernel computes at a time (its tile size).

    Args:
        head_dim: the larger head dimension of q and v.
        block: tokens of a block of the block-sparse layout, which bound the tile; None for dense attention.
        itemsize: bytes of an input value.
        card: GPU for which tiles may have been measured; None for another one.
    """
    key = kernel, head_bound(head_dim)
    tile = MEASURED.get((card.capability, itemsize), {}).get(key) if card else None
    if tile is None:
        tile = TILES[key]
        if itemsize == 4:
            tile = Tile(max(16, tile.queries // 2), max(16, tile.keys // 2), tile.num_warps, 1)
    if block is not None:
        tile = tile._replace(queries=min(tile.queries, max(block, _MERGED)), keys=min(tile.keys, max(block, _MERGED)))
    return tile


def micro_of(tile: Tile) -> int:
    """Side of the squares of scores in `Diagonals`: 8 or 4, so that a tile has at least 16."""
    return 8 if tile.queries * tile.keys >= 1024 else 4


def head_bound(head_dim: int) -> int:
    """Round a head dimension up to one for which `TILES` lists tile sizes: 64, 128 or 256."""
    return next(limit for limit in (64, 128, 256) if head_dim <= limit)


def power_of_two(size: int) -> int:
    """Round up to a power of two, at least 16: the sizes that Triton's matrix products support."""
    return max(16, 1 << (size - 1).bit_length())


class TileLists(NamedTuple):
    """For each row of tiles of the score matrix, the list of tiles that an attention kernel computes, left to right.

    A row of tiles belongs to a block of queries; in the kernel of key gradients to a block of keys. `ranges` splits
    each list into three parts: tiles far before, near and far after the diagonal. Part i is
    tiles[ranges[i] : ranges[i + 1]]. Dense attention has no lists: the tile numbers are ranges[0] to ranges[3] - 1.
    """

    ranges: Tensor  # int32 [layout heads, row tiles, 4]
    order: Tensor  # int32 [layout heads, row tiles], longest lists first
    tiles: Tensor  # int32
    bits: Tensor  # int32
    rank_major: bool


@dataclass(frozen=True)
class Cut:
    """A block-sparse layout as tiles of a kernel's size: which to compute, and which layout blocks lie in each."""

    tile: Tile
    active: Tensor  # bool [layout heads, query tiles, key tiles]
    bits: Tensor  # int32, same shape: a bit for each layout block in a tile, row by row
    sub_queries: int  # tokens of a layout block in a tile
    sub_keys: int
    left: Tensor  # bool [query tiles, key tiles]: tiles before all that is near the diagonal
    right: Tensor  # tiles after it
    dense: bool
    has_bits: bool  # True if any tile is attended to in part


def cut(inputs: AttentionInputs, tile: Tile, saturation: int | None) -> Cut:
    """Convert the block-sparse layout of an attention call to tiles of a kernel's size.

    Args:
        saturation: distance from which the position bias is constant; None: no tile is near the diagonal.
    """
    query_length, key_length = inputs.scores_shape[2:]
    rows, columns = num_blocks(query_length, tile.queries), num_blocks(key_length, tile.keys)
    sub_queries, sub_keys = tile.queries, tile.keys
    if inputs.is_dense:
        active = torch.ones(1, rows, columns, dtype=torch.bool, device="cpu")
        bits = active.int()
    else:
        block = inputs.spec.layout.block
        sub_queries, sub_keys = min(block, tile.queries), min(block, tile.keys)
        parts = inputs.spec.layout.blocks.repeat_interleave(block // sub_queries, 1)
        parts = parts.repeat_interleave(block // sub_keys, 2)
        parts = parts[:, : num_blocks(query_length, sub_queries), : num_blocks(key_length, sub_keys)]
        active = _parts_of_tiles(parts, rows, columns, tile, sub_queries, sub_keys, outside=False).any(-1)
        # Scores outside of the inputs are masked by position, so a tile at the edge may count as full.
        flags = _parts_of_tiles(parts, rows, columns, tile, sub_queries, sub_keys, outside=True)
        bits = (flags.int() << _range(flags.shape[-1])).sum(-1, dtype=torch.int32)
    offset = _range(columns)[None, :] * tile.keys - _range(rows)[:, None] * tile.queries
    nearest, farthest = offset - (tile.queries - 1), offset + (tile.keys - 1)
    if inputs.spec.causal:
        active = active & (nearest <= 0)
    everything = torch.ones_like(offset, dtype=torch.bool)
    left = everything if saturation is None else farthest <= -saturation
    right = ~everything if saturation is None else nearest >= max(1, saturation)
    full = (1 << (tile.queries // sub_queries * (tile.keys // sub_keys))) - 1
    has_bits = bool((bits[active] != full).any())
    return Cut(tile, active, bits, sub_queries, sub_keys, left, right, inputs.is_dense, has_bits)


def _range(length: int) -> Tensor:
    """0..length - 1 on the CPU, also where a default device is set, as by PyTorch while it records CUDA graphs."""
    return torch.arange(length, dtype=torch.int32, device="cpu")


def _parts_of_tiles(
    parts: Tensor, rows: int, columns: int, tile: Tile, sub_queries: int, sub_keys: int, outside: bool
) -> Tensor:
    """Parts [heads, n, m] by tile: [heads, rows, columns, parts of a tile]; those beyond n and m are `outside`."""
    in_rows, in_columns = tile.queries // sub_queries, tile.keys // sub_keys
    missing = rows * in_rows - parts.shape[1], columns * in_columns - parts.shape[2]
    parts = torch.nn.functional.pad(parts, (0, missing[1], 0, missing[0]), value=outside)
    return parts.unflatten(2, (columns, in_columns)).unflatten(1, (rows, in_rows)).transpose(2, 3).flatten(3)


def lists_of(cut: Cut, by_key: bool, device: torch.device) -> TileLists:
    """List the tiles that an attention kernel computes: for each tile of queries its tiles of keys.

    `by_key` lists the tiles of queries of each tile of keys instead, for the gradients of keys and values.
    """
    active, bits, first, last = cut.active, cut.bits, cut.left, cut.right
    if by_key:
        active, bits, first, last = active.mT, bits.mT, first.T, last.T
        if not first.all():  # later queries have a key farther to their left
            first, last = last, first
    counts = active.sum(-1)
    begin = active.int().argmax(-1) if cut.dense else (counts.flatten().cumsum(0) - counts.flatten()).view_as(counts)
    near, far = begin + (active & first).sum(-1), begin + counts - (active & last).sum(-1)
    ranges = torch.stack([begin, near, far, begin + counts], dim=-1)
    return TileLists(
        ranges.int().to(device),
        counts.argsort(dim=-1, descending=True, stable=True).int().to(device),
        active.nonzero()[:, 2].int().to(device),
        bits[active].to(device),
        rank_major=bool(counts.max() > _UNEVEN * counts.float().mean()),
    )


class Diagonals(NamedTuple):
    """Constants with which a Triton kernel computes the gradient of a T5 bias from tiles near the diagonal.

    The gradient sums scores at equal distances. The kernel cuts a tile into squares of micro x micro scores, and adds
    up all squares on the same diagonal. It holds SUM_ROWS such sums at a time, which cover a window of distances. A
    large bias table needs several windows.
    """

    micro: int  # scores
    leftmost: int  # tokens from the first query of a tile to the first key of the leftmost near tile
    window: int  # tokens
    sides: Tensor  # [2, keys, 16]: factors in `add_far`, for tiles left and right of the near ones
    places: Tensor  # [2 * SUM_ROWS, blocks of a tile]: factors in `add_near`
    windows: Tensor  # int32 [layout heads, query tiles, windows + 1]: their begins in a list, and the last one's end
    sums: Tensor  # int64 [sums of a distance, distances]: where they are in [windows, SUM_ROWS, 16] and 16 far sums

    @property
    def num_windows(self) -> int:
        return self.windows.shape[2] - 1


def diagonals_of(cut: Cut, saturation: int, ranges: Tensor, dtype: torch.dtype, device: torch.device) -> Diagonals:
    """Compute the constants for the gradient of a T5 bias (see `Diagonals`).

    Args:
        ranges: `TileLists.ranges` of the kernel for the gradient of queries.
        dtype: dtype of the constant matrices, that of q.
    """
    (queries, keys), (_, rows, columns), micro = cut.tile[:2], cut.active.shape, micro_of(cut.tile)
    step = min(queries, keys)
    leftmost, rightmost = -((saturation + keys - 2) // step * step), (saturation + queries - 2) // step * step
    window = ((SUM_ROWS + 1) * micro - queries - keys) // step * step + step
    edges = leftmost + window * _range((rightmost - leftmost) // window + 2)
    away = _range(columns) * keys - _range(rows)[:, None] * queries
    before = (cut.active[..., None] & (away[..., None] < edges)).sum(2)
    begin, near, after, _ = ranges.long().cpu().unbind(-1)
    windows = (begin[..., None] + before).clamp(near[..., None], after[..., None])
    parts = queries // micro, keys // micro
    diagonal = _range(parts[1]) - _range(parts[0])[:, None] + parts[0] - 1
    places = (_range(2 * SUM_ROWS) - SUM_ROWS)[:, None] == diagonal.flatten()
    sides = torch.eye(2, 16, device="cpu")[:, None].repeat(1, keys, 1)
    matrices = (x.to(device, dtype) for x in (sides, places))
    sums = _places_of_sums(leftmost - queries + 1, window, windows.shape[2] - 1, micro, saturation)
    return Diagonals(micro, leftmost, window, *matrices, windows.int().to(device), sums.to(device))


def _places_of_sums(lowest: int, window: int, num_windows: int, micro: int, saturation: int) -> Tensor:
    """`Diagonals.sums` from the distance `lowest` on, as many left as right; the outermost two are the far sums."""
    columns, num_near = _range(16), num_windows * SUM_ROWS * 16
    distances = lowest + window * _range(num_windows)[:, None, None] + micro * _range(SUM_ROWS)[:, None] + columns
    places = (columns < 2 * micro - 1).expand_as(distances).flatten().nonzero()[:, 0]
    reach = max(saturation, int(distances.abs().max())) + 1
    found, order = (distances.flatten()[places] + reach).sort(stable=True)
    counts = found.bincount(minlength=2 * reach + 1)
    rank = _range(len(found)) - (counts.cumsum(0) - counts)[found]
    sums = torch.full((int(counts.max()), 2 * reach + 1), num_near + 2, device="cpu")  # which is always zero
    sums[rank, found] = places[order]
    sums[0, 0], sums[0, -1] = num_near, num_near + 1
    return sums

"""How the Triton kernels cut the score matrix into tiles, and the shared memory that these take."""

from __future__ import annotations

from typing import NamedTuple


class Tile(NamedTuple):
    """How a kernel cuts the score matrix, and how Triton is to build it."""

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
    ("bias_gradient", 64): Tile(64, 64, 4, 2),
    ("bias_gradient", 128): Tile(64, 64, 4, 2),
    ("bias_gradient", 256): Tile(32, 32, 4, 1),
}
_MASKS = 2560  # bytes of shared memory, at most, for masks and sums of rows
_MERGED = 64  # layouts of smaller blocks are computed in tiles of this many tokens, with the rest masked


def tile_of(kernel: str, head_dim: int, block: int | None, itemsize: int) -> Tile:
    """The tile for a kernel; not larger than the layout's block (None: dense) unless that is small."""
    bound = next(limit for limit in (64, 128, 256) if head_dim <= limit)
    queries, keys, num_warps, num_stages = TILES[kernel, bound]
    if itemsize == 4:
        queries, keys, num_stages = max(16, queries // 2), max(16, keys // 2), 1
    if block is not None:
        queries, keys = (min(size, max(block, _MERGED)) for size in (queries, keys))
    return Tile(queries, keys, num_warps, num_stages)


def shared_memory(kernel: str, head_dim: int, block: int | None, itemsize: int) -> int:
    """Bytes of shared memory that a kernel takes at most: for rows that it holds, those on their way, and scores."""
    tile, size = fitting_tile(kernel, head_dim, block, itemsize), power_of_two(head_dim) * itemsize
    queries, keys = tile.queries * size, tile.keys * size
    scores = tile.queries * tile.keys * itemsize  # given from one product to the next
    if kernel == "bias_gradient":
        return 2 * queries + 2 * keys + 2 * scores + _MASKS
    held, streamed = {
        "forward": (queries, 2 * keys),
        "query_gradient": (2 * queries, 2 * keys),
        "key_gradient": (2 * keys, 2 * queries),
    }[kernel]
    if kernel == "forward" and tile.queries >= 16 * tile.num_warps:  # each warp has whole rows of scores
        scores = 0
    if kernel == "key_gradient" and tile.num_stages == 1:
        streamed += queries  # turned
    # The loop near the diagonal has a bias for each score on its way, in float32, and so fewer rows.
    near = streamed + 4 * tile.queries * tile.keys
    return held + max(max(1, tile.num_stages - 1) * streamed, near) + scores + _MASKS


def fitting_tile(kernel: str, head_dim: int, block: int | None, itemsize: int) -> Tile:
    """The same, of the kernels together."""
    tile = tile_of(kernel, head_dim, block, itemsize)
    if kernel != "bias_gradient":
        return tile
    # It computes what the kernel of q's gradient leaves out, so its tiles have to fit into those.
    within = tile_of("query_gradient", head_dim, block, itemsize)
    size = min(tile.queries, within.queries, within.keys)
    return tile._replace(queries=size, keys=size)


def power_of_two(size: int) -> int:
    """The next one from 16 up."""
    return max(16, 1 << (size - 1).bit_length())

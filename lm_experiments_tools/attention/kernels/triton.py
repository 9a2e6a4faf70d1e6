"""The Triton kernels as a backend: tiles and lists of tiles from a layout, launches, and gradients for autograd.

Triton itself is imported when the first call is made. TRITON_INTERPRET=1 runs the kernels on the CPU, for tests.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from lm_experiments_tools.attention.kernels.bias import AlibiBias, sum_diagonals
from lm_experiments_tools.attention.kernels.plan import cached, num_blocks
from lm_experiments_tools.attention.kernels.request import Kept, Request
from lm_experiments_tools.attention.kernels.tiles import Tile, fitting_tile, power_of_two, shared_memory

_LOG2_E = math.log2(math.e)
_NO_BIAS, _T5, _ALIBI = 0, 1, 2
_PROGRAMS = 512  # of the bias gradient: about four for each multiprocessor of a large GPU
_OLDEST = 8, 0  # compute capability that Triton supports from on
_LARGEST = 128  # tokens of a tile, at most
_UNEVEN = 4  # lists this much longer than the average are started first


class TileLists(NamedTuple):
    """For each tile of rows the tiles of columns that meet it, ascending.

    A list's runs are [ranges[0], ranges[1]), [ranges[1], ranges[2]) and [ranges[2], ranges[3]): before, near and after
    the diagonal. In a dense plan they count tiles of columns themselves; else they are places in `tiles` and `bits`.
    """

    ranges: Tensor  # int32 [layout heads, row tiles, 4]
    order: Tensor  # int32 [layout heads, row tiles], longest lists first
    tiles: Tensor  # int32
    bits: Tensor  # int32
    rank_major: bool


@dataclass(frozen=True)
class Cut:
    """A layout cut into tiles: which of them hold anything, and which blocks those hold."""

    tile: Tile
    active: Tensor  # bool [layout heads, query tiles, key tiles]
    bits: Tensor  # int32, same shape: one for each part of a tile, row by row
    sub_queries: int  # tokens of a part
    sub_keys: int
    left: Tensor  # bool [query tiles, key tiles]: tiles before all that is near the diagonal
    right: Tensor  # tiles after it
    dense: bool
    has_bits: bool  # True if any tile is attended to in part


def cut(request: Request, tile: Tile, saturation: int | None) -> Cut:
    """Tiles of a request's layout: a larger block gives several, smaller blocks share one.

    Args:
        saturation: distance from which on nothing changes; tiles at smaller ones are near. None if no tile is.
    """
    query_length, key_length = request.scores_shape[2:]
    rows, columns = num_blocks(query_length, tile.queries), num_blocks(key_length, tile.keys)
    sub_queries, sub_keys = tile.queries, tile.keys
    if request.is_dense:
        active = torch.ones(1, rows, columns, dtype=torch.bool)
        bits = active.int()
    else:
        block = request.layout.block
        sub_queries, sub_keys = min(block, tile.queries), min(block, tile.keys)
        parts = request.layout.blocks.repeat_interleave(block // sub_queries, 1)
        parts = parts.repeat_interleave(block // sub_keys, 2)
        parts = parts[:, : num_blocks(query_length, sub_queries), : num_blocks(key_length, sub_keys)]
        active = _parts_of_tiles(parts, rows, columns, tile, sub_queries, sub_keys, outside=False).any(-1)
        # What lies outside of the inputs is masked by position, so a tile full up to there counts as full.
        flags = _parts_of_tiles(parts, rows, columns, tile, sub_queries, sub_keys, outside=True)
        bits = (flags.int() << torch.arange(flags.shape[-1], dtype=torch.int32)).sum(-1, dtype=torch.int32)
    offset = torch.arange(columns)[None, :] * tile.keys - torch.arange(rows)[:, None] * tile.queries
    nearest, farthest = offset - (tile.queries - 1), offset + (tile.keys - 1)
    if request.causal:
        active = active & (nearest <= 0)
    everything = torch.ones_like(offset, dtype=torch.bool)
    left = everything if saturation is None else farthest <= -saturation
    right = ~everything if saturation is None else nearest >= max(1, saturation)
    full = (1 << (tile.queries // sub_queries * (tile.keys // sub_keys))) - 1
    has_bits = bool((bits[active] != full).any())
    return Cut(tile, active, bits, sub_queries, sub_keys, left, right, request.is_dense, has_bits)


def _parts_of_tiles(
    parts: Tensor, rows: int, columns: int, tile: Tile, sub_queries: int, sub_keys: int, outside: bool
) -> Tensor:
    """Parts [heads, n, m] by tile: [heads, rows, columns, parts of a tile]; those beyond n and m are `outside`."""
    in_rows, in_columns = tile.queries // sub_queries, tile.keys // sub_keys
    missing = rows * in_rows - parts.shape[1], columns * in_columns - parts.shape[2]
    parts = torch.nn.functional.pad(parts, (0, missing[1], 0, missing[0]), value=outside)
    return parts.unflatten(2, (columns, in_columns)).unflatten(1, (rows, in_rows)).transpose(2, 3).flatten(3)


def lists_of(cut: Cut, by_key: bool, device: torch.device) -> TileLists:
    """The list of each tile of queries, or of keys."""
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


class DiagonalLists(NamedTuple):
    """Near tiles of each layout head by diagonal, from the leftmost: those of one are [starts[n], starts[n + 1])."""

    starts: Tensor  # int32 [layout heads * diagonals + 1]
    tiles: Tensor  # int32, tiles of queries
    bits: Tensor  # int32
    diagonals: int


def diagonals_of(cut: Cut, rough: Cut, device: torch.device) -> DiagonalLists:
    """Tiles of `cut`, which must be square and no larger than those of `rough`, that lie in near tiles of `rough`."""
    near = ~rough.left & ~rough.right
    size, (_, rows, columns) = cut.tile.queries, cut.active.shape
    near = near[torch.arange(rows) * size // rough.tile.queries][:, torch.arange(columns) * size // rough.tile.keys]
    head, row, column = (cut.active & near).nonzero(as_tuple=True)
    reach = int((column - row).abs().max()) if row.numel() else 0
    diagonals = 2 * reach + 1
    diagonal = head * diagonals + column - row + reach
    order = diagonal.argsort(stable=True)
    counts = torch.bincount(diagonal, minlength=cut.active.shape[0] * diagonals)
    starts = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    bits = cut.bits[head, row, column][order]
    return DiagonalLists(starts.int().to(device), row[order].int().to(device), bits.to(device), diagonals)


@dataclass
class Call:
    """Settings that the kernels of one call share, and their launches."""

    request: Request  # with empty tensors: what the backward pass needs is for autograd to keep, or to drop
    device: torch.device
    kernels: ModuleType
    bias: int
    saturation: int  # of the table; 0 without one
    key_mask: Tensor | None
    segments: tuple[Tensor, Tensor] | None
    seed: int

    @property
    def near(self) -> int | None:
        """Distance below which tiles have to be looked at more closely."""
        return self.saturation if self.bias == _T5 else 0 if self.request.causal else None

    def plan(self, kernel: str) -> tuple[Cut, TileLists | DiagonalLists]:
        """The tiles of a kernel and its lists, kept with the layout."""
        request, device = self.request, self.device
        tile = _tile_for(request, kernel)

        def make() -> tuple[Cut, TileLists | DiagonalLists]:
            if kernel == "bias_gradient":
                rough = cut(request, _tile_for(request, "query_gradient"), self.near)
                parts = cut(request, tile, self.near)
                return parts, diagonals_of(parts, rough, device)
            parts = cut(request, tile, self.near)
            return parts, lists_of(parts, kernel == "key_gradient", device)

        lengths = request.scores_shape[2:]
        return cached(request.layout, ("triton", kernel, tile, lengths, request.causal, self.near, device), make)

    def launch(self, kernel: str, tensors: Mapping[str, Tensor | None], **more: object) -> None:
        """Run a kernel that walks lists, one program for each tile of each sequence of each head.

        Args:
            tensors, more: its own arguments, by name.
        """
        parts, lists = self.plan(kernel)
        batch, num_heads, num_tiles = *self.request.scores_shape[:2], lists.order.shape[1]
        self.run(
            kernel,
            num_tiles * batch * num_heads,
            parts,
            {**tensors, "ranges": lists.ranges, "order": lists.order, "tiles": lists.tiles, "tile_bits": lists.bits},
            num_tiles=num_tiles,
            sequences=batch * num_heads,
            BLOCK_N=parts.tile.keys,
            SUB_N=parts.sub_keys,
            BIAS=self.bias,
            DENSE=parts.dense,
            RANK_MAJOR=lists.rank_major,
            STAGES=parts.tile.num_stages,
            **more,
        )

    def run(
        self, kernel: str, programs: int, parts: Cut, tensors: Mapping[str, Tensor | None], **more: object
    ) -> None:
        """Run any kernel; in place of a tensor that it does not read, it is given one that exists."""
        query_segments, key_segments = self.segments or (None, None)
        hidden = self.hidden(parts)
        masks = {"key_mask": hidden, "query_segments": query_segments, "key_segments": key_segments}
        pointers = {name: tensors["q"] if x is None else x for name, x in {**tensors, **masks}.items()}
        output = tensors["o"] if "o" in tensors else tensors["do"]
        strides = {
            f"stride_{name}{dimension}": stride
            for name, x in zip("qkvo", (tensors["q"], tensors["k"], tensors["v"], output), strict=True)
            for dimension, stride in zip("bhn", x.stride()[:3], strict=True)
        }
        _, num_heads, query_length, key_length = self.request.scores_shape
        dropout_p, below = self.request.dropout_p, int(256 * self.request.dropout_p)
        getattr(self.kernels, f"{kernel}_kernel")[(programs,)](
            **pointers,
            seed=self.seed,
            drop_below=below,
            drop_chance=int((256 * dropout_p - below) * (1 << 24)),
            grow=1 / (1 - dropout_p),
            scale2=self.request.scale * _LOG2_E,
            num_heads=num_heads,
            layout_heads=parts.active.shape[0],
            query_length=query_length,
            key_length=key_length,
            **strides,
            stride_mask=0 if hidden is None or hidden.shape[0] == 1 else hidden.stride(0),
            **self.constants(parts),
            **more,
        )

    def hidden(self, parts: Cut) -> Tensor | None:
        """What is added to the scores of keys: -inf where masked or beyond the last; None if that is nowhere."""
        if self.key_mask is not None:
            return self.key_mask
        length = self.request.scores_shape[3]
        return None if length % parts.tile.keys == 0 else _beyond(length, self.device)

    def constants(self, parts: Cut) -> dict[str, object]:
        """Compile-time arguments that all kernels take."""
        (_, _, query_length, key_length), q, v = self.request.scores_shape, self.request.q, self.request.v
        ieee = q.dtype != torch.float32 or torch.get_float32_matmul_precision() == "highest"
        return {
            "HEAD_DIM": q.shape[3],
            "BLOCK_D": power_of_two(q.shape[3]),
            "VALUE_DIM": v.shape[3],
            "BLOCK_V": power_of_two(v.shape[3]),
            "BLOCK_M": parts.tile.queries,
            "SUB_M": parts.sub_queries,
            "WIDTH": _width(self.saturation),
            "CAUSAL": self.request.causal,
            "HAS_BITS": parts.has_bits,
            "HAS_PADDING": self.hidden(parts) is not None,
            "HAS_SEGMENTS": self.segments is not None,
            "HAS_DROPOUT": self.request.dropout_p > 0,
            "EVEN_M": query_length % parts.tile.queries == 0,
            "EVEN_N": key_length % parts.tile.keys == 0,
            "PRECISION": "ieee" if ieee else "tf32",
            "num_warps": parts.tile.num_warps,
            "num_stages": parts.tile.num_stages,
        }


def _tile_for(request: Request, kernel: str) -> Tile:
    return fitting_tile(kernel, *_sizes(request))


def _sizes(request: Request) -> tuple[int, int | None, int]:
    """The larger head dimension, the layout's block (None: dense), bytes of a number."""
    head_dim = max(request.q.shape[3], request.v.shape[3])
    return head_dim, None if request.is_dense else request.layout.block, request.q.dtype.itemsize


class _TritonAttention(torch.autograd.Function):
    """q, k, v and the bias table (base e, float32) or ALiBi's slopes -> output."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, table: Tensor | None, call: Call, kept: Kept) -> Tensor:
        o, lse = kept.output, kept.lse
        if o is None:
            o = v.new_empty(*q.shape[:3], v.shape[3])
            lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
            with torch.cuda.device_of(q):
                call.launch("forward", {"q": q, "k": k, "v": v, "o": o, "lse": lse, "table": _base_two(table, call)})
            kept.lse = lse
        ctx.save_for_backward(q, k, v, o, lse, table)
        ctx.call = call
        return o

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, do: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, o, lse, table = ctx.saved_tensors
        call, scale, train_bias = ctx.call, ctx.call.request.scale, ctx.needs_input_grad[3]
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        given = {"q": q, "k": k, "v": v, "do": do.contiguous(), "lse": lse, "table": _base_two(table, call)}
        given["delta"] = torch.empty_like(lse)  # filled by the first kernel
        far_sums = None  # of the scores' gradients, left and right of near tiles
        if train_bias:
            far_sums = lse.new_empty(*lse.shape[:2], call.plan("query_gradient")[0].active.shape[1], 2)
        with torch.cuda.device_of(q):
            written = {"o": o, "dq": dq, "far_sums": far_sums}
            call.launch("query_gradient", {**given, **written}, scale=scale, TRAIN_BIAS=train_bias)
            call.launch("key_gradient", {**given, "dk": dk, "dv": dv}, scale=scale)
            d_table = None
            if train_bias:
                far_sums = far_sums.sum((0, 2))  # [heads, 2]
                d_table = far_sums[:, 0] if call.bias == _ALIBI else _bias_gradient(call, given, far_sums)
        return dq, dk, dv, d_table, None, None


def _hidden(mask: Tensor) -> Tensor:
    """0 where a mask [rows, keys] is True, else -inf; up to a whole number of tiles: float32."""
    length = num_blocks(mask.shape[1], _LARGEST) * _LARGEST
    hidden = torch.full((mask.shape[0], length), -math.inf, device=mask.device)
    hidden[:, : mask.shape[1]].masked_fill_(mask, 0.0)
    return hidden


@lru_cache(maxsize=64)
@torch.inference_mode(False)
def _beyond(length: int, device: torch.device) -> Tensor:
    return _hidden(torch.ones(1, length, dtype=torch.bool, device=device))


def _width(saturation: int) -> int:
    """Distances that near tiles hold: from -width / 2 up."""
    return 2 * (num_blocks(saturation, 16) * 16 + 2 * _LARGEST)


@lru_cache(maxsize=64)
@torch.inference_mode(False)
def _copies(saturation: int, device: torch.device) -> Tensor:
    """Places in a table of what `bias_of` reads: [2, 4, width], by key - query four times, then by query - key."""
    places = torch.arange(_width(saturation), device="cpu") - torch.arange(4, device="cpu")[:, None]
    distances = places - _width(saturation) // 2
    both = torch.stack([distances, -distances])
    return (both.clamp(-saturation, saturation) + saturation).to(device)


def _base_two(table: Tensor | None, call: Call) -> Tensor | None:
    """The table as kernels read it: slopes, or copies of a T5 table, all times log2(e)."""
    if table is None or call.bias == _ALIBI:
        return None if table is None else (table * _LOG2_E).contiguous()
    return (table * _LOG2_E)[:, _copies(call.saturation, call.device)]


def _bias_gradient(call: Call, given: Mapping[str, Tensor], far_sums: Tensor) -> Tensor:
    """Gradient of the table, [heads, 2 * saturation + 1]: near tiles by one more kernel, the rest is `far_sums`."""
    parts, lists = call.plan("bias_gradient")
    batch, num_heads, lse = *call.request.scores_shape[:2], given["lse"]
    size, saturation, diagonals = parts.tile.queries, call.saturation, lists.diagonals
    splits = max(1, min(_PROGRAMS // (num_heads * diagonals), batch * parts.active.shape[1]))
    sums = lse.new_empty(num_heads, diagonals, splits, size, size)
    call.run(
        "bias_gradient",
        num_heads * diagonals * splits,
        parts,
        {**given, "sums": sums, "starts": lists.starts, "tiles": lists.tiles, "tile_bits": lists.bits},
        num_diagonals=diagonals,
        splits=splits,
        batch_size=batch,
    )
    by_distance = sum_diagonals(sums.sum(2))  # [heads, diagonals, 2 * size - 1]
    reach = diagonals // 2 * size + size - 1
    extended = lse.new_zeros(num_heads, 2 * max(reach, saturation) + 1)
    middle = max(reach, saturation)
    for diagonal in range(diagonals):  # neighbours overlap
        begin = middle - reach + diagonal * size
        extended[:, begin : begin + 2 * size - 1] += by_distance[:, diagonal]
    d_table = extended[:, middle - saturation : middle + saturation + 1].clone()
    d_table[:, 0] += extended[:, : middle - saturation].sum(1) + far_sums[:, 0]
    d_table[:, -1] += extended[:, middle + saturation + 1 :].sum(1) + far_sums[:, 1]
    return d_table


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def refusal(request: Request) -> str | None:
    """Why this backend cannot serve a request; None if it can."""
    block, widest = request.layout.block, max(request.q.shape[3], request.v.shape[3])
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed (pip install triton)"
    if request.q.device.type != "cuda" and not (_interpreted() and request.q.device.type == "cpu"):
        return f"the tensors are on {request.q.device}, and its kernels run on a GPU (TRITON_INTERPRET=1 for tests)"
    if request.q.dtype == torch.float64:
        return "it computes in float32, not in float64"
    if widest > 256:
        return f"head_dim {widest} is above 256"
    if isinstance(request.bias, Tensor):
        return "the bias is a matrix, not a T5Bias or AlibiBias"
    if request.dropout_p > 255 / 256:
        return f"dropout_p {request.dropout_p} is above 255/256"
    if not request.is_dense and (block < 16 or block & (block - 1)):
        return f"the layout's block {block} is not a power of two from 16 up"
    return refusal_of_device(request)


@lru_cache(maxsize=64)
def _device(device: torch.device) -> tuple[str, tuple[int, int], int]:
    """Name, compute capability, and bytes of shared memory that a program may have."""
    properties = torch.cuda.get_device_properties(device)
    return properties.name, (properties.major, properties.minor), properties.shared_memory_per_block_optin


def refusal_of_device(request: Request) -> str | None:
    """Why the GPU of a request cannot run these kernels; None if it can, or is none of NVIDIA's."""
    if request.q.device.type != "cuda" or torch.version.hip is not None:
        return None
    name, capability, available = _device(request.q.device)
    if capability < _OLDEST:
        return (
            f"{name} has compute capability {capability[0]}.{capability[1]}, and Triton needs "
            f"{_OLDEST[0]}.{_OLDEST[1]}"
        )
    trained = any(x.requires_grad for x in (request.q, request.k, request.v)) and torch.is_grad_enabled()
    kernels = ["forward", *(("query_gradient", "key_gradient") if trained or request.trains_bias else ())]
    kernels += ["bias_gradient"] if request.trains_bias and not isinstance(request.bias, AlibiBias) else []
    needed, kernel = max((shared_memory(kernel, *_sizes(request)), kernel) for kernel in kernels)
    if needed <= available:
        return None
    return (
        f"its kernel {kernel} takes up to {needed / 1024:.0f} KiB of shared memory at head_dim "
        f"{_sizes(request)[0]} in {str(request.q.dtype).removeprefix('torch.')}, and {name} has {available / 1024:.0f}"
    )


def cost(request: Request) -> tuple[float, int]:
    """(scores computed per score of the full matrix, bytes beside inputs, output and their gradients)."""
    batch, num_heads, query_length, key_length = request.scores_shape
    parts = cut(request, _tile_for(request, "forward"), None)
    computed = parts.active.float().mean().item() * parts.active[0].numel() * parts.tile.queries * parts.tile.keys
    rows = 2 * batch * num_heads * query_length  # lse and delta
    sums = 0
    if request.trains_bias:
        sums = max(_PROGRAMS, num_heads * 2 * num_blocks(256, 64)) * _tile_for(request, "bias_gradient").queries ** 2
    return computed / (query_length * key_length), 4 * (rows + sums)


def attend(request: Request, seed: int) -> Tensor:
    """`block_sparse_attention` of a checked request."""
    return attend_kept(request, seed, Kept())


def attend_kept(request: Request, seed: int, kept: Kept) -> Tensor:
    """The same, computed unless it is known."""
    kernels = importlib.import_module(f"{__package__}.triton_kernels")
    table, kind, saturation = None, _NO_BIAS, 0
    if type(request.bias) is AlibiBias:
        table, kind = request.bias.slopes.float(), _ALIBI
    elif request.bias is not None:
        table, kind = request.bias.table(max(request.scores_shape[2:])).float(), _T5
        saturation = table.shape[1] // 2
    mask, segments = request.key_padding_mask, request.segment_ids
    q, k, v = (_packed(x) for x in (request.q, request.k, request.v))
    empty = {name: x.detach().to("meta") for name, x in (("q", q), ("k", k), ("v", v))}
    call = Call(
        request._replace(**empty, bias=None, key_padding_mask=None, segment_ids=None),
        q.device,
        kernels,
        kind,
        saturation,
        # copies, because the backward pass reads them after their owner may have written the next batch into them
        key_mask=None if mask is None else _hidden(mask),
        segments=None if segments is None else tuple(ids.to(torch.int64, copy=True).contiguous() for ids in segments),
        seed=seed,
    )
    return _TritonAttention.apply(q, k, v, table, call, kept)


def _packed(x: Tensor) -> Tensor:
    """x, copied unless it fills its memory, head_dim innermost: gradients then have its strides."""
    like = torch.empty_like(x, device="meta")
    return x if like.stride() == x.stride() and x.stride(-1) == 1 else x.contiguous()

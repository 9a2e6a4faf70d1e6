"""The attention backend "triton", which launches the Triton kernels.

Triton is imported by the first call. With TRITON_INTERPRET=1 the kernels run on the CPU, for tests.
"""

from __future__ import annotations

import importlib
import itertools
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from types import ModuleType
from typing import NamedTuple
from weakref import ref

import torch
from torch import Tensor

from lm_experiments_tools.attention.kernels.bias import AlibiBias, Bias
from lm_experiments_tools.attention.kernels.call import AttentionInputs
from lm_experiments_tools.attention.kernels.layout_cache import Layout, cached, num_blocks
from lm_experiments_tools.attention.kernels.operator import KernelAttention
from lm_experiments_tools.attention.kernels.tiles import (
    SUM_ROWS,
    Cut,
    Diagonals,
    Tile,
    TileLists,
    cut,
    diagonals_of,
    lists_of,
    power_of_two,
    tile_of,
)
from lm_experiments_tools.modules.devices import TRITON_CAPABILITY, card_of, lacks_triton

_LOG2_E = math.log2(math.e)
_NO_BIAS, _T5, _ALIBI = 0, 1, 2
_LARGEST = 128  # tokens of a tile, at most


@dataclass(eq=False)
class Plan:
    """Constants of all attention calls with inputs of the same shapes and settings; cached with the layout."""

    shapes: AttentionInputs  # with meta tensors, and without layout, masks and bias
    layout: ref[Layout]  # weak, because the layout owns the cache
    device: torch.device
    kernels: ModuleType
    bias: int
    saturation: int  # of the table; 0 without one
    mask_rows: int  # of the key padding mask; 0 without one
    has_segments: bool
    is_ieee: bool  # products have the precision of float32
    launches: dict[tuple, tuple] = field(default_factory=dict)

    @property
    def inputs(self) -> AttentionInputs:
        return self.shapes._replace(spec=self.shapes.spec._replace(layout=self.layout()))

    @property
    def near(self) -> int | None:
        """Distance below which a tile counts as near the diagonal (see tiles.py); None if no tile is near."""
        return self.saturation if self.bias == _T5 else 0 if self.inputs.spec.causal else None

    def tiles_of(self, kernel: str) -> tuple[Cut, TileLists]:
        """Tiles that a kernel computes, and their lists by row; cached with the block-sparse layout."""
        tile = self.tile(kernel)

        def make() -> tuple[Cut, TileLists]:
            parts = cut(self.inputs, tile, self.near)
            return parts, lists_of(parts, kernel == "key_gradient", self.device)

        return cached(self.layout(), ("triton", kernel, tile, *self._key), make)

    def diagonals(self) -> Diagonals:
        """Constants for the gradient of a T5 bias, cached with the block-sparse layout."""
        (parts, lists), dtype = self.tiles_of("query_gradient"), self.shapes.q.dtype
        return cached(
            self.layout(),
            ("diagonals", parts.tile, self.saturation, dtype, *self._key),
            lambda: diagonals_of(parts, self.saturation, lists.ranges, dtype, self.device),
        )

    @cached_property
    def _key(self) -> tuple:
        return self.inputs.scores_shape[2:], self.inputs.spec.causal, self.near, self.device

    @cached_property
    def _sizes(self) -> tuple:
        return *_sizes(self.inputs), card_of(self.device)

    def tile(self, kernel: str) -> Tile:
        """The tile that `tiles.py` has for a kernel at this moment."""
        return tile_of(kernel, *self._sizes)

    def arguments(self, kernel: str, strides: tuple[tuple[int, ...], ...]) -> tuple[int, dict[str, object]]:
        """Number of programs of a kernel, and its arguments that do not differ between calls.

        `strides` are those of q, k, v and the output in their first three dimensions.
        """
        parts, lists = self.tiles_of(kernel)
        batch, num_heads, query_length, key_length = self.inputs.scores_shape
        dropout_p, num_tiles = self.inputs.spec.dropout_p, lists.order.shape[1]
        below, is_padded = int(256 * dropout_p), self.mask_rows > 0 or key_length % parts.tile.keys > 0
        names = [f"stride_{x}{dimension}" for x in "qkvo" for dimension in "bhn"]
        return num_tiles * batch * num_heads, {
            "ranges": lists.ranges,
            "order": lists.order,
            "tiles": lists.tiles,
            "tile_bits": lists.bits,
            "drop_below": below,
            "drop_chance": int((256 * dropout_p - below) * (1 << 24)),
            "grow": 1 / (1 - dropout_p),
            "scale2": self.inputs.spec.scale * _LOG2_E,
            "num_tiles": num_tiles,
            "num_heads": num_heads,
            "layout_heads": parts.active.shape[0],
            "sequences": batch * num_heads,
            "query_length": query_length,
            "key_length": key_length,
            **dict(zip(names, itertools.chain(*strides), strict=True)),
            "stride_mask": 0 if self.mask_rows <= 1 else num_blocks(key_length, _LARGEST) * _LARGEST,
            **self.constants(parts),
            "HAS_PADDING": is_padded,
            "SKIPS": parts.dense and (self.mask_rows > 0 or self.has_segments),
            "RANK_MAJOR": lists.rank_major,
        }

    def constants(self, parts: Cut) -> dict[str, object]:
        """Compile-time arguments that all attention kernels have in common."""
        (_, _, query_length, key_length), q, v = self.inputs.scores_shape, self.inputs.q, self.inputs.v
        return {
            "HEAD_DIM": q.shape[3],
            "BLOCK_D": power_of_two(q.shape[3]),
            "VALUE_DIM": v.shape[3],
            "BLOCK_V": power_of_two(v.shape[3]),
            "BLOCK_M": parts.tile.queries,
            "BLOCK_N": parts.tile.keys,
            "SUB_M": parts.sub_queries,
            "SUB_N": parts.sub_keys,
            "BIAS": self.bias,
            "DENSE": parts.dense,
            "STAGES": parts.tile.num_stages,
            "WIDTH": _width(self.saturation),
            "CAUSAL": self.inputs.spec.causal,
            "HAS_BITS": parts.has_bits,
            "HAS_SEGMENTS": self.has_segments,
            "HAS_DROPOUT": self.inputs.spec.dropout_p > 0,
            "EVEN_M": query_length % parts.tile.queries == 0,
            "EVEN_N": key_length % parts.tile.keys == 0,
            "PRECISION": "tf32" if q.dtype == torch.float32 and not self.is_ieee else "ieee",
            "num_warps": parts.tile.num_warps,
            "num_stages": parts.tile.num_stages,
        }


class Call(NamedTuple):
    """An attention call of the backend "triton": what `Plan` does not hold, and the launch of its kernels."""

    plan: Plan
    layout: Layout  # which the plan does not keep until the backward pass
    key_mask: Tensor | None  # to add to the scores: -inf at padding and beyond the last key
    segments: tuple[Tensor, Tensor] | tuple[None, None]
    seed: Tensor | None

    def launch(self, kernel: str, tensors: Mapping[str, Tensor | None], **more: object) -> None:
        """Launch one of `tiles.KERNELS`, with one program for each row of tiles of each head.

        `tensors` are its tensor arguments by name, None for those that it does not read.
        """
        q, output = tensors["q"], tensors["o"] if "o" in tensors else tensors["do"]
        strides = tuple(x.stride()[:3] for x in (q, tensors["k"], tensors["v"], output))
        key = kernel, self.plan.tile(kernel), strides
        found = self.plan.launches.get(key)
        if found is None:
            found = self.plan.launches[key] = self.plan.arguments(kernel, strides)
        num_programs, arguments = found
        given = {**tensors, "key_mask": self.key_mask, "seed": self.seed}
        given["query_segments"], given["key_segments"] = self.segments
        # a tensor that the kernel does not read is replaced by one that exists
        given = {name: q if x is None else x for name, x in given.items()}
        getattr(self.plan.kernels, f"{kernel}_kernel")[(num_programs,)](**given, **arguments, **more)


def _is_ieee(x: Tensor) -> bool:
    """True if products must have the precision of float32."""
    return x.dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest"


def _sizes(inputs: AttentionInputs) -> tuple[int, int | None, int]:
    """The larger head dimension, the layout's block (None: dense), bytes of a number."""
    head_dim = max(inputs.q.shape[3], inputs.v.shape[3])
    return head_dim, None if inputs.is_dense else inputs.spec.layout.block, inputs.q.dtype.itemsize


def run_forward(call: Call, q: Tensor, k: Tensor, v: Tensor, table: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute the attention output, in q's memory layout if possible, and the log-sum-exp of each query's scores."""
    o = torch.empty_like(q) if q.shape[3] == v.shape[3] else v.new_empty(*q.shape[:3], v.shape[3])
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    with torch.cuda.device_of(q):
        call.launch("forward", {"q": q, "k": k, "v": v, "o": o, "lse": lse, "table": _base_two(table, call.plan)})
    return o, lse


def run_backward(
    call: Call,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor | None,
    o: Tensor,
    lse: Tensor,
    do: Tensor,
    trains_bias: bool,
    gradients: Sequence[Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Compute the gradients of q, k, v and the bias values (None unless `trains_bias`) from the output's, `do`.

    The first three are written to `gradients` if they are given, with the heads of a token adjacent in memory.
    """
    plan, scale = call.plan, call.plan.shapes.spec.scale
    if gradients is None:
        gradients = [x.new_empty(x.transpose(1, 2).shape).transpose(1, 2) for x in (q, k, v)]
    dq, dk, dv = gradients
    do = do if do.stride() == o.stride() else torch.empty_like(o).copy_(do)
    given = {"q": q, "k": k, "v": v, "do": do, "table": _base_two(table, plan)}
    # Filled by the first kernel.
    given["pairs"] = lse.new_empty(*lse.shape[:2], 3 if plan.bias == _T5 else 1, lse.shape[2], 2)
    with torch.cuda.device_of(q):
        sums, constants = _sums_of_bias(plan, lse) if trains_bias else ({}, {})
        written = {"o": o, "lse": lse, "dq": dq, **dict.fromkeys(_SUMS), **sums}
        constants = {**dict.fromkeys(_SUM_CONSTANTS, 1), **constants, "stride_dq": dq.stride(2)}
        call.launch("query_gradient", {**given, **written}, scale=scale, TRAIN_BIAS=trains_bias, **constants)
        strides = {"stride_dk": dk.stride(2), "stride_dv": dv.stride(2)}
        call.launch("key_gradient", {**given, "dk": dk, "dv": dv}, scale=scale, **strides)
        d_table = _bias_gradient(plan, sums) if trains_bias else None
    return dq, dk, dv, d_table


def _hidden(mask: Tensor) -> Tensor:
    """0 where a mask [rows, keys] is True, else -inf, padded to full tiles: float32."""
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
    """Indices into a table of what `bias_of` reads: [2, 4, width], by key - query four times, then by query - key."""
    places = torch.arange(_width(saturation), device="cpu") - torch.arange(4, device="cpu")[:, None]
    distances = places - _width(saturation) // 2
    both = torch.stack([distances, -distances])
    return (both.clamp(-saturation, saturation) + saturation).to(device)


def _base_two(table: Tensor | None, plan: Plan) -> Tensor | None:
    """The table as kernels read it: slopes, or copies of a T5 table, all times log2(e)."""
    if table is None or plan.bias == _ALIBI:
        return None if table is None else (table * _LOG2_E).contiguous()
    return (table * _LOG2_E)[:, _copies(plan.saturation, plan.device)]


_SUMS = "far_sums", "near_sums", "sides", "places", "windows"
_SUM_CONSTANTS = "LEFTMOST", "WINDOW", "NUM_WINDOWS", "SUM_ROWS", "MICRO", "FOLD"


def _sums_of_bias(plan: Plan, lse: Tensor) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Tensors and constants with which the kernel of q's gradient sums that of a bias; it fills the first tensors."""
    num_tiles = plan.tiles_of("query_gradient")[0].active.shape[1]
    far_sums = lse.new_empty(*lse.shape[:2], num_tiles, 16)  # left and right of near tiles: columns 0 and 1
    if plan.bias == _ALIBI:
        return {"far_sums": far_sums}, {}
    lists = plan.diagonals()
    near_sums = lse.new_empty(*lse.shape[:2], num_tiles, lists.num_windows, SUM_ROWS, 16)
    tensors = {"far_sums": far_sums, "near_sums": near_sums, "sides": lists.sides}
    tensors |= {"places": lists.places, "windows": lists.windows}
    constants = {"LEFTMOST": lists.leftmost, "WINDOW": lists.window, "NUM_WINDOWS": lists.num_windows}
    # TF32 has more digits than the 16-bit numbers that were summed, and as many as it has where those are its own
    fold = "ieee" if torch.version.hip or plan.is_ieee else "tf32"
    return tensors, {**constants, "SUM_ROWS": SUM_ROWS, "MICRO": lists.micro, "FOLD": fold}


def _bias_gradient(plan: Plan, sums: Mapping[str, Tensor]) -> Tensor:
    """Gradient of ALiBi's slopes [heads] or of a table [heads, 2 * saturation + 1], from sums by tile."""
    far_sums = sums["far_sums"].sum((0, 2))  # [heads, 16]
    if plan.bias == _ALIBI:
        return far_sums.sum(1)
    near_sums = sums["near_sums"].sum((0, 2)).flatten(1)
    by_distance = torch.cat([near_sums, far_sums], dim=1)[:, plan.diagonals().sums].sum(1)
    beyond = by_distance.shape[1] // 2 - plan.saturation
    d_table = by_distance[:, beyond:-beyond].contiguous()
    d_table[:, 0] += by_distance[:, :beyond].sum(1)
    d_table[:, -1] += by_distance[:, -beyond:].sum(1)
    return d_table


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def refusal(inputs: AttentionInputs) -> str | None:
    """Reason why the backend "triton" cannot compute these inputs; None if it can."""
    block, widest = inputs.spec.layout.block, max(inputs.q.shape[3], inputs.v.shape[3])
    if lacking := lacks_triton():
        return lacking
    if inputs.q.device.type != "cuda" and not (_interpreted() and inputs.q.device.type == "cpu"):
        return f"the tensors are on {inputs.q.device}, and its kernels run on a GPU (TRITON_INTERPRET=1 for tests)"
    if inputs.q.dtype == torch.float64:
        return "it computes in float32, not in float64"
    if widest > 256:
        return f"head_dim {widest} is above 256"
    if inputs.spec.mask is not None:
        return "the mask is a matrix"
    if isinstance(inputs.spec.bias, Tensor):
        return "the bias is a matrix, not a T5Bias or AlibiBias"
    if inputs.spec.dropout_p > 255 / 256:
        return f"dropout_p {inputs.spec.dropout_p} is above 255/256"
    if not inputs.is_dense and (block < 16 or block & (block - 1)):
        return f"the layout's block {block} is not a power of two from 16 up"
    return refusal_of_device(inputs)


def refusal_of_device(inputs: AttentionInputs) -> str | None:
    """Reason why the GPU of the inputs cannot run the Triton kernels; None if it can, or is not from NVIDIA."""
    card = card_of(inputs.q.device)
    if card is None:
        return None
    if card.capability < TRITON_CAPABILITY:
        found, oldest = (".".join(map(str, x)) for x in (card.capability, TRITON_CAPABILITY))
        return f"{card.name} has compute capability {found}, and Triton needs {oldest}"
    # Up to head_dim 128 the kernels take at most 98 KiB of shared memory, which every such card has; above, 109 KiB.
    if _sizes(inputs)[0] > 128 and card.shared_memory < 109 << 10:
        return f"head_dim above 128 takes 109 KiB of shared memory, and {card.name} has {card.shared_memory >> 10}"
    return None


def attend(inputs: AttentionInputs, seed: Tensor | None) -> Tensor:
    call, *tensors = prepare(inputs, seed)
    return KernelAttention.apply(*tensors, call, sys.modules[__name__])


def kernel_bias(inputs: AttentionInputs, bias: Bias | None) -> Tensor | None:
    """Convert a position bias to the float32 tensor that the Triton kernels read.

    It is ALiBi's slopes [heads]. For another bias it has a value for each distance from -s to s, [heads, 2 * s + 1],
    where s is the distance beyond which the bias is constant.
    """
    if isinstance(bias, AlibiBias):
        return bias.slopes.float()
    return None if bias is None else bias.table(max(inputs.scores_shape[2:])).float()


def prepare(inputs: AttentionInputs, seed: Tensor | None) -> tuple[Call, Tensor, Tensor, Tensor, Tensor | None]:
    """Return what the Triton kernels read: the settings of the call, then q, k, v and the bias (`kernel_bias`)."""
    spec, table = inputs.spec, kernel_bias(inputs, inputs.spec.bias)
    mask, segments = spec.key_padding_mask, spec.segment_ids
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in inputs[:3])
    bias = _NO_BIAS if table is None else _ALIBI if isinstance(spec.bias, AlibiBias) else _T5
    saturation = table.shape[1] // 2 if bias == _T5 else 0
    mask_rows, is_ieee = 0 if mask is None else mask.shape[0], _is_ieee(q)

    def make() -> Plan:
        empty = (x.detach().to("meta") for x in (q, k, v))
        settings = spec._replace(layout=None, bias=None, key_padding_mask=None, segment_ids=None, packed=None)
        kernels = importlib.import_module(f"{__package__}.triton_kernels")
        shapes = AttentionInputs(*empty, settings)
        has_segments = segments is not None
        return Plan(shapes, ref(spec.layout), q.device, kernels, bias, saturation, mask_rows, has_segments, is_ieee)

    key = q.shape, k.shape[2], v.shape[3], q.dtype, q.device, spec.causal, spec.scale, spec.dropout_p
    key = "plan", *key, bias, saturation, mask_rows, segments is not None, is_ieee
    plan = cached(spec.layout, key, make)
    # copies, because the caller may overwrite its masks before the backward pass
    key_mask = _beyond(k.shape[2], q.device) if mask is None else _hidden(mask)
    segments = (ids.to(torch.int64, copy=True).contiguous() for ids in segments) if segments else (None, None)
    return Call(plan, spec.layout, key_mask, tuple(segments), seed), q, k, v, table

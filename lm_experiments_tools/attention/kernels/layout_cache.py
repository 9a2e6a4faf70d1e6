"""Block-sparse layouts for one input length, and a cache of the lists of blocks that kernels derive from them.

A layout says which blocks of keys each block of queries attends to. Making a kernel's lists takes longer than
attention on a short input. So they are cached for each layout object, length and device, until the layout is deleted.
"""

from __future__ import annotations

import reprlib
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral
from typing import Protocol

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from lm_experiments_tools.errors import UserError

DENSE_BLOCK = 64  # tokens of a block where no layout is given


class LayoutMaker(Protocol):
    """Protocol of block-sparse layouts for any input length, such as `BigBirdSparsityConfig`."""

    block: int

    def make_layout(self, seq_len: int) -> Tensor:
        """Build the block-sparse layout for `seq_len` tokens, int64 [heads, seq_len / block, seq_len / block].

        In each head, element (q, k) is 1 where query block q attends to key block k.
        """


@dataclass(frozen=True, eq=False)
class Layout:
    """A block-sparse layout for one input length: the key blocks that each query block attends to.

    Args:
        blocks: [heads or 1, query_blocks, key_blocks], True or 1 where attended; 1 holds for all heads.
        block: tokens of a block, in queries and in keys.

    Raises:
        UserError: blocks of another shape or with values besides 0 and 1, or a block below 1.
    """

    blocks: Tensor
    block: int

    def __post_init__(self) -> None:
        if not isinstance(self.blocks, Tensor) or self.blocks.dim() != 3 or self.blocks.is_meta:
            raise UserError(f"Layout: blocks is {describe(self.blocks)}, not [heads or 1, query_blocks, key_blocks].")
        if not is_int(self.block) or self.block < 1:
            raise UserError(f"Layout: block is {self.block!r}; it must be a number of tokens.")
        if self.blocks.dtype != torch.bool and not ((self.blocks == 0) | (self.blocks == 1)).all():
            raise UserError("Layout: blocks has values besides 0 and 1.")

    def tokens(self, device: torch.device) -> Tensor:
        """Expand the blocks to a mask of tokens, bool [1, heads or 1, query_blocks * block, key_blocks * block]."""
        rows = self.blocks.to(device).repeat_interleave(self.block, 1)
        return rows.repeat_interleave(self.block, 2)[None]


AnyLayout = LayoutMaker | Layout | Tensor | None


def is_int(x: object) -> bool:
    """True for an integer of Python or numpy that is not a bool."""
    return isinstance(x, Integral) and not isinstance(x, bool)


def describe(x: object) -> str:
    """Describe a value briefly for an error message: dtype and shape of a tensor, `repr` of anything else."""
    if isinstance(x, Tensor):
        return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"
    return f"{reprlib.repr(x)} ({type(x).__name__})"


def num_blocks(length: int, block: int) -> int:
    """Number of blocks that cover `length` tokens."""
    return -(-length // block)


_MAX_CACHED = 256  # values of a layout
_ABSENT = object()
_cache: dict[int, dict[tuple, object]] = {}  # by id of the layout; the most recently used keys come last


def cached(owner: object, key: tuple, make: Callable[[], object]) -> object:
    """Return `make()`, from a cache that lives as long as the object `owner`.

    Args:
        owner: for example a layout, whose derived lists are cached.
        key: what the value depends on besides the owner. The `_MAX_CACHED` keys used last are kept.
        make: function that computes a missing value.
    """
    values = _cache.get(id(owner))
    if values is None:
        values = _cache[id(owner)] = {}
        weakref.finalize(owner, _cache.pop, id(owner), None)
    value = values.pop(key, _ABSENT)
    if value is _ABSENT:
        value = make()
    values[key] = value
    if len(values) > _MAX_CACHED:
        del values[next(iter(values))]
    return value


def resolve_layout(layout: AnyLayout, num_heads: int, query_length: int, key_length: int) -> Layout:
    """Convert any kind of block-sparse layout to a `Layout` for these lengths; the last block may be partial.

    Args:
        layout: a configuration such as `BigBirdSparsityConfig`, a `Layout`, or a tensor [heads or 1, query_blocks,
            key_blocks]. A tensor's block is query_length / query_blocks, rounded up. It must be a power of two,
            because other sizes would be ambiguous.

    Returns:
        `Layout` with bool blocks [num_heads or 1, query_blocks, key_blocks] on the CPU; 1 if all heads are equal.

    Raises:
        UserError: not a layout, a layout for other heads or lengths, or a configuration in cross-attention.
    """
    block = DENSE_BLOCK
    if isinstance(layout, Tensor):
        rows = layout.shape[1] if layout.dim() == 3 else 0
        block = num_blocks(query_length, rows) if rows else 0
        if block < 1 or block & (block - 1):
            raise UserError(
                f"layout is {describe(layout)} for {query_length} queries; it must be [heads or 1, query_blocks, "
                "key_blocks] with a power of two of tokens a block. Wrap other ones: Layout(blocks, block)."
            )
    elif isinstance(layout, Layout) or (callable(getattr(layout, "make_layout", 0)) and not isinstance(layout, type)):
        block = getattr(layout, "block", None)
    elif layout is not None:
        raise UserError(
            f"layout is {describe(layout)}; it must be a configuration (get_sparsity_config finds one by name), a "
            "Layout, a tensor [heads or 1, query_blocks, key_blocks] or None."
        )
    if not is_int(block) or block < 1:
        raise UserError(f"The layout's block is {block!r}; it must be a number of tokens.")
    shape = num_blocks(query_length, block), num_blocks(key_length, block), query_length == key_length
    owner = _DENSE if layout is None else layout
    versions, version = cached(owner, ("blocks", num_heads, *shape, block), dict), _version(layout)
    if version not in versions:
        made = _resolve(layout, block, num_heads, query_length, key_length)
        if isinstance(made.blocks, FakeTensor):  # valid only within this trace
            return made
        versions.clear()  # made before the layout was changed
        versions[version] = made
    return versions[version]


def _version(layout: AnyLayout) -> object:
    """A value that changes whenever the blocks or settings of a layout change."""
    blocks = layout.blocks if isinstance(layout, Layout) else layout
    if not isinstance(blocks, Tensor):
        values = getattr(layout, "__dict__", None)
        if values is None:
            return repr(layout)
        return repr({name: (id(x), _version(x)) if isinstance(x, Tensor) else x for name, x in values.items()})
    return (blocks != 0).cpu().numpy().tobytes() if blocks.is_inference() else blocks._version


def _resolve(layout: AnyLayout, block: int, num_heads: int, query_length: int, key_length: int) -> Layout:
    expected = num_blocks(query_length, block), num_blocks(key_length, block)
    if layout is None:
        return Layout(torch.ones(1, *expected, dtype=torch.bool, device="cpu"), DENSE_BLOCK)
    if isinstance(layout, Layout | Tensor):
        blocks = layout if isinstance(layout, Tensor) else layout.blocks
    elif query_length == key_length:
        blocks = torch.as_tensor(layout.make_layout(expected[0] * block))
    else:
        raise UserError(
            f"{type(layout).__name__} is for self-attention, but there are {query_length} queries and {key_length} "
            "keys: pass a Layout."
        )
    blocks = Layout(blocks, block).blocks.detach().to("cpu") != 0
    if blocks.shape[0] not in (1, num_heads) or blocks.shape[1:] != expected:
        raise UserError(
            f"The layout has blocks {list(blocks.shape)} of {block} tokens, but {num_heads} heads, {query_length} "
            f"queries and {key_length} keys need [{num_heads} or 1, {expected[0]}, {expected[1]}]."
        )
    if blocks.shape[0] > 1 and bool((blocks == blocks[:1]).all()):
        blocks = blocks[:1].clone()
    return Layout(blocks, block)


_DENSE = Layout(torch.ones(1, 1, 1, dtype=torch.bool, device="cpu"), DENSE_BLOCK)  # owns cached lists of layout None

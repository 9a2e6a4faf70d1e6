"""Block-sparse layouts for one input length, and a cache of the lists of blocks that kernels derive from them.

A layout says which blocks of keys each block of queries attends to. Making a kernel's lists takes longer than
attention on a short input. So they are cached for each layout object, length and device, until the layout is deleted.
"""

from __future__ import annotations

import reprlib
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lm_experiments_tools.errors import UserError

DENSE_BLOCK = 64  # tokens of a block where no layout is given


@dataclass(frozen=True, eq=False)
class Layout:
    """A block-sparse layout for one input length: the key blocks that each query block attends to. Raises UserError.

    It must not change after its first use.

    Args:
        blocks: [heads or 1, query_blocks, key_blocks], True or 1 where attended; 1 holds for all heads.
        block: tokens of a block, in queries and in keys.
    """

    blocks: Tensor
    block: int

    def __post_init__(self) -> None:
        if not isinstance(self.blocks, Tensor) or self.blocks.dim() != 3 or self.blocks.is_meta:
            raise UserError(f"Layout: blocks is {describe(self.blocks)}, not [heads or 1, query_blocks, key_blocks].")
        if self.blocks.dtype != torch.bool and not ((self.blocks == 0) | (self.blocks == 1)).all():
            raise UserError("Layout: blocks has values besides 0 and 1.")

    def tokens(self, device: torch.device) -> Tensor:
        """Expand the blocks to a mask of tokens, bool [1, heads or 1, query_blocks * block, key_blocks * block]."""
        rows = self.blocks.to(device).repeat_interleave(self.block, 1)
        return rows.repeat_interleave(self.block, 2)[None]


AnyLayout = "SparsityConfig | Layout | None"  # layouts must not change after their first use


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

    `key` is what the value depends on besides the owner. The `_MAX_CACHED` keys used last are kept.
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

    Returns:
        `Layout` with bool blocks [num_heads or 1, query_blocks, key_blocks] on the CPU; 1 if all heads are equal.

    Raises:
        UserError: not a layout, a layout for other heads or lengths, or a configuration in cross-attention.
    """
    owner = _DENSE if layout is None else layout
    if isinstance(owner, type) or not (isinstance(owner, Layout) or hasattr(owner, "make_layout")):
        raise UserError(
            f"layout is {describe(layout)}; it must be a configuration (get_sparsity_config finds one by name), a "
            "Layout or None."
        )
    expected = num_blocks(query_length, owner.block), num_blocks(key_length, owner.block)

    def make() -> Layout:
        if layout is None:
            return Layout(torch.ones(1, *expected, dtype=torch.bool, device="cpu"), DENSE_BLOCK)
        if isinstance(layout, Layout):
            blocks = layout.blocks
        elif query_length == key_length:
            blocks = torch.as_tensor(layout.make_layout(expected[0] * layout.block))
        else:
            raise UserError(
                f"{type(layout).__name__} is for self-attention, but there are {query_length} queries and "
                f"{key_length} keys: pass a Layout."
            )
        blocks = Layout(blocks, layout.block).blocks.detach().to("cpu") != 0
        if blocks.shape[0] not in (1, num_heads) or blocks.shape[1:] != expected:
            raise UserError(
                f"The layout has blocks {list(blocks.shape)} of {layout.block} tokens, but {num_heads} heads, "
                f"{query_length} queries and {key_length} keys need [{num_heads} or 1, {expected[0]}, {expected[1]}]."
            )
        return Layout(blocks[:1].clone() if (blocks == blocks[:1]).all() else blocks, layout.block)

    return cached(owner, ("blocks", num_heads, *expected, query_length == key_length), make)


_DENSE = Layout(torch.ones(1, 1, 1, dtype=torch.bool, device="cpu"), DENSE_BLOCK)  # owns cached lists of layout None

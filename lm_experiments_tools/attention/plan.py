"""From a layout to the lists that kernels walk: which key blocks each query block attends to, and the reverse.

Making the lists costs more than one attention call on a short input, so they are kept per layout object, length and
device for as long as the layout lives.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from lm_experiments_tools.errors import UserError

DENSE_BLOCK = 64


class SparsityConfig(Protocol):
    """What is needed of the classes in `layouts`."""

    block: int

    def make_layout(self, seq_len: int) -> Tensor:
        """int64 [heads, seq_len / block, seq_len / block], 1 where a query block (row) attends to a key block."""


@dataclass(frozen=True, eq=False)
class Layout:
    """Which key blocks each query block attends to, for inputs of one length.

    Args:
        blocks: [heads or 1, query_blocks, key_blocks], non-zero where attended; 1 holds for all heads.
        block: tokens of a block, in queries and in keys.
    """

    blocks: Tensor
    block: int

    def __post_init__(self) -> None:
        if self.blocks.dim() != 3 or self.block < 1:
            raise UserError(
                f"Layout: blocks has shape {list(self.blocks.shape)} and block is {self.block}; blocks must be "
                "[heads or 1, query_blocks, key_blocks] and block at least 1."
            )

    @property
    def density(self) -> float:
        """Fraction of blocks attended to."""
        return self.blocks.count_nonzero().item() / max(1, self.blocks.numel())


def num_blocks(length: int, block: int) -> int:
    """Blocks that hold `length` tokens."""
    return -(-length // block)


_cache: dict[int, dict[tuple, object]] = {}


def cached(owner: object, key: tuple, make: Callable[[], object]) -> object:
    """`make()`, kept under `key` for as long as `owner` lives."""
    values = _cache.get(id(owner))
    if values is None:
        values = _cache[id(owner)] = {}
        weakref.finalize(owner, _cache.pop, id(owner), None)
    if key not in values:
        values[key] = make()
    return values[key]


def resolve_layout(
    layout: SparsityConfig | Layout | None, num_heads: int, query_length: int, key_length: int
) -> Layout:
    """The blocks of a layout for these lengths; inputs that do not fill the last block are padded there.

    Returns:
        Layout with bool blocks [num_heads or 1, query_blocks, key_blocks] on the CPU; 1 where all heads are alike.

    Raises:
        UserError: the layout is for other heads or lengths, or is made from a length but asked for cross-attention.
    """
    owner, block = (_DENSE, DENSE_BLOCK) if layout is None else (layout, layout.block)
    # What the object says now: blocks written to and settings changed since are seen.
    version = layout.blocks._version if isinstance(layout, Layout) else repr(layout)
    shape = num_blocks(query_length, block), num_blocks(key_length, block), query_length == key_length
    return cached(
        owner,
        ("blocks", num_heads, *shape, version),
        lambda: _resolve(layout, num_heads, query_length, key_length),
    )


def _resolve(layout: SparsityConfig | Layout | None, num_heads: int, query_length: int, key_length: int) -> Layout:
    if layout is None:
        shape = 1, num_blocks(query_length, DENSE_BLOCK), num_blocks(key_length, DENSE_BLOCK)
        return Layout(torch.ones(shape, dtype=torch.bool), DENSE_BLOCK)
    block = layout.block
    expected = num_blocks(query_length, block), num_blocks(key_length, block)
    if isinstance(layout, Layout):
        blocks = layout.blocks
    elif query_length == key_length:
        blocks = layout.make_layout(expected[0] * block)
    else:
        raise UserError(
            f"{type(layout).__name__} lays out self-attention, but there are {query_length} queries and {key_length} "
            "keys: give a Layout with blocks [heads or 1, query_blocks, key_blocks] for cross-attention."
        )
    blocks = blocks.detach().to("cpu") != 0
    if blocks.shape[0] not in (1, num_heads) or blocks.shape[1:] != expected:
        raise UserError(
            f"The layout has blocks {list(blocks.shape)} of {block} tokens, but {num_heads} heads, {query_length} "
            f"queries and {key_length} keys need [{num_heads} or 1, {expected[0]}, {expected[1]}]."
        )
    if blocks.shape[0] > 1 and bool((blocks == blocks[:1]).all()):
        blocks = blocks[:1].clone()
    return Layout(blocks, block)


class _Dense:
    """Stands for the layout None where something has to own the cached lists."""


_DENSE = _Dense()

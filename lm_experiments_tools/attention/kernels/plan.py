"""From a layout to the lists that kernels walk: which key blocks each query block attends to, and the reverse.

Making the lists costs more than one attention call on a short input, so they are cached per layout object, length and
device for as long as the layout lives.
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
    """A layout for any length, as the classes in `layouts` are."""

    block: int

    def make_layout(self, seq_len: int) -> Tensor:
        """int64 [heads, seq_len / block, seq_len / block], 1 where a query block (row) attends to a key block."""


@dataclass(frozen=True, eq=False)
class Layout:
    """Which key blocks each query block attends to, for inputs of one length.

    Args:
        blocks: [heads or 1, query_blocks, key_blocks], True or 1 where attended; 1 holds for all heads.
        block: tokens of a block, in queries and in keys.

    Raises:
        UserError: blocks of another shape, or with other values than 0 and 1; a block that is no number of tokens.
    """

    blocks: Tensor
    block: int

    def __post_init__(self) -> None:
        if not isinstance(self.blocks, Tensor) or self.blocks.dim() != 3 or self.blocks.is_meta:
            raise UserError(
                f"Layout: blocks is {describe(self.blocks)}; it must be a tensor "
                "[heads or 1, query_blocks, key_blocks]."
            )
        if not is_int(self.block) or self.block < 1:
            raise UserError(f"Layout: block is {self.block!r}; it must be a whole number of tokens, at least 1.")
        if self.blocks.dtype != torch.bool and not ((self.blocks == 0) | (self.blocks == 1)).all():
            raise UserError("Layout: blocks has values besides 0 and 1; it must be 1 where attended and 0 elsewhere.")

    @property
    def density(self) -> float:
        """Fraction of blocks attended to."""
        return self.blocks.count_nonzero().item() / max(1, self.blocks.numel())

    def tokens(self, device: torch.device) -> Tensor:
        """Which keys each query attends to: bool [1, heads or 1, query_blocks * block, key_blocks * block]."""
        rows = self.blocks.to(device).repeat_interleave(self.block, 1)
        return rows.repeat_interleave(self.block, 2)[None]


AnyLayout = LayoutMaker | Layout | Tensor | None


def is_int(x: object) -> bool:
    """True for a whole number, of Python or numpy, that is no truth value."""
    return isinstance(x, Integral) and not isinstance(x, bool)


def describe(x: object) -> str:
    """dtype and shape of a tensor, and its device unless that is the CPU; a short form of anything else."""
    if not isinstance(x, Tensor):
        return f"{reprlib.repr(x)} ({type(x).__name__})"
    device = "" if x.device.type == "cpu" else f" on {x.device}"
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}{device}"


def num_blocks(length: int, block: int) -> int:
    """Blocks that hold `length` tokens."""
    return -(-length // block)


_MAX_CACHED = 256  # lengths of a layout, lists of a length
_ABSENT = object()
_cache: dict[int, dict[tuple, object]] = {}  # the keys used last come last


def cached(owner: object, key: tuple, make: Callable[[], object]) -> object:
    """`make()`, cached under `key` until `owner` is deleted or `_MAX_CACHED` other keys have been used."""
    values = _cache.get(id(owner))
    if values is None:
        values = _cache[id(owner)] = {}
        weakref.finalize(owner, _cache.pop, id(owner), None)
    value = values.pop(key, _ABSENT)
    if value is _ABSENT:
        value = make()
    values[key] = value
    if len(values) > _MAX_CACHED:  # lists of a layout of some length are deleted with it
        del values[next(iter(values))]
    return value


def resolve_layout(layout: AnyLayout, num_heads: int, query_length: int, key_length: int) -> Layout:
    """The blocks of a layout for these lengths; inputs that do not fill the last block are padded there.

    The blocks of a tensor have query_length / query_blocks tokens, rounded up. That must be a power of two: it is then
    the only one that gives so many blocks, while another number may be a larger block that is not filled.

    Returns:
        Layout with bool blocks [num_heads or 1, query_blocks, key_blocks] on the CPU; 1 where all heads are alike.

    Raises:
        UserError: no layout; one for other heads or lengths; one made from a length but asked for cross-attention; a
            tensor whose block cannot be told.
    """
    if isinstance(layout, Tensor):
        block = _block_of(layout, query_length)
    elif layout is None:
        block = DENSE_BLOCK
    elif isinstance(layout, Layout) or (callable(getattr(layout, "make_layout", 0)) and not isinstance(layout, type)):
        block = getattr(layout, "block", None)
    else:
        raise UserError(
            f"layout is {describe(layout)}; it must be a configuration (get_sparsity_config finds one by name), a "
            "Layout, a tensor [heads or 1, query_blocks, key_blocks] or None."
        )
    if not is_int(block) or block < 1:
        raise UserError(f"The layout's block is {block!r}; it must be a whole number of tokens, at least 1.")
    shape = num_blocks(query_length, block), num_blocks(key_length, block), query_length == key_length
    owner = _DENSE if layout is None else layout
    versions, version = cached(owner, ("blocks", num_heads, *shape, block), dict), _version(layout)
    if version not in versions:
        source = Layout(layout, block) if isinstance(layout, Tensor) else layout
        made = _resolve(source, num_heads, query_length, key_length)
        if isinstance(made.blocks, FakeTensor):  # good only while torch.export traces
            return made
        versions.clear()  # the layout before it was changed
        versions[version] = made
    return versions[version]


def _block_of(blocks: Tensor, query_length: int) -> int:
    """Tokens of a block of a layout that is given as a tensor."""
    rows = blocks.shape[1] if blocks.dim() == 3 else 0
    block = num_blocks(query_length, rows) if rows else 0
    if block < 1 or block & (block - 1):
        problem = f"{block} tokens a block are no power of two" if rows else "that is not [heads or 1, rows, columns]"
        raise UserError(
            f"layout is {describe(blocks)} for {query_length} queries, but {problem}: wrap it, Layout(blocks, block)."
        )
    return block


def _version(layout: AnyLayout) -> object:
    """Content of a layout now, so that blocks written to and settings changed since are seen."""
    blocks = layout.blocks if isinstance(layout, Layout) else layout
    if not isinstance(blocks, Tensor):
        values = getattr(layout, "__dict__", None)
        if values is None:
            return repr(layout)
        return repr({name: (id(x), _version(x)) if isinstance(x, Tensor) else x for name, x in values.items()})
    if blocks.is_inference():  # these count no versions
        return (blocks != 0).cpu().numpy().tobytes()
    return blocks._version


def _resolve(layout: LayoutMaker | Layout | None, num_heads: int, query_length: int, key_length: int) -> Layout:
    if layout is None:
        shape = 1, num_blocks(query_length, DENSE_BLOCK), num_blocks(key_length, DENSE_BLOCK)
        return Layout(torch.ones(shape, dtype=torch.bool, device="cpu"), DENSE_BLOCK)
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

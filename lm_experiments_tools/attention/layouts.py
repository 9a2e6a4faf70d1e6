"""Block-sparse layouts with the names, arguments and defaults of DeepSpeed's `sparsity_config.py`.

A layout says which blocks of keys each block of queries attends to: int64 [num_heads, blocks, blocks]. DeepSpeed
removed its module in 0.19.7. `compat="deepspeed"` gives its layouts. Without it two things differ:

- Random blocks depend on (seed, layer_idx, head, row) alone, not on Python's global generator.
- "unidirectional" lets no block attend to a later one. Some of DeepSpeed's layouts do.

"unidirectional" orders blocks, but tokens of one block still attend to each other. For a causal model pass
`causal=True` to the attention as well.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from hashlib import blake2b
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from lm_experiments_tools.attention.kernels.layout_cache import describe
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.names import nearest_names, resolve_configured

TYPE_KEY = "sparse_config_cls"
_DIRECTIONS = "bidirectional", "unidirectional"
_MODULES = "deepspeed.ops.sparse_attention", "lm_experiments_tools.attention"


@dataclass
class SparsityConfig:
    """Base class of block-sparse layouts. A new layout is a dataclass that overrides `blocks` or `make_layout`.

    Args:
        num_heads: heads of the attention layer.
        block: tokens of a block.
        different_layout_per_head: draw a layout for each head instead of one for all.
        seed: seed for random blocks.
        layer_idx: index of the layer; each layer draws other random blocks.
        max_seq_length: tokens; shorter inputs use the upper left corner of the layout for this length, as in
            DeepSpeed. None makes a layout for each length.
        compat: "deepspeed" gives DeepSpeed's layouts bit for bit. Random blocks are those that it
            draws after `random.seed(seed)` for layers 0, 1, ... None gives ours. Raises UserError.
    """

    num_heads: int
    block: int = 16
    different_layout_per_head: bool = False
    seed: int = field(default=0, kw_only=True)
    layer_idx: int = field(default=0, kw_only=True)
    max_seq_length: int | None = field(default=None, kw_only=True)
    compat: str | None = field(default=None, kw_only=True)

    attention: ClassVar[str] = "bidirectional"
    uses_random_blocks: ClassVar[bool] = False
    _positive: ClassVar[tuple[str, ...]] = ("num_heads", "block")  # other counts may be 0

    def __post_init__(self) -> None:
        for setting in fields(self):
            value = getattr(self, setting.name)
            if isinstance(value, Sequence | np.ndarray) and not isinstance(value, str):
                setattr(self, setting.name, tuple(map(int, value)))
            least = 1 if setting.name in self._positive else 0
            if setting.name.startswith(("num_", "block", "layer_idx")) and value < least:
                raise self._error(f"{setting.name}={value} must be at least {least}")
        if self.attention not in _DIRECTIONS:
            raise self._error(f"attention={self.attention!r} is neither {' nor '.join(map(repr, _DIRECTIONS))}")
        if self.compat not in (None, "deepspeed"):
            raise self._error(f'compat={self.compat!r} is neither None nor "deepspeed"')
        if self.max_seq_length is not None and (self.max_seq_length < 1 or self.max_seq_length % self.block):
            raise self._error(f"max_seq_length={self.max_seq_length} is not a positive multiple of block={self.block}")

    @property
    def num_layout_heads(self) -> int:
        """Number of different layouts to draw: 1 for all heads, or one for each head."""
        return self.num_heads if self.different_layout_per_head else 1

    @property
    def _unidirectional(self) -> bool:
        return self.attention == "unidirectional"

    def make_layout(self, seq_len: int) -> Tensor:
        """Build the block-sparse layout for inputs of `seq_len` tokens. Raises UserError.

        Returns:
            int64 [num_heads, seq_len / block, seq_len / block], 1 where a query block (row) attends to a key block
            (column).
        """
        if seq_len < 1 or seq_len % self.block:
            raise self._error(f"a length of {seq_len!r} is not a positive multiple of block={self.block}")
        if self.max_seq_length is not None and seq_len > self.max_seq_length:
            raise self._error(f"a length of {seq_len} is beyond max_seq_length={self.max_seq_length}")
        num_blocks = seq_len // self.block
        size = num_blocks if self.max_seq_length is None else self.max_seq_length // self.block
        layout = torch.as_tensor(self.blocks(size), device="cpu")
        if self._unidirectional and self.compat is None:
            layout = layout.tril()
        if layout.dim() != 3 or layout.shape[0] not in (1, self.num_heads) or layout.shape[1:] != (size, size):
            raise self._error(f"blocks returned {describe(layout)}, not [1 or {self.num_heads}, {size}, {size}]")
        layout = layout[:, :num_blocks, :num_blocks].long()
        return layout.repeat(self.num_heads // layout.shape[0], 1, 1)

    def blocks(self, num_blocks: int) -> Tensor:
        """Key blocks of each query block: bool [1 or num_layout_heads, num_blocks, num_blocks].

        Subclasses implement it. `make_layout` applies "unidirectional" to the result, except with `compat`.
        """
        raise self._error("it has no pattern: write its method `blocks`, or use a subclass")

    def to_dict(self) -> dict[str, Any]:
        """Convert all settings to JSON values, including the class's name ("sparse_config_cls")."""
        ours = SPARSITY_CONFIGS.get(type(self).__name__) is type(self)
        name = type(self).__name__ if ours else f"{type(self).__module__}:{type(self).__qualname__}"
        values = {setting.name: getattr(self, setting.name) for setting in fields(self) if setting.init}
        return {TYPE_KEY: name} | {key: list(x) if isinstance(x, tuple) else x for key, x in values.items()}

    def _error(self, problem: str) -> UserError:
        return UserError(f"{type(self).__name__}: {problem}.")

    def _window(self, num_blocks: int, width: int) -> Tensor:
        """|row - column| <= width // 2, so that an even width counts as the next odd one: [1, blocks, blocks]."""
        rows, columns = _grid(num_blocks)
        return ((rows - columns).abs() <= width // 2)[None]

    def _random(self, num_blocks: int, count: int, past_only: bool) -> Tensor:
        """`count` random blocks in each row, drawn without replacement: [num_layout_heads, blocks, blocks]."""
        heads = self.num_layout_heads
        if self.compat is None:
            columns = _random_columns(self.seed, self.layer_idx, heads, num_blocks, count, past_only)
        elif past_only and count > 1:
            raise self._error(f"the first block has no {count} blocks before it to draw: leave out compat='deepspeed'")
        else:
            columns = _deepspeed_columns(self.seed, self.layer_idx, heads, num_blocks, count, past_only)
        layout = torch.zeros(heads, num_blocks, num_blocks + 1, dtype=torch.bool, device="cpu")
        return layout.scatter_(2, columns, True)[..., :num_blocks]  # the last column takes what was not drawn


@dataclass
class DenseSparsityConfig(SparsityConfig):
    """Layout in which every block attends to every block: exact attention."""

    def blocks(self, num_blocks: int) -> Tensor:
        return torch.ones(1, num_blocks, num_blocks, dtype=torch.bool, device="cpu")


@dataclass
class FixedSparsityConfig(SparsityConfig):
    """Block-sparse layout of disjoint local windows, each with global blocks that every block attends to.

    The pattern is from Child et al. 2019, arXiv 1904.10509.

    Args:
        num_local_blocks: blocks of a local window.
        num_global_blocks: global blocks of a window: its last ones, or in other patterns those before them.
        attention: "bidirectional", or "unidirectional": blocks attend to themselves and earlier blocks only.
        horizontal_global_attention: let global blocks attend to all blocks too; bidirectional only.
        num_different_global_patterns: number of patterns of global blocks, assigned to heads round robin; more than
            one needs different_layout_per_head.
    """

    num_local_blocks: int = 4
    num_global_blocks: int = 1
    attention: str = "bidirectional"
    horizontal_global_attention: bool = False
    num_different_global_patterns: int = 1

    _positive = (*SparsityConfig._positive, "num_local_blocks", "num_global_blocks", "num_different_global_patterns")

    def __post_init__(self) -> None:
        super().__post_init__()
        local, patterns = self.num_local_blocks, self.num_different_global_patterns
        if local % self.num_global_blocks:
            raise self._error(f"num_local_blocks={local} is no multiple of num_global_blocks={self.num_global_blocks}")
        _check_horizontal(self)
        if patterns > 1 and not self.different_layout_per_head:
            raise self._error(f"num_different_global_patterns={patterns} needs different_layout_per_head=True")
        if patterns > local // self.num_global_blocks:
            raise self._error(f"num_different_global_patterns={patterns} is more than a window of {local} blocks has")

    def blocks(self, num_blocks: int) -> Tensor:
        rows, columns = _grid(num_blocks)
        local = rows // self.num_local_blocks == columns // self.num_local_blocks
        if self._unidirectional:
            local = local & (columns <= rows)
        patterns = range(min(self.num_different_global_patterns, self.num_layout_heads))
        layouts = torch.stack([local | self._global(num_blocks, pattern) for pattern in patterns])
        return layouts[torch.arange(self.num_layout_heads, device="cpu") % len(patterns)]

    def _global(self, num_blocks: int, pattern: int) -> Tensor:
        """Global columns (and rows) of one pattern: [blocks, blocks]."""
        rows, _ = _grid(num_blocks)
        local, width = self.num_local_blocks, self.num_global_blocks
        offset = local - (1 + pattern) * width
        # For each column the first one of its global group; num_blocks if the column is not global.
        first = torch.full((num_blocks,), num_blocks, device="cpu")
        whole = num_blocks - num_blocks % local
        columns = torch.arange(offset, max(offset, whole), local, device="cpu")[:, None] + _grid(width)[1]
        first[columns] = columns[:, :1].expand_as(columns)
        if whole < num_blocks:  # the last window is incomplete: its global blocks end at the input's end at the latest
            start = min(whole + offset, num_blocks - width)
            if self.compat is None:
                start = max(0, start)
            # With fewer blocks than `width` start is negative, which DeepSpeed counts from the end.
            first[start : start + width].clamp_(max=start % num_blocks if start > -num_blocks else 0)
        is_global = first < num_blocks
        if self._unidirectional:
            return rows >= first
        return is_global[None, :] | (is_global[:, None] if self.horizontal_global_attention else is_global[None, :])


@dataclass
class VariableSparsityConfig(SparsityConfig):
    """Block-sparse layout of local windows of several sizes, global blocks by index, and random blocks.

    Args:
        num_random_blocks: random key blocks of each query block.
        local_window_blocks: blocks of the first window, the second, ...; the last value is repeated.
        global_block_indices: blocks that every block attends to; negative indices count from the end.
        global_block_end_indices: exclusive ends of groups of global blocks that start at `global_block_indices`; None
            for single blocks.
        attention: as in FixedSparsityConfig.
        horizontal_global_attention: as in FixedSparsityConfig.
    """

    num_random_blocks: int = 0
    local_window_blocks: Sequence[int] = (4,)
    global_block_indices: Sequence[int] = (0,)
    global_block_end_indices: Sequence[int] | None = None
    attention: str = "bidirectional"
    horizontal_global_attention: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.local_window_blocks, default=0) < 1:
            raise self._error(f"local_window_blocks={list(self.local_window_blocks)} must be numbers of at least 1")
        _check_global_indices(self)
        _check_horizontal(self)

    @property
    def uses_random_blocks(self) -> bool:
        return self.num_random_blocks > 0

    def blocks(self, num_blocks: int) -> Tensor:
        rows, columns = _grid(num_blocks)
        sizes = list(self.local_window_blocks)
        sizes += [sizes[-1]] * (max(0, num_blocks - sum(sizes)) // sizes[-1] + 1)
        ends = torch.tensor(sizes, device="cpu").cumsum(0)
        window = torch.searchsorted(ends, columns[0], right=True)
        local = window[:, None] == window[None, :]
        if self._unidirectional:
            local = local & (columns <= rows)
        layout = local[None] | self._random(
            num_blocks, self.num_random_blocks, past_only=self._unidirectional and self.compat is None
        )
        for start, end in _global_slices(self, num_blocks):
            if self.horizontal_global_attention:
                layout[:, start:end] = True
            layout[:, start if self._unidirectional else 0 :, start:end] = True
        return layout


@dataclass
class BigBirdSparsityConfig(SparsityConfig):
    """Block-sparse layout of BigBird-ITC (Zaheer et al. 2020, arXiv 2007.14062): window, global and random blocks.

    Args:
        num_random_blocks: random key blocks of each query block; they may coincide with the window or global blocks.
        num_sliding_window_blocks: blocks of the window around each block; an even number counts as the next odd one.
        num_global_blocks: number of first blocks that attend to all blocks, and that all blocks attend to.
        attention: as in FixedSparsityConfig.
    """

    num_random_blocks: int = 1
    num_sliding_window_blocks: int = 3
    num_global_blocks: int = 1
    attention: str = "bidirectional"

    uses_random_blocks = VariableSparsityConfig.uses_random_blocks

    def blocks(self, num_blocks: int) -> Tensor:
        random_blocks = self._random(num_blocks, self.num_random_blocks, past_only=self._unidirectional)
        layout = random_blocks | self._window(num_blocks, self.num_sliding_window_blocks)
        layout[:, : self.num_global_blocks] = True
        layout[:, :, : self.num_global_blocks] = True
        return layout.tril() if self._unidirectional else layout


@dataclass
class BSLongformerSparsityConfig(SparsityConfig):
    """Block-sparse layout of Longformer: a sliding window and global blocks (Beltagy et al. 2020, arXiv 2004.05150).

    Args:
        num_sliding_window_blocks: as in BigBirdSparsityConfig.
        global_block_indices: blocks that attend to all blocks, and that all blocks attend to; negative indices count
            from the end.
        global_block_end_indices: as in VariableSparsityConfig.
        attention: as in FixedSparsityConfig.
    """

    num_sliding_window_blocks: int = 3
    global_block_indices: Sequence[int] = (0,)
    global_block_end_indices: Sequence[int] | None = None
    attention: str = "bidirectional"

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_global_indices(self)

    def blocks(self, num_blocks: int) -> Tensor:
        layout = self._window(num_blocks, self.num_sliding_window_blocks)
        for start, end in _global_slices(self, num_blocks):
            layout[:, start:end] = True
            layout[:, :, start:end] = True
        return layout.tril() if self._unidirectional else layout


@dataclass
class LocalSlidingWindowSparsityConfig(SparsityConfig):
    """Block-sparse layout of a sliding window only; unidirectional by default.

    Args:
        num_sliding_window_blocks: as in BigBirdSparsityConfig; "unidirectional" drops the later half of the window.
        attention: as in FixedSparsityConfig.
    """

    different_layout_per_head: bool = field(default=False, init=False)
    num_sliding_window_blocks: int = 3
    attention: str = "unidirectional"

    def blocks(self, num_blocks: int) -> Tensor:
        layout = self._window(num_blocks, self.num_sliding_window_blocks)
        return layout.tril() if self._unidirectional else layout


SPARSITY_CONFIGS: dict[str, type[SparsityConfig]] = {cls.__name__: cls for cls in SparsityConfig.__subclasses__()}


def get_sparsity_config(name: str, num_heads: int, **settings: Any) -> SparsityConfig:
    """Create a block-sparse layout by its name. Raises UserError.

    Args:
        name: "BigBirdSparsityConfig", "BigBird", "bigbird" (DeepSpeed's `mode`), DeepSpeed's import path
            "deepspeed.ops.sparse_attention:BigBirdSparsityConfig", or "module:Class" of an imported module.
        num_heads: heads of the attention layer.
        settings: further arguments of the class.
    """
    config_cls = _config_class(name)
    known = [setting.name for setting in fields(config_cls) if setting.init]
    if unknown := [key for key in settings if key not in known]:
        hint = nearest_names(unknown[0], known) or f"; it has {', '.join(known)}"
        raise UserError(f"{config_cls.__name__} has no setting {unknown[0]!r}{hint}.")
    return config_cls(num_heads=num_heads, **settings)


def _config_class(name: str) -> type[SparsityConfig]:
    module, _, bare = name.replace(":", ".").rpartition(".")
    if not module or module.startswith(_MODULES):
        short = {key.removesuffix("SparsityConfig").lower(): config for key, config in SPARSITY_CONFIGS.items()}
        wanted = bare.lower().replace("_", "").removesuffix("sparsityconfig")
        if wanted in short:
            return short[wanted]
        hint = nearest_names(wanted, short) or f"; there are {', '.join(SPARSITY_CONFIGS)}"
        raise UserError(f"There is no sparsity configuration {name!r}{hint}.")
    path = name if ":" in name else f"{module}:{bare}"
    return resolve_configured(path, SparsityConfig, f"sparsity configuration {name!r}")


def _grid(num_blocks: int) -> tuple[Tensor, Tensor]:
    """Row numbers [blocks, 1] and column numbers [1, blocks]."""
    numbers = torch.arange(num_blocks, device="cpu")
    return numbers[:, None], numbers[None, :]


def _check_horizontal(config: FixedSparsityConfig | VariableSparsityConfig) -> None:
    if config.horizontal_global_attention and config.attention != "bidirectional":
        raise config._error("horizontal_global_attention lets blocks attend to later ones: it needs bidirectional")


def _check_global_indices(config: VariableSparsityConfig | BSLongformerSparsityConfig) -> None:
    starts, ends = config.global_block_indices, config.global_block_end_indices
    if ends is None:
        return
    if len(starts) != len(ends) or any(start >= end for start, end in zip(starts, ends, strict=True)):
        raise config._error(f"global_block_end_indices={list(ends)} do not fit global_block_indices={list(starts)}")


def _global_slices(
    config: VariableSparsityConfig | BSLongformerSparsityConfig, num_blocks: int
) -> list[tuple[int, int | None]]:
    """Groups of global blocks as slices; groups outside of the input are left out."""
    if config.global_block_end_indices is not None:
        pairs = zip(config.global_block_indices, config.global_block_end_indices, strict=True)
        return [(start, min(end, num_blocks)) for start, end in pairs if start < num_blocks]
    inside = [index % num_blocks for index in config.global_block_indices if -num_blocks <= index < num_blocks]
    if config.compat and min(config.global_block_indices, default=0) < -num_blocks:
        raise config._error(f"global_block_indices={list(config.global_block_indices)} of {num_blocks} blocks")
    return [(index, index + 1) for index in inside]


def _random_columns(seed: int, layer_idx: int, heads: int, num_blocks: int, count: int, past_only: bool) -> Tensor:
    """Columns drawn in each row, int64 [heads, num_blocks, count]; `num_blocks` means none."""
    # Floyd's algorithm (Bentley and Floyd, "A sample of brilliance", CACM 1987) for all rows at once. Bits depend on
    # the row and not on the number of rows, so unidirectional layouts of two lengths agree where both exist.
    bits = np.stack([_random_bits(f"{seed}/{layer_idx}/{head}", num_blocks * count) for head in range(heads)])
    bits = bits.reshape(heads, num_blocks, count)
    population = np.arange(1, num_blocks + 1) if past_only else np.full(num_blocks, num_blocks)
    drawn = np.full(bits.shape, num_blocks, dtype=np.int64)
    for step in range(count):
        last = population - count + step
        column = (bits[..., step] % np.maximum(last + 1, 1).astype(np.uint64)).astype(np.int64)
        taken = (drawn[..., :step] == column[..., None]).any(-1)
        drawn[..., step] = np.where(last < 0, num_blocks, np.where(taken, last, column))
    return torch.from_numpy(drawn)


def _random_bits(name: str, count: int) -> np.ndarray:
    """64-bit random numbers of a head; the bit stream of Philox is the same in every release of numpy."""
    digest = blake2b(f"sparse attention/{name}".encode(), digest_size=16).digest()
    return np.random.Philox(key=int.from_bytes(digest, "little")).random_raw(count)


def _deepspeed_columns(seed: int, layer_idx: int, heads: int, num_blocks: int, count: int, past_only: bool) -> Tensor:
    """Columns that DeepSpeed draws from Python's generator: head by head, row by row, layer by layer."""
    generator = random.Random(seed)
    for _ in range(layer_idx + 1):
        columns = [
            [generator.sample(range(row + 1 if past_only else num_blocks), count) for row in range(num_blocks)]
            for _ in range(heads)
        ]
    return torch.tensor(columns, dtype=torch.int64, device="cpu").view(heads, num_blocks, count)

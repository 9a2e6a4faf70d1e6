"""SVG pictures of block-sparse layouts, coloured by the reason why a block is attended to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from lm_experiments_tools.attention.layouts import DenseSparsityConfig, FixedSparsityConfig, SparsityConfig

COLOURS = {"local": "#4c72b0", "global": "#dd8452", "random": "#55a868"}
_EMPTY, _INK = "#eeeeee", "#333333"
_PANEL, _GAP, _HEADER = 192, 24, 40  # pixels of an SVG


def draw_layouts(configs: Sequence[SparsityConfig], seq_len: int, path: Path | str) -> Path:
    """Draw head 0 of layouts side by side, rows of queries and columns of keys, into an .svg.

    Raises:
        UserError: a layout does not fit seq_len.
    """
    path = Path(path)
    panels = [(_title(config, seq_len), parts(config, seq_len)) for config in configs]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_svg(panels), encoding="utf-8")
    return path


def parts(config: SparsityConfig, seq_len: int) -> dict[str, Tensor]:
    """Blocks of head 0, bool [blocks, blocks], by the first reason that applies: local, then global, then random."""
    names = {field.name for field in fields(config)}
    without_random = replace(config, num_random_blocks=0) if "num_random_blocks" in names else config
    whole, fixed = (c.make_layout(seq_len)[0].bool() for c in (config, without_random))
    if isinstance(config, FixedSparsityConfig):
        window = torch.arange(len(fixed)) // config.num_local_blocks
        local = fixed & (window[:, None] == window)
    elif "num_global_blocks" in names:
        local = replace(without_random, num_global_blocks=0).make_layout(seq_len)[0].bool()
    elif "global_block_indices" in names:
        nothing = {"global_block_indices": (), "global_block_end_indices": None}
        local = replace(without_random, **nothing).make_layout(seq_len)[0].bool()
    else:
        local = fixed
    return {"local": local, "global": fixed & ~local, "random": whole & ~fixed}


def _title(config: SparsityConfig, seq_len: int) -> tuple[str, str]:
    name = type(config).__name__.removesuffix("SparsityConfig")
    arrow = "" if isinstance(config, DenseSparsityConfig) else f"{config.attention}, "
    return name, f"{arrow}{config.density(seq_len):.1%}"


def _svg(panels: Sequence[tuple[tuple[str, str], dict[str, Tensor]]]) -> str:
    width = len(panels) * (_PANEL + _GAP) + _GAP
    height = _HEADER + _PANEL + 2 * _GAP
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="sans-serif" font-size="12" fill="{_INK}">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    for number, ((name, subtitle), blocks) in enumerate(panels):
        left, cell = _GAP + number * (_PANEL + _GAP), _PANEL / len(blocks["local"])
        lines += [
            f'<text x="{left}" y="18" font-weight="bold">{name}</text>',
            f'<text x="{left}" y="33">{subtitle}</text>',
            f'<g transform="translate({left} {_HEADER}) scale({cell:g})">',
            f'<rect width="{len(blocks["local"])}" height="{len(blocks["local"])}" fill="{_EMPTY}"/>',
            *(f'<path fill="{COLOURS[part]}" d="{_runs(where)}"/>' for part, where in blocks.items() if where.any()),
            "</g>",
        ]
    for number, (part, colour) in enumerate(COLOURS.items()):
        left, top = _GAP + 80 * number, _HEADER + _PANEL + 10
        lines += [
            f'<rect x="{left}" y="{top}" width="12" height="12" fill="{colour}"/>',
            f'<text x="{left + 18}" y="{top + 10}">{part}</text>',
        ]
    return "\n".join([*lines, "</svg>\n"])


def _runs(where: Tensor) -> str:
    """An SVG path over the blocks, adjacent ones of a row joined, with a thin gap between rows."""
    path = []
    for row, flags in enumerate(where.int().tolist()):
        changes = [column for column, (a, b) in enumerate(pairwise([0, *flags, 0])) if a != b]
        for start, end in zip(changes[::2], changes[1::2], strict=True):
            path.append(f"M{start + 0.04:g} {row + 0.04:g}h{end - start - 0.08:g}v.92H{start + 0.04:g}z")
    return "".join(path)

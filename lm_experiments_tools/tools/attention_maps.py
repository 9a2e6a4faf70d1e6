"""Attention maps of a model on a text, as arrays or as a picture, and pictures of block-sparse layouts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from lm_experiments_tools.attention.layouts import DenseSparsityConfig, FixedSparsityConfig, SparsityConfig
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.models.build import check_positions

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

MAX_NEW_TOKENS = 32
MAX_TICKS = 48  # labels along an axis; more would overlap
_COLOURS = {"local": (0.30, 0.45, 0.69), "global": (0.87, 0.52, 0.32), "random": (0.33, 0.66, 0.41)}


@dataclass(frozen=True, eq=False)
class AttentionMap:
    """Attention weights of one head.

    `weights` is float32 [queries, keys], rows summing to one; kind is "encoder", "decoder", "cross" or "self".
    """

    kind: str
    layer: int
    head: int
    queries: list[str]
    keys: list[str]
    weights: np.ndarray


def attention_maps(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    *,
    target: str | None = None,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
) -> list[AttentionMap]:
    """Attention maps of a text, layer by layer. Weights outside a block-sparse layout are 0.

    Args:
        model: encoder-decoder, encoder or decoder of transformers; its attention implementation is changed.
        tokenizer: the model's.
        text: input of the model (of its encoder).
        target: input of the decoder; None for the model's own greedy output of at most 32 tokens.
        layers, heads: numbers; None for all.

    Raises:
        UserError: a layer or head that the model does not have, a target for a model without decoder, or a text that
            is longer than the model has positions.
    """
    from lm_experiments_tools.attention import huggingface
    from lm_experiments_tools.modules.variants import VariantConfig

    # Models of this package return weights of their layouts under any implementation.
    if getattr(model.config, huggingface.TYPE_KEY, None) is not None and not isinstance(model.config, VariantConfig):
        exact, weighing = huggingface.NAME, huggingface.WITH_WEIGHTS
    else:
        exact = weighing = "eager"
    model.eval()
    inputs = tokenizer(text, return_tensors="pt").to(model.device)
    length = inputs["input_ids"].shape[1]
    check_positions(model.config, length, f"--text of {length} tokens")
    model.set_attn_implementation(exact)
    with torch.no_grad():
        decoded = _decoder_input(model, tokenizer, inputs, target)
        model.set_attn_implementation(weighing)
        outputs = model(**inputs, **decoded, output_attentions=True)
    memory = [f"<memory {number}>" for number in range(getattr(model.config, "num_memory_tokens", 0))]
    read = memory + tokenizer.convert_ids_to_tokens(inputs["input_ids"][0])
    written = tokenizer.convert_ids_to_tokens(decoded["decoder_input_ids"][0]) if decoded else []
    sides = {
        "encoder_attentions": ("encoder", read, read),
        "decoder_attentions": ("decoder", written, written),
        "cross_attentions": ("cross", written, read),
        "attentions": ("self", read, read),
    }
    maps = []
    for name, (kind, queries, keys) in sides.items():
        for layer, weights in _chosen(outputs.get(name) or (), layers, "layer"):
            for head, one in _chosen(weights[0].float().cpu(), heads, "head"):
                maps.append(AttentionMap(kind, layer, head, queries, keys, one.numpy()))
    return maps


def _decoder_input(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, inputs: Any, target: str | None
) -> dict[str, Tensor]:
    """Inputs of the decoder of an encoder-decoder; empty for other models."""
    if not model.config.is_encoder_decoder:
        if target is not None:
            raise UserError(
                f"--target is the input of a decoder, and {type(model).__name__} is no encoder-decoder: leave it out."
            )
        return {}
    if target is None:
        written = model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS, do_sample=False, num_beams=1)
        return {"decoder_input_ids": written[:, :-1]}
    labels = tokenizer(text_target=target, return_tensors="pt")["input_ids"].to(model.device)
    check_positions(model.config, labels.shape[1], f"--target of {labels.shape[1]} tokens")
    return {"decoder_input_ids": model.prepare_decoder_input_ids_from_labels(labels)}


def _chosen(values: Sequence[Any], numbers: Sequence[int] | None, what: str) -> list[tuple[int, Any]]:
    """(number, value) of the chosen numbers."""
    if numbers is None or not len(values):
        return list(enumerate(values))
    for number in numbers:
        if not 0 <= number < len(values):
            raise UserError(f"--{what}s: there is no {what} {number}, the model has 0 to {len(values) - 1}.")
    return [(number, values[number]) for number in numbers]


def write_maps(maps: Sequence[AttentionMap], path: Path | str, *, title: str) -> Path:
    """Write maps as a picture (.png) or as arrays (.npz).

    The .npz holds `KIND_layer_L_head_H` [queries, keys] for each map, and `KIND_queries` and `KIND_keys`, the tokens.

    Raises:
        UserError: no maps, or matplotlib is missing.
    """
    if not maps:
        raise UserError("There are no maps to write: choose at least one layer and one head.")
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".npz":
        arrays = {f"{m.kind}_layer_{m.layer}_head_{m.head}": m.weights for m in maps}
        tokens = {f"{m.kind}_{side}": np.array(getattr(m, side)) for m in maps for side in ("queries", "keys")}
        np.savez_compressed(path, **arrays, **tokens)
        return path
    figure, panels = new_figure(len(maps), 3.6)
    plain = {"parse_math": False}  # a dollar sign in a text starts no formula
    figure.suptitle(title, x=0.01, ha="left", fontsize=10, **plain)
    for one, axes in zip(maps, panels, strict=True):
        axes.imshow(np.sqrt(one.weights), cmap="Blues", vmin=0, vmax=1, interpolation="nearest", aspect="auto")
        axes.set_title(f"{one.kind}, layer {one.layer}, head {one.head}", fontsize=8)
        axes.set_xticks(*_ticks(one.keys), rotation=90, fontsize=5, **plain)
        axes.set_yticks(*_ticks(one.queries), fontsize=5, **plain)
    figure.savefig(path, dpi=150)
    return path


def draw_layouts(configs: Sequence[SparsityConfig], seq_len: int, path: Path | str) -> Path:
    """Draw head 0 of layouts side by side: rows of queries, columns of keys, a colour for each reason.

    Raises:
        UserError: a layout does not fit seq_len, or matplotlib is missing.
    """
    path = Path(path)
    reasons = [layout_parts(config, seq_len) for config in configs]
    figure, panels = new_figure(len(configs), 2.2)
    for config, blocks, axes in zip(configs, reasons, panels, strict=True):
        image = np.full((*blocks["local"].shape, 3), 0.93)
        for reason, colour in _COLOURS.items():
            image[blocks[reason].numpy()] = colour
        axes.imshow(image, interpolation="nearest")
        arrow = "" if isinstance(config, DenseSparsityConfig) else f"{config.attention}, "
        name = type(config).__name__.removesuffix("SparsityConfig")
        axes.set_title(f"{name}\n{arrow}{config.density(seq_len):.1%}", fontsize=8)
        axes.set_axis_off()
    for number, (reason, colour) in enumerate(_COLOURS.items()):
        figure.text(0.01 + 0.08 * number, 0.01, reason, color=colour, fontsize=8, weight="bold")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    return path


def layout_parts(config: Any, seq_len: int) -> dict[str, Tensor]:
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


def new_figure(number: int, width: float, height: float | None = None) -> tuple[Any, list[Any]]:
    """A figure and its axes, at most five in a row; width and height (None: the width) of each are in inches.

    Raises:
        UserError: matplotlib is missing.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("drawing a .png needs matplotlib: pip install matplotlib.") from None
    columns = min(5, number)
    rows = math.ceil(number / columns)
    figure = Figure(figsize=(width * columns, (height or width) * rows + 0.4), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, [figure.add_subplot(rows, columns, place + 1) for place in range(number)]


def _ticks(tokens: list[str]) -> tuple[list[int], list[str]]:
    step = math.ceil(len(tokens) / MAX_TICKS)
    return list(range(0, len(tokens), step)), tokens[::step]

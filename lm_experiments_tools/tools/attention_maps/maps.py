"""Attention maps of a model on a text, as arrays or as a picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from lm_experiments_tools.errors import UserError
from lm_experiments_tools.models.build import check_positions

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

MAX_NEW_TOKENS = 32
MAX_TICKS = 48  # labels along an axis; more would overlap


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
    """Attention maps of a text, layer by layer; those of a block-sparse model show its layout.

    Args:
        model: encoder-decoder, encoder or decoder of transformers; its attention implementation is changed.
        tokenizer: the model's.
        text: what the model (its encoder) reads.
        target: what the decoder reads; None for the model's own greedy output of at most 32 tokens.
        layers, heads: numbers; None for all.

    Raises:
        UserError: a layer or head that the model does not have, a target for a model without decoder, or a text of no
            tokens or of more than the model has positions.
    """
    from lm_experiments_tools.attention import huggingface
    from lm_experiments_tools.modules.variants import VariantConfig

    # Models of this project give the weights of their layouts whatever the implementation.
    if getattr(model.config, huggingface.TYPE_KEY, None) is not None and not isinstance(model.config, VariantConfig):
        exact, weighing = huggingface.NAME, huggingface.WITH_WEIGHTS
    else:
        exact = weighing = "eager"
    model.eval()
    inputs = tokenizer(text, return_tensors="pt").to(model.device)
    length = inputs["input_ids"].shape[1]
    if length == 0:
        raise UserError(f"--text {text!r} has no tokens: write at least a word.")
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
    else:
        _draw(maps, path, title)
    return path


def _draw(maps: Sequence[AttentionMap], path: Path, title: str) -> None:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("drawing a .png needs matplotlib: pip install matplotlib.") from None
    columns = min(4, len(maps))
    rows = math.ceil(len(maps) / columns)
    figure = Figure(figsize=(3.6 * columns, 3.6 * rows + 0.4), layout="constrained")
    FigureCanvasAgg(figure)
    plain = {"parse_math": False}  # a dollar sign in a text starts no formula
    figure.suptitle(title, x=0.01, ha="left", fontsize=10, **plain)
    for number, one in enumerate(maps):
        axes = figure.add_subplot(rows, columns, number + 1)
        axes.imshow(np.sqrt(one.weights), cmap="Blues", vmin=0, vmax=1, interpolation="nearest", aspect="auto")
        axes.set_title(f"{one.kind}, layer {one.layer}, head {one.head}", fontsize=8)
        axes.set_xticks(*_ticks(one.keys), rotation=90, fontsize=5, **plain)
        axes.set_yticks(*_ticks(one.queries), fontsize=5, **plain)
        axes.tick_params(length=0)
    figure.savefig(path, dpi=150)


def _ticks(tokens: list[str]) -> tuple[list[int], list[str]]:
    step = math.ceil(len(tokens) / MAX_TICKS)
    return list(range(0, len(tokens), step)), tokens[::step]

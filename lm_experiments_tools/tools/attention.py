"""Plot the attention maps of a model on a text, or block-sparse attention layouts.

    lmtools attention --model runs/mine/last --text "The cat sat on the mat." --layers 0,3 --output maps.png
    lmtools attention --layout BigBird,Fixed --block 64 --length 2048 --output layouts.png

Maps take --model and --text, layouts --layout.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np

from lm_experiments_tools.config.flags import check_groups, needs
from lm_experiments_tools.errors import UserError

MAX_NEW_TOKENS = 32
MAX_TICKS = 48  # labels along an axis; more would overlap


@dataclass(frozen=True, kw_only=True)
class AttentionArgs:
    """The plot: attention maps of a model on a text, or block-sparse attention layouts."""

    output: str
    """Maps: a .png picture or the arrays as .npz. Layouts: a .png picture."""
    model: str | None = None
    """Hugging Face name or folder, run directory (its best checkpoint, else its last) or checkpoint."""
    text: Annotated[str | None, needs("model")] = None
    """Input of the model."""
    target: Annotated[str | None, needs("model")] = None
    """Input of an encoder-decoder's decoder. None: the greedy output of the model."""
    layers: Annotated[str, needs("model")] = "all"
    """Layers to show: all, or numbers as in 0,3 or 0-5."""
    heads: Annotated[str, needs("model")] = "all"
    """Heads to show, likewise."""
    layout: str | None = None
    """Dense, Fixed, Variable, BigBird, BSLongformer, LocalSlidingWindow; several with commas."""
    block: Annotated[int, needs("layout")] = 64
    """Tokens of a block."""
    length: Annotated[int, needs("layout")] = 2048
    """Tokens of the input."""
    settings: Annotated[str, needs("layout")] = "{}"
    """Other settings of the layout as JSON, as in {"num_random_blocks": 2}."""

    def __post_init__(self) -> None:
        if (self.model is None) == (self.layout is None):
            raise UserError("lmtools attention: give --model and --text for maps, or --layout for layouts.")
        check_groups(self, (AttentionArgs,))
        if self.model is not None and self.text is None:
            raise UserError("--text is missing: --model needs an input.")
        for flag in ("layers", "heads"):
            numbers(getattr(self, flag), flag)
        kinds = (".png", ".npz") if self.model is not None else (".png",)
        if Path(self.output).suffix not in kinds:
            raise UserError(f"--output {self.output}: it must end in {' or '.join(kinds)}.")


class AttentionMap(NamedTuple):
    """One plot of `lmtools attention`: a matrix of attention weights or a layout.

    It holds the attention weights of a head, float32[queries, keys], or a block-sparse layout [blocks, blocks] of 0
    and 1, where 1 marks blocks of tokens that attend to each other.
    """

    title: str
    weights: np.ndarray
    queries: Sequence[str] = ()
    keys: Sequence[str] = ()


def run(args: AttentionArgs) -> None:
    """Plot attention maps or layouts as the flags say, and print the path of the picture."""
    path = Path(args.output)
    maps = _layouts(args) if args.layout is not None else _maps(args)
    if not maps:
        raise UserError(f"--model {args.model} returns no attention weights: name a model with attention.")
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".npz":
        _write_arrays(maps, path)
    else:
        _draw(maps, path, f"{args.model}: {args.text}" if args.layout is None else "")
    print(path)


def _layouts(args: AttentionArgs) -> list[AttentionMap]:
    """Head 0 of each layout."""
    from lm_experiments_tools.attention.layouts import get_sparsity_config
    from lm_experiments_tools.names import allow_modules

    try:
        settings = dict(json.loads(args.settings))
    except (ValueError, TypeError) as error:
        raise UserError(f'--settings {args.settings!r} is no JSON object ({error}): write {{"seed": 1}}.') from error
    names = args.layout.split(",")
    allow_modules(names)
    configs = [get_sparsity_config(name, 1, **{"block": args.block, **settings}) for name in names]
    return [
        AttentionMap(f"{name}: {config.density(args.length):.1%}", config.make_layout(args.length)[0].numpy())
        for name, config in zip(names, configs, strict=True)
    ]


def _maps(args: AttentionArgs) -> list[AttentionMap]:
    """Maps of the chosen heads, layer by layer. Weights outside a block-sparse layout are 0."""
    import torch

    from lm_experiments_tools.attention import huggingface  # registers its attention, which configurations may name
    from lm_experiments_tools.models.saved import open_saved
    from lm_experiments_tools.modules.variants import VariantConfig

    opened = open_saved(args.model, flag="--model")
    model, tokenizer = opened.model.eval(), opened.tokenizer
    if args.target is not None and not model.config.is_encoder_decoder:
        raise UserError(
            f"--target is the input of a decoder, {type(model).__name__} is no encoder-decoder: leave it out."
        )
    # Models of this package return weights of their layouts under any implementation.
    is_sparse = getattr(model.config, huggingface.TYPE_KEY, None) is not None
    is_sparse = is_sparse and not isinstance(model.config, VariantConfig)
    model.set_attn_implementation(huggingface.NAME if is_sparse else "eager")
    inputs, written = _tokens(model, tokenizer, "text", args.text), []
    with torch.no_grad():
        if args.target is not None:
            labels = _tokens(model, tokenizer, "target", args.target)["input_ids"]
            inputs["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(labels)
        elif model.config.is_encoder_decoder:
            generated = model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS, do_sample=False, num_beams=1)
            inputs["decoder_input_ids"] = generated[:, :-1]
        model.set_attn_implementation(huggingface.WITH_WEIGHTS if is_sparse else "eager")
        outputs = model(**inputs, output_attentions=True)
    memory = [f"<memory {number}>" for number in range(getattr(model.config, "num_memory_tokens", 0))]
    read = memory + tokenizer.convert_ids_to_tokens(inputs["input_ids"][0])
    if "decoder_input_ids" in inputs:
        written = tokenizer.convert_ids_to_tokens(inputs["decoder_input_ids"][0])
    weights = outputs.get("decoder_attentions")
    is_merged = weights and weights[0].shape[-1] > len(written)  # T5MergedAttention: own tokens, then the encoder's
    own = [*written, *read] if is_merged else written
    sides = {"encoder": (read, read), "decoder": (written, own), "cross": (written, read), "self": (read, read)}
    return [
        AttentionMap(f"{kind}_layer_{layer}_head_{head}", weights.numpy(), queries, keys)
        for kind, (queries, keys) in sides.items()
        for layer, of_heads in _chosen(outputs.get(f"{kind}_attentions".removeprefix("self_")), args.layers, "layers")
        for head, weights in _chosen(of_heads[0].float(), args.heads, "heads")
    ]


def _tokens(model: Any, tokenizer: Any, flag: str, text: str) -> Any:
    from lm_experiments_tools.models.build import check_positions

    inputs = tokenizer(**{"text" if flag == "text" else "text_target": text}, return_tensors="pt")
    length = inputs["input_ids"].shape[1]
    check_positions(model.config, length, f"--{flag} of {length} tokens")
    return inputs


def numbers(text: str, flag: str) -> list[int] | None:
    """Parse a flag's list of numbers: "0,3-5" gives [0, 3, 4, 5], "all" gives None.

    Args:
        flag: name of the flag, for error messages.
    """
    if text == "all":
        return None
    found = [re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part) for part in text.split(",")]
    spans = [range(int(match[1]), int(match[2] or match[1]) + 1) if match else () for match in found]
    if not all(spans):
        raise UserError(f"--{flag} {text}: write all, or numbers as in 0,3 or 0-5.")
    return [number for span in spans for number in span]


def _chosen(values: Any, text: str, flag: str) -> list[tuple[int, Any]]:
    """Selected (number, value) pairs; none if there are no values."""
    if values is None or not len(values):
        return []
    chosen = numbers(text, flag) or range(len(values))
    if (highest := max(chosen)) >= len(values):
        raise UserError(f"--{flag}: there is no {flag[:-1]} {highest}, the model has 0 to {len(values) - 1}.")
    return [(number, values[number]) for number in chosen]


def _write_arrays(maps: Sequence[AttentionMap], path: Path) -> None:
    """`KIND_layer_L_head_H` [queries, keys] for each map, and `KIND_queries` and `KIND_keys`, the tokens."""
    kinds = {one.title.partition("_")[0]: one for one in maps}
    tokens = {
        f"{kind}_{side}": np.array(getattr(m, side), str) for kind, m in kinds.items() for side in ("queries", "keys")
    }
    np.savez_compressed(path, **{one.title: one.weights for one in maps}, **tokens)


def _draw(maps: Sequence[AttentionMap], path: Path, title: str) -> None:
    """Draw the maps, at most five in a row."""
    from lm_experiments_tools.tracking.curve import new_figure

    columns = min(5, len(maps))
    rows, inches = math.ceil(len(maps) / columns), 3.6 if maps[0].keys else 2.2
    figure = new_figure(inches * columns, inches * rows + 0.4)
    plain = {"parse_math": False}  # a dollar sign in a text starts no formula
    figure.suptitle(title, x=0.01, ha="left", fontsize=10, **plain)
    for number, one in enumerate(maps, start=1):
        axes = figure.add_subplot(rows, columns, number)
        axes.imshow(one.weights**0.5, cmap="Blues", vmin=0, vmax=1, interpolation="nearest", aspect="auto")
        axes.set_title(one.title.replace("_", " "), fontsize=8)
        axes.set_xticks(*_ticks(one.keys), rotation=90, fontsize=5, **plain)
        axes.set_yticks(*_ticks(one.queries), fontsize=5, **plain)
    figure.savefig(path, dpi=150)


def _ticks(tokens: Sequence[str]) -> tuple[range, Sequence[str]]:
    step = math.ceil(len(tokens) / MAX_TICKS) or 1
    return range(0, len(tokens), step), tokens[::step]

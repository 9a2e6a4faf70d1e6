"""Attention maps of a model on a text, or pictures of block-sparse layouts.

    lmtools attention --model runs/mine/last --text "The cat sat on the mat." --layers 0,3 --output maps.png
    lmtools attention --layout BigBird,Fixed --block 64 --length 2048 --output layouts.svg

Maps take --model and --text, layouts --layout.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lm_experiments_tools.errors import UserError


@dataclass(frozen=True, kw_only=True)
class OutputArgs:
    """Where to write."""

    output: str
    """Maps: a .png picture or the arrays as .npz. Layouts: an .svg."""


@dataclass(frozen=True, kw_only=True)
class MapsArgs:
    """Attention maps of a model on a text."""

    model: str | None = None
    """Folder of a checkpoint or run, or name of a model on the Hugging Face hub."""
    text: str | None = None
    """What the model reads."""
    target: str | None = None
    """What the decoder of an encoder-decoder reads. None: what the model writes, greedily."""
    layers: str = "all"
    """Layers to show: all, or numbers as in 0,3 or 0-5."""
    heads: str = "all"
    """Heads to show, likewise."""


@dataclass(frozen=True, kw_only=True)
class LayoutsArgs:
    """Pictures of block-sparse layouts."""

    layout: str | None = None
    """Dense, Fixed, Variable, BigBird, BSLongformer, LocalSlidingWindow; several with commas."""
    block: int = 64
    """Tokens of a block."""
    length: int = 2048
    """Tokens of the input."""
    settings: str = "{}"
    """Other settings of the layout as JSON, as in {"num_random_blocks": 2}."""


@dataclass(frozen=True, kw_only=True)
class AttentionArgs(LayoutsArgs, MapsArgs, OutputArgs):
    """Maps of a model on a text, or pictures of layouts."""

    def __post_init__(self) -> None:
        if (self.model is None) == (self.layout is None):
            raise UserError("lmtools attention: give --model and --text to see maps, or --layout to see layouts.")
        if self.model is not None and self.text is None:
            raise UserError("lmtools attention: --model needs a --text to read.")
        if self.layout is not None and (self.text is not None or self.target is not None):
            raise UserError("lmtools attention: --text and --target are for --model; a --layout needs none.")
        if self.layout is None and self.settings != LayoutsArgs.settings:
            raise UserError("lmtools attention: --settings are those of a --layout, which is not given.")
        kinds = (".png", ".npz") if self.layout is None else (".svg",)
        if Path(self.output).suffix not in kinds:
            raise UserError(f"--output {self.output}: it must end in {' or '.join(kinds)}.")


def run(args: AttentionArgs) -> None:
    """Draw, and print the path."""
    print(_draw_layouts(args) if args.layout is not None else _draw_maps(args))


def _draw_layouts(args: AttentionArgs) -> Path:
    from lm_experiments_tools.attention.layouts import get_sparsity_config
    from lm_experiments_tools.names import allow_modules
    from lm_experiments_tools.tools.attention_maps.pictures import draw_layouts

    try:
        settings: Any = json.loads(args.settings)
    except (ValueError, RecursionError) as error:
        raise UserError(f'--settings {args.settings!r} is not JSON ({error}): write {{"seed": 1}}.') from error
    if not isinstance(settings, dict):
        raise UserError(f'--settings {args.settings!r} is no JSON object: write {{"seed": 1}}.')
    if "block" in settings:
        raise UserError(f"--settings {args.settings!r}: give the block as --block {settings['block']} instead.")
    if "num_heads" in settings:
        raise UserError(f"--settings {args.settings!r}: leave out num_heads, a picture shows one head.")
    names = args.layout.split(",")
    allow_modules(names)
    configs = [get_sparsity_config(name, 1, block=args.block, **settings) for name in names]
    return draw_layouts(configs, args.length, args.output)


def _draw_maps(args: AttentionArgs) -> Path:
    from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM, AutoTokenizer

    import lm_experiments_tools.attention.huggingface  # noqa: F401 - configurations may name its attention
    import modeling_bert  # noqa: F401 - and AutoModel then knows variants
    import modeling_t5  # noqa: F401
    from lm_experiments_tools.checkpoint.source import find_source
    from lm_experiments_tools.models.saved import unread
    from lm_experiments_tools.tools.attention_maps.maps import attention_maps, write_maps

    layers, heads = (numbers(getattr(args, flag), flag) for flag in ("layers", "heads"))
    last = Path(args.model) / "last"  # of a run: its own config.json holds the settings of the run
    name = find_source(str(last) if last.exists() else args.model, "--model").name
    with unread(f"--model {args.model}", "a model with its tokenizer"):
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
        auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModel
        model = auto.from_pretrained(name, trust_remote_code=False)
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    maps = attention_maps(model, tokenizer, args.text, target=args.target, layers=layers, heads=heads)
    return write_maps(maps, args.output, title=f"{args.model}: {args.text}")


def numbers(text: str, flag: str) -> list[int] | None:
    """Numbers of "0,3-5": [0, 3, 4, 5]; None for "all"."""
    if text == "all":
        return None
    chosen = []
    for part in text.split(","):
        if not re.fullmatch(r"\d+(-\d+)?", part.strip()):
            raise UserError(f"--{flag} {text}: write all, or numbers as in 0,3 or 0-5.")
        first, _, last = part.strip().partition("-")
        first, last = int(first), int(last or first)
        if first > last:
            raise UserError(f"--{flag} {text}: {first}-{last} holds no number: write {last}-{first}.")
        chosen += range(first, last + 1)
    return chosen

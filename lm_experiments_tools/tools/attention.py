"""Attention maps of a model on a text, or pictures of block-sparse layouts.

    lmtools attention --model runs/mine/last --text "The cat sat on the mat." --layers 0,3 --output maps.png
    lmtools attention --layout BigBird,Fixed --block 64 --length 2048 --output layouts.png

Maps take --model and --text, layouts --layout.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from lm_experiments_tools.config.flags import check_groups, needs
from lm_experiments_tools.errors import UserError


@dataclass(frozen=True, kw_only=True)
class AttentionArgs:
    """Maps of a model on a text, or pictures of layouts."""

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
        kinds = (".png", ".npz") if self.model is not None else (".png",)
        if Path(self.output).suffix not in kinds:
            raise UserError(f"--output {self.output}: it must end in {' or '.join(kinds)}.")


def run(args: AttentionArgs) -> None:
    """Write the file, and print its path."""
    print(_draw_layouts(args) if args.layout is not None else _draw_maps(args))


def _draw_layouts(args: AttentionArgs) -> Path:
    from lm_experiments_tools.attention.layouts import get_sparsity_config
    from lm_experiments_tools.names import allow_modules
    from lm_experiments_tools.tools.attention_maps import draw_layouts

    try:
        settings = dict(json.loads(args.settings))
    except (ValueError, TypeError) as error:
        raise UserError(f'--settings {args.settings!r} is no JSON object ({error}): write {{"seed": 1}}.') from error
    names = args.layout.split(",")
    allow_modules(names)
    configs = [get_sparsity_config(name, 1, **{"block": args.block, **settings}) for name in names]
    return draw_layouts(configs, args.length, args.output)


def _draw_maps(args: AttentionArgs) -> Path:
    import lm_experiments_tools.attention.huggingface  # noqa: F401 - configurations may name its attention
    from lm_experiments_tools.models.saved import open_saved
    from lm_experiments_tools.tools.attention_maps import attention_maps, write_maps

    layers, heads = (numbers(getattr(args, flag), flag) for flag in ("layers", "heads"))
    opened = open_saved(args.model, flag="--model")
    maps = attention_maps(opened.model, opened.tokenizer, args.text, target=args.target, layers=layers, heads=heads)
    return write_maps(maps, args.output, title=f"{args.model}: {args.text}")


def numbers(text: str, flag: str) -> list[int] | None:
    """Numbers of "0,3-5": [0, 3, 4, 5]; None for "all"."""
    if text == "all":
        return None
    chosen: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        span = range(int(found[1]), int(found[2] or found[1]) + 1) if found else ()
        if not span:
            raise UserError(f"--{flag} {text}: write all, or numbers as in 0,3 or 0-5.")
        chosen += span
    return chosen

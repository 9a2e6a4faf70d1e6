"""Convert weights of other programs to a folder for `from_pretrained`, and verify its logits.

    lmtools convert t5-experiments/runs/mine/model_100000.pth --to mine --model_cfg t5-small --tokenizer vocab.model
    lmtools convert nanoT5/logs/.../pytorch_model.bin --to mine --model_cfg t5-v1_1-base --tokenizer DIR
    lmtools convert t5_1_1_small/checkpoint_1000000 --to mine --model_cfg t5-v1_1-small
    lmtools convert ModernBERT-base --to mine
    lmtools convert runs/mine --to theirs --model_type modernbert

Sources are weights of t5-experiments (.pth, or a folder of its accelerate trainer), nanoT5 (pytorch_model.bin) and t5x
(a folder of zarr arrays). ModernBERT and EuroBERT become this package's BERT, T5Gemma its T5. --model_type converts
such models back to modernbert, eurobert or t5gemma.
Checkpoints of this package need no conversion: use lmtools export.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from lm_experiments_tools.checkpoint.source import CONFIG
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.tools.export import check_shard_size

if TYPE_CHECKING:
    from transformers import PreTrainedModel

POSITIONAL = "source"


@dataclass(frozen=True, kw_only=True)
class ConvertArgs:
    """Which weights to convert, and where to write the result."""

    source: str | None = None
    """File or folder of weights. As the first argument it needs no flag."""
    to: str | None = None
    """New folder."""
    model_cfg: str | None = None
    """Configuration of the model: a JSON file, or the name of one below models_configs, for example t5-small."""
    model_cls: str | None = None
    """Class of the model, as module:Class. None: transformers:T5ForConditionalGeneration."""
    model_type: Literal["modernbert", "eurobert", "t5gemma"] | None = None
    """Write modeling_bert's BertForMaskedLM, or modeling_t5's T5ForConditionalGeneration, as this model of
    transformers."""
    tokenizer: str | None = None
    """Folder, .model file or name of the Hub. None: the one next to the weights, if there is one."""
    max_shard_size: str = "50GB"
    """Largest file of weights, as in 5GB or 500MB."""
    allow_pickle: bool = False
    """Unpickle any object, which can run code of the file's author."""

    def __post_init__(self) -> None:
        if self.source is None or self.to is None:
            raise UserError("lmtools convert: name weights and the new folder, as in lmtools convert a.pth --to a.")
        if self.model_type and (self.model_cfg or self.model_cls):
            raise UserError("--model_type reads a folder with its config.json: leave --model_cfg and --model_cls out.")
        check_shard_size(self.max_shard_size)


def run(args: ConvertArgs) -> None:
    """Convert weights as the flags say, and print what was written."""
    if not Path(args.source).exists():
        raise UserError(f"--source {args.source}: there is no such file or folder.")

    from lm_experiments_tools.checkpoint.weights import quiet_saving
    from lm_experiments_tools.models.saved import loaded
    from lm_experiments_tools.tools.hub_folder import difference, example_inputs, logits_of, new_folder
    from lm_experiments_tools.tracking.progress import make_bar

    folder = Path(args.to)
    # A step each: read, write, and read back.
    with make_bar(desc="convert", total=3) as bar, new_folder(folder) as temporary:
        model = _model(args).eval()
        cls = type(model)
        bar.update()
        with quiet_saving():
            model.save_pretrained(temporary, max_shard_size=args.max_shard_size)
        bar.update()
        has_tokenizer = _save_tokenizer(args, temporary)
        again = loaded(cls, str(temporary), args.to)
        inputs = example_inputs(model)
        if differs := difference(logits_of(again.eval(), inputs), logits_of(model, inputs)):
            raise UserError(f"{folder} {differs}; nothing was written.")
        bar.update()
    parameters = sum(weight.numel() for weight in model.parameters())
    print(f"{folder}: {cls.__name__} of {parameters:,} parameters; loaded back, its logits are equal.")
    if not has_tokenizer:
        print("It has no tokenizer: put one there, or name it by --tokenizer.")


def _model(args: ConvertArgs) -> PreTrainedModel:
    from lm_experiments_tools.checkpoint.weights import load_weights
    from lm_experiments_tools.models.build import build_model, load_model_config
    from lm_experiments_tools.modules.user_classes import get_cls_by_name

    source = Path(args.source)
    if args.model_cfg is None and args.model_cls is None and (converted := _converted(args)) is not None:
        return converted
    if args.model_cfg is None:
        file = source / "config.json"
        example = f" Pass for example --model_cfg {file}." if file.is_file() else ""
        raise UserError(f"--model_cfg is required: weights do not describe their model.{example}")
    cls = get_cls_by_name(args.model_cls or "transformers:T5ForConditionalGeneration")
    model = build_model(cls, load_model_config(args.model_cfg, getattr(cls, "config_class", None)), seed=0)
    load_weights(model, source, allow_pickle=args.allow_pickle)
    return model


def _converted(args: ConvertArgs) -> PreTrainedModel | None:
    """A model of transformers as one of this package, or back, as requested; None for other sources."""
    from lm_experiments_tools.checkpoint.source import find_source
    from lm_experiments_tools.checkpoint.weights import read_weights
    from lm_experiments_tools.models.saved import open_saved
    from modeling_bert.conversion import FAMILIES, from_original, to_original
    from modeling_t5.t5gemma import from_t5gemma, to_t5gemma

    is_folder = (Path(args.source) / CONFIG).is_file()
    found = find_source(args.source, "--source") if is_folder else None
    kind = None if found is None else found.config.get("model_type")
    if args.model_type == "t5gemma":
        return to_t5gemma(open_saved(args.source, "modeling_t5:T5ForConditionalGeneration", "--source").model)
    if args.model_type is not None:
        return to_original(open_saved(args.source, "modeling_bert:BertForMaskedLM", "--source").model, args.model_type)
    if kind == "t5gemma":
        return from_t5gemma(open_saved(args.source, flag="--source").model.float())
    if kind in FAMILIES:
        return from_original(found.config, read_weights(found.path, args.allow_pickle)).float()
    return None


def _save_tokenizer(args: ConvertArgs, folder: Path) -> bool:
    from lm_experiments_tools.checkpoint.manifest import verify_model
    from lm_experiments_tools.checkpoint.weights import copy_tokenizer
    from lm_experiments_tools.models.tokenizers import named_tokenizer

    if args.tokenizer is None:
        source = Path(args.source)
        verify_model(source)
        return copy_tokenizer(source if source.is_dir() else source.parent, folder)
    named_tokenizer(args.tokenizer, "--tokenizer").save_pretrained(folder)
    return True

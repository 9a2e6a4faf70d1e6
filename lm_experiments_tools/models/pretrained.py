"""Load pre-trained models for fine-tuning, check them, and prepare them for training.

`--from_pretrained` may be a Hugging Face name or folder, a run or checkpoint of this package, an adapter of peft, or a
weights file of t5-experiments or nanoT5 (with --model_cfg).
"""

from __future__ import annotations

import logging
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lm_experiments_tools.checkpoint.conversion import load_unsharded, quiet_loading
from lm_experiments_tools.checkpoint.source import ModelFiles, Source, real_names
from lm_experiments_tools.checkpoint.weights import load_weights
from lm_experiments_tools.data.examples.example_encoder import end_id
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.files import read_json
from lm_experiments_tools.models.adapters import add_adapter, check_peft, load_adapted, new_token_prefix
from lm_experiments_tools.models.build import (
    build_model,
    check_positions,
    check_size,
    enable_checkpointing,
    first_position,
    load_model_config,
    pretrained_config,
    refusals_named,
    register_own_models,
    set_decoder_start,
    set_dropout,
    set_special_tokens,
    set_z_loss,
    takes_our_attention,
    untie_only_output,
)
from lm_experiments_tools.models.freezing import freeze
from lm_experiments_tools.models.speed import speed_up
from lm_experiments_tools.modules.devices import HostEmbedding
from lm_experiments_tools.modules.user_classes import get_cls_by_name

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from lm_experiments_tools.config.finetuning import FinetuningArgs

logger = logging.getLogger(__name__)

AUTO_CLASSES = {
    "encoder": "AutoModelForSequenceClassification",
    "encoder-decoder": "AutoModelForSeq2SeqLM",
    "decoder": "AutoModelForCausalLM",
}
STRICTLY: dict[str, Any] = {"dtype": torch.float32, "output_loading_info": True, "trust_remote_code": False}
_NAMES_SHOWN = 4
# Heads are trained next to a quantized body, so they stay unquantized.
_HEADS = ["classifier", "score", "classification_head", "pre_classifier", "pooler", "lm_head"]


def pretrained_model(
    args: FinetuningArgs,
    tokenizer: PreTrainedTokenizerBase,
    label_names: Sequence[str] = (),
    files: ModelFiles | None = None,
) -> nn.Module:
    """Load the pre-trained model of the flags; `requires_grad` marks the trained parameters. Raises UserError."""
    if args.peft is not None and args.from_pretrained is None:
        raise UserError(f"--peft {args.peft} needs --from_pretrained: the adapter is saved without its base model.")
    if args.quantize is not None and args.peft is None and _resumes(args):
        raise UserError(
            "--quantize cannot resume a run: name its checkpoint by --from_pretrained, without --model_path."
        )
    files = files or ModelFiles(args)
    adapter, base = files.adapter, files.base
    if args.peft is not None or adapter is not None:
        check_peft("--peft" if args.peft is not None else f"the adapter {args.from_pretrained}")
    model, new_weights = _base_model(args, files, tokenizer, label_names)
    if adapter is not None:
        _check_labels(adapter.name, adapter.label_names, label_names)
    elif args.validate_only and new_weights and not _resumes(args):
        raise UserError(f"--validate_only: {base.name} has no head for --task {args.task}: name a fine-tuned model.")
    if args.quantize is not None and (args.peft or adapter):
        from peft import prepare_model_for_kbit_training  # what is not quantised, in fp32

        prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    if args.gradient_checkpointing:
        enable_checkpointing(model)
    if args.embeddings_on_cpu and torch.cuda.is_available():
        host_embeddings(model)
    elif args.embeddings_on_cpu:
        logger.info("--embeddings_on_cpu: this machine has no GPU, so all of the model is in main memory anyway")
    if base is not None and (adapter is not None or args.peft is not None):
        model.base_fingerprint = base.fingerprint()
    if adapter is not None:
        model = load_adapted(model, adapter.path, args)
    elif args.peft is not None:
        model = add_adapter(model, args, tokenizer, base.reference if base is not None else None, new_weights)
    else:
        freeze(model, args.freeze)
    _check_length(model, args)
    speed_up(model, args, plain=adapter is None and args.peft is None and args.quantize is None)
    return model


def untrained_model(args: FinetuningArgs) -> PreTrainedModel:
    """Build the model that the flags describe with random weights and no adapter, for memory estimates."""
    files = ModelFiles(args)
    config = _config(args, files)
    if args.dropout_rate is not None:
        set_dropout(config, args.dropout_rate)
    if args.z_loss is not None:
        set_z_loss(config, args.z_loss)
    return build_model(_model_class(args, config), config, seed=args.seed)


def _resumes(args: FinetuningArgs) -> bool:
    """True if the weights are going to be those of a checkpoint of this run."""
    if args.resume not in ("auto", "never"):
        return True
    return bool(args.model_path) and any((Path(args.model_path) / "checkpoints").glob("step_*"))


def _check_labels(name: str, saved: Sequence[str], label_names: Sequence[str]) -> None:
    """Refuse labels in another order than those of a trained head."""
    saved, label_names = list(saved), list(label_names)
    if not saved or not label_names or saved == label_names:
        return
    if sorted(saved) == sorted(label_names):
        raise UserError(
            f"{name} has other labels than {', '.join(label_names)}: give --label_names {shlex.join(saved)}."
        )
    logger.warning("the head of %s was trained for the labels %s", name, ", ".join(saved))


def _check_length(model: nn.Module, args: FinetuningArgs) -> None:
    """Inputs, prompt and text to be generated within the positions of the model. Raises UserError."""
    adapters = getattr(model, "peft_config", {}).values()
    before = max((getattr(c, "num_virtual_tokens", None) or 0 for c in adapters), default=0)
    lengths = {"--input_seq_len": args.input_seq_len}
    if args.model_type == "encoder-decoder":
        lengths["--target_seq_len"] = args.target_seq_len
    if args.needs_generation():
        source = args.input_seq_len - args.target_seq_len if args.model_type == "decoder" else 0
        lengths["--max_new_tokens after a source"] = source + (args.max_new_tokens or args.target_seq_len)
    for what, length in lengths.items():
        prompt = f" with the {before} tokens of the prompt" if before else ""
        check_positions(model.config, length + before, f"{what} ({length}){prompt}", first_position(model))


def _base_model(
    args: FinetuningArgs, files: ModelFiles, tokenizer: PreTrainedTokenizerBase, label_names: Sequence[str]
) -> tuple[PreTrainedModel, list[str]]:
    """The model without adapter, and the names of its weights that are new."""
    source, config = files.base, _config(args, files)
    model_cls = _model_class(args, config)
    saved_labels = real_names(config.id2label, args.model_cfg or files.configuration.name)
    _set_up_config(config, args, label_names)
    _set_up_special_tokens(config, args, tokenizer, model_cls)
    new_weights: list[str] = []
    if source is None and args.init_checkpoint:
        path = Path(args.init_checkpoint)
        _check_labels(args.init_checkpoint, Source(args.init_checkpoint, path).label_names, label_names)
    if source is None or source.is_file:
        if args.quantize is not None or args.device_map is not None:
            flag = "--quantize" if args.quantize is not None else "--device_map"
            raise UserError(f"{flag} needs a model in a folder: write one with save_pretrained, and name it.")
        model = build_model(model_cls, config, seed=args.seed)
        if source is not None:
            report = load_weights(
                model, source.path, allow_partial=args.allow_partial_checkpoint, allow_pickle=args.allow_pickle
            )
            logger.info("weights from %s: %s", source.name, report)
    else:
        options = loading_options(args)
        if args.device_map is None:
            bits = {None: 32, "int8": 8}.get(args.quantize, 4)
            check_size(model_cls, config, bits / 8)
        model, new_weights = load_pretrained(model_cls, config, source, args, **options)
        if not any(".pooler." not in name for name in new_weights):
            _check_labels(source.name, saved_labels, label_names)
        if args.device_map is not None:
            say_where(model)
    _fit_vocabulary(model, tokenizer, args)
    _set_up_generation(model, tokenizer)
    return model, new_weights


# ---- configuration and class ----------------------------------------------------------------------------------------
def _config(args: FinetuningArgs, files: ModelFiles) -> PreTrainedConfig:
    config_cls = getattr(get_cls_by_name(args.model_cls), "config_class", None) if args.model_cls else None
    source = files.base
    if source is not None and source.is_file and args.model_cfg is None:
        raise UserError(f"--from_pretrained {source.name} holds weights alone: describe the model with --model_cfg.")
    if args.model_cfg is not None:
        if source is not None and not source.is_file:
            raise UserError(
                f"--model_cfg and --from_pretrained {source.name} both describe the model: leave --model_cfg out."
            )
        return load_model_config(args.model_cfg, config_cls)
    source = files.configuration
    register_own_models(source)
    return pretrained_config(source.name, config_cls)


def _model_class(args: FinetuningArgs, config: PreTrainedConfig) -> type:
    """`--model_cls`, else transformers' class for the kind of model. Raises UserError for another kind's weights."""
    import transformers

    found = kind_of(config)
    named = get_cls_by_name(args.model_cls) if args.model_cls else None
    reads_only = named is not None and args.model_type == "encoder" and not named.can_generate()
    auto = getattr(transformers, AUTO_CLASSES[args.model_type])
    if found is not None and found != args.model_type and not reads_only:
        raise UserError(
            f"--model_type {args.model_type} does not fit weights of kind {found} ({config.model_type}): choose "
            f"--model_type {found}, or other weights."
        )
    if named is not None:
        return named
    if type(config) not in auto._model_mapping:
        raise UserError(f"transformers has no {auto.__name__} for {config.model_type}: name a class by --model_cls.")
    return auto._model_mapping[type(config)]


def kind_of(config: PreTrainedConfig) -> str | None:
    """The value of `--model_type` that fits a model configuration; None if none fits."""
    import transformers

    if config.is_encoder_decoder:
        return "encoder-decoder"
    if type(config) in transformers.MODEL_FOR_MASKED_LM_MAPPING:  # BERT is in both
        return "encoder"
    return "decoder" if type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING else None


def _set_up_config(config: PreTrainedConfig, args: FinetuningArgs, label_names: Sequence[str]) -> None:
    if args.dropout_rate is not None:
        set_dropout(config, args.dropout_rate)
    if args.z_loss is not None:
        set_z_loss(config, args.z_loss)
    if args.model_type != "encoder":
        return
    if args.task == "regression":
        config.num_labels, config.problem_type = 1, "regression"
        return
    if len(label_names) < 2:
        raise UserError(
            f"--task {args.task} needs at least 2 labels, the data has {len(label_names)}: check --label_field."
        )
    config.id2label = dict(enumerate(label_names))
    config.label2id = {name: number for number, name in enumerate(label_names)}
    config.problem_type = f"{'multi' if args.task == 'multi_label' else 'single'}_label_classification"


# ---- weights --------------------------------------------------------------------------------------------------------
def load_pretrained(
    model_cls: type, config: PreTrainedConfig, source: Source, args: FinetuningArgs, **options: Any
) -> tuple[PreTrainedModel, list[str]]:
    """Load a model by `model_cls.from_pretrained`; returns it and the names of weights that were not in the files.

    Only a classifier's head may be missing there; it gets random values that depend on `--seed`. transformers sets
    `tie_word_embeddings` to True for a T5 v1.1 that it loads; the value of config.json is restored. Raises UserError
    if other weights do not fit (without --allow_partial_checkpoint).
    """
    ours = takes_our_attention(config)
    unties = source.config.get("tie_word_embeddings") is False
    readable = refusals_named(f"{source.name}: its weights cannot be read")
    with readable, quiet_loading(), load_unsharded(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(args.seed)
        model, info = model_cls.from_pretrained(
            source.name, config=config, ignore_mismatched_sizes=True, **{**STRICTLY, **options}
        )
    new_weights = _judge(model, info, source, args)
    if unties and getattr(model, "_tied_weights_keys", None):
        untie_only_output(model)
    if ours:
        from lm_experiments_tools.attention.huggingface import enable

        enable(model)
    return model, new_weights


def _judge(model: PreTrainedModel, info: dict[str, Any], source: Source, args: FinetuningArgs) -> list[str]:
    """Refuse weights of the body that are not the model's; say which of the head are new (returned) or dropped."""
    found = {"missing": sorted(info["missing_keys"]), "unexpected": sorted(info["unexpected_keys"])}
    found["of another shape"] = [entry[0] for entry in info["mismatched_keys"]]
    has_new_head = args.model_type == "encoder"
    is_head = {name for names in found.values() for name in names if has_new_head and _in_head(model, name)}
    new = [name for what in ("missing", "of another shape") for name in found[what] if name in is_head]
    bad = {what: [name for name in names if name not in is_head] for what, names in found.items()}
    words = [f"{len(names)} are {what} ({some_names(names)})" for what, names in bad.items() if names]
    bodies = (name.rpartition(".")[0] for name in bad["of another shape"])
    lost = [name for name in bodies if isinstance(model.get_submodule(name), nn.Embedding)]
    if words and (lost or not args.allow_partial_checkpoint):
        advice = f", as {lost[0]} is never dropped" if lost else ", or pass --allow_partial_checkpoint"
        raise UserError(
            f"{source.name} does not fit {type(model).__name__}: of its weights {', '.join(words)}; check "
            f"--model_type and --model_cls{advice}."
        )
    if words:
        logger.warning("%s fits only in part: of its weights %s", source.name, ", ".join(words))
    if new:
        logger.info("the head is new, with random weights: %s", ", ".join(new))
    if dropped := [name for name in found["unexpected"] if name in is_head]:
        logger.info(
            "not used of %s: %d weights of its former head (%s)", source.name, len(dropped), some_names(dropped)
        )
    return new


def _in_head(model: PreTrainedModel, name: str) -> bool:
    """True for weights outside the body; a pooler counts as head, because not every objective trains it."""
    return not name.startswith(f"{model.base_model_prefix}.") or ".pooler." in name


def some_names(names: Sequence[str]) -> str:
    return ", ".join(names[:_NAMES_SHOWN]) + (", ..." if len(names) > _NAMES_SHOWN else "")


# ---- precision and devices ------------------------------------------------------------------------------------------
def loading_options(args: FinetuningArgs) -> dict[str, Any]:
    """Arguments of `from_pretrained` that follow from --quantize and --device_map."""
    options: dict[str, Any] = {}
    if args.quantize is not None:
        options["quantization_config"] = _quantization(args)
    if args.device_map is not None:
        file = Path(args.device_map)
        options["device_map"] = read_json(file) if file.is_file() else args.device_map
    return options


def _quantization(args: FinetuningArgs) -> Any:
    from transformers import BitsAndBytesConfig

    try:
        import bitsandbytes  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"--quantize {args.quantize} needs the package bitsandbytes ({error}): pip install bitsandbytes"
        ) from error
    if args.quantize == "int8":
        return BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=_HEADS)
    compute = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else torch.float32
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=args.quantize,
        bnb_4bit_compute_dtype=compute,
        llm_int8_skip_modules=_HEADS,
    )


def say_where(model: nn.Module) -> None:
    """Log which devices hold the layers of a model loaded with --device_map."""
    layers: dict[str, list[str]] = {}
    for module, device in (getattr(model, "hf_device_map", None) or {"": model.device}).items():
        layers.setdefault(str(device), []).append(module or "all layers")
    for device, names in layers.items():
        logger.info("on %s: %s", device, ", ".join(names))


def host_embeddings(model: nn.Module) -> None:
    """Keep the token embeddings of a model in main memory, by turning them into `HostEmbedding`s. Raises UserError."""
    table, output = model.get_input_embeddings(), model.get_output_embeddings()
    if output is not None and output.weight is table.weight:
        raise UserError(
            f"--embeddings_on_cpu: the output layer of {type(model).__name__} is tied to its embeddings: choose a "
            "model with untied ones (T5 v1.1)."
        )
    for module in model.modules():
        if isinstance(module, nn.Embedding) and module.weight is table.weight:
            if type(module) is not nn.Embedding:
                raise UserError(f"--embeddings_on_cpu: {type(module).__name__} is more than a look-up.")
            module.__class__ = HostEmbedding


# ---- tokenizer and model --------------------------------------------------------------------------------------------
def _fit_vocabulary(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, args: FinetuningArgs) -> None:
    """Add rows to the embeddings for tokens that were added to the tokenizer; rows that exist keep their values."""
    rows = model.get_input_embeddings().num_embeddings
    added = range(rows, len(tokenizer))
    if not added:
        return
    own = len(added) <= new_token_prefix(tokenizer).count("<")  # of --peft new_tokens
    if not own and (args.peft is not None or not set(added) <= tokenizer.added_tokens_decoder.keys()):
        where = "--from_pretrained" if args.from_pretrained else "--model_cfg"
        raise UserError(
            f"the tokenizer has {len(tokenizer)} tokens, the embedding {rows} rows: --tokenizer and {where} differ; "
            "only tokens that were added to the model's own tokenizer get new rows, and only without --peft."
        )
    logger.info("the embedding gets %d rows for the tokens that were added to the tokenizer", len(added))
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)


def _set_up_special_tokens(
    config: PreTrainedConfig, args: FinetuningArgs, tokenizer: PreTrainedTokenizerBase, model_cls: type
) -> None:
    """Complete the special tokens of a configuration by those of the tokenizer, before the model is built.

    Pre-trained weights keep their padding id, because modules may depend on it: RoBERTa counts positions from it.
    """
    names = ("bos", "cls", "sep", "mask", "pad")
    ids: dict[str, int | None] = {name: getattr(tokenizer, f"{name}_token_id") for name in names}
    if (tokenizer.eos_token_id, tokenizer.sep_token_id) != (None, None):
        ids["eos"] = end_id(tokenizer)
    if args.from_pretrained is None and args.init_checkpoint is None:
        set_special_tokens(config, ids, model_cls)
    elif getattr(config, "pad_token_id", None) is None and args.model_type != "decoder":
        config.pad_token_id = ids["pad"]
    if model_cls.can_generate() and "eos" in ids:
        config.eos_token_id = ids["eos"]
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = ids["pad"]


def _set_up_generation(model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> None:
    settings = getattr(model, "generation_config", None)
    if settings is None:
        return
    settings.pad_token_id = tokenizer.pad_token_id
    settings.eos_token_id = getattr(model.config, "eos_token_id", None)
    set_decoder_start(model)

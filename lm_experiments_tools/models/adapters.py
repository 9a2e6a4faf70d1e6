"""Parameter-efficient fine-tuning with peft: the model is frozen, and only a small adapter is trained and saved.

    lora           low-rank matrices added to linear layers            adapter_model.safetensors: lora_A, lora_B
    prompt_tuning  a soft prompt before the input embeddings           prompt_embeddings
    prefix_tuning  soft keys and values before those of every layer    prompt_embeddings
    new_tokens     the embeddings of tokens added to the vocabulary    trainable_tokens_delta

A classifier's head is trained and saved too. `peft.PeftModel.from_pretrained(base, folder)` loads an adapter; for
new_tokens resize the base first (`resize_token_embeddings(len(tokenizer))`).
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lm_experiments_tools.checkpoint.adapter_files import (
    DEFAULT_ADAPTER,
    read_adapter_into,
    saved_by_name,
)
from lm_experiments_tools.checkpoint.source import ADAPTER_CONFIG
from lm_experiments_tools.config.finetuning import MemoryArgs
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.models.build import refusals_named

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from lm_experiments_tools.config.finetuning import FinetuningArgs

logger = logging.getLogger(__name__)

TASK_TYPES = {"encoder": "SEQ_CLS", "encoder-decoder": "SEQ_2_SEQ_LM", "decoder": "CAUSAL_LM"}
KINDS = {
    "lora": "LORA",
    "prompt_tuning": "PROMPT_TUNING",
    "prefix_tuning": "PREFIX_TUNING",
    "new_tokens": "TRAINABLE_TOKENS",
}
# Layers for LoRA in our models, as peft has them for transformers'.
LORA_TARGETS = {"lm_experiments_t5": ["q", "v"], "lm_experiments_bert": ["query", "value"]}
# Parts of the names of parameters that start from embeddings of words.
_STARTED = {"prompt_tuning": "prompt_encoder", "new_tokens": "trainable_tokens_delta"}
_COMMON_WORDS = 5000  # words that prompts start from: Lester et al. 2021, section 3.2
_NEW_TOKEN = re.compile(r"<prompt_\d+>")


def check_peft(flag: str) -> None:
    """Raise UserError if the library peft, which `flag` needs, is not installed."""
    try:
        import peft  # noqa: F401
    except ImportError as error:
        raise UserError(f"{flag} needs the package peft ({error}): pip install peft") from error


# ---- putting an adapter on a model ----------------------------------------------------------------------------------
def add_adapter(
    model: PreTrainedModel,
    args: FinetuningArgs,
    tokenizer: PreTrainedTokenizerBase,
    base_name: str | None,
    new_weights: Sequence[str],
) -> PeftModel:
    """Freeze a model and add a new adapter of the kind `--peft`, so that only the adapter is trained.

    The adapter's random weights depend on `--seed` alone. `new_weights` names weights that were not loaded, such as a
    classifier's head, which are trained too. Raises UserError if the adapter does not fit.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(args.seed)
        config = _config(model, args, tokenizer, heads_of(model, args.model_type, new_weights))
        config.base_model_name_or_path = base_name
        flag = "--lora_targets" if args.lora_targets else f"--peft {args.peft}"
        hint = "; name layers by --lora_targets" if args.peft == "lora" and not args.lora_targets else ""
        with refusals_named(f"{flag} does not fit {type(model).__name__}{hint}"):
            adapted = _wrapped(model, config, args)
        if args.peft in _STARTED:
            weight = next(p for name, p in adapted.named_parameters() if _STARTED[args.peft] in name)
            prompt = prompt_words(args, tokenizer, args.num_virtual_tokens)
            weight.data.copy_(model.get_input_embeddings().weight[prompt].detach().float())
    _train_heads(adapted, args.model_type, new_weights)
    return adapted


def described_by(file: Path) -> contextlib.AbstractContextManager[None]:
    """Context in which peft's errors become a UserError about an adapter's description, `file`."""
    return refusals_named(f"{file}: peft cannot build the adapter that it describes")


def load_adapted(model: PreTrainedModel, path: Path, args: FinetuningArgs) -> PeftModel:
    """Add the adapter saved in a folder to a model, to train it further. Raises UserError."""
    with described_by(path / ADAPTER_CONFIG):
        adapted = _described(model, path, args)
        _train_heads(adapted, args.model_type, list(saved_by_name(path)))
    read_adapter_into(adapted, path)
    return adapted


def _described(model: PreTrainedModel, path: Path, args: FinetuningArgs) -> PeftModel:
    """`model` with an adapter as the files in `path` describe it, whose weights are still to be read."""
    from peft import PeftConfig

    config = PeftConfig.from_pretrained(str(path))
    if args.peft is not None and config.peft_type != KINDS[args.peft]:
        raise UserError(
            f"--peft {args.peft} does not fit the adapter in {path}, which is {config.peft_type}: leave --peft out."
        )
    _refuse_other_settings(args, path, config)
    config.inference_mode = False
    if config.peft_type == KINDS["prompt_tuning"]:
        config.prompt_tuning_init = "RANDOM"  # overwritten by the file
    return _wrapped(model, config, args)


def _refuse_other_settings(args: FinetuningArgs, path: Path, config: PeftConfig) -> None:
    """Refuse flags that differ from a saved adapter, where they would be ignored."""
    if args.freeze:
        raise UserError(f"--freeze: everything under the adapter in {path} is frozen already; leave the flag out.")
    targets, tokens = getattr(config, "target_modules", None), getattr(config, "token_indices", None)
    saved = {
        "lora_r": getattr(config, "r", None),
        "lora_alpha": getattr(config, "lora_alpha", None),
        "lora_dropout": getattr(config, "lora_dropout", None),
        "lora_targets": tuple(sorted(targets or ())),
        "num_virtual_tokens": len(tokens) if tokens is not None else getattr(config, "num_virtual_tokens", None),
        "prompt_init_text": None,
    }
    given = {name: getattr(args, name) for name in saved if getattr(args, name) != getattr(MemoryArgs, name)}
    given = {name: tuple(sorted(value)) if isinstance(value, tuple) else value for name, value in given.items()}
    other = [f"--{name} ({saved[name]} there)" for name, value in given.items() if value != saved[name]]
    if other:
        raise UserError(f"{', '.join(other)} cannot change the adapter in {path}: leave it out.")


def _wrapped(model: PreTrainedModel, config: PeftConfig, args: FinetuningArgs) -> PeftModel:
    from peft import get_peft_model

    if args.gradient_checkpointing and config.peft_type == KINDS["prefix_tuning"]:
        raise UserError(
            "--peft prefix_tuning and --gradient_checkpointing exclude each other: recomputed layers would extend the "
            "cache of its keys and values again."
        )
    adapted = get_peft_model(model, config)
    if config.peft_type == KINDS["prompt_tuning"] and config.task_type == TASK_TYPES["decoder"]:
        if "inputs_embeds" in inspect.signature(model.prepare_inputs_for_generation).parameters:
            adapted.generate = MethodType(_generate_after_prompt, adapted)
    return adapted


def _generate_after_prompt(
    self: PeftModel, input_ids: Tensor, attention_mask: Tensor | None = None, **options: Any
) -> Tensor:
    """Replaces peft's `generate`, which drops positions: left padding would shift a decoder's."""
    prompt, embedded = self.get_prompt(batch_size=len(input_ids)), self.get_input_embeddings()(input_ids)
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    if options.get("max_length") is not None:  # transformers would count the prompt
        options.setdefault("max_new_tokens", options.pop("max_length") - input_ids.shape[1])
    return self.get_base_model().generate(
        input_ids=input_ids,
        inputs_embeds=torch.cat([prompt.to(embedded.dtype), embedded], 1),
        attention_mask=torch.cat([mask.new_ones(prompt.shape[:2]), mask], 1),
        **options,
    )


def _config(
    model: PreTrainedModel, args: FinetuningArgs, tokenizer: PreTrainedTokenizerBase, heads: list[str]
) -> PeftConfig:
    import peft

    task_type, count = TASK_TYPES[args.model_type], args.num_virtual_tokens
    if args.peft == "lora":
        targets: Any = list(args.lora_targets) or _usual_targets(model)
        return peft.LoraConfig(
            task_type=task_type,
            r=args.lora_r,
            lora_alpha=args.lora_alpha,
            lora_dropout=args.lora_dropout,
            target_modules="all-linear" if targets == ["all-linear"] else targets,
            modules_to_save=heads or None,
        )
    if args.peft == "prompt_tuning":  # one prompt, of the encoder: with 2 submodules peft adds one nobody reads
        return peft.PromptTuningConfig(task_type=task_type, num_virtual_tokens=count, num_transformer_submodules=1)
    if args.peft == "prefix_tuning":
        return peft.PrefixTuningConfig(task_type=task_type, num_virtual_tokens=count)
    ids = tokenizer.convert_tokens_to_ids(new_token_names(args))
    return peft.TrainableTokensConfig(task_type=task_type, token_indices=ids)


def _usual_targets(model: PreTrainedModel) -> list[str] | None:
    """Layers for LoRA where `--lora_targets` names none; None: those that peft knows for the kind of model."""
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING

    kind = model.config.model_type
    if kind in LORA_TARGETS or kind in TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING:
        return LORA_TARGETS.get(kind)
    logger.info("--peft lora: all linear layers, because peft names none for %s (--lora_targets)", kind)
    return ["all-linear"]


def heads_of(model: PreTrainedModel, model_type: str, new_weights: Sequence[str]) -> list[str]:
    """Modules of a classifier that are trained with any adapter: its head, and a pooler among the new weights."""
    if model_type != "encoder":
        return []
    heads = [n for n, m in model.named_children() if n != model.base_model_prefix and list(m.parameters())]
    return heads + (["pooler"] if any(".pooler." in name for name in new_weights) else [])


def _train_heads(adapted: PeftModel, model_type: str, new_weights: Sequence[str]) -> None:
    """LoRA trains copies of the heads; with other adapters the model's own heads are trained."""
    if adapted.peft_config[DEFAULT_ADAPTER].peft_type == KINDS["lora"]:
        return
    base = adapted.get_base_model()
    names = heads_of(base, model_type, new_weights)
    for name, parameter in base.named_parameters():
        words = name.split(".")
        if "original_module" not in words and any(word in names for word in words):  # peft itself copies some heads
            parameter.requires_grad_(True)


# ---- prompts and new tokens -----------------------------------------------------------------------------------------
def new_token_names(args: FinetuningArgs) -> list[str]:
    """List the tokens that `--peft new_tokens` adds to the vocabulary; `--num_virtual_tokens` is their number."""
    return [f"<prompt_{number}>" for number in range(args.num_virtual_tokens)]


def new_token_prefix(tokenizer: PreTrainedTokenizerBase) -> str:
    """Text to put before every input: the tokens that `--peft new_tokens` added; empty without them."""
    added = tokenizer.get_added_vocab()
    return "".join(sorted((token for token in added if _NEW_TOKEN.fullmatch(token)), key=added.__getitem__))


def prompt_words(args: FinetuningArgs, tokenizer: PreTrainedTokenizerBase, count: int) -> list[int]:
    """`count` token ids whose embeddings initialize a soft prompt (learned vectors before the input).

    They are the tokens of `--prompt_init_text`, repeated. Without this flag they are random ones of the 5000 most
    common tokens, which are the first of the vocabulary.
    """
    if args.prompt_init_text:
        ids = tokenizer(args.prompt_init_text, add_special_tokens=False)["input_ids"]
        if not ids:
            raise UserError("--prompt_init_text has no tokens: give a text, or leave it out for random words.")
        return (ids * -(-count // len(ids)))[:count]
    marks = set(tokenizer.all_special_ids) | set(tokenizer.convert_tokens_to_ids(new_token_names(args)))
    words = (i for i in range(len(tokenizer)) if i not in marks and tokenizer.convert_ids_to_tokens(i)[:1] not in "<[")
    common = [word for word, _ in zip(words, range(_COMMON_WORDS), strict=False)]
    return [common[i] for i in torch.randint(len(common), (count,)).tolist()]

"""Default values of flags that depend on pre-trained weights; the scripts import this module before torch."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lm_experiments_tools.checkpoint.source import CONFIG, KINDS, TASK_FILE, Source, find_base, find_source
from lm_experiments_tools.config.bert import SENTENCES
from lm_experiments_tools.config.cli import DEFAULT
from lm_experiments_tools.config.finetuning import PROMPT, SAVED
from lm_experiments_tools.config.pretraining import INHERITED
from lm_experiments_tools.errors import UserError, first_line
from lm_experiments_tools.tracking.run_directory import settings_in_use

_FILES = ["*.json", "*.safetensors", "*.txt", "*.model"]  # of a model on the Hub


def inherited_settings(given: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
    """Read settings recorded with the weights of `from_pretrained`, as defaults for flags that are not set.

    Weights fine-tuned by this package set their task with its prefix, lengths and prompt, unless the user names
    another task. Other weights set only the kind of model. Weights that are not found set nothing; loading them
    reports the error later.

    Returns:
        {flag's name: (value, file that it comes from)}.
    """
    if not given.get("from_pretrained"):
        return {}
    name, folder = str(given["from_pretrained"]), given.get("working_dir", ".")
    try:
        source = find_source(str(Path(folder, name)) if Path(folder, name).exists() else name)
    except UserError:
        return {}
    saved, file = source.task, f"{source.name}/{TASK_FILE}"
    if saved and all(given.get(name, saved.get(name)) == saved.get(name) for name in KINDS):
        kept = {*given, *(PROMPT if given.get("tk_instruct") else ())}  # which draws the prompts of training itself
        values = {name: saved[name] for name in SAVED if name in saved and name not in kept}
        return {name: (tuple(v) if isinstance(v, list) else v, file) for name, v in values.items()}
    kind = None if "model_type" in given else _kind_of_weights(source)
    return {} if kind is None else {"model_type": (kind, f"{source.name}/{CONFIG}")}


def of_t5(given: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
    """Default values for flags of run_t5_pretraining.py from pre-trained weights: {name: (value, origin)}."""
    return pretrained_settings(given, ("vocab",)) if given.get("from_pretrained") else {}


def of_bert(given: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
    """Default values for flags of run_bert_pretraining.py that depend on pre-trained weights or on other flags."""
    found, packing = {}, given.get("packing", SENTENCES)
    if packing != SENTENCES:
        if given.get("use_nsp"):
            raise UserError(f"--packing {packing} has no pairs of sentences: leave --use_nsp out.")
        found = {name: (False, f"--packing {packing}") for name in ("use_nsp", "whole_word") if name not in given}
    if given.get("from_pretrained"):
        found |= pretrained_settings(given, ("tokenizer", "vocab_file"))
    return found


def pretrained_settings(given: Mapping[str, Any], tokenizer_flags: Sequence[str]) -> dict[str, tuple[Any, str]]:
    """Default values for flags of a pre-training run that starts from weights (`from_pretrained`). Raises UserError.

    Only the weights of a checkpoint are used; optimizer, schedule and step restart. A resumed run keeps the source
    that it recorded, even if `best` or `last` of the other run has moved. Paths are relative to `working_dir`.

    Args:
        tokenizer_flags: flags that name the tokenizer; the first is set if none is given.
    """
    named, folder = str(given["from_pretrained"]), str(given.get("working_dir", "."))
    for flag in ("base_model", "init_checkpoint"):
        if given.get(flag):
            raise UserError(f"--from_pretrained and --{flag} exclude each other: both name a model to start from.")
    others = {"base_model"} if given.get("model_cfg") else set()
    others |= {"vocab", "tokenizer"} if any(given.get(flag) for flag in tokenizer_flags) else set()
    before = given.get("model_path") and settings_in_use(Path(folder, given["model_path"]))
    # A run of fine-tuning has other settings of these names, and is refused later.
    before = None if before and "peft" in before else before
    is_known = before and os.path.normpath(before.get("from_pretrained") or "") == os.path.normpath(named)
    values = before if is_known else _values_of(named, folder, tokenizer_flags[0])
    origins = {"model_cls": DEFAULT}  # so that `--speed auto` may choose our class for the same weights
    missing = [name for name in INHERITED if name not in given and name not in others and name in values]
    return {name: (values[name], origins.get(name, f"--from_pretrained {named}")) for name in missing}


def _values_of(named: str, folder: str, tokenizer_flag: str) -> dict[str, Any]:
    """Values of the flags for weights that are looked for now."""
    from lm_experiments_tools.models.build import OWN_PACKAGES

    is_local = Path(folder, named).exists()
    source = find_source(str(Path(folder, named)) if is_local else named)
    if source.is_adapter or source.is_file:
        found = "holds an adapter" if source.is_adapter else "is a file of weights, without configuration"
        raise UserError(f"--from_pretrained {named} {found}: name the folder of a full model.")
    path = source.path
    if path is None:
        from huggingface_hub import snapshot_download

        try:
            path = Path(snapshot_download(named, allow_patterns=_FILES))
        except OSError as error:
            raise UserError(f"--from_pretrained {named} cannot be downloaded: {first_line(error)}") from error
    name = os.path.relpath(os.path.realpath(path), os.path.realpath(folder)) if is_local else str(path)
    values: dict[str, Any] = dict.fromkeys(("base_model", "init_checkpoint", tokenizer_flag), name)
    values |= dict.fromkeys(("reset_optimizer", "reset_lr", "reset_iteration"), True)
    config = Source(named, path).config
    if architectures := config.get("architectures"):
        values["model_cls"] = f"{OWN_PACKAGES.get(config.get('model_type'), 'transformers')}:{architectures[0]}"
    return values


def _kind_of_weights(source: Source) -> str | None:
    """The kind of model by the configuration; None if unknown."""
    from lm_experiments_tools.models.build import pretrained_config, register_own_models
    from lm_experiments_tools.models.pretrained import kind_of

    try:
        base = find_base(source) if source.is_adapter else source
        if base.is_file:
            return None
        register_own_models(base)
        return kind_of(pretrained_config(base.name))
    except UserError:
        return None

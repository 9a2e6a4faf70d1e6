"""Defaults of flags that pre-trained weights bring along."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lm_experiments_tools.checkpoint.source import CONFIG, KINDS, TASK_FILE, Source, find_base, find_source
from lm_experiments_tools.config.finetuning import PROMPT, SAVED
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.models.build import register_own_models
from lm_experiments_tools.models.pretrained import kind_of


def inherited_settings(given: Mapping[str, Any], found: list[Source] | None = None) -> dict[str, tuple[Any, str]]:
    """{name: (value, its file)} of settings that are not given and follow from `from_pretrained`.

    Fine-tuned weights bring their task, unless another is given, with its prefix, lengths and prompt; others bring the
    kind of model. Weights that cannot be found bring nothing; their loading reports it.

    Args:
        found: gets the source of the weights, so that `ModelFiles` need not look again; not with `working_dir`.

    Raises:
        UserError: a damaged file.
    """
    if not given.get("from_pretrained"):
        return {}
    name, folder = str(given["from_pretrained"]), given.get("working_dir", ".")
    try:
        source = find_source(str(Path(folder, name)) if Path(folder, name).exists() else name)
    except UserError:
        return {}
    if found is not None and folder == ".":
        found.append(source)
    saved, file = source.task, f"{source.name}/{TASK_FILE}"
    if saved and all(given.get(name, saved.get(name)) == saved.get(name) for name in KINDS):
        kept = {*given, *(PROMPT if given.get("tk_instruct") else ())}  # which draws the prompts of training itself
        values = {name: saved[name] for name in SAVED if name in saved and name not in kept}
        return {name: (tuple(v) if isinstance(v, list) else v, file) for name, v in values.items()}
    kind = None if "model_type" in given else _kind_of_weights(source)
    return {} if kind is None else {"model_type": (kind, f"{source.name}/{CONFIG}")}


def _kind_of_weights(source: Source) -> str | None:
    """The kind of model by the configuration; None if unknown."""
    from transformers import AutoConfig

    try:
        base = find_base(source) if source.is_adapter else source
        if base.is_file:
            return None
        register_own_models(base)
        return kind_of(AutoConfig.from_pretrained(base.name, trust_remote_code=False))
    except (UserError, OSError, ValueError, KeyError):
        return None

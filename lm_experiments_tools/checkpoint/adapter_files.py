"""Files of adapters in peft's format, with the sha256 of the base model's weights."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open
from torch import Tensor

from lm_experiments_tools.checkpoint.manifest import verify_model
from lm_experiments_tools.checkpoint.source import (
    ADAPTER_CONFIG,
    LABELS_FILE,
    Source,
    real_names,
)
from lm_experiments_tools.checkpoint.tree import WriteTensors, load_tensors, write_now
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.modules.inspection import trained_parameters

if TYPE_CHECKING:
    from peft import PeftModel

ADAPTER_WEIGHTS = "adapter_model.safetensors"  # peft's name
DEFAULT_ADAPTER = "default"  # peft's name of a model's only adapter
_BASE_SHA256 = "base_sha256"  # Source.fingerprint of the base, in the header of ADAPTER_WEIGHTS; peft ignores it


def saved_names(model: PeftModel) -> dict[str, str]:
    """Map the names of tensors in an adapter's file, which are peft's, to the names of the model's parameters."""
    from peft import get_peft_model_state_dict
    from peft.utils.other import AuxiliaryTrainingWrapper

    # peft asks for a tied parameter by any of its names.
    every = dict(model.named_parameters(remove_duplicate=False))
    name_of = {id(parameter): name for name, parameter in trained_parameters(model).items()}
    # For prompts peft would compute the prompt, from this worker's shard too, so they are named here.
    if model.peft_config[DEFAULT_ADAPTER].is_prompt_learning:
        state: dict[str, Tensor] = {"prompt_embeddings": model.prompt_encoder[DEFAULT_ADAPTER].embedding.weight}
        for path, module in model.named_modules():
            # This is a classifier's head, which peft has copied to train it.
            if isinstance(module, AuxiliaryTrainingWrapper):
                inside = {n.removeprefix(f"{path}."): p for n, p in every.items() if n.startswith(f"{path}.")}
                state |= {f"{path}.{n}": p for n, p in module.adapter_state_dict(DEFAULT_ADAPTER, inside).items()}
    else:
        state = get_peft_model_state_dict(model, state_dict=every, save_embedding_layers=False)
    found: dict[str, str] = {}
    for saved, value in state.items():
        # A parameter that is tied under several names is saved once.
        name = name_of.pop(id(value), None)
        if name is not None:
            found[saved] = name
    return found | {name: name for name in name_of.values()}


def save_adapter(
    path: Path, model: PeftModel, state: dict[str, Tensor] | None = None, write: WriteTensors = write_now
) -> None:
    """Write a model's adapter as adapter_config.json and adapter_model.safetensors into an existing folder.

    A classifier's labels are written to label_names.json, which peft ignores. `state` has the trained parameters if
    the model's own are sharded; None takes the model's.
    """
    state = trained_parameters(model) if state is None else state
    config, base = model.peft_config[DEFAULT_ADAPTER], getattr(model, "base_fingerprint", None)
    if names := real_names(model.config.id2label, str(path)):
        (path / LABELS_FILE).write_text(json.dumps({"label_names": names}), encoding="utf-8")
    weights = {saved: state[name].detach().cpu().contiguous() for saved, name in saved_names(model).items()}
    metadata = {"format": "pt"} if base is None else {"format": "pt", _BASE_SHA256: base}
    write(weights, path / ADAPTER_WEIGHTS, metadata=metadata)
    saved = copy.copy(config)
    # peft writes it so, and `PeftModel.from_pretrained` trains only if it is told to.
    saved.inference_mode = True
    for name, value in vars(config).items():
        # The order of a set depends on the hash seed, and files should not.
        if isinstance(value, set):
            setattr(saved, name, sorted(value))
    saved.save_pretrained(str(path))


def read_adapter(model: PeftModel, path: Path) -> dict[str, Tensor]:
    """Read the adapter in a folder, as {parameter name: value}. Raises UserError."""
    verify_model(path)
    if not (path / ADAPTER_CONFIG).is_file():
        raise UserError(f"{path} is no adapter of peft ({ADAPTER_CONFIG}): name the base model by --from_pretrained.")
    shapes = {n: tuple(getattr(p, "ds_shape", p.shape)) for n, p in trained_parameters(model).items()}
    saved, names = saved_by_name(path), saved_names(model)
    _check_fit(path, saved, names, shapes)
    check_base(model, path)
    return {names[name]: value for name, value in saved.items()}


def _check_fit(path: Path, saved: dict[str, Tensor], names: dict[str, str], shapes: dict[str, tuple]) -> None:
    missing, unexpected = sorted(names.keys() - saved.keys()), sorted(saved.keys() - names.keys())
    other = [n for n in saved if n in names and tuple(saved[n].shape) != shapes[names[n]]]
    if missing or unexpected or other:
        example = [f"{n} is {tuple(saved[n].shape)} there and {shapes[names[n]]} here" for n in other[:1]]
        raise UserError(
            f"the adapter in {path} does not fit this model: {len(missing)} of its weights are missing, "
            f"{len(unexpected)} unexpected, {len(other)} of another shape "
            f"({', '.join([*missing[:2], *unexpected[:2], *example])}); check the base model and --peft."
        )


def check_base(model: PeftModel, path: Path) -> None:
    """Refuse an adapter that was trained on other weights than the model's base. Raises UserError."""
    with safe_open(path / ADAPTER_WEIGHTS, framework="pt") as file:
        then = (file.metadata() or {}).get(_BASE_SHA256)
    now = getattr(model, "base_fingerprint", None)
    if then is None or now is None or then == now:
        return
    former, present = Source(str(path), path).base, model.peft_config[DEFAULT_ADAPTER].base_model_name_or_path
    advice = "put those back"
    if former != present and Path(former).is_dir() and Source(former, Path(former)).fingerprint() == then:
        advice = f"continue by --from_pretrained {former} --resume {path}"
    raise UserError(
        f"the weights of {present} are not those that the adapter in {path} was trained on ({former}): {advice}, or "
        "train a new adapter with another --model_path."
    )


def read_adapter_into(model: PeftModel, path: Path) -> list[str]:
    """Load the adapter in a folder into the model; returns the names of the loaded parameters."""
    values, own = read_adapter(model, path), trained_parameters(model)
    with torch.no_grad():
        for name, value in values.items():
            own[name].copy_(value)
    return list(values)


def saved_by_name(path: Path) -> dict[str, Tensor]:
    file = path / ADAPTER_WEIGHTS
    if not file.is_file():
        raise UserError(f"{file} is missing: copy the adapter again.")
    verify_model(path, [file.name])
    return load_tensors(file)

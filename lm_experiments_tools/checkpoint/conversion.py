"""Conversion of weights whose names or shapes on disk differ from those of the model."""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Iterator

import torch
from torch import nn


def is_converted(model: nn.Module) -> bool:
    """True for a model of transformers whose files have other names or shapes of weights than the model."""
    library = sys.modules.get("transformers.modeling_utils")
    if library is None or not isinstance(model, library.PreTrainedModel):
        return False
    from transformers.conversion_mapping import get_model_conversion_mapping

    return bool(getattr(model, "_weight_conversions", None) or get_model_conversion_mapping(model, add_legacy=False))


def to_model_names(model: nn.Module, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Convert weights from a file to the model's names and shapes, as `from_pretrained` does.

    For example, a file of Qwen3-MoE has a matrix per expert, and the model a single tensor for all of them. Weights
    that the model stores in the same way are returned unchanged.
    """
    if not is_converted(model):
        return weights
    # FSDP2 adds a class in front of the model's own.
    cls = next(base for base in type(model).__mro__ if not base.__name__.startswith("FSDP"))
    with quiet_loading(), load_unsharded(), torch.random.fork_rng(devices=[]):
        loaded, info = cls.from_pretrained(
            None,
            config=copy.deepcopy(model.config),
            state_dict=dict(weights),
            dtype=torch.float32,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            trust_remote_code=False,
        )
    shapes = {name: in_file for name, in_file, _ in info["mismatched_keys"]}
    converted = {name: weights[name] for name in info["unexpected_keys"] if name in weights}
    for name, tensor in loaded.state_dict().items():
        if name in shapes:
            same = name in weights and weights[name].shape == shapes[name]
            converted[name] = weights[name] if same else torch.empty(shapes[name], device="meta")
        elif name not in info["missing_keys"]:
            converted[name] = tensor
    return converted


@contextlib.contextmanager
def quiet_loading() -> Iterator[None]:
    """Context without transformers' progress bars and loading report."""
    from transformers.utils import logging as transformers_logging

    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        with without_progress_bars():
            yield
    finally:
        transformers_logging.set_verbosity(level)


@contextlib.contextmanager
def without_progress_bars() -> Iterator[None]:
    """Context without transformers' progress bars ("Writing model shards", "Loading weights")."""
    from transformers.utils import logging as transformers_logging

    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


@contextlib.contextmanager
def load_unsharded() -> Iterator[None]:
    """Context in which `from_pretrained` loads full weights even in a ZeRO-3 run; DeepSpeed shards them later."""
    from transformers.integrations import deepspeed

    before = deepspeed._hf_deepspeed_config_weak_ref
    deepspeed.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        deepspeed._hf_deepspeed_config_weak_ref = before

"""Properties of a model: trained parameters, devices, arguments of its forward, evaluation mode."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


def is_spread(model: nn.Module) -> bool:
    """True if the model is device-mapped: its layers are on several devices."""
    return len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1


def is_adapted(model: nn.Module) -> bool:
    """True for a model with an adapter: then checkpoints hold only the trained parameters."""
    return hasattr(model, "peft_config")


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Map the names of the parameters that require a gradient to these parameters."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def forward_names(model: nn.Module) -> set[str]:
    """Names of the arguments of forward, including those of base classes and of a PEFT wrapper's base model."""
    return forward_names_of(type(model.get_base_model() if hasattr(model, "get_base_model") else model))


def forward_names_of(model_cls: type) -> set[str]:
    """Names of the arguments of a model class's forward, including those of base classes."""
    names: set[str] = set()
    for cls in model_cls.__mro__:
        if "forward" in vars(cls):
            parameters = [*inspect.signature(vars(cls)["forward"]).parameters.values()][1:]  # without self
            names |= {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
            if not any(p.kind is p.VAR_KEYWORD for p in parameters):
                break
    return names


@contextmanager
def evaluated(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode inside a `with` block; afterwards each module gets its previous mode back."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode

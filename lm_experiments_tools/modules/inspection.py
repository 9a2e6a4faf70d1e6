"""Properties of a model: trained parameters, devices, arguments of its forward, evaluation mode."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from lm_experiments_tools.names import is_of_user


def is_spread(model: nn.Module) -> bool:
    """True if the model is device-mapped: its layers are on several devices."""
    return len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1


def is_adapted(model: nn.Module) -> bool:
    """True for a model with an adapter: then checkpoints hold only the trained parameters."""
    return hasattr(model, "peft_config")


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Map the names of the parameters that require a gradient to these parameters."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def saved_state(model: nn.Module) -> dict[str, Tensor]:
    """Select the tensors of a model that a checkpoint stores, as {name: tensor}.

    These are the tensors of the state dict. For a model with an adapter they are only the trained ones.
    """
    if is_adapted(model):
        return dict(trained_parameters(model))
    return model.state_dict(keep_vars=True)


def untied(names: dict[str, Tensor]) -> dict[str, Tensor]:
    """Drop the further names of tied weights, which are one tensor under several names; the first name stays."""
    first: dict[int, str] = {}
    for name, tensor in names.items():
        first.setdefault(id(tensor), name)
    return {name: names[name] for name in first.values()}


def forward_names(model: nn.Module) -> set[str]:
    """Names of the arguments of forward, including those of base classes and of a PEFT wrapper's base model."""
    return forward_names_of(type(base_of(model)))


def base_of(model: nn.Module) -> nn.Module:
    """The model inside a PEFT wrapper, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def forward_names_of(model_cls: type) -> set[str]:
    """Names of the arguments of a model class's forward, including those of base classes and of typed `**kwargs`."""
    names: set[str] = set()
    for _, parameters in _forwards(model_cls):
        names |= {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        for p in parameters:
            typed = getattr(p.annotation, "__args__", ()) if p.kind is p.VAR_KEYWORD else ()
            names |= set().union(*(getattr(kind, "__annotations__", ()) for kind in typed))
    return names


def takes_any_name(model_cls: type) -> bool:
    """True if a user's forward takes `**kwargs` that no base class names."""
    forwards = _forwards(model_cls)
    cls, parameters = forwards[-1] if forwards else (nn.Module, [])
    return is_of_user(cls) and any(p.kind is p.VAR_KEYWORD for p in parameters)


def _forwards(model_cls: type) -> list[tuple[type, list[inspect.Parameter]]]:
    """Classes that define the forward of a class, each with its arguments: up to the first without `**kwargs`."""
    found = []
    for cls in model_cls.__mro__:
        if "forward" not in vars(cls) or cls is nn.Module:
            continue
        found.append((cls, [*inspect.signature(vars(cls)["forward"]).parameters.values()][1:]))  # without self
        if not any(p.kind is p.VAR_KEYWORD for p in found[-1][1]):
            break
    return found


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

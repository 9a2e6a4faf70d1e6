"""Users' own classes, named by `module:Class`, and the initialization of parameters that they add to a model."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from lm_experiments_tools.errors import UserError
from lm_experiments_tools.names import resolve_name


def get_cls_by_name(name: str, base: type = nn.Module) -> type:
    """Import the class, `base` or derived from it, that `module:Class` names. Raises UserError."""
    return resolve_name(name, base)


def set_own_values(owner: nn.Module, known: Collection[str]) -> None:
    """Initialize the parameters that a user's own class, a positional encoding or attention layer, adds to a model.

    It calls the `reset_parameters()` of the class or of its layers; `known` names what the model has initialized.
    UserError without one: from_pretrained would leave parameters uninitialized.
    """
    if hasattr(owner, "reset_parameters"):
        owner.reset_parameters()
        return
    unset = [name for name, _ in owner.named_parameters(recurse=False) if name not in known]
    if unset:
        raise UserError(
            f"{type(owner).__module__}.{type(owner).__name__} has parameters ({', '.join(unset)}) but no "
            "reset_parameters() for their initial values."
        )
    for name, child in owner.named_children():
        for layer in child.modules() if name not in known else ():
            if hasattr(layer, "reset_parameters"):
                layer.reset_parameters()

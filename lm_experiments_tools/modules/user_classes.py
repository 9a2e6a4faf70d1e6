"""Users' own classes, named by `module:Class`, and the initialization of parameters that they add to a model."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from lm_experiments_tools.errors import UserError
from lm_experiments_tools.names import resolve_name


def get_cls_by_name(name: str, base: type = nn.Module) -> type:
    """Import the class that `module:Class` names.

    Args:
        base: the class must be `base` or derive from it.

    Raises:
        UserError: the name is malformed, cannot be imported, or is no such class.
    """
    return resolve_name(name, base)


def set_own_values(owner: nn.Module, known: Collection[str]) -> None:
    """Initialize the parameters that a user's own class adds to a model.

    It calls the `reset_parameters()` of the class or of its layers.

    Args:
        owner: the user's positional encoding or attention layer.
        known: names of its parameters and children that the model has initialized.

    Raises:
        UserError: parameters without `reset_parameters()`; from_pretrained would leave them uninitialized.
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

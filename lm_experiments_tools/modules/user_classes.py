"""A user's classes and functions, named by `module:Class`, and values of their own."""

from __future__ import annotations

import difflib
import importlib
from typing import Any

from torch import nn

from lm_experiments_tools.errors import UserError


def get_cls_by_name(name: str, base: type = nn.Module) -> type:
    """The class named by `module:Class`, e.g. `transformers:T5ForConditionalGeneration`.

    Args:
        name: an importable module and a class in it; dots are allowed on either side (`package.module:Outer.Inner`).
        base: the class it must be, or derive from.

    Raises:
        UserError: not of this form, a module that cannot be imported (with the reason), no such class, another kind.
    """
    module_name, colon, class_name = name.partition(":")
    if not (colon and module_name and class_name) or ":" in class_name:
        raise UserError(
            f"'{name}' does not name a class: write module:Class, e.g. transformers:T5ForConditionalGeneration."
        )
    try:
        found: Any = importlib.import_module(module_name)
    except ImportError as error:
        raise UserError(f"'{name}': module {module_name} cannot be imported ({error}).") from error
    for part in class_name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError as error:
            raise UserError(
                f"'{name}': {module_name} has no {class_name}{nearest_names(part, dir(found))}."
            ) from error
    if not (isinstance(found, type) and issubclass(found, base)):
        raise UserError(f"'{name}' is {found!r}, not a subclass of {base.__module__}.{base.__qualname__}.")
    return found


def nearest_names(word: str, known: object) -> str:
    near = difflib.get_close_matches(word, [str(key) for key in known], n=1)
    return f"; did you mean '{near[0]}'" if near else ""

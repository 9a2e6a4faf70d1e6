"""Layout classes, the user's too: settings and their types, blocks that are tensors, arrays or lists."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lm_experiments_tools.attention.kernels.plan import describe, is_int
from lm_experiments_tools.errors import UserError


def _is_bool(value: object) -> bool:
    return isinstance(value, bool | np.bool_) or (is_int(value) and value in (0, 1))


def _is_ints(value: object) -> bool:
    return isinstance(value, Sequence | np.ndarray) and all(map(is_int, value))


# By annotation: what a setting must be, in words and as a test.
_TYPES: dict[str, tuple[str, Callable[[object], bool]]] = {
    "int": ("an integer", is_int),
    "bool": ("true or false", _is_bool),
    "Sequence[int]": ("a list of integers", _is_ints),
}


def misfit(setting: Field, value: object) -> str | None:
    """The type that a setting's annotation asks for, in words, if `value` is of another; else None."""
    kind, _, optional = getattr(setting.type, "__name__", str(setting.type)).partition(" | ")
    if kind not in _TYPES or (value is None and optional == "None"):
        return None
    expected, fits = _TYPES[kind]
    return None if fits(value) else f"{expected}{' or None' if optional else ''}"


def _arguments_of(config_cls: type) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments of a class by name, and settings that it hands on by **kwargs; each with its default or MISSING."""
    parameters = list(inspect.signature(config_cls.__init__).parameters.values())[1:]
    named = {p.name: p.default for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    named = {name: MISSING if default is inspect.Parameter.empty else default for name, default in named.items()}
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        return named, {}
    return named, {f.name: f.default for f in fields(config_cls) if f.init and f.name not in named}


def check_settings(config_cls: type, settings: Mapping[str, object]) -> None:
    """Refuse settings that a class does not have, and their lack where it needs one."""
    names, others = _arguments_of(config_cls)
    known = [*names, *others]
    for key in settings:
        if key not in known:
            near = [name for name in known if name.startswith(key)] or difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(known)}."
            raise UserError(f"{config_cls.__name__} has no setting {key!r}: {hint}")
    missing = [name for name, default in names.items() if default is MISSING and name not in settings]
    if missing:
        raise UserError(f"{config_cls.__name__} needs a value for {', '.join(missing)}, which its __init__ takes.")


def settings_of(config: object) -> dict[str, Any]:
    """The arguments that make such a configuration again, as JSON values; raises as `SparsityConfig.to_dict`."""
    names, others = _arguments_of(type(config))
    for name in names:
        if not hasattr(config, name):
            raise UserError(
                f"{type(config).__name__}: its __init__ takes {name}, but it has no attribute {name}: set self.{name} "
                "there."
            )
    # Those that pass through **kwargs: at their defaults they may be what the class itself gives its base.
    changed = [name for name, default in others.items() if getattr(config, name) != default]
    return {name: _plain(getattr(config, name)) for name in (*names, *changed)}


def _plain(value: object) -> object:
    """A setting as JSON holds it."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def giving_tensors(make_layout: Callable[..., object]) -> Callable[..., Tensor]:
    """A method `make_layout` that may give arrays or lists, giving tensors."""

    @functools.wraps(make_layout)
    def make_tensor(self: object, *args: Any, **kwargs: Any) -> Tensor:
        return as_layout(make_layout(self, *args, **kwargs), self, "make_layout")

    return make_tensor


def as_layout(made: object, config: object, method: str) -> Tensor:
    """The layout that a method of a user's class made, as a tensor.

    Raises:
        UserError: no tensor [heads or 1, blocks, blocks] of 0 and 1.
    """
    layout = made
    if isinstance(made, np.ndarray | list | tuple):
        try:
            layout = torch.as_tensor(made, device="cpu")
        except (TypeError, ValueError, RuntimeError):  # ragged, or no numbers
            layout = None
    if not isinstance(layout, Tensor) or layout.dim() != 3 or 0 in layout.shape:
        raise UserError(
            f"{type(config).__name__}: {method} gave {describe(made)}; it must give a tensor [heads or 1, blocks, "
            "blocks]."
        )
    if layout.dtype != torch.bool and not ((layout == 0) | (layout == 1)).all():
        raise UserError(
            f"{type(config).__name__}: {method} gave values besides 0 and 1: give 1 where attended and 0 elsewhere."
        )
    return layout

"""Settings of block-sparse layout classes, including users' own: their types, their names, and how they are saved."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from typing import Any

import numpy as np

from lm_experiments_tools.attention.kernels.layout_cache import is_int
from lm_experiments_tools.errors import UserError

_TESTS: dict[str, Callable[[Any], bool]] = {  # by annotation
    "int": is_int,
    "bool": lambda value: isinstance(value, bool | np.bool_) or (is_int(value) and value in (0, 1)),
    "Sequence[int]": lambda value: isinstance(value, Sequence | np.ndarray) and all(map(is_int, value)),
}


def has_type(setting: Field, value: object) -> bool:
    """True if a value has the annotated type of a layout's setting; unknown annotations allow any value."""
    kind, _, optional = getattr(setting.type, "__name__", str(setting.type)).partition(" | ")
    return kind not in _TESTS or (value is None and optional == "None") or _TESTS[kind](value)


def _arguments_of(config_cls: type) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments of a class by name, and settings that it passes on by **kwargs; each with its default or MISSING."""
    parameters = list(inspect.signature(config_cls.__init__).parameters.values())[1:]
    named = {
        p.name: MISSING if p.default is p.empty else p.default
        for p in parameters
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    }
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        return named, {}
    return named, {f.name: f.default for f in fields(config_cls) if f.init and f.name not in named}


def check_settings(config_cls: type, settings: Mapping[str, object]) -> None:
    """Raise UserError if settings for a block-sparse layout class are unknown or missing."""
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
    """Read the constructor arguments of a block-sparse layout from its attributes, as JSON values."""
    names, others = _arguments_of(type(config))
    missing = [name for name in names if not hasattr(config, name)]
    if missing:
        raise UserError(f"{type(config).__name__}: its __init__ takes {missing[0]}, but sets no self.{missing[0]}.")
    # Settings passed on by **kwargs: at their defaults they may be what the class itself gives its base.
    changed = [name for name, default in others.items() if getattr(config, name) != default]
    return {name: _plain(getattr(config, name)) for name in (*names, *changed)}


def _plain(value: object) -> object:
    """A setting as JSON holds it."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    return [_plain(item) for item in value] if isinstance(value, tuple) else value

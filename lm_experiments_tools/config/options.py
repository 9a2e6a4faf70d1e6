"""Options written NAME=VALUE, checked against the parameters of an optimizer or schedule. Standard library only."""

import ast
import contextlib
import inspect
import json
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from inspect import Parameter
from typing import Any

from lm_experiments_tools.errors import UserError
from lm_experiments_tools.names import nearest_names

_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text", type(None): "none"}


def read_options(flag: str, texts: Sequence[str]) -> dict[str, Any]:
    """Parse NAME=VALUE texts: `eps=1e-6`, `betas=0.9,0.98`, `betas=[0.9,0.98]`, `amsgrad=true`, `decay_type=linear`.

    Args:
        flag: name of the flag, for error messages.

    Returns:
        name -> value, read as JSON, otherwise as a Python literal, otherwise as text.

    Raises:
        UserError: a text of another form, or a repeated name.
    """
    options: dict[str, Any] = {}
    for text in texts:
        name, _, value = text.partition("=")
        if not name.isidentifier() or not value:
            raise UserError(
                f"--{flag} {text!r} is not NAME=VALUE: write betas=0.9,0.98 without spaces, in YAML in quotes."
            )
        if name in options:
            raise UserError(f"--{flag} gives {name} twice: {options[name]!r} and {value!r}.")
        options[name] = _value(value)
    return options


def _value(text: str) -> Any:
    for read in (json.loads, ast.literal_eval):
        try:
            return read(text)
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):  # all that literal_eval documents
            continue
    return text


def parameters_of(function: Callable) -> dict[str, Parameter]:
    """Return the parameters of `function` by name; empty for a builtin without a signature."""
    parameters: Mapping[str, Parameter] = {}
    for with_types in (False, True):
        with contextlib.suppress(NameError, TypeError, AttributeError, SyntaxError, ValueError):
            parameters = inspect.signature(function, eval_str=with_types).parameters
    return {name: p for name, p in parameters.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}


def checked_options(
    said: str, options: Mapping[str, Any], known: Mapping[str, Parameter] | None, flags: Mapping[str, str]
) -> dict[str, Any]:
    """Convert options to the types of a function's parameters: lists to tuples, integers to floats.

    Args:
        said: prefix of error messages, such as "--optimizer AdamW".
        known: the parameters by name; None if the function accepts any keyword.
        flags: parameters that have a flag of their own and are refused here: name -> flag.

    Raises:
        UserError: an unknown name, a parameter of `flags`, or a value of the wrong type.
    """
    for name in options:
        if name in flags:
            raise UserError(f"{said}: {name} is no option but has a flag of its own, --{flags[name]}: give that.")
        if known is not None and name not in known:
            takes = (
                nearest_names(name, known) or f"; it takes {', '.join(k for k in known if k not in flags) or 'none'}"
            )
            raise UserError(f"{said} has no option '{name}'{takes}.")
    return {
        name: value if known is None else _fitted(f"{said}: {name}", value, known[name])
        for name, value in options.items()
    }


def _fitted(said: str, value: Any, parameter: Parameter) -> Any:
    kinds, default = _kinds(parameter), parameter.default
    example = "" if default in (None, Parameter.empty) else f", such as {default!r}"
    if isinstance(value, list) and list not in kinds:
        value = tuple(value)
    if type(value) is int and float in kinds and int not in kinds:
        value = float(value)
    fits = object in kinds or type(value) in kinds or (isinstance(value, kinds) and not isinstance(value, bool))
    if not fits:
        takes = " or ".join(_WORDS[kind] for kind in _WORDS if kind in kinds) or "a list"
        raise UserError(f"{said} is {value!r}, but it takes {takes}{example}.")
    # Such as the betas of an optimizer.
    if isinstance(value, tuple) and isinstance(default, tuple) and default and isinstance(default[0], (int, float)):
        if len(value) != len(default) or not all(isinstance(part, (int, float, type(None))) for part in value):
            raise UserError(f"{said} is {value!r}, but it takes {len(default)} numbers{example}.")
    return value


def _kinds(parameter: Parameter) -> tuple[type, ...]:
    """The types that a parameter is annotated with, else that of its default; object for any."""
    if isinstance(parameter.annotation, str) or parameter.annotation is Parameter.empty:
        if parameter.default in (None, Parameter.empty):
            return (object,)
        kind = type(parameter.default)
        return (int, float) if kind in (int, float) else (kind,)
    found = _plain(parameter.annotation)
    return (*found, type(parameter.default)) if parameter.default is not Parameter.empty else found


def _plain(hint: Any) -> tuple[type, ...]:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return tuple(kind for part in typing.get_args(hint) for kind in _plain(part))
    if typing.get_origin(hint) is typing.Literal:
        return tuple(map(type, typing.get_args(hint)))
    kind = typing.get_origin(hint) or hint
    return (kind,) if isinstance(kind, type) else (object,)

"""Settings of an optimizer or a schedule, written NAME=VALUE; standard library only."""

import ast
import contextlib
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from inspect import Parameter
from typing import Any

from lm_experiments_tools.errors import UserError
from lm_experiments_tools.names import nearest_names


def read_options(flag: str, texts: Sequence[str]) -> dict[str, Any]:
    """The values of NAME=VALUE by name, each read as JSON, else as a Python literal, else as text.

    `eps=1e-6`, `betas=0.9,0.98`, `betas=[0.9,0.98]`, `amsgrad=true`, `decay_type=linear`

    Raises:
        UserError: not of this form, or a name twice.
    """
    options: dict[str, Any] = {}
    for text in texts:
        name, _, value = text.partition("=")
        if not name.isidentifier() or not value or name in options:
            raise UserError(f"--{flag} {text!r}: write each NAME=VALUE once, without spaces, such as betas=0.9,0.98.")
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
    """The named parameters of `function`; none for builtins without a signature."""
    parameters: Mapping[str, Parameter] = {}
    with contextlib.suppress(TypeError, ValueError):
        parameters = inspect.signature(function).parameters
    return {name: p for name, p in parameters.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}


def checked_options(
    said: str, options: Mapping[str, Any], known: Mapping[str, Parameter] | None, flags: Mapping[str, str]
) -> dict[str, Any]:
    """The options with lists as tuples, and whole numbers as floats where the default is one.

    Args:
        said: what errors begin with, e.g. "--optimizer AdamW".
        known: the parameters by name; None for a function that takes any.
        flags: parameter -> the flag that sets it, which is no option.

    Raises:
        UserError: an unknown name, one that a flag sets, or a value of another type than the default.
    """
    checked = {}
    for name, value in options.items():
        if name in flags:
            raise UserError(f"{said}: {name} is not an option; set it by --{flags[name]}.")
        if known is not None and name not in known:
            takes = f"; it takes {', '.join(k for k in known if k not in flags) or 'none'}"
            raise UserError(f"{said} has no option '{name}'{nearest_names(name, known) or takes}.")
        checked[name] = value if known is None else _fitted(f"{said}: {name}", value, known[name].default)
    return checked


def _fitted(said: str, value: Any, default: Any) -> Any:
    """`value` with the type of the parameter's default."""
    value = tuple(value) if isinstance(value, list) else value
    if default in (None, Parameter.empty) or value is None or not isinstance(default, (bool, int, float, str, tuple)):
        return value
    if type(value) is int and type(default) is float:
        return float(value)
    kinds = {int: (int, float), tuple: tuple}.get(type(default), type(default))
    fits = isinstance(value, kinds) and isinstance(value, bool) == isinstance(default, bool)
    if not fits or (isinstance(value, tuple) and len(value) != len(default)):
        raise UserError(f"{said} is {value!r}, but it takes a value such as {default!r}.")
    return value

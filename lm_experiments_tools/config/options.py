"""Options written NAME=VALUE, checked against the parameters of an optimizer or schedule. Standard library only."""

import ast
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from inspect import Parameter
from typing import Any

from lm_experiments_tools.config.flags import FALSE_WORDS, TRUE_WORDS
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.names import nearest_names


def read_options(flag: str, texts: Sequence[str]) -> dict[str, Any]:
    """Parse NAME=VALUE texts: `eps=1e-6`, `betas=0.9,0.98`, `betas=[0.9,0.98]`, `amsgrad=true`, `decay_type=linear`.

    Values are read as JSON, otherwise as a Python literal, otherwise as text. UserError, which names `flag`, for a
    text of another form or a repeated name.
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
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:
        return {}
    return {name: p for name, p in parameters.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}


def checked_options(
    said: str, options: Mapping[str, Any], known: Mapping[str, Parameter] | None, flags: Mapping[str, str]
) -> dict[str, Any]:
    """Convert options to the types of a function's defaults: lists to tuples, integers to floats. Raises UserError.

    Args:
        said: prefix of error messages, such as "--optimizer AdamW".
        known: the parameters by name; None if the function accepts any keyword.
        flags: parameters that have a flag of their own and are refused here: name -> flag.
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
        name: value if known is None else _fitted(f"{said}: {name}", value, known[name].default)
        for name, value in options.items()
    }


def _fitted(said: str, value: Any, default: Any) -> Any:
    if isinstance(value, list) and not isinstance(default, list):
        value = tuple(value)
    if type(default) is float and type(value) is int:
        value = float(value)
    if default is None and isinstance(value, str) and value.lower() in (*TRUE_WORDS, *FALSE_WORDS):
        raise UserError(f"{said} is {value!r}: write True or False.")
    kinds = (int, float) if type(default) in (int, float) else (type(default),)
    if default not in (None, Parameter.empty) and type(value) not in kinds:
        raise UserError(f"{said} is {value!r}, but it takes a value such as {default!r}.")
    return value

"""Convert the nodes of a parsed YAML file to values of flags."""

import json
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import yaml

from lm_experiments_tools.config.flags import NULL_WORDS, Flag, describe
from lm_experiments_tools.config.suggestions import own_name, suggestion
from lm_experiments_tools.errors import UserError


class Setting(NamedTuple):
    """Value of a flag, with the place where it was set ("run.yaml line 3")."""

    value: Any
    origin: str


def read_settings(
    items: Iterable[tuple[yaml.Node, yaml.Node]], flags: Mapping[str, Flag], origin_of: Callable[[yaml.Node], str]
) -> dict[str, Setting]:
    """Convert the (key, value) nodes of a YAML mapping to values of flags. Raises UserError.

    `origin_of` returns where a node was set ("run.yaml line 3"), for error messages.
    """
    settings: dict[str, Setting] = {}
    for key, value in items:
        origin, name = origin_of(key), own_name(str(key.value), flags)
        if name not in flags:
            raise UserError(f"{origin}: unknown setting {key.value!r}{suggestion(name, flags)}")
        if name in settings:
            raise UserError(f"{origin}: {name} is set a second time, after {settings[name].origin}.")
        settings[name] = Setting(read_setting(flags[name], value, origin), origin)
    return settings


def read_setting(flag: Flag, node: yaml.Node, origin: str) -> Any:
    """Convert a YAML node to the type of a flag; error messages begin with `origin`. Raises UserError."""
    items = node.value if isinstance(node, yaml.SequenceNode) and flag.is_list else [node]
    if flag.name == "phases" and all(isinstance(item, yaml.MappingNode) for item in items):
        return tuple(map(phase_text, items))
    if not all(isinstance(item, yaml.ScalarNode) for item in items):
        raise UserError(f"{origin}: {flag.name} takes {describe(flag.annotation)}, not a {node.id}.")
    options = typing.get_args(flag.annotation)
    is_null = node.value not in options and str(node.value).lower() in NULL_WORDS
    # "none" is null only for flags that have it: it is no null of YAML, and a metric's name.
    if items == [node] and node.style is None and is_null and (type(None) in options or node.value.lower() != "none"):
        if type(None) not in options:
            raise UserError(f"{origin}: {flag.name} has no value, but it takes {describe(flag.annotation)}.")
        return None
    try:
        values = tuple(flag.read(item.value) for item in items)
    except ValueError as error:
        raise UserError(f"{origin}: {flag.name} {error}.") from None
    return values if flag.is_list else values[0]


def phase_text(node: yaml.MappingNode) -> str:
    """Write the YAML mapping of a phase in one line: "{iters: 1000, lr: 1e-4}"."""

    def text(node: yaml.Node) -> str:
        if isinstance(node, yaml.MappingNode):
            return phase_text(node)
        if isinstance(node, yaml.SequenceNode):
            return f"[{', '.join(map(text, node.value))}]"
        is_null = node.style is None and node.value.lower() in NULL_WORDS
        return (node.value or "null") if is_null else json.dumps(node.value)

    pairs = [f"{json.dumps(str(key.value))}: {text(value)}" for key, value in node.value]
    return f"{{{', '.join(pairs)}}}"

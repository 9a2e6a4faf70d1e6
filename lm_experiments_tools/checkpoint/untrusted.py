"""Checks of a model folder whose author is not trusted: its files may name neither code nor files outside the folder.

Import strings in a configuration are checked where they are resolved, by `names.resolve_configured`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from lm_experiments_tools.errors import UserError
from lm_experiments_tools.files import read_json

INDEXES = "*.index.json"


def check_untrusted(folder: Path) -> None:
    """Refuse a model folder that leads outside of itself or names code to run. A missing folder passes.

    Raises:
        UserError: a shard outside the folder, or a kernel of the Hub.
    """
    config = read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
    indexes = {*folder.glob(INDEXES), folder / str(config.get("transformers_weights"))}  # of any subfolder
    for index in indexes:
        if index.match(INDEXES) and index.is_file():
            shards_of(index)
    for key, value in _implementations(config):
        raise UserError(
            f"{folder / 'config.json'}: {key} is {value!r}, a kernel of the Hub, which is code: remove it there, "
            "or name the file by --model_cfg."
        )


def shards_of(index: Path) -> list[str]:
    """The files that an index of weight shards lists, all inside its folder. Raises UserError."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise UserError(f"{index} is not an index of weight shards: copy the checkpoint again.")
    for name in weight_map.values():
        if not isinstance(name, str) or not is_plain_relative_name(name):
            raise UserError(f"{index} points to {name!r}, outside its directory: the checkpoint is not to be trusted.")
    return sorted(set(weight_map.values()))


def is_plain_relative_name(name: str) -> bool:
    """True for `a/b.txt`: no absolute path, no `..`, no backslash, drive, NUL or half a surrogate pair."""
    parts = PurePosixPath(name).parts
    safe = bool(name) and not name.startswith("/") and not re.search(r"[\\:\x00\ud800-\udc7f\udd00-\udfff]", name)
    return safe and ".." not in parts and PurePosixPath(name).as_posix() == name and name != "."


def _implementations(values: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Implementations of attention, in a configuration and those within it, that transformers takes from the Hub."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _implementations({f"{key}.{name}": inner for name, inner in value.items()})
        elif isinstance(value, str) and "/" in value and "_implementation" in key:
            yield key, value

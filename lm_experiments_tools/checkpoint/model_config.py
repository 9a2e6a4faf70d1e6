"""Read configurations of models, and check types and ranges of their values before a constructor sees them."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lm_experiments_tools.errors import UserError
from lm_experiments_tools.files import read_json

_TYPES: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("model_type", "transformers_version", "position_embedding_type"), str),
    **dict.fromkeys(("tie_word_embeddings", "is_decoder", "is_encoder_decoder", "separate_encoder_embeddings"), bool),
    **dict.fromkeys(("vocab_size", "d_model", "hidden_size", "n_embd"), int),
    **dict.fromkeys(("architectures", "layer_types"), list),
    "max_position_embeddings": (int, float),
}
_DTYPE = re.compile(r"(b?float(16|32|64)|float8_\w+|half|float|double)")
# Limits of sizes over which constructors loop in Python. No published model exceeds them: DeepNet has 1,000 layers
# (arXiv 2203.00555), Doge 16,384 experts, Llama 4 Scout 10,485,760 positions.
_MOST = {
    r"(layers?|groups|group_num)$": 1000,
    "experts$": 1 << 14,
    "labels$": 10**6,
    "position(s|_embeddings)$": 1 << 24,
}


def read_model_config(path: Path, what: str = "an object") -> dict[str, Any]:
    """Read the JSON file of a model's configuration, and check it by `check_model_config`. Raises UserError."""
    values = read_json(path, what)
    check_model_config(values, str(path))
    return values


def check_model_config(values: Mapping[str, Any], where: str) -> None:
    """Check types and ranges in a model's configuration, of what this package reads and of all numbers.

    Raises:
        UserError: a value that no model can have; `where` names the file or flag.
    """
    parts = [(where, values)]
    while parts:  # not by recursion: JSON may be nested more deeply than calls
        name, part = parts.pop()
        for key, value in part.items():
            if (problem := _problem(key, value)) is not None:
                raise UserError(f"{name}: {key} is {str(value)[:80]}, {problem}.")
            parts += [(f"{name}: {key}", value)] if isinstance(value, dict) else []


def _problem(key: str, value: Any) -> str | None:
    """Describe the problem with a value of a model's configuration; None if it is valid."""
    allowed = _TYPES.get(key)
    if allowed is not None and value is not None:
        if not isinstance(value, allowed) or (allowed is int and isinstance(value, bool)):
            names = " or ".join(kind.__name__ for kind in (allowed if isinstance(allowed, tuple) else (allowed,)))
            return f"not of type {names}"
    if key == "architectures" and not all(isinstance(name, str) for name in value or ()):
        return "not a list of names"
    if key in ("dtype", "torch_dtype") and value is not None:
        return None if isinstance(value, str) and _DTYPE.fullmatch(value) else "which is no number format of a model"
    if key.endswith("_token_id") and not all(type(n) is int and -1 <= n < 1 << 63 for n in _listed(value)):
        return "which is no token's number"
    if type(value) is int and value > (
        most := next((m for k, m in _MOST.items() if re.search(k, key)), (1 << 63) - 1)
    ):
        return f"more than {most:,}"
    stack = [value]
    while stack:
        item = stack.pop()
        stack += item if isinstance(item, list) else ()
        if isinstance(item, float | int) and not abs(item) <= sys.float_info.max:
            return "not a finite number"
    return None


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]

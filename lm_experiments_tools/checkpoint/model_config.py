"""Read configurations of models, and check types and ranges of their values before a constructor sees them."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lm_experiments_tools.errors import UserError
from lm_experiments_tools.files import read_json

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
    """Raise UserError for a value that no model's configuration can have; `where` names the file or flag."""
    stack = [(where, key, value) for key, value in values.items()]
    # JSON may be nested more deeply than Python's calls, so this is no recursion.
    while stack:
        name, key, value = stack.pop()
        if (problem := _problem(key, value)) is not None:
            raise UserError(f"{name}: {key} is {str(value)[:80]}, {problem}.")
        if isinstance(value, dict):
            stack += [(f"{name}: {key}", *item) for item in value.items()]
        elif isinstance(value, list):
            stack += [(name, key, item) for item in value if key != "architectures"]


def _problem(key: str, value: Any) -> str | None:
    """Describe the problem with a value of a model's configuration; None if it is valid."""
    if key == "model_type" and not isinstance(value, str | None):
        return "not the name of a kind of model"
    if key == "architectures" and not (value is None or (isinstance(value, list) and {*map(type, value)} <= {str})):
        return "not a list of names"
    if key in ("dtype", "torch_dtype") and value is not None:
        return None if isinstance(value, str) and _DTYPE.fullmatch(value) else "which is no number format of a model"
    if key.endswith("_token_id") and not isinstance(value, list | None):
        return None if type(value) is int and -1 <= value < 1 << 63 else "which is no token's number"
    if type(value) in (int, float):
        most = next((m for k, m in _MOST.items() if re.search(k, key)), (1 << 63) - 1)
        if not abs(value) <= (most if type(value) is int else sys.float_info.max):
            return f"not a finite number up to {most:,}"
    return None

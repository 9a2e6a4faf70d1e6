"""Show validation examples with the model's predictions in the log."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

logger = logging.getLogger(__name__)

SHOWN_CHARACTERS = 300


def show_examples(split: str, examples: Sequence[Mapping[str, Any]]) -> None:
    for example in examples:
        logger.info("\n".join(example_lines(split, example)))


def example_lines(split: str, example: Mapping[str, Any]) -> list[str]:
    """Format a validation example as lines of text: its name ("id"), then one indented line for each value."""
    lines = [f"{split} example {example['id']}"]
    for name, value in list(example.items())[1:]:
        values = value if name == "references" else [value]
        lines += [f"  {name.removesuffix('s'):<11}{_shortened(v)}" for v in values]
    return lines


def _shortened(value: Any) -> str:
    """The value in one line, without its middle if it is long."""
    line = " ".join(str(value).split())
    half = SHOWN_CHARACTERS // 2
    return line if len(line) <= SHOWN_CHARACTERS else f"{line[:half]} ... {line[-half:]}"

"""Show validation examples with the model's predictions in the log and in TensorBoard's text tab."""

from __future__ import annotations

import html
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from lm_experiments_tools.tracking.tracker import Tracker

logger = logging.getLogger(__name__)

SHOWN_CHARACTERS = 300


def show_examples(split: str, examples: Sequence[Mapping[str, Any]], tracker: Tracker | None, step: int) -> None:
    """Log validation examples with predictions, and show them as a table in TensorBoard.

    The table's tag is `examples/{split}`.

    Args:
        split: name of the data, such as "valid".
        examples: dicts with the same keys; "id" is the example's name, "references" a list.
        tracker: the run's tracker; None writes to the log only.
        step: updates applied.
    """
    for example in examples:
        logger.info("\n".join(example_lines(split, example)))
    if tracker is not None and examples:
        names = list(examples[0])
        rows = [names, ["---"] * len(names)]
        rows += [[_cell(example.get(name)) for name in names] for example in examples]
        tracker.text(f"examples/{split}", "\n".join(f"| {' | '.join(row)} |" for row in rows), step)


def example_lines(split: str, example: Mapping[str, Any]) -> list[str]:
    """Format a validation example as lines of text: its name, then one indented line for each value.

    Args:
        split: name of the data, such as "valid".
        example: "id" is the example's name, "references" a list.
    """
    lines = [f"{split} example {example['id']}"]
    for name, value in list(example.items())[1:]:
        values = value if name == "references" else [value]
        lines += [f"  {name.removesuffix('s'):<11}{_shortened(v)}" for v in values]
    return lines


def _cell(value: Any) -> str:
    """A value as a cell of a Markdown table, with all markup escaped."""
    if isinstance(value, (list, tuple)):
        return "<br>".join(map(_cell, value))
    text = html.escape(" ".join(str(value).split()), quote=False)
    return "".join(f"\\{sign}" if sign in "\\`*_{}[]()#+-.!|" else sign for sign in text)


def _shortened(value: Any) -> str:
    """The value in one line, without its middle if it is long."""
    line = " ".join(str(value).split())
    half = SHOWN_CHARACTERS // 2
    return line if len(line) <= SHOWN_CHARACTERS else f"{line[:half]} ... {line[-half:]}"

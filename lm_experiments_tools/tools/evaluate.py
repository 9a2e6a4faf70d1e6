"""Evaluate several fine-tuned models, or checkpoints of one run, on the same data: one table.

    lmtools evaluate --checkpoints runs/a runs/b runs/c --valid_data_path valid.jsonl --metrics rouge
    lmtools evaluate --checkpoints runs/a/checkpoints/step_* --test_data_path test.jsonl --output table.jsonl

Of a run its best checkpoint is taken, else its last. Flags are those of run_finetuning.py; what is not given is as
each model was trained (its task, prefix, lengths), so models of different tasks can stand beside each other.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from lm_experiments_tools.config.cli import DEFAULT
from lm_experiments_tools.config.finetuning import FinetuningArgs
from lm_experiments_tools.config.launchers import launcher_rank
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.files import dump_json


@dataclass(frozen=True, kw_only=True)
class CheckpointsArgs:
    """What is evaluated."""

    checkpoints: tuple[str, ...] = ()
    """Run directories, checkpoints, folders of models, adapters, or names of the Hugging Face Hub."""
    output: str | None = None
    """File to which each model's values are added, one JSON object a line. None: none."""


@dataclass(frozen=True, kw_only=True)
class EvaluateArgs(FinetuningArgs, CheckpointsArgs):
    """The flags of run_finetuning.py, and the models. What they say is checked for each model, with its own task."""

    def __post_init__(self) -> None:
        if not self.checkpoints:
            raise UserError("--checkpoints is missing: name the models to evaluate.")
        if self.from_pretrained is not None:
            raise UserError(f"--from_pretrained {self.from_pretrained}: name it among --checkpoints.")
        if self.model_path is not None:
            raise UserError("--model_path: nothing is trained; --output names the file of the table.")
        if self.measures_nothing():
            raise UserError("there is nothing to evaluate on: give --valid_data_path or --test_data_path.")


def run(args: EvaluateArgs, origins: Mapping[str, str]) -> None:
    """Print the metrics of each model as they are there, and the table at the end."""
    from lm_experiments_tools.checkpoint.source import find_source

    for name in args.checkpoints:
        find_source(name, "--checkpoints")
    settings = {f.name: getattr(args, f.name) for f in fields(FinetuningArgs) if origins[f.name] != DEFAULT}
    rows: list[dict[str, str | float]] = []
    try:
        for name in args.checkpoints:
            for row in _evaluated(name, settings):
                rows.append(row)
                if launcher_rank() == 0 and args.output is not None:
                    with Path(args.output).open("a", encoding="utf-8") as file:
                        file.write(dump_json(row, indent=None) + "\n")
    finally:  # of those before one that cannot be evaluated, too
        if launcher_rank() == 0 and rows:
            print("\n".join(table(rows)))


def _evaluated(name: str, settings: Mapping[str, object]) -> list[dict[str, str | float]]:
    """The values of one model on validation and test data, what there is of them."""
    from lm_experiments_tools.recipes.finetuner import FineTuner

    tuner = FineTuner(name, **settings)
    splits = [split for split in ("valid", "test") if getattr(tuner.args, f"{split}_data_path") is not None]
    rows = [{"checkpoint": name, "split": split, **tuner.evaluate(split)} for split in splits]
    del tuner
    gc.collect()  # one model at a time
    return rows


def table(rows: Sequence[Mapping[str, str | float]], texts: Sequence[str] = ("checkpoint", "split")) -> list[str]:
    """Lines of text: a row each, a column for each value that any of them has; `texts` are the first columns."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    cells = [columns, *([_cell(row.get(name)) for name in columns] for row in rows)]
    widths = [max(len(line[number]) for line in cells) for number in range(len(columns))]
    left = sum(name in texts for name in columns)  # numbers stand to the right
    return [
        "  ".join(
            cell.ljust(width) if number < left else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in cells
    ]


def _cell(value: str | float | None) -> str:
    return "-" if value is None else value if isinstance(value, str) else f"{value:.5g}"

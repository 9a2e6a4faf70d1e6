"""Evaluate models or checkpoints on the same data or the same benchmark suite, and print one table.

    lmtools evaluate runs/a runs/b runs/c --valid_data_path valid.jsonl --metrics rouge
    lmtools evaluate runs/a/checkpoints/step_* --test_data_path test.jsonl --output table.jsonl
    lmtools evaluate runs/gpt --suite lm_eval --tasks my_tasks/colours.yaml hellaswag

With data, a run directory means its best checkpoint, or the last one. Flags are those of run_finetuning.py. Their
defaults (task, prefix, lengths) are those each model was trained with.

With --suite, all checkpoints of a run are evaluated, and the values are appended to its metrics.jsonl. Recorded values
are not measured again, so the command can be repeated during a run.
"""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from lm_experiments_tools.config.cli import DEFAULT
from lm_experiments_tools.config.finetuning import FinetuningArgs
from lm_experiments_tools.config.flags import COUNT, NOT_NEGATIVE, check_groups, needs
from lm_experiments_tools.config.launchers import launcher_rank
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.files import dump_json

logger = logging.getLogger(__name__)
POSITIONAL = "checkpoints"
Row = Mapping[str, "str | float"]


@dataclass(frozen=True, kw_only=True)
class CheckpointsArgs:
    """The models to evaluate, and benchmark suites to run on them."""

    checkpoints: tuple[str, ...] = ()
    """Run directories, checkpoints, folders of models, adapters, or names of the Hugging Face Hub."""
    output: str | None = None
    """File to append each model's values to, one JSON object a line. None: none."""
    suite: Literal["lm_eval"] | None = None
    """lm_eval: lm-evaluation-harness, for models that generate. None: the data of the flags below."""
    tasks: Annotated[tuple[str, ...], needs("suite")] = ()
    """Tasks of the suite: names or YAML files."""
    num_fewshot: Annotated[int | None, NOT_NEGATIVE, needs("suite", "lm_eval")] = None
    """Examples before each question. None: the task's own number."""
    limit: Annotated[int | None, COUNT, needs("suite", "lm_eval")] = None
    """Use only the first N questions of a task. None: all."""


@dataclass(frozen=True, kw_only=True)
class EvaluateArgs(FinetuningArgs, CheckpointsArgs):
    """The flags of run_finetuning.py, and the models. Flags are checked for each model, with its own task."""

    def __post_init__(self) -> None:
        if not self.checkpoints:
            raise UserError("--checkpoints is missing: name the models to evaluate.")
        if self.from_pretrained is not None:
            raise UserError(f"--from_pretrained {self.from_pretrained}: name it among --checkpoints.")
        if self.model_path is not None:
            raise UserError("--model_path: nothing is trained; --output names the file of the table.")
        check_groups(self, (CheckpointsArgs,))
        if self.suite is not None and not self.tasks:
            raise UserError(f"--suite {self.suite} measures --tasks: name at least one.")
        if self.suite is not None and not self.measures_nothing():
            raise UserError("--suite brings its own data: leave --valid_data_path and --test_data_path out.")
        if self.suite is None and self.measures_nothing():
            raise UserError("there is nothing to evaluate on: give --valid_data_path or --test_data_path.")


def run(args: EvaluateArgs, origins: Mapping[str, str]) -> None:
    """Print the metrics of each model, and a table of all at the end."""
    given = {field.name: getattr(args, field.name) for field in fields(args) if origins[field.name] != DEFAULT}
    rows: list[Row] = []
    try:
        for row in _by_suite(args, given) if args.suite is not None else _on_data(args, given):
            rows.append(row)
            if launcher_rank() == 0 and args.output is not None:
                with Path(args.output).open("a", encoding="utf-8") as file:
                    file.write(dump_json(row, indent=None) + "\n")
    finally:  # also if a later model cannot be evaluated
        if launcher_rank() == 0 and rows:
            print("\n".join(table(rows)))


def _on_data(args: EvaluateArgs, given: Mapping[str, Any]) -> Iterator[Row]:
    from lm_experiments_tools.checkpoint.source import find_source

    for name in args.checkpoints:
        find_source(name, "--checkpoints")
    own = {field.name for field in fields(CheckpointsArgs)}
    settings = {name: value for name, value in given.items() if name not in own}
    for name in args.checkpoints:
        yield from _evaluated(name, settings)


def _evaluated(name: str, settings: Mapping[str, Any]) -> list[Row]:
    """The values of one model on validation and test data, whichever is given."""
    from lm_experiments_tools.recipes.finetuner import FineTuner

    tuner = FineTuner(name, **settings)
    splits = [split for split in ("valid", "test") if getattr(tuner.args, f"{split}_data_path") is not None]
    rows = [{"checkpoint": name, "split": split, **tuner.evaluate(split)} for split in splits]
    del tuner
    gc.collect()  # only one model is in memory at a time
    return rows


def _by_suite(args: EvaluateArgs, given: Mapping[str, Any]) -> Iterator[Row]:
    from lm_experiments_tools.tools.suites import Suite, checkpoints_of, measured

    if int(os.environ.get("WORLD_SIZE", "1")) > 1 or "HOROVOD_RANK" in os.environ:
        raise UserError("--suite is measured by one process: start it without torchrun, horovodrun or accelerate.")
    own = {field.name for field in fields(CheckpointsArgs)} | {"model_cls", "eval_batch_size"}
    if ignored := sorted(set(given) - own):
        raise UserError(f"--{ignored[0]} is not read by --suite {args.suite}: leave it out.")
    settings = {name: given[name] for name in ("num_fewshot", "limit") if name in given}
    suite = Suite(args.suite, args.tasks, settings, args.eval_batch_size or 8, args.model_cls)
    suite.check()
    for name in [name for run in args.checkpoints for name in checkpoints_of(run)]:
        # A run that still trains may have removed it since the list was made.
        if Path(name).parent.name == "checkpoints" and not Path(name).exists():
            logger.warning("%s is left out: its run has removed it meanwhile", name)
            continue
        yield {"checkpoint": name, **measured(name, suite)}


def table(rows: Sequence[Row], texts: Sequence[str] = ("checkpoint", "split")) -> list[str]:
    """Format rows as the lines of a table with a column for each key; the columns `texts` come first."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    cells = [columns, *([_cell(row.get(name)) for name in columns] for row in rows)]
    widths = [max(len(line[number]) for line in cells) for number in range(len(columns))]
    left = sum(name in texts for name in columns)
    return [
        "  ".join(
            cell.ljust(width) if number < left else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in cells
    ]


def _cell(value: str | float | None) -> str:
    return "-" if value is None else value if isinstance(value, str) else f"{value:.5g}"

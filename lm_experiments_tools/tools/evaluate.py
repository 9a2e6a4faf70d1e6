"""Evaluate models, or the checkpoints of a run, on the same data or by the same suite: one table.

    lmtools evaluate runs/a runs/b runs/c --valid_data_path valid.jsonl --metrics rouge
    lmtools evaluate runs/a/checkpoints/step_* --test_data_path test.jsonl --output table.jsonl
    lmtools evaluate runs/gpt --suite lm_eval --tasks my_tasks/colours.yaml hellaswag
    lmtools evaluate runs/bert --suite glue --tasks glue/SST-2 --epochs 3 --lr 2e-5

On data, of a run its best checkpoint is taken, else its last. Flags are those of run_finetuning.py; what is not given
is as each model was trained (its task, prefix, lengths), so models of different tasks can stand beside each other.

By a suite, of a run all its checkpoints are taken, and their values go into its metrics.jsonl, where lmtools compare
finds them; one that is there already is not measured again, so the command can be repeated while the run goes on.
"""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Literal

from lm_experiments_tools.config.cli import DEFAULT
from lm_experiments_tools.config.finetuning import FinetuningArgs
from lm_experiments_tools.config.flags import COUNT, NOT_NEGATIVE, check_groups, needs, only
from lm_experiments_tools.config.launchers import launcher_rank
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.files import dump_json

logger = logging.getLogger(__name__)
POSITIONAL = "checkpoints"


@dataclass(frozen=True, kw_only=True)
class CheckpointsArgs:
    """What is evaluated."""

    checkpoints: tuple[str, ...] = ()
    """Run directories, checkpoints, folders of models, adapters, or names of the Hugging Face Hub."""
    output: str | None = None
    """File to which each model's values are added, one JSON object a line. None: none."""
    suite: Literal["lm_eval", "sts", "mteb", "glue"] | None = None
    """lm_eval: lm-evaluation-harness, of models that write. sts, mteb: sentence-transformers, of encoders. glue: each
    checkpoint is fine-tuned on a folder, by the flags of run_finetuning.py. None: data as below."""
    tasks: Annotated[tuple[str, ...], needs("suite")] = ()
    """Of the suite: names or YAML files (lm_eval), files with sentence1, sentence2 and score (sts), names or
    module:Class (mteb), folders with training and validation data (glue)."""
    num_fewshot: Annotated[int | None, NOT_NEGATIVE, only("suite", "lm_eval")] = None
    """Examples before each question. None: as the task says."""
    limit: Annotated[int | None, COUNT, only("suite", "lm_eval")] = None
    """Questions of a task, the first ones. None: all."""


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
        check_groups(self, (CheckpointsArgs,))
        if self.suite is not None and not self.tasks:
            raise UserError(f"--suite {self.suite} measures --tasks: name at least one.")
        if self.suite is not None and not self.measures_nothing():
            raise UserError("--suite brings its own data: leave --valid_data_path and --test_data_path out.")
        if self.suite is None and self.measures_nothing():
            raise UserError("there is nothing to evaluate on: give --valid_data_path or --test_data_path.")


def run(args: EvaluateArgs, origins: Mapping[str, str]) -> None:
    """Print the metrics of each model as they are there, and the table at the end."""
    if args.suite is not None:
        _along(args, origins)
        return
    from lm_experiments_tools.checkpoint.source import find_source, on_newest

    for name in args.checkpoints:
        on_newest(name, lambda name=name: find_source(name, "--checkpoints"))
    settings = {f.name: getattr(args, f.name) for f in fields(FinetuningArgs) if origins[f.name] != DEFAULT}
    rows: list[dict[str, str | float]] = []
    try:
        for name in args.checkpoints:
            for row in on_newest(name, lambda name=name: _evaluated(name, settings)):
                rows.append(row)
                _keep(row, args.output)
    finally:  # of those before one that cannot be evaluated, too
        if launcher_rank() == 0 and rows:
            print("\n".join(table(rows)))


def _along(args: EvaluateArgs, origins: Mapping[str, str]) -> None:
    """Measure a suite on every checkpoint; the table, and what was left out, at the end."""
    from lm_experiments_tools.tools.suites import Suite, checkpoints_of, measured

    if int(os.environ.get("WORLD_SIZE", "1")) > 1 or "HOROVOD_RANK" in os.environ:
        raise UserError("--suite is measured by one process: start it without torchrun, horovodrun or accelerate.")
    given = {f.name: getattr(args, f.name) for f in fields(args) if origins[f.name] != DEFAULT}
    own = {f.name for f in fields(CheckpointsArgs)} | {"model_cls", "eval_batch_size"}
    settings = {name: value for name, value in given.items() if name not in own or name in ("num_fewshot", "limit")}
    if args.suite != "glue" and (unread := sorted(set(settings) - {"num_fewshot", "limit"})):
        raise UserError(f"--{unread[0]} is not read by --suite {args.suite}: leave it out.")
    suite = Suite(args.suite, args.tasks, settings, args.eval_batch_size or 8, args.model_cls)
    suite.check()
    names = [name for run in args.checkpoints for name in checkpoints_of(run)]
    rows: list[dict[str, str | float]] = []
    try:
        for name in names:
            try:
                values = measured(name, suite)
            except (UserError, OSError):
                if Path(name).exists() or len(names) == 1:
                    raise
                logger.warning("%s is left out: its run has removed it meanwhile", name)
                continue
            rows.append({"checkpoint": name, **values})
            _keep(rows[-1], args.output)
    finally:
        if rows:
            print("\n".join(table(rows, texts=("checkpoint",))))


def _keep(row: Mapping[str, str | float], output: str | None) -> None:
    if launcher_rank() == 0 and output is not None:
        with Path(output).open("a", encoding="utf-8") as file:
            file.write(dump_json(row, indent=None) + "\n")


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

"""The objective of `--task`, and the datasets of a pre-training run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lm_experiments_tools.data.arrangement import MixedSteps
from lm_experiments_tools.data.dataset import Dataset
from lm_experiments_tools.data.objectives.objective import Objective
from lm_experiments_tools.data.objectives.token_rows import TokenRows, TokenSource
from lm_experiments_tools.data.parallel import ParallelDataset
from lm_experiments_tools.names import resolve_name

if TYPE_CHECKING:
    from lm_experiments_tools.config.objectives import ModelKind
    from lm_experiments_tools.config.pretraining import T5PretrainingArgs
    from lm_experiments_tools.data.text.tokenizer import Tokenizer


def build_objective(args: T5PretrainingArgs, vocabulary: Tokenizer, model_kind: ModelKind) -> Objective:
    """Make the objective `--task`, with the flags that it reads as arguments of its class.

    No training data are needed, so that a run can fail before it tokenizes any text.

    Raises:
        UserError: the objective refuses the settings or the vocabulary.
    """
    facts = args.objective()
    target_length = args.target_seq_len if facts.has_targets else None
    kind = resolve_name(facts.objective_class, Objective, f"--task {args.task}")
    return kind.create(vocabulary, args.input_seq_len, target_length, model_kind, **args.options_of_objective())


def pretraining_dataset(
    args: T5PretrainingArgs,
    objective: Objective,
    tokens: Sequence[TokenSource | Sequence[TokenSource]],
    world_size: int = 1,
    num_workers: int = 0,
) -> Dataset:
    """Build the dataset of an objective from one or several data sets, mixed by `--data_weights`.

    Args:
        tokens: one item per data set of the mixture: a token file, or several that are read as one.
        world_size: number of workers.
        num_workers: number of processes that make examples; 0 makes them in this one.
    """
    dataset = Dataset.mixed(tokens, lambda source, seed: TokenRows(source, objective, seed), args.seed, args.mixing())
    if num_workers:
        dataset = ParallelDataset(dataset, num_workers)
    return arranged_by_length(args, dataset, mixed_rows(args, world_size))


def arranged_by_length(args: T5PretrainingArgs, dataset: Dataset, step_rows: float, num_before: int = 0) -> Dataset:
    """Arrange samples by length within each step, if the examples of `--task` differ in length.

    Args:
        step_rows: rows of a step that come from this dataset, on average.
        num_before: samples that are read before those of the dataset.
    """
    if not args.objective().varies_in_length:
        return dataset
    rows = max(1, round(step_rows))
    return dataset.arranged(MixedSteps(dataset.lengths, len(dataset), rows, args.seed, num_before))


def mixed_rows(args: T5PretrainingArgs, world_size: int) -> int:
    """Return the rows that hold all lengths: `--mix_rows`, by default those of a training step over all workers."""
    return args.mix_rows or args.global_batch_size(world_size)

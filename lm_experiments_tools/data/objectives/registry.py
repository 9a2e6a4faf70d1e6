"""Registry of training objectives: makes the objective of `--task`, and its datasets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lm_experiments_tools.data.buckets import BucketedDataset, MixedSteps
from lm_experiments_tools.data.loader import SampleDataset
from lm_experiments_tools.data.mixture import MixtureDataset
from lm_experiments_tools.data.objectives.dataset import ObjectiveDataset
from lm_experiments_tools.data.objectives.objective import Objective
from lm_experiments_tools.data.objectives.token_stream import TokenSource
from lm_experiments_tools.data.order import stream_key
from lm_experiments_tools.names import resolve_name

if TYPE_CHECKING:
    from lm_experiments_tools.config.objectives import ModelKind
    from lm_experiments_tools.config.pretraining import T5PretrainingArgs
    from lm_experiments_tools.data.text.vocabulary import Vocabulary


def build_objective(args: T5PretrainingArgs, vocabulary: Vocabulary, model_kind: ModelKind) -> Objective:
    """Make the objective `--task`, with the flags that it reads as arguments of its class.

    No training data are needed, so that a run can fail before it tokenizes any text.

    Raises:
        UserError: the objective refuses the settings or the vocabulary.
    """
    facts = args.objective()
    target_length = args.target_seq_len if facts.has_targets else None
    kind = resolve_name(facts.objective_class, Objective, f"--task {args.task}")
    return kind.create(vocabulary, args.input_seq_len, target_length, model_kind, **args.options_of_objective())


def mixed_dataset(
    args: T5PretrainingArgs,
    objective: Objective,
    tokens: Sequence[TokenSource | Sequence[TokenSource]],
    world_size: int = 1,
) -> SampleDataset:
    """Build the dataset of an objective from one or several data sets, mixed by `--data_weights`.

    Samples are grouped by length if they differ in length.

    Args:
        tokens: one item per data set of the mixture: a token file, or several that are read as one.
        world_size: number of workers.
    """
    if len(tokens) == 1:
        return grouped_by_length(args, ObjectiveDataset(tokens[0], objective, args.seed), world_size)
    # A seed for each: equal ones would give members of equal size the same order and noise.
    members = [
        ObjectiveDataset(source, objective, stream_key(args.seed, f"member {number}"))
        for number, source in enumerate(tokens)
    ]
    mixture = MixtureDataset(members, pad_id=objective.vocabulary.pad_id, **args.mixing())
    return grouped_by_length(args, mixture, world_size)


def grouped_by_length(
    args: T5PretrainingArgs, dataset: SampleDataset, world_size: int, stream: int = 0, num_streams: int = 1
) -> SampleDataset:
    """Group samples by length to reduce padding, if the examples of `--task` differ in length.

    Otherwise the dataset is returned unchanged.

    Args:
        dataset: the samples.
        world_size: number of workers; the size of a group depends on it.
        stream, num_streams: for `--streaming`, which divides the text into streams: the number of the stream that the
            dataset belongs to, and the number of streams.
    """
    if not args.objective().varies_in_length:
        return dataset
    if args.bucket_rows:
        return BucketedDataset(dataset, -(-args.bucket_rows // num_streams), args.seed)
    return MixedSteps(dataset, mixed_rows(args, world_size), args.seed, stream, num_streams)


def mixed_rows(args: T5PretrainingArgs, world_size: int) -> int:
    """Return the rows per length-balanced step: `--mix_rows`, by default those of a training step over all workers."""
    return args.mix_rows or args.global_batch_size(world_size)

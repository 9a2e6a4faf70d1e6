"""Registry of training objectives: builds the dataset of `--task` with the builder that `OBJECTIVES` lists for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from lm_experiments_tools.data.buckets import BucketedDataset, MixedSteps
from lm_experiments_tools.data.loader import SampleDataset
from lm_experiments_tools.data.mixture import MixtureDataset
from lm_experiments_tools.data.objectives.token_stream import TokensInMemory, TokenSource
from lm_experiments_tools.data.order import stream_key
from lm_experiments_tools.names import resolve_name

if TYPE_CHECKING:
    from lm_experiments_tools.config.objectives import ModelKind
    from lm_experiments_tools.config.pretraining import T5PretrainingArgs
    from lm_experiments_tools.data.text.vocabulary import Vocabulary


@dataclass(frozen=True)
class ObjectiveContext:
    """Everything that an objective's builder needs to make a dataset, except for the tokens.

    Attributes:
        args: arguments of the run.
        vocabulary: vocabulary of the tokens.
        model_kind: kind of the model, such as "encoder-decoder".
        seed: determines order and noise.
        quiet: True to omit the log lines about lengths that follow from the settings.
    """

    args: T5PretrainingArgs
    vocabulary: Vocabulary
    model_kind: ModelKind
    seed: int
    quiet: bool = False

    def stream_options(self) -> dict[str, int]:
        """Return `pad_id`, `vocab_size` and `seed`, the arguments common to the datasets of all objectives."""
        return {"pad_id": self.vocabulary.pad_id, "vocab_size": self.vocabulary.size, "seed": self.seed}


def example_dataset(context: ObjectiveContext, tokens: TokenSource | Sequence[TokenSource]) -> SampleDataset:
    """Build the dataset of the objective `--task` from tokenized text, without length grouping.

    Args:
        context: settings of the objective.
        tokens: a token file, or several that are read as one.

    Raises:
        UserError: the objective refuses the settings, or the tokens have ids outside the vocabulary.
    """
    args = context.args
    return resolve_name(args.objective().builder)(context, tokens, **args.checked_task_options())


def check_objective(context: ObjectiveContext) -> None:
    """Raise UserError if the objective `--task` refuses the settings or the vocabulary.

    No training data are needed, so that a run can fail before it tokenizes any text.
    """
    if context.args.objective().builder.startswith(f"{__package__}."):
        example_dataset(replace(context, quiet=True), TokensInMemory(np.broadcast_to(np.uint16(0), 1 << 20)))


def mixed_dataset(
    context: ObjectiveContext, tokens: Sequence[TokenSource | Sequence[TokenSource]], world_size: int = 1
) -> SampleDataset:
    """Build the dataset of `--task` from one or several data sets, mixed by `--data_weights`.

    Samples are grouped by length if they differ in length.

    Args:
        context: settings of the objective.
        tokens: one item per data set of the mixture: a token file, or several that are read as one.
        world_size: number of workers.
    """
    if len(tokens) == 1:
        return grouped_by_length(context, example_dataset(context, tokens[0]), world_size)
    # A seed for each: equal ones would give members of equal size the same order and noise.
    members = [
        example_dataset(replace(context, seed=stream_key(context.seed, f"member {number}"), quiet=number > 0), source)
        for number, source in enumerate(tokens)
    ]
    mixture = MixtureDataset(members, pad_id=context.vocabulary.pad_id, **context.args.mixing())
    return grouped_by_length(context, mixture, world_size)


def grouped_by_length(
    context: ObjectiveContext, dataset: SampleDataset, world_size: int, stream: int = 0, num_streams: int = 1
) -> SampleDataset:
    """Group samples by length to reduce padding, if the examples of `--task` differ in length.

    Otherwise the dataset is returned unchanged.

    Args:
        context: settings of the objective.
        dataset: the samples.
        world_size: number of workers; the size of a group depends on it.
        stream, num_streams: for `--streaming`, which divides the text into streams: the number of the stream that the
            dataset belongs to, and the number of streams.
    """
    args = context.args
    if not args.objective().varies_in_length:
        return dataset
    if args.bucket_rows:
        return BucketedDataset(dataset, -(-args.bucket_rows // num_streams), context.seed)
    return MixedSteps(dataset, mixed_rows(args, world_size), context.seed, stream, num_streams)


def mixed_rows(args: T5PretrainingArgs, world_size: int) -> int:
    """Return the rows per length-balanced step: `--mix_rows`, by default those of a training step over all workers."""
    return args.mix_rows or args.global_batch_size(world_size)

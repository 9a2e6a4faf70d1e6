"""From `--task` and token streams to a dataset of numbered examples, by the builders that `OBJECTIVES` names."""

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
    """Arguments of an objective's builder, besides the tokens.

    `quiet`: do not log derived lengths, for example because a dataset with the same settings has logged them.
    """

    args: T5PretrainingArgs
    vocabulary: Vocabulary
    model_kind: ModelKind
    seed: int
    quiet: bool = False

    def stream_options(self) -> dict[str, int]:
        """Keyword arguments common to all datasets over a token stream."""
        return {"pad_id": self.vocabulary.pad_id, "vocab_size": self.vocabulary.size, "seed": self.seed}


def example_dataset(context: ObjectiveContext, tokens: TokenSource | Sequence[TokenSource]) -> SampleDataset:
    """The dataset of `--task` over the given tokens, read as one stream, without length grouping.

    Raises:
        UserError: settings that the objective refuses, or tokens of another vocabulary.
    """
    args = context.args
    return resolve_name(args.objective().builder)(context, tokens, **args.checked_task_options())


def check_objective(context: ObjectiveContext) -> None:
    """Raise UserError for settings and vocabularies that an objective refuses, before there are any tokens."""
    if context.args.objective().builder.startswith(f"{__package__}."):
        example_dataset(replace(context, quiet=True), TokensInMemory(np.broadcast_to(np.uint16(0), 1 << 20)))


def mixed_dataset(
    context: ObjectiveContext, tokens: Sequence[TokenSource | Sequence[TokenSource]], world_size: int = 1
) -> SampleDataset:
    """`example_dataset` of each of `tokens`, mixed by `--data_weights`; varying examples are grouped by length."""
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
    """The dataset, its samples in another order where their lengths vary; `world_size` decides the rows of a group.

    `dataset` may be one of `num_streams` streams, whose rows make a group together.
    """
    args = context.args
    if not args.objective().varies_in_length:
        return dataset
    if args.bucket_rows:
        return BucketedDataset(dataset, -(-args.bucket_rows // num_streams), context.seed)
    return MixedSteps(dataset, mixed_rows(args, world_size), context.seed, stream, num_streams)


def mixed_rows(args: T5PretrainingArgs, world_size: int) -> int:
    """`--mix_rows`; by default the rows of a step, which then holds the same samples however it is split."""
    return args.mix_rows or args.global_batch_size(world_size)

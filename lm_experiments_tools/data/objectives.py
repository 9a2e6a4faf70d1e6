"""The training objectives by name: from a tape of tokens to a dataset of numbered examples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lm_experiments_tools.data.dataset import SpanCorruptionDataset, TokenSource
from lm_experiments_tools.data.loader import SampleDataset
from lm_experiments_tools.data.vocabulary import Vocabulary

if TYPE_CHECKING:
    from lm_experiments_tools.pretraining_args import ObjectiveArgs


def objective_dataset(
    args: ObjectiveArgs, tokens: TokenSource | Sequence[TokenSource], vocabulary: Vocabulary, *, seed: int
) -> SampleDataset:
    """The dataset that `--task` describes, over the given tokens.

    Raises:
        UserError: settings that the objective refuses, or tokens of another vocabulary.
    """
    return SpanCorruptionDataset(
        tokens,
        args.input_seq_len,
        args.target_seq_len,
        sentinel_ids=vocabulary.sentinel_ids,
        eos_id=vocabulary.eos_id,
        pad_id=vocabulary.pad_id,
        vocab_size=vocabulary.size,
        noise_density=args.noise_density,
        mean_noise_span_length=args.mean_noise_span_length,
        seed=seed,
    )

"""The training objectives by name: from tapes of tokens to a dataset of numbered examples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from lm_experiments_tools.data.buckets import BucketedDataset
from lm_experiments_tools.data.loader import SampleDataset
from lm_experiments_tools.data.mixture import MixtureDataset
from lm_experiments_tools.data.objectives.causal_lm import CausalLMDataset
from lm_experiments_tools.data.objectives.denoising import PrefixLMDataset, SpanCorruptionDataset
from lm_experiments_tools.data.objectives.mlm import MaskedLMDataset
from lm_experiments_tools.data.objectives.tape import TokenSource
from lm_experiments_tools.data.objectives.ul2 import UL2Dataset, mode_ids
from lm_experiments_tools.data.order import stream_key
from lm_experiments_tools.data.text.vocabulary import Vocabulary
from lm_experiments_tools.errors import UserError

if TYPE_CHECKING:
    from lm_experiments_tools.config.pretraining import T5PretrainingArgs
    from lm_experiments_tools.recipes.common import ModelKind, ModelSource

MASK_PIECES = ("[MASK]", "<mask>")

# Kinds of models (`experiment.model_kind`) that an objective can train.
MODELS_OF: dict[str, tuple[ModelKind, ...]] = {
    "span_corruption": ("encoder-decoder",),
    "prefix_lm": ("encoder-decoder",),
    "ul2": ("encoder-decoder",),
    "causal_lm": ("decoder", "encoder-decoder"),
    "mlm": ("encoder",),
}
_EXAMPLE_OF = {
    "encoder-decoder": "transformers:T5ForConditionalGeneration",
    "decoder": "transformers:GPT2LMHeadModel",
    "encoder": "transformers:BertForMaskedLM",
}


def check_model(args: T5PretrainingArgs, model: ModelSource) -> None:
    """Refuse a model that cannot learn the objective.

    Raises:
        UserError: another kind of model is needed, or one with more positions.
    """
    kind, kinds = model.kind, MODELS_OF.get(args.task)
    if kinds is not None and kind not in kinds:
        raise UserError(
            f"--task {args.task} is for {' and '.join(f'{kind}s' for kind in kinds)}, and --model_cls "
            f"{args.model_cls} is {'a' if kind == 'decoder' else 'an'} {kind}: choose a class such as "
            f"{_EXAMPLE_OF[kinds[0]]}, or another --task."
        )
    positions = getattr(model.config, "max_position_embeddings", None)
    if positions is not None and args.input_seq_len > positions:
        raise UserError(
            f"--input_seq_len {args.input_seq_len} is more than the {positions} positions of the model "
            "(max_position_embeddings in its configuration): shorten the inputs or raise that number."
        )


def check_causality(args: T5PretrainingArgs, model: nn.Module, num_tokens: int = 8) -> None:
    """Refuse a model for causal LM that reads the tokens it shall predict, as BERT's LM head does unless told not to.

    Raises:
        UserError: the prediction at the first position changes with a later token.
    """
    if args.task != "causal_lm" or getattr(model.config, "is_encoder_decoder", False):
        return
    ids = torch.arange(num_tokens)[None]
    other = ids.clone()
    other[0, -1] = 0
    training = model.training
    model.eval()
    with torch.no_grad():
        first, second = (model(input_ids=row)["logits"][0, 0] for row in (ids, other))
    model.train(training)
    if not torch.equal(first, second):
        raise UserError(
            f"--task causal_lm: --model_cls {args.model_cls} sees the tokens it shall predict; set is_decoder to true "
            "in its configuration, or choose a class such as transformers:GPT2LMHeadModel."
        )


def objective_dataset(
    args: T5PretrainingArgs,
    tokens: TokenSource | Sequence[TokenSource],
    vocabulary: Vocabulary,
    *,
    kind: ModelKind = "encoder-decoder",
    seed: int,
    world_size: int = 1,
) -> SampleDataset:
    """The dataset that `--task` describes, over the given tokens, read as one tape.

    Args:
        world_size: workers of the run, for the rows of a bucket.

    Raises:
        UserError: settings that the objective refuses, or tokens of another vocabulary.
    """
    return _in_buckets(args, example_dataset(args, tokens, vocabulary, kind=kind, seed=seed), seed, world_size)


def mixed_dataset(
    args: T5PretrainingArgs,
    tokens: Sequence[TokenSource],
    vocabulary: Vocabulary,
    *,
    kind: ModelKind = "encoder-decoder",
    seed: int,
    world_size: int = 1,
) -> SampleDataset:
    """`objective_dataset` of each of `tokens`, mixed by `--data_weights` and `--data_blending`; of one, itself."""
    if len(tokens) == 1:
        return objective_dataset(args, tokens[0], vocabulary, kind=kind, seed=seed, world_size=world_size)
    # A seed for each: equal ones would give members of equal size the same order and noise.
    members = [
        example_dataset(args, source, vocabulary, kind=kind, seed=stream_key(seed, f"member {number}"))
        for number, source in enumerate(tokens)
    ]
    mixture = MixtureDataset(members, args.data_weights or None, args.data_blending, pad_id=vocabulary.pad_id)
    return _in_buckets(args, mixture, seed, world_size)


def example_dataset(
    args: T5PretrainingArgs,
    tokens: TokenSource | Sequence[TokenSource],
    vocabulary: Vocabulary,
    *,
    kind: ModelKind = "encoder-decoder",
    seed: int,
    quiet: bool = False,
) -> SampleDataset:
    """`objective_dataset` before examples of like length are put together.

    Args:
        quiet: do not log what the settings come to, for one dataset of many with the same.
    """
    ids = {"pad_id": vocabulary.pad_id, "vocab_size": vocabulary.size, "seed": seed}
    lengths = args.input_seq_len, args.target_seq_len
    if args.task == "mlm":
        special = [vocabulary.pad_id, vocabulary.eos_id, vocabulary.unk_id, *vocabulary.sentinel_ids.tolist()]
        return MaskedLMDataset(
            tokens,
            args.input_seq_len,
            mask_id=mask_id(vocabulary),
            special_ids=special,
            probability=args.mlm_probability,
            **ids,
        )
    ids["eos_id"] = vocabulary.eos_id
    if args.task == "causal_lm":
        return CausalLMDataset(tokens, args.input_seq_len, encoder_decoder=kind == "encoder-decoder", **ids)
    if args.task == "prefix_lm":
        return PrefixLMDataset(tokens, *lengths, **ids)
    if args.task == "ul2":
        modes = mode_ids(vocabulary) if args.mode_tokens else {}
        sentinels = [index for index in vocabulary.sentinel_ids.tolist() if index not in modes.values()]
        return UL2Dataset(
            tokens, *lengths, args.denoiser_specs(), modes=modes, sentinel_ids=sentinels, quiet=quiet, **ids
        )
    return SpanCorruptionDataset(
        tokens,
        *lengths,
        sentinel_ids=vocabulary.sentinel_ids,
        noise_density=args.noise_density,
        mean_noise_span_length=args.mean_noise_span_length,
        quiet=quiet,
        **ids,
    )


def mask_id(vocabulary: Vocabulary) -> int:
    """What hides a token in masked LM: the piece [MASK] or <mask>, else sentinel 0.

    Raises:
        UserError: a vocabulary with none of them.
    """
    found = [index for piece in MASK_PIECES if (index := vocabulary.find(piece)) is not None]
    if not found and vocabulary.num_sentinels == 0:
        raise UserError(
            f"--task mlm needs a token that hides others, but {vocabulary.path} has neither "
            f"{' nor '.join(MASK_PIECES)} nor a sentinel: train one with `lmtools vocab`."
        )
    return found[0] if found else int(vocabulary.sentinel_ids[0])


def _in_buckets(args: T5PretrainingArgs, dataset: SampleDataset, seed: int, world_size: int) -> SampleDataset:
    if not args.varies_in_length():
        return dataset
    # By default all rows of a step, however they are split: a step then holds the same samples for any split of it.
    rows = args.bucket_rows or args.global_batch_size(world_size)
    return BucketedDataset(dataset, rows, seed, args.trim_to(), micro_rows=args.batch_size * world_size)

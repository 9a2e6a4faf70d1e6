"""Checks that a model can learn the objective."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from lm_experiments_tools.config.objectives import OBJECTIVES
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.models.build import check_vocabulary

if TYPE_CHECKING:
    from lm_experiments_tools.config.pretraining import T5PretrainingArgs
    from lm_experiments_tools.recipes.common import ModelSource

_EXAMPLE_OF = {
    "encoder-decoder": "transformers:T5ForConditionalGeneration",
    "decoder": "transformers:GPT2LMHeadModel",
    "encoder": "transformers:BertForMaskedLM",
}


def check_model(args: T5PretrainingArgs, model: ModelSource, vocabulary_size: int) -> None:
    """Refuse a model that cannot learn the objective.

    Raises:
        UserError: another kind of model is needed, or one with more positions or a larger embedding.
    """
    kind, kinds = model.kind, args.objective().models
    if args.task in OBJECTIVES and kind not in kinds:
        raise UserError(
            f"--task {args.task} is for {' and '.join(f'{kind}s' for kind in kinds)}, and --model_cls "
            f"{args.model_cls} is {'a' if kind == 'decoder' else 'an'} {kind}: choose a class such as "
            f"{_EXAMPLE_OF[kinds[0]]}, or another --task."
        )
    check_vocabulary(model.config, vocabulary_size)
    positions = getattr(model.config, "max_position_embeddings", None)
    if positions is not None and args.input_seq_len > positions:
        raise UserError(
            f"--input_seq_len {args.input_seq_len} is more than the {positions} positions of the model "
            "(max_position_embeddings in its configuration): shorten the inputs or raise that number."
        )


def check_causality(args: T5PretrainingArgs, model: nn.Module, num_tokens: int = 8) -> None:
    """Refuse a decoder that sees the tokens it is to predict, as BERT's LM head does unless told not to.

    Raises:
        UserError: the prediction at the first position changes with a later token.
    """
    if "decoder" not in args.objective().models or getattr(model.config, "is_encoder_decoder", False):
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
            f"--task {args.task}: --model_cls {args.model_cls} sees the tokens it is to predict; set is_decoder to "
            "true in its configuration, or choose a class such as transformers:GPT2LMHeadModel."
        )

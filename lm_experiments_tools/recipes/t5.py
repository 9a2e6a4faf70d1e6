"""Pre-training of T5, and of other models with other objectives (`--task`)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from lm_experiments_tools.backends.collective import on_all
from lm_experiments_tools.data.tokens.indexed import IndexedDataset
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.labels import IGNORED_LABEL
from lm_experiments_tools.models.build import check_positions, check_vocabulary
from lm_experiments_tools.modules.inspection import evaluated, forward_names
from lm_experiments_tools.recipes.common import PretrainingData, distilled_loss, labels_alone
from lm_experiments_tools.recipes.recipe import Pretraining
from lm_experiments_tools.recipes.report import continued, unmasked, write_report, written
from lm_experiments_tools.recipes.t5_data import build_objective, pretraining_data
from lm_experiments_tools.training.losses import MODEL_LOSS

if TYPE_CHECKING:
    from torch import nn

    from lm_experiments_tools.config.pretraining import T5PretrainingArgs
    from lm_experiments_tools.models.from_args import ModelSource
    from lm_experiments_tools.recipes.t5_sources import T5Sources
    from lm_experiments_tools.training.phases import Phase

logger = logging.getLogger(__name__)
_EXAMPLE_OF = {
    "encoder-decoder": "transformers:T5ForConditionalGeneration",
    "decoder": "transformers:GPT2LMHeadModel",
    "encoder": "transformers:BertForMaskedLM",
}


class T5Pretraining(Pretraining):
    """A run of the script run_t5_pretraining.py.

    Args:
        sources: returns the vocabulary and data (`T5Sources`) of each phase. All workers call it at the same time.
    """

    script = "t5"

    def __init__(
        self, args: T5PretrainingArgs, origins: Mapping[str, str], sources: Callable[[], Sequence[T5Sources]]
    ) -> None:
        super().__init__(args, origins)
        self._sources = sources

    @cached_property
    def data_sources(self) -> Sequence[T5Sources]:
        """Vocabulary and data paths of each phase. Every worker must read this property at the same time."""
        return on_all(self.backend, self._sources)

    @property
    def special_tokens(self) -> dict[str, int | None]:
        return self.data_sources[0].vocabulary.special_tokens

    def check(self, args: T5PretrainingArgs, source: ModelSource) -> None:
        vocabulary = self.data_sources[0].vocabulary
        check_model(args, source, vocabulary.size)
        if not args.is_registered_task():
            on_all(self.backend, lambda: build_objective(args, vocabulary, source.kind))

    def training_tokens(self, phase: Phase) -> list[IndexedDataset]:
        return [self.data_sources[phase.number].tokens(path) for path in phase.args.data_path]

    def hold_out(self, phase: Phase) -> T5PretrainingArgs:
        args = super().hold_out(phase)
        for prefix in (*args.data_path, args.valid_data_path):
            self.data_sources[phase.number].add(IndexedDataset(prefix))
        return args

    def build_data(self, phase: Phase, source: ModelSource) -> PretrainingData:
        return pretraining_data(phase.args, self.backend, self.data_sources[phase.number], source.kind)

    def loop_options(self, args: T5PretrainingArgs, source: ModelSource, model: nn.Module) -> dict[str, Any]:
        check_causality(args, model)
        loss = MODEL_LOSS
        if args.task == "mlm":
            loss = replace(loss, most_labels=labels_alone(args, self.backend, model))
        takes_no_logits = "return_logits" in forward_names(model) and args.distill_from is None
        return {
            "batch_transform_fn": without_full_masks(model),
            "batch_metrics_fn": pretraining_metrics,  # none of logits, which modeling_t5 then need not hold whole
            "forward_kwargs": {"return_logits": False} if takes_no_logits else None,
            "generate_kwargs": {"do_sample": False},
            "loss": distilled_loss(args, self.backend, model, source.kind, loss),
        }

    def metric_names(self, args: T5PretrainingArgs) -> Sequence[str]:
        return ("generation_accuracy",) if args.use_generate_on_valid else ()

    def commands(self, folder: str) -> list[str]:
        args, model = self.trainer.args, self.backend.unwrap()
        if args.objective().models == ("encoder",) or not getattr(model, "can_generate", bool)():
            return []
        fills = args.task in ("span_corruption", "ul2")
        if fills and self.data.vocabulary.find("<extra_id_0>") is None:
            return []  # `generate` knows blanks by this name alone
        blank = "<extra_id_0> " if fills else ""
        # A decoder's positions hold the text too.
        return [f"lmtools generate {folder} 'The {blank}text' --max_new_tokens {min(64, args.input_seq_len // 2)}"]

    def report(self) -> None:
        objective = self.trainer.args.objective()
        language_model = unmasked if objective.models == ("encoder",) else continued
        write_report(self.trainer, self.data.vocabulary, written if objective.has_targets else language_model)


def pretraining_metrics(batch: Mapping[str, Any], outputs: Mapping[str, Any]) -> dict[str, Any]:
    """Count correctly generated target tokens, position by position, for the metric `generation_accuracy`.

    Returns {"generation_accuracy": (number correct, number of all)}; empty without `--use_generate_on_valid`.
    """
    if "generation_outputs" not in outputs:
        return {}
    labels, generated = batch["labels"], outputs["generation_outputs"][:, 1:]  # without the start token
    width = min(labels.shape[1], generated.shape[1])
    right = (generated[:, :width] == labels[:, :width]).sum()
    return {"generation_accuracy": (right, (labels != IGNORED_LABEL).sum())}


def without_full_masks(model: nn.Module) -> Callable[[Mapping[str, Any]], Mapping[str, Any]] | None:
    """Return a function that removes an all-ones `attention_mask` from a batch.

    The fused path of our models is faster without a mask. None for a model that does not use the fused path.
    """
    if not getattr(model, "is_fast", False):
        return None

    def transform(batch: Mapping[str, Any]) -> Mapping[str, Any]:
        mask = batch.get("attention_mask")
        if mask is None or not mask.is_cpu or not mask.all():
            return batch
        return {name: value for name, value in batch.items() if name != "attention_mask"}

    return transform


def check_model(args: T5PretrainingArgs, model: ModelSource, vocabulary_size: int) -> None:
    """Check that the model fits the objective and the vocabulary. Raises UserError.

    Reasons are an objective that needs another kind of model, too few positions, or a smaller embedding.
    """
    kind, kinds = model.kind, args.objective().models
    if not args.is_registered_task() and kind not in kinds:
        example = f"choose a class such as {_EXAMPLE_OF[kinds[0]]}"
        is_one_key_away = model.may_be_decoder and "decoder" in kinds
        advice = "set is_decoder to true in its configuration" if is_one_key_away else example
        raise UserError(
            f"--task {args.task} is for {' and '.join(f'{kind}s' for kind in kinds)}, --model_cls {args.model_cls} is "
            f"of kind {kind}: {advice}, or another --task."
        )
    check_vocabulary(model.config, vocabulary_size)
    check_positions(model.config, args.input_seq_len, f"--input_seq_len {args.input_seq_len}")


def check_causality(args: T5PretrainingArgs, model: nn.Module, num_tokens: int = 8) -> None:
    """Check that a decoder's prediction at the first position does not depend on later tokens. Raises UserError."""
    if "decoder" not in args.objective().models or getattr(model.config, "is_encoder_decoder", False):
        return
    ids = torch.arange(num_tokens)[None]
    other = ids.clone()
    other[0, -1] = 0
    with evaluated(model), torch.no_grad():
        first, second = (model(input_ids=row)["logits"][0, 0] for row in (ids, other))
    if not torch.equal(first, second):
        raise UserError(
            f"--task {args.task}: --model_cls {args.model_cls} sees the tokens it is to predict; set is_decoder to "
            "true in its configuration, or choose a class such as transformers:GPT2LMHeadModel."
        )

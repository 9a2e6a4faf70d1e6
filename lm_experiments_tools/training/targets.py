"""Targets: what a model's loss is a mean over. Its class declares it; classes of transformers are known by name.

    class MyModel(nn.Module):
        shifts_labels = True     # token j - 1 predicts label j, so the first label of a row has no prediction
        loss_mean_over = "rows"  # default: "labels"

| `loss_mean_over` | the loss is |
|---|---|
| labels | a mean over labels other than -100 |
| rows | a mean over rows |
| spans | (start + end) / 2, of means over answers whose first or last token is in the text |
| batch | no mean: it compares the rows of a batch, as contrastive losses with in-batch negatives do |

A loss with another divisor, such as the sum of class weights, needs a model that takes `num_items_in_batch` and
divides its sum by it, or returns the sum as `loss_sum` and the divisor as `num_labels`.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass, replace

from torch import Tensor, nn

from lm_experiments_tools.errors import UserError
from lm_experiments_tools.labels import IGNORED_LABEL
from lm_experiments_tools.modules.inspection import base_of, forward_names
from lm_experiments_tools.names import is_of_user

LABELS_MASK = "labels_mask"
NUM_ITEMS = "num_items_in_batch"
SPANS = ("start_positions", "end_positions")
_KINDS = ("labels", "rows", "spans", "batch")
_MEANS = re.compile(
    r"(For(CausalLM|MaskedLM|ConditionalGeneration|(Sequence|Token|Image|Video|Audio)Classification|MultipleChoice|"
    r"NextSentencePrediction)|LMHeadModel)$"
)
# Decoders of transformers whose labels are the tokens after their inputs: the caller shifts them.
_UNSHIFTED = {
    "BartForCausalLM", "BigBirdPegasusForCausalLM", "BlenderbotForCausalLM", "BlenderbotSmallForCausalLM",
    "MBartForCausalLM", "MarianForCausalLM", "MvpForCausalLM", "PLBartForCausalLM", "PegasusForCausalLM",
    "ProphetNetForCausalLM", "TrOCRForCausalLM", "WhisperForCausalLM", "XLMWithLMHeadModel", "XLNetLMHeadModel",
}  # fmt: skip


@dataclass(frozen=True)
class Targets:
    """Divisor of a model's loss: what it is a mean over.

    Attributes:
        shifts_labels: the first label of a row is not predicted.
        mean_over: "labels", "rows", "spans" or "batch".
        takes_count: the model takes `num_items_in_batch`.
        is_declared: False if the other values are assumed.
    """

    shifts_labels: bool = False
    mean_over: str = "labels"
    takes_count: bool = False
    is_declared: bool = True

    def valid(self, labels: Tensor, mask: Tensor | None = None, segment_ids: Tensor | None = None) -> Tensor:
        """Bool mask of the labels that count, of the shape of `labels`, or of `mask` if `labels` have classes.

        Args:
            labels: [rows], [rows, columns], or [rows, columns, classes].
            mask: `labels_mask`, nonzero where a label counts; ignored if the shapes differ.
            segment_ids: document numbers of packed rows, [rows, columns].
        """
        valid = labels != IGNORED_LABEL
        if mask is not None and mask.shape == valid.shape[: mask.dim()]:
            valid = mask.bool() & (valid.flatten(mask.dim()).any(-1) if valid.dim() > mask.dim() else valid)
        if self.shifts_labels and valid.dim() > 1:
            valid = valid.clone()
            valid[:, 0] = False
            if segment_ids is not None:
                valid[:, 1:] &= segment_ids[:, 1:] == segment_ids[:, :-1]
        return valid

    def count(self, name: str, values: Tensor | None, rows: int, width: int) -> int:
        """Count the valid labels in a batch entry other than `labels` (see `valid`).

        Args:
            name: batch entry that holds the labels.
            values: None if the batch lacks the entry.
            width: tokens of a row; answers beyond them do not count.
        """
        if values is None or self.mean_over in ("rows", "batch"):
            return rows
        if name in SPANS:
            return int((values < width).sum())
        return int((values != IGNORED_LABEL).sum())


def targets_of(model: nn.Module) -> Targets:
    """Targets of a model: declared by its class, or known for classes of transformers. Raises UserError."""
    inner = base_of(model)
    classes, names = type(inner).__mro__, forward_names(inner)
    computes = next(cls for cls in classes if "forward" in vars(cls))
    declared = {name for cls in classes[: classes.index(computes) + 1] for name in vars(cls)} | vars(inner).keys()
    found = _known_by_name(inner, [cls.__name__ for cls in classes if not is_of_user(cls)], names)
    own = computes.forward if is_of_user(computes) else getattr(inner, "_loss_function", None)
    if own is not None:
        counts = NUM_ITEMS in inspect.signature(own).parameters
        counts |= "accepts_loss_kwargs" in declared and bool(inner.accepts_loss_kwargs)
        found = replace(found, is_declared=counts, takes_count=counts)
    if "loss_mean_over" in declared:
        found = replace(found, mean_over=inner.loss_mean_over, is_declared=True)
    if found.mean_over not in _KINDS:
        raise UserError(f"{type(inner).__name__}.loss_mean_over is {found.mean_over!r}, not one of {_KINDS}")
    shifts = getattr(inner, "shifts_labels", found.shifts_labels)
    return replace(found, shifts_labels=bool(shifts) and not _is_soft_prompt(model))


def _known_by_name(model: nn.Module, names: list[str], forward: set[str]) -> Targets:
    """Targets of a class of transformers or of this project.

    Args:
        names: the model's classes, without a user's own.
        forward: arguments of its forward.
    """
    config = getattr(model, "config", None)
    is_causal = getattr(model, "loss_type", None) in ("ForCausalLM", "ForConditionalGeneration")
    if not is_causal and any(cls.__module__.startswith("transformers.") for cls in type(model).__mro__):
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        is_causal = not set(names).isdisjoint(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    shifts = is_causal and not getattr(config, "is_encoder_decoder", False) and _UNSHIFTED.isdisjoint(names)
    if "return_loss" in forward:
        return Targets(mean_over="batch")
    if set(SPANS) <= forward and "start_n_top" not in forward and any("QuestionAnswering" in name for name in names):
        return Targets(mean_over="spans")
    is_mean = any(map(_MEANS.search, names)) or "next_sentence_label" in forward
    is_mean &= not getattr(config, "output_router_logits", False)
    return Targets(shifts_labels=shifts, is_declared=is_mean)


def _is_soft_prompt(model: nn.Module) -> bool:
    """True for PEFT's learned tokens before the input, the last of which predicts a row's first label."""
    config = getattr(model, "active_peft_config", None)
    kind = str(getattr(config, "peft_type", "")).rpartition(".")[2]
    return getattr(config, "is_prompt_learning", False) and kind not in ("PREFIX_TUNING", "CARTRIDGE")

"""Packed rows for masked language models: a row holds several documents that do not attend to each other.

Positions restart with each document. Models that accept `segment_ids` (modeling_bert) isolate documents themselves.
For encoders of transformers, `isolate` makes a mask from `position_ids`, within the model's own mask (full or sliding
window):

    position_ids    0 1 2 0 1 0     a document begins at every 0
    segments        1 1 1 2 2 3     tokens attend to those with the same number

The mask is dense, [batch, 1, length, length], and made once per forward pass for each type of layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from lm_experiments_tools.attention.segments import positions_of
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.models.build import first_position
from lm_experiments_tools.modules.inspection import evaluated, forward_names

NAME = "sdpa_of_documents"
_SAME = 1e-4  # relative difference of fp32 logits; isolated documents differ by 1e-6
_PROBED = 256  # tokens of a document at most: more than the windows of published encoders
_segments: list[Tensor] = []  # of the forward pass that is running

Transform = Callable[[Mapping[str, Any]], Mapping[str, Any]]


def prepare(model: nn.Module, length: int) -> Transform | None:
    """Prepare a model for packed rows (several documents each), and test that it isolates their documents.

    Args:
        length: tokens of a row.

    Returns:
        A `batch_transform_fn` that replaces `segment_ids` by `position_ids`; None if the model accepts `segment_ids`.

    Raises:
        UserError: the model cannot isolate documents.
    """
    transform = None if "segment_ids" in forward_names(model) else _with_positions
    reason = isolate(model) if transform else None
    if reason := reason or _failed_check(model, min(_PROBED, (length - 1) // 2), transform or dict):
        raise UserError(
            f"--packing documents: {type(model).__name__} cannot keep the documents of a row apart ({reason}); choose "
            "--packing none, or a class such as modeling_bert:BertForMaskedLM."
        )
    return transform


def isolate(model: nn.Module) -> str | None:
    """Make a transformers encoder isolate the documents of packed rows by their `position_ids`.

    Returns None, or the reason if the model cannot.
    """
    if "position_ids" not in forward_names(model):
        return "it takes neither segment_ids nor position_ids"
    implementation = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if implementation != "sdpa":
        return f"its attention is {implementation}, not sdpa"
    AttentionInterface.register(NAME, sdpa_attention_forward)
    AttentionMaskInterface.register(NAME, _mask_of_documents)
    model.set_attn_implementation(NAME)
    first = first_position(model)

    def enter(_: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        positions = kwargs.get("position_ids")
        if positions is None:
            return args, kwargs
        _segments[:] = [(positions == 0).cumsum(-1)]
        return args, {**kwargs, "position_ids": positions + first}

    model.register_forward_pre_hook(enter, with_kwargs=True)
    model.register_forward_hook(lambda *_: _segments.clear(), always_call=True)
    return None


def _mask_of_documents(*sizes: Any, attention_mask: Tensor | None = None, **options: Any) -> Tensor | None:
    """transformers' mask function. Padding is a document of its own, so that every token sees at least itself."""
    if not _segments:
        return sdpa_mask(*sizes, attention_mask=attention_mask, **options)
    options |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    mask, segments = sdpa_mask(*sizes, **options), _segments[0]
    return mask & (segments[:, None, :, None] == segments[:, None, None, :])


def _with_positions(batch: Mapping[str, Any]) -> Mapping[str, Any]:
    others = {name: value for name, value in batch.items() if name != "segment_ids"}
    return {**others, "position_ids": positions_of(batch["segment_ids"])}


def _failed_check(model: nn.Module, length: int, transform: Transform) -> str | None:
    """What differs between a row of two documents of `length` tokens with padding and these documents alone."""
    device, random = next(model.parameters()).device, torch.Generator().manual_seed(0)
    ids = torch.randint(model.get_input_embeddings().weight.shape[0], (2, length), generator=random).to(device)
    segments = torch.tensor([[1] * length + [2] * length + [0]], device=device)
    if (pad := getattr(model.config, "pad_token_id", None)) is not None:  # some models count positions without it
        ids = ids.masked_fill(ids == pad, pad - 1 if pad else 1)
    row = {"input_ids": torch.cat([*ids, ids[0, :1]])[None], "segment_ids": segments}
    try:
        with evaluated(model), torch.no_grad(), torch.compiler.set_stance("force_eager"):
            alone = _logits(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}).flatten(0, 1)
            found = _logits(model, transform({**row, "attention_mask": (segments > 0).long()}))[0, : 2 * length]
    except (IndexError, ValueError) as error:  # too few positions, or a layout over the whole row
        return " ".join(str(error).split())
    same = (found - alone).abs().max() <= _SAME * alone.abs().max()
    return None if same else "the documents of a row see each other"


def _logits(model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
    outputs = model(**inputs)
    return outputs["prediction_logits" if "prediction_logits" in outputs else "logits"].float()

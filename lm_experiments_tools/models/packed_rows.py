"""Packed rows for masked language models: a row holds several documents that do not attend to each other.

Positions restart with each document. Models that accept `segment_ids` (modeling_bert) isolate documents themselves.
For encoders of transformers, `prepare` makes a mask from `position_ids`, where each 0 begins a document, within the
model's own mask (full or sliding window).

The mask is dense, [batch, 1, length, length], and made once per forward pass for each type of layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from lm_experiments_tools.attention.segments import positions_of
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.models.build import first_position
from lm_experiments_tools.modules.inspection import forward_names

NAME = "sdpa_of_documents"
_segments: list[Tensor] = []  # of the forward pass that is running

Transform = Callable[[Mapping[str, Any]], Mapping[str, Any]]


def prepare(model: PreTrainedModel) -> Transform | None:
    """Prepare a model for packed rows (several documents each). Raises UserError.

    An encoder of transformers must declare `_supports_attention_backend` and accept `position_ids`.

    Returns:
        A `batch_transform_fn` that replaces `segment_ids` by `position_ids`; None if the model accepts `segment_ids`.
    """
    names = forward_names(model)
    if "segment_ids" in names:
        return None
    is_declared = getattr(model, "_supports_attention_backend", False) and not model.config.is_encoder_decoder
    if not is_declared or "position_ids" not in names or model.config._attn_implementation != "sdpa":
        raise UserError(
            f"--packing documents: {type(model).__name__} cannot keep the documents of a row apart (it takes no "
            "segment_ids, and no position_ids with sdpa by transformers' attention interface); choose --packing none, "
            "or a class such as modeling_bert:BertForMaskedLM."
        )
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
    return _with_positions


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

"""Packed rows: several isolated documents in one row, with the same outputs as in rows of their own.

One worked example, documents of 3 and 2 tokens in a row of 6; 0 is padding::

    segment_ids     1 1 1 2 2 0     tokens see those of their own number, padding sees padding
    position_ids    0 1 2 0 1 0     begin again with every document
    starts          0 3             where the documents begin, whose states there are pooled
    labels          7 4             of documents 1 and 2; -100 in rows that have fewer
"""

from typing import Any

import torch
from torch import Tensor

from lm_experiments_tools.attention.kernels.spec import AttentionSpec
from lm_experiments_tools.attention.positions import PositionScheme, RotaryPosition
from modeling_bert.configuration_bert import BertConfig


def positions_of(segment_ids: Tensor) -> Tensor:
    """Position of each token in its document, int64 [B, L], from segment IDs int [B, L]."""
    places = torch.arange(segment_ids.shape[1], device=segment_ids.device).expand_as(segment_ids)
    begins = segment_ids != segment_ids.roll(1, -1)
    return places - places.where(begins, 0).cummax(-1).values


def starts_of(segment_ids: Tensor, num_segments: int) -> Tensor:
    """The place in its row of the first token of each document, int64 [B, num_segments]; 0 for one that is not there.

    Numbers int [B, L] run from 1 on.
    """
    numbers = torch.arange(1, num_segments + 1, device=segment_ids.device)
    return (segment_ids[:, None] == numbers[:, None]).byte().argmax(-1)


def spec_of_packed_rows(
    segment_ids: Tensor, spec: AttentionSpec, config: BertConfig, position: PositionScheme
) -> tuple[AttentionSpec, int | Tensor]:
    """The attention of packed rows, and the position offset of each token for schemes that rotate.

    Masked tokens become padding, which only padding attends to.

    Raises:
        ValueError: a layout of blocks, or a mask of more than tokens.
    """
    if config.sparse_config_cls is not None:
        raise ValueError(
            f"sparse_config_cls={config.sparse_config_cls!r} lays its blocks over the row, so what a document of a "
            "packed row (segment_ids) looks at would depend on its place."
        )
    if spec.mask is not None:
        raise ValueError("segment_ids and an attention_mask of more than [batch, length]: give one of the two.")
    offset = 0
    if isinstance(position, RotaryPosition):
        offset = (positions_of(segment_ids) - torch.arange(segment_ids.shape[1], device=segment_ids.device))[:, None]
    if spec.key_padding_mask is not None:
        segment_ids = segment_ids.masked_fill(~spec.key_padding_mask, 0)
    return AttentionSpec(segment_ids=(segment_ids, segment_ids)), offset


def of_documents(segment_ids: Tensor | None, labels: Tensor | None) -> dict[str, Any]:
    """Arguments of packed rows for `BertModel`; labels of documents [B, S, ...] say how many a row has at most.

    Raises:
        ValueError: labels of rows.
    """
    if segment_ids is None:
        return {}
    if labels is not None and labels.dim() < 2:
        raise ValueError(f"labels are {list(labels.shape)}: those of packed rows are [batch, documents of a row].")
    return {"segment_ids": segment_ids, "num_segments": None if labels is None else labels.shape[1]}

"""Packed rows for BERT: a row holds several documents that do not attend to each other.

Outputs equal those of separate rows. One worked example, documents of 3 and 2 tokens in a row of 6; 0 is padding::

    segment_ids     1 1 1 2 2 0     tokens attend to the same number, padding to padding
    position_ids    0 1 2 0 1 0     restart with every document
    starts          0 3             indices of the documents' first tokens, which are pooled
    labels          7 4             of documents 1 and 2; -100 for documents that a row lacks
"""

from typing import Any

import torch
from torch import Tensor

from lm_experiments_tools.attention.kernels.spec import AttentionSpec
from lm_experiments_tools.attention.positions import PositionScheme, RotaryPosition
from modeling_bert.configuration_bert import BertConfig


def positions_of(segment_ids: Tensor) -> Tensor:
    """Compute the position of each token in its document, for packed rows: int64 [batch, length].

    Args:
        segment_ids: document ID of each token, int [batch, length].
    """
    places = torch.arange(segment_ids.shape[1], device=segment_ids.device).expand_as(segment_ids)
    begins = segment_ids != segment_ids.roll(1, -1)
    return places - places.where(begins, 0).cummax(-1).values


def starts_of(segment_ids: Tensor, num_segments: int) -> Tensor:
    """Find the first token of each document in packed rows: its index, int64 [batch, num_segments].

    Documents that a row lacks have the index 0.

    Args:
        segment_ids: document ID of each token, int [batch, length], from 1 on.
        num_segments: largest number of documents in a row.
    """
    numbers = torch.arange(1, num_segments + 1, device=segment_ids.device)
    return (segment_ids[:, None] == numbers[:, None]).byte().argmax(-1)


def spec_of_packed_rows(
    segment_ids: Tensor, spec: AttentionSpec, config: BertConfig, position: PositionScheme
) -> tuple[AttentionSpec, int | Tensor]:
    """Attention settings for packed rows, and each token's position offset for `PositionScheme.rotate`.

    Masked tokens are treated as padding.

    Args:
        segment_ids: document ID of each token, int [batch, length].
        spec: the masks of the call.
        position: the layers' positional encoding; only rotary ones need offsets.

    Raises:
        ValueError: a block-sparse layout, or a mask other than [batch, length].
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
    """Arguments `segment_ids` and `num_segments` of `BertModel.forward` for packed rows; none if rows are not packed.

    Args:
        segment_ids: document ID of each token, [batch, length]; None for rows that are not packed.
        labels: [batch, documents, ...], a label for each document, which gives the number of documents; or None.

    Raises:
        ValueError: labels have no dimension for documents.
    """
    if segment_ids is None:
        return {}
    if labels is not None and labels.dim() < 2:
        raise ValueError(f"labels are {list(labels.shape)}: those of packed rows are [batch, documents of a row].")
    return {"segment_ids": segment_ids, "num_segments": None if labels is None else labels.shape[1]}

"""Rows of packed documents, and each document by itself."""

from __future__ import annotations

import torch
from torch import Tensor

LENGTHS = [[7, 4, 9], [20, 2], [1, 1, 1, 5]]  # of the documents of three rows


def packed_rows(
    lengths: list[list[int]] = LENGTHS, padding: int = 3, lowest: int = 1
) -> tuple[dict[str, Tensor], list[tuple[int, int, Tensor]]]:
    """A batch of rows that end in padding, and (row, number in the row, ids [1, length]) of each document."""
    generator = torch.Generator().manual_seed(0)
    width = max(map(sum, lengths)) + padding
    ids, segments = torch.zeros(2, len(lengths), width, dtype=torch.long)
    documents = []
    for row, row_lengths in enumerate(lengths):
        end = 0
        for number, length in enumerate(row_lengths, 1):
            document = torch.randint(lowest, 60, (1, length), generator=generator)
            ids[row, end : end + length], segments[row, end : end + length] = document[0], number
            documents.append((row, number, document))
            end += length
    return {"input_ids": ids, "segment_ids": segments, "attention_mask": (segments > 0).long()}, documents

"""Tensors whose elements are divided between workers, or between files.

FSDP2's shards of the first dimension and ZeRO's partitions of flattened parameters are both ranges of a tensor's
elements in row-major order, so one form serves all backends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class SlicedTensor:
    """Ranges of the elements of a tensor, in row-major order: those that a worker holds, or all, in files.

    Attributes:
        shape: of the full tensor.
        parts: (index of the first element, flat values), by index.
    """

    shape: torch.Size
    parts: tuple[tuple[int, Tensor], ...] = ()

    @property
    def dtype(self) -> torch.dtype:
        return self.parts[0][1].dtype

    def elements(self, start: int, stop: int) -> Tensor:
        """Elements `start` to `stop`, flat; the parts must have them. A view if they are in one part."""
        found = [
            values[max(start - first, 0) : stop - first]
            for first, values in self.parts
            if first < stop and start < first + len(values)
        ]
        return found[0] if len(found) == 1 else torch.cat(found) if found else self.parts[0][1][:0]


def elements(value: Tensor | SlicedTensor, start: int, stop: int) -> Tensor:
    """Elements `start` to `stop` of a tensor in row-major order, as a flat tensor."""
    return value.elements(start, stop) if isinstance(value, SlicedTensor) else value.flatten()[start:stop]


def full(value: Tensor | SlicedTensor) -> Tensor:
    """The full tensor, which the parts must cover."""
    return value.elements(0, value.shape.numel()).view(value.shape) if isinstance(value, SlicedTensor) else value


def assign(sizes: Mapping[str, int], world_size: int) -> dict[str, int]:
    """Assign each name to a rank, so that the ranks' total sizes are close: the largest one first."""
    totals, ranks = [0] * world_size, {}
    for name in sorted(sizes, key=sizes.__getitem__, reverse=True):
        ranks[name] = totals.index(min(totals))
        totals[ranks[name]] += sizes[name]
    return ranks

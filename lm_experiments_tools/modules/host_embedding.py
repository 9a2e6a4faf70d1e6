"""Embeddings that stay in main memory while the rest of a model is on a GPU."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class HostEmbedding(nn.Embedding):
    """An embedding that stays in main memory whatever device its model moves to; its output follows the inputs."""

    def _apply(self, fn: Any, recurse: bool = True) -> HostEmbedding:
        return self

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.to(self.weight.device)).to(input.device)

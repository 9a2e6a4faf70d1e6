"""Memory alignment: MKL rounds a product with a single row by the address of its operands."""

from __future__ import annotations

from itertools import chain

import torch
from torch import Tensor, nn

ALIGNMENT = 64  # bytes: torch allocates at multiples of it; safetensors files and slices of a batch do not


def aligned(tensor: Tensor) -> Tensor:
    """The tensor, or an aligned copy of a floating-point one whose memory is not."""
    return tensor.clone() if tensor.is_floating_point() and tensor.data_ptr() % ALIGNMENT else tensor


def align_model(model: nn.Module) -> None:
    """Align the parameters and buffers of a model in place, copying one at a time.

    Weights that `from_pretrained` maps from a file and weights that a backend copies then give the same bits.
    """
    for tensor in chain(model.parameters(), model.buffers()):
        if type(tensor.data) is torch.Tensor:  # not a shard (DTensor)
            tensor.data = aligned(tensor.data)

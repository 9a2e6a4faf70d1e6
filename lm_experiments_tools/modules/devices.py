"""Tensors in memory: alignment, embeddings on the host, and asynchronous reads of a device."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

ALIGNMENT = 64  # bytes; torch allocates at multiples of it, but safetensors files and slices of a batch do not


def aligned(tensor: Tensor) -> Tensor:
    """Copy a floating-point tensor to an aligned address if needed, because MKL's rounding depends on the address."""
    return tensor.clone() if tensor.is_floating_point() and tensor.data_ptr() % ALIGNMENT else tensor


def align_model(model: nn.Module) -> None:
    """Align the parameters and buffers of a model in place (see `aligned`), so that equal weights give equal bits."""
    for tensor in chain(model.parameters(), model.buffers()):
        if type(tensor.data) is torch.Tensor:  # not a shard (DTensor)
            tensor.data = aligned(tensor.data)


class HostEmbedding(nn.Embedding):
    """Embedding that stays in main memory when its model moves to a GPU; outputs are copied to the inputs' device."""

    def _apply(self, fn: Any, recurse: bool = True) -> HostEmbedding:
        return self

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.to(self.weight.device)).to(input.device)


def synchronize(device: torch.device) -> None:
    """Wait for all work queued on a GPU; nothing to do on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def read_later(value: Tensor) -> Callable[[], float | bool | list]:
    """Start an asynchronous copy to the host; the returned function waits for it and returns a number or list."""
    copy = value.detach().to("cpu", non_blocking=value.device.type in ("cpu", "cuda"))
    if value.device.type != "cuda":
        return copy.tolist
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(value.device))

    def read() -> float | bool | list:
        event.synchronize()
        return copy.tolist()

    return read

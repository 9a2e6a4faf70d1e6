"""Values of a device that are asked for now and read later, so that the host does not wait for the device."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def read_later(value: Tensor) -> Callable[[], float | bool]:
    """Copy a scalar to the host behind all that its device has queued; what is returned waits for it, and gives it."""
    copy = value.detach().to("cpu", non_blocking=value.device.type in ("cpu", "cuda"))
    if value.device.type != "cuda":
        return copy.item
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(value.device))

    def read() -> float | bool:
        event.synchronize()
        return copy.item()

    return read

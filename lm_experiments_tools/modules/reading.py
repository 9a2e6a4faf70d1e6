"""Values of a device that are asked for now and read later, so that the host does not wait for the device."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def read_later(value: Tensor) -> Callable[[], float | bool | list]:
    """Copy numbers to the host behind all that their device has queued; what is returned waits for them and gives
    them as Python's: of a scalar one, else a list.
    """
    copy = value.detach().to("cpu", non_blocking=value.device.type in ("cpu", "cuda"))
    if value.device.type != "cuda":
        return copy.tolist
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(value.device))

    def read() -> float | bool | list:
        event.synchronize()
        return copy.tolist()

    return read

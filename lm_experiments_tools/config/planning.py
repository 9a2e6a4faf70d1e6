"""Arguments of `lmtools plan`, besides those of the script whose run is planned. Standard library only."""

import re
from dataclasses import dataclass
from typing import Annotated, Literal

from lm_experiments_tools.config.flags import COUNT
from lm_experiments_tools.errors import UserError

_UNITS = {"": 1, "B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True, kw_only=True)
class PlanningArgs:
    """What is planned for."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the run is to be; auto: a GPU if this machine has one."""
    trace: bool = True
    """Also trace two steps of the model on tensors without data, in seconds; --no_trace: formulas alone."""
    workers: Annotated[int, COUNT] = 1
    """Processes of the run, each with a batch of its own."""
    sharding: Literal["none", "zero1", "zero2", "zero3", "fsdp"] = "none"
    """What the workers divide among them: optimizer state (zero1), gradients too (zero2), weights too (the others)."""
    offload: Literal["none", "optimizer", "all"] = "none"
    """What a GPU's run keeps in main memory: state, for an update on the CPU (optimizer: ZeRO), or weights too (all:
    ZeRO 3, FSDP). Also says what that costs in time."""
    fit: str | None = None
    """Memory to fit into, as 24GiB, or auto for this device's: proposes micro-batch, accumulation, checkpointing and
    optimizer for the same global batch."""

    def check(self) -> None:
        if self.fit not in (None, "auto"):
            bytes_of(self.fit)
        fits = {"optimizer": ("zero1", "zero2", "zero3"), "all": ("zero3", "fsdp")}.get(self.offload)
        if fits is not None and self.sharding not in fits:
            raise UserError(f"--offload {self.offload} is for --sharding {' or '.join(fits)}, not {self.sharding}")
        if self.sharding != "none" and self.workers == 1 and self.offload == "none":
            raise UserError(f"--sharding {self.sharding} divides among workers: add --workers N, for example 8")


def bytes_of(text: str) -> int:
    """24GiB, 24G, 24576MiB or bytes, as bytes. Raises UserError."""
    match = re.fullmatch(r"\s*([\d.]+)\s*([KMGT]?)(i?B)?\s*", text, re.IGNORECASE)
    try:
        size = int(float(match[1]) * _UNITS[match[2].upper()]) if match else 0
    except ValueError:
        size = 0
    if size <= 0:
        raise UserError(f"--fit {text} is no size: give one such as 24GiB or 800MiB, or auto for this device's memory")
    return size

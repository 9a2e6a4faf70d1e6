"""Arguments of `lmtools plan`, in addition to those of a script. Standard library only."""

import re
from dataclasses import dataclass
from typing import Annotated, Literal

from lm_experiments_tools.config.flags import COUNT
from lm_experiments_tools.errors import UserError

_UNITS = {"": 1, "B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True, kw_only=True)
class PlanningArgs:
    """The hardware for which the memory of a run is estimated."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the run; auto: a GPU if this machine has one."""
    workers: Annotated[int, COUNT] = 1
    """Processes of the run, each with a batch of its own."""
    sharding: Literal["none", "zero1", "zero2", "zero3", "fsdp"] = "none"
    """Tensors divided among the workers: optimizer state (zero1), gradients too (zero2), weights too (the others)."""
    fit: str | None = None
    """Memory to fit into, as 24GiB, or auto for this device's: proposes micro-batch, accumulation, checkpointing and
    optimizer for the same global batch."""

    def check(self) -> None:
        if self.fit not in (None, "auto"):
            bytes_of(self.fit)
        if self.sharding != "none" and self.workers == 1:
            raise UserError(f"--sharding {self.sharding} divides among workers: add --workers N, for example 8")


def bytes_of(text: str) -> int:
    """Parse a size such as 24GiB, 24G (the same) or 24576MiB into bytes. Raises UserError."""
    match = re.fullmatch(r"\s*([\d.]+)\s*([KMGT]?)(i?B)?\s*", text, re.IGNORECASE)
    try:
        size = int(float(match[1]) * _UNITS[match[2].upper()]) if match else 0
    except ValueError:
        size = 0
    if size <= 0:
        raise UserError(f"--fit {text} is no size: give one such as 24GiB or 800MiB, or auto for this device's memory")
    return size

"""Find settings with the same global batch that fit into a given amount of memory."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import psutil
import torch

from lm_experiments_tools.config.planning import bytes_of
from lm_experiments_tools.errors import RunError, UserError
from lm_experiments_tools.files import human_bytes
from lm_experiments_tools.modules.devices import available_memory
from lm_experiments_tools.planning.estimate import MemoryEstimate

if TYPE_CHECKING:
    from lm_experiments_tools.config.training import ExperimentArgs

    Estimate = Callable[[ExperimentArgs], MemoryEstimate]

_REFUSED = ("DefaultCPUAllocator", "can't allocate memory", "out of memory")  # in torch's RuntimeErrors
_PROCESS = 0.75 * 2**30  # bytes of a training process without tensors, with a tokenizer, a loader and logs
USABLE = 0.92  # of the memory: the rest is the allocator's, and on a GPU CUDA's own


class Fit(NamedTuple):
    """Settings with which a run fits into a memory, their estimate, and the changed flags as text ("" if none)."""

    args: ExperimentArgs
    estimate: MemoryEstimate
    flags: str

    def __str__(self) -> str:
        size = human_bytes(self.estimate.total)
        if not self.flags:
            return f"fits as it is, {size}"
        advice = "; another optimizer needs another learning rate" if "--optimizer" in self.flags else ""
        return f"{self.flags}\n  estimated at {size}; still {self.args.rows_per_worker()} rows an update{advice}"


def memory_of(device: str) -> int:
    """Return the free bytes of the GPU ("cuda") or of main memory and the container ("cpu"). Raises UserError."""
    if device == "cpu":
        return available_memory()
    if not torch.cuda.is_available():
        raise UserError("--fit auto: PyTorch finds no GPU (see CUDA_VISIBLE_DEVICES). Pass a size, such as 24GiB.")
    return torch.cuda.mem_get_info()[0]


def memory_for_tensors(fit: str, device: str) -> float:
    """Return the bytes that tensors may take: `fit` ("24GiB", or "auto" for the free memory) less a reserve.

    On a CPU also less the process itself. Raises UserError if nothing is left.
    """
    memory = memory_of(device) if fit == "auto" else bytes_of(fit)
    process = max(_PROCESS, psutil.Process().memory_info().rss) if device == "cpu" else 0
    if USABLE * memory <= process:
        raise UserError(f"--fit {fit}: {human_bytes(memory)} is too little. The process takes {human_bytes(process)}.")
    return USABLE * memory - process


def largest_fit(args: ExperimentArgs, estimate: Estimate, memory: float) -> Fit:
    """Find the largest micro-batch whose estimate is at most `memory` bytes, with the same number of rows per update.

    If none fits, gradient checkpointing is tried, then Adafactor. Raises UserError if not even one row fits.
    """
    for optimizer in dict.fromkeys([args.optimizer, "Adafactor"]):
        options = {} if optimizer == args.optimizer else {"optimizer_options": ()}
        for checkpointing in dict.fromkeys([args.gradient_checkpointing, True]):
            tried = replace(args, gradient_checkpointing=checkpointing, optimizer=optimizer, **options)
            found, estimated = _largest_micro_batch(tried, estimate, memory)
            if found is not None:
                names = "batch_size", "gradient_accumulation_steps", "gradient_checkpointing", "optimizer"
                changed = {n: getattr(found, n) for n in names if getattr(found, n) != getattr(args, n)}
                flags = [f"--{name}" if value is True else f"--{name} {value}" for name, value in changed.items()]
                return Fit(found, estimated, " ".join(flags))
    raise UserError(
        f"{human_bytes(memory)} for tensors is too little: micro-batches of one row with gradient checkpointing and "
        f"Adafactor still need {human_bytes(estimated.total)}. Shorten the rows, shard the model (--workers N "
        "--sharding fsdp), or take adapters or a smaller model."
    )


def _largest_micro_batch(
    args: ExperimentArgs, estimate: Estimate, memory: float
) -> tuple[ExperimentArgs | None, MemoryEstimate]:
    """Settings with the largest one that fits, and their estimate; None and the estimate of one row if none does."""
    rows = args.rows_per_worker()

    @cache
    def tried(size: int) -> tuple[ExperimentArgs, MemoryEstimate]:
        settings = replace(args, batch_size=size, gradient_accumulation_steps=rows // size)
        return settings, estimate(settings)

    sizes = [size for size in range(1, rows + 1) if rows % size == 0]
    index = bisect_left(sizes, True, key=lambda size: tried(size)[1].total > memory)
    return tried(sizes[index - 1]) if index else (None, tried(1)[1])


def is_out_of_memory(error: BaseException) -> bool:
    """Return True for an out-of-memory error of torch, numpy or Python, on a GPU or a CPU."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _REFUSED)


@contextmanager
def out_of_memory_explained(args: ExperimentArgs) -> Iterator[None]:
    """Context for training that turns an out-of-memory error into a RunError with advice on what to try next."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError is a RuntimeError
        if not is_out_of_memory(error):
            raise
        reason = str(error).rpartition("DefaultCPUAllocator: ")[2].split(". ")[0] or "Python's own objects"
        raise RunError(
            f"out of memory ({reason}) with micro-batches of {args.batch_size}. Try a smaller --batch_size with more "
            "--gradient_accumulation_steps, or let `lmtools plan --fit auto` find settings for the same global batch; "
            "docs/out_of_memory.md has more."
        ) from error

"""What offloading to main memory costs each optimizer step: bytes over the bus, and the update on the CPU; no torch.

Counted is what DeepSpeed (0.19) and FSDP2 copy. ZeRO-Offload's paper (Ren et al. 2021, arXiv 2101.06840) has 2 N down
and 2 N up in 16 bits; DeepSpeed sends float32 gradients to the optimizer, and with ZeRO 2 (of several micro-batches)
and 3 those of each micro-batch to and fro besides.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from lm_experiments_tools.config.planning import PlanningArgs
    from lm_experiments_tools.config.training import ExperimentArgs
    from lm_experiments_tools.planning.shapes import Model

REUSED = 5e8  # parameters that ZeRO 3 keeps gathered from forward to backward pass: half its stage3_max_reuse_distance
_PCIE = 25e9  # bytes a second of pinned memory, each way, over PCIe 4.0 x16
_COPIED, _ROUNDS = 2**26, 5  # bytes, and how often, to measure with


@dataclass(frozen=True)
class Offload:
    """Bytes of one worker."""

    down: float  # to main memory, in an optimizer step
    up: float
    touched: float  # of main memory, read and written by the update
    held: float  # of main memory
    value: int  # of a weight or gradient on the GPU: DeepSpeed casts the model, FSDP2 keeps float32


class Rate(NamedTuple):
    """Bytes a second, and where the number is from."""

    speed: float
    source: str


def offload_of(args: ExperimentArgs, planning: PlanningArgs, model: Model, trained: int, state: float) -> Offload:
    """The cost of `--offload`, at DeepSpeed's default thresholds.

    Args:
        trained: parameters.
        state: bytes of the optimizer's, of all workers together.
    """
    kind, passes, workers = planning.sharding, args.gradient_accumulation_steps, planning.workers
    weights = model.parameters()
    touched = 12 * trained + 2 * state  # gradients read, weights and state read and written
    if kind == "fsdp":
        blocks = model.encoder_layers * model.encoder_block + model.decoder_layers * model.decoder_block
        size, down, up = 4, 4 * trained, 4 * passes * (weights + blocks)  # blocks for either pass, the rest once
        held = 4 * (weights + trained) + state
    else:
        size = 2 if args.bf16 or args.fp16 else 4
        kept = 0 if kind == "zero1" or (kind == "zero2" and passes == 1) else passes  # times, to be added up
        returned = kept if kind == "zero3" else max(kept - 1, 0)
        down, up = (4 + size * kept) * trained, size * returned * trained
        held = (8 + size * (1 + bool(kept))) * trained + state
        touched += (4 + size) * trained
        if planning.offload == "all":  # a shared table comes for each of its uses, which is left out
            up += size * passes * (weights + max(0, weights - REUSED))
            held += size * weights
        else:
            up += size * trained
    return Offload(down / workers, up / workers, touched / workers, held / workers, size)


def memory_rate() -> Rate:
    """Of main memory, reads and writes together, as one thread copies now."""
    source, target = bytearray(_COPIED), memoryview(bytearray(_COPIED))
    best = float("inf")
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        target[:] = source
        best = min(best, time.perf_counter() - start)
    return Rate(2 * _COPIED / best, "one thread's copy, measured here; the workers of a machine share its memory")


def link_rate(*, measured: bool) -> Rate:
    """Of the way between main memory and GPU, the slower direction; a stated one where no GPU can be asked.

    Args:
        measured: torch may be loaded for it.
    """
    if measured:
        import torch

        if torch.cuda.is_available():
            host = torch.empty(_COPIED, dtype=torch.uint8, pin_memory=True)
            device = host.to("cuda")
            return Rate(min(_copied(host, device), _copied(device, host)), "measured here, pinned memory")
    return Rate(_PCIE, "assumed: pinned memory over PCIe 4.0 x16; not measured")


def _copied(source: object, target: object) -> float:
    """Bytes a second of the best of a few copies."""
    import torch

    best = float("inf")
    for _ in range(_ROUNDS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return _COPIED / best

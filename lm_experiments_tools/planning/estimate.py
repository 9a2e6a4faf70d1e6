"""Estimate the memory of one worker by tracing a training step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from transformers.modeling_layers import GradientCheckpointingLayer

from lm_experiments_tools.backends.launch import cpu_asked
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.planning.build import prepare, resolve
from lm_experiments_tools.planning.trace import Moment, Prepared, Trace, trace_step

if TYPE_CHECKING:
    from lm_experiments_tools.config.planning import PlanningArgs
    from lm_experiments_tools.config.training import ExperimentArgs

# Raised by the code of models that reads tensors without data.
_FAILURES = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, NotImplementedError, AssertionError)
_SHARD_WEIGHTS = ("fsdp", "zero3")
_FUSION_BUFFER = 128 * 2**20  # bytes, Horovod's default
_ZERO3_LIVE = 4 * 5 * 10**8  # bytes of parameters that ZeRO 3 leaves gathered: half its stage3_max_reuse_distance


@dataclass(frozen=True)
class MemoryEstimate:
    """The largest memory of one worker during a training step, as estimated without running the step.

    Attributes:
        parts: bytes of "parameters", "gradients", "optimizer state", "activations" and "communication".
        phase: when the memory is largest: "forward", "backward" or "update".
        device: "cpu" or "cuda".
        args: the settings, with `--speed auto` replaced by what it chose.
    """

    parts: dict[str, float]
    phase: str
    device: str
    args: ExperimentArgs
    prepared: Prepared

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    def lines(self) -> list[str]:
        args, (model, _, batch, dtype) = self.args, self.prepared
        counts = [sum(p.numel() for p in model.parameters() if p.requires_grad or not only) for only in (False, True)]
        inputs = {name: " x ".join(map(str, batch[name].shape)) for name in ("input_ids", "labels")}
        numbers = "float32" if dtype is None else f"{str(dtype).removeprefix('torch.')} layers"
        checkpointing = ", gradient checkpointing" if args.gradient_checkpointing else ""
        lines = [
            f"{args.model_cls or type(model).__name__}: {counts[0]:,} parameters, {counts[1]:,} of them trained",
            f"input_ids {inputs['input_ids']}, labels {inputs['labels']}, {numbers}, {args.optimizer}{checkpointing}, "
            f"on {self.device}",
            "",
            f"{'at the peak':<26}{'GiB':>10}{'share':>8}",
        ]
        for name, size in {**self.parts, f"total, in the {self.phase} phase": self.total}.items():
            if size:
                lines.append(f"  {name:<24}{size / 2**30:>10.3f}{size / self.total:>8.0%}")
        if self.device == "cuda" and not torch.cuda.is_available():
            lines.append(
                "note: traced with the kernels of a CPU. Fused attention of a GPU needs less, logits of modeling_t5 "
                "up to 1/64 of its memory more."
            )
        return lines


def estimate_memory(args: ExperimentArgs, planning: PlanningArgs, origins: Mapping[str, str]) -> MemoryEstimate:
    """Estimate the memory of one worker by running a training step on tensors without data.

    Raises UserError, also for a model whose forward pass reads the values of tensors.
    """
    device = device_of(planning.device)
    args = resolve(args, origins, device)
    traced_on, is_alone = device if torch.cuda.is_available() else "cpu", planning.sharding == "none"
    if planning.sharding in _SHARD_WEIGHTS:
        args = replace(args, speed="off")  # hooks that gather weights keep our models from their fused path
    try:
        trace, prepared = trace_step(lambda: prepare(args, traced_on), casts_weights=is_alone)
    except _FAILURES as error:
        if isinstance(error, UserError):
            raise
        reason = " ".join(str(error).split())[:160]
        raise UserError(f"{args.model_cls} cannot be traced: {type(error).__name__}: {reason}") from error
    parts = {moment: _parts_of_worker(moment, trace, prepared, args, planning) for moment in trace.moments}
    peak = max(parts, key=lambda moment: sum(parts[moment].values()))
    return MemoryEstimate(parts[peak], peak.phase, device, args, prepared)


def device_of(requested: str) -> str:
    """Return "cpu" or "cuda"; "auto" means cuda if PyTorch can use a GPU."""
    if requested != "auto":
        return requested
    return "cuda" if torch.cuda.is_available() and not cpu_asked() else "cpu"


def _parts_of_worker(
    moment: Moment, trace: Trace, prepared: Prepared, args: ExperimentArgs, planning: PlanningArgs
) -> dict[str, float]:
    """Divide what is sharded, and add what workers send and gather."""
    workers, sharding = planning.workers, planning.sharding
    shards_weights, is_alone = sharding in _SHARD_WEIGHTS, sharding == "none"
    has_buckets = workers > 1 and is_alone and args.backend != "horovod"  # of DDP, whose views gradients are
    holds_gradients = args.gradient_accumulation_steps > 1 or has_buckets
    gradients = trace.gradients if holds_gradients else moment.gradients
    communication = 0.0
    if shards_weights:
        communication = _gathered(prepared, trace, sharding)
    elif args.reproducible != "off" and is_alone:
        communication = 2 * trace.gradients  # sums in float64
    elif workers > 1:
        communication = trace.gradients / 2 if args.fp16_allreduce else 0
        communication += min(_FUSION_BUFFER, trace.gradients) if args.backend == "horovod" else 0
    return {
        "parameters": trace.parameters / (workers if shards_weights else 1),
        "gradients": gradients / (workers if shards_weights or sharding == "zero2" else 1),
        "optimizer state": trace.state / (1 if is_alone else workers),
        "activations": moment.activations / (workers if moment.phase == "update" and not is_alone else 1),
        "communication": communication,
    }


def _gathered(prepared: Prepared, trace: Trace, sharding: str) -> int:
    """Bytes of what is gathered: parameters outside of blocks, two blocks' parameters, one block's gradients."""
    blocks = [module for module in prepared.model.modules() if isinstance(module, GradientCheckpointingLayer)]
    sizes = [sum(p.nbytes for p in block.parameters()) for block in blocks]
    gathered = max(0, trace.parameters - sum(sizes)) + 3 * max(sizes, default=0)
    if sharding == "zero3":
        gathered = max(gathered, min(trace.parameters, _ZERO3_LIVE))
    return gathered if prepared.dtype is None else gathered // 2

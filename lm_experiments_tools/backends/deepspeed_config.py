"""Fill the open settings of a DeepSpeed configuration from the training arguments, and check the others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from lm_experiments_tools.errors import UserError

if TYPE_CHECKING:
    from lm_experiments_tools.config.training import TrainerArgs

# Elementwise optimizers. ZeRO flattens all parameters, so optimizers that need matrices (Adafactor, LAMB) cannot work.
ELEMENTWISE = (
    "Adadelta Adagrad Adam AdamW Adamax ASGD NAdam RAdam RMSprop Rprop SGD Lion FusedAdam FusedAdagrad FusedSGD "
    "DeepSpeedCPUAdam DeepSpeedCPUAdagrad DeepSpeedCPULion"
).split()
# No checkpoint reaches their optimizer state, or frozen weights would be rounded in it, or workers get the same rows.
REFUSED = (
    "zero_optimization.zenflow",
    "zero_optimization.offload_optimizer.super_offload",
    "zero_optimization.zero_quantized_nontrainable_weights",
    "tensor_parallel",
    "sequence_parallel_size",
)


def fill_config(config: dict[str, Any], args: TrainerArgs, world_size: int, source: str) -> None:
    """Set all open values of a DeepSpeed configuration in place, from `args`.

    A value is open if it is absent, "auto", or the gradient_accumulation_steps = 1 that Accelerate writes by default.
    UserError, which names `source`, for a value that contradicts `args`, or a request of something unsupported.
    """
    for section, ours in (("optimizer", "--optimizer and --lr"), ("scheduler", "--lr_scheduler")):
        if section in config:
            raise UserError(f"{source} has a section {section!r}: take it out, {ours} decide that")
    stage = config.get("zero_optimization", {}).get("stage", 0)
    if stage not in (1, 2, 3):
        raise UserError(f"{source} says ZeRO stage {stage}: use 1, 2 or 3; without sharding, DDP does the same")
    for key in REFUSED:
        found: Any = config
        for name in key.split("."):
            found = found.get(name) if isinstance(found, dict) else None
        if (found and found != 1) or found is True:
            raise UserError(f"{source} says {key} = {found}, which is not supported: take it out")
    offload = config["zero_optimization"].get("offload_optimizer") or {}
    if offload.get("device") == "nvme" or offload.get("ratio", 1.0) != 1.0:
        raise UserError(
            f"{source} says offload_optimizer {offload}, which no checkpoint reaches: use device: cpu with ratio: 1"
        )
    steps = args.gradient_accumulation_steps
    if config.get("gradient_accumulation_steps") == 1:
        config["gradient_accumulation_steps"] = "auto"
    fill(config, "train_micro_batch_size_per_gpu", args.batch_size, "--batch_size", source)
    fill(config, "gradient_accumulation_steps", steps, "--gradient_accumulation_steps", source)
    name = f"--batch_size x --gradient_accumulation_steps x {world_size} workers"
    fill(config, "train_batch_size", args.batch_size * steps * world_size, name, source)
    fill(config, "gradient_clipping", args.clip_grad_norm or 0.0, "--clip_grad_norm", source)
    fill(config, "fp16.enabled", args.fp16, "--fp16", source)
    fill(config, "bf16.enabled", args.bf16, "--bf16", source)
    # Loss scaling is that of torch.amp where the file does not say otherwise.
    if args.fp16:
        for key, value in {"loss_scale": 0, "loss_scale_window": 2000, "initial_scale_power": 16}.items():
            fill(config, f"fp16.{key}", value, None, source)
        fill(config, "fp16.hysteresis", 1, None, source)
    if args.bf16:
        fill(config, "bf16.check_grad_overflow", True, "a non-finite gradient must skip the step", source)
        if stage == 1 and config.get("data_types", {}).get("grad_accum_dtype") in ("fp32", "float32"):
            raise UserError(f"{source}: bf16 with fp32 gradient accumulation needs ZeRO stage 2 or 3, not stage 1")


def fill(config: dict[str, Any], key: str, value: Any, flag: str | None, source: str) -> None:
    """Set one entry of a DeepSpeed configuration if it is open; UserError if it contradicts a flag (None: none)."""
    *parents, leaf = key.split(".")
    for parent in parents:
        config = config.setdefault(parent, {})
    current = config.get(leaf)
    if current is None or current == "auto":
        config[leaf] = value
    elif flag is not None and current != value:
        raise UserError(
            f'{source} says {key} = {current}, but {flag} says {value}: write "auto" there or make them equal'
        )


@contextmanager
def refusals() -> Iterator[None]:
    """Context that turns DeepSpeed's errors about its configuration into UserError."""
    from deepspeed.runtime.config import DeepSpeedConfigError

    try:
        yield
    except (AssertionError, DeepSpeedConfigError, ValueError) as error:
        # Errors of pydantic are ValueErrors with a list.
        listed = error.errors() if hasattr(error, "errors") else []
        text = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in listed) or str(error)
        raise UserError(f"DeepSpeed does not take its configuration: {text}") from error


def check_optimizer(optimizer: Optimizer) -> None:
    """Refuse optimizers that need whole matrices: ZeRO flattens all parameters into one vector. Raises UserError."""
    if type(optimizer) is torch.optim.Adagrad and len(optimizer.param_groups) > 1:
        raise UserError(
            f"Adagrad cannot be trained under DeepSpeed in {len(optimizer.param_groups)} parameter groups, which it "
            "merges: use RMSprop or AdamW, FSDP or DDP"
        )
    if type(optimizer).__name__ not in ELEMENTWISE and not getattr(optimizer, "elementwise", False):
        raise UserError(
            f"{type(optimizer).__name__} cannot be trusted under DeepSpeed: ZeRO flattens all parameters to one "
            "vector, without rows and columns; use AdamW, FSDP or DDP, or set `elementwise = True` on an optimizer "
            "that works element by element"
        )


def has_cpu_version(optimizer: Optimizer) -> bool:
    """True if DeepSpeed's CPU Adam computes the same update as this optimizer."""
    adam = type(optimizer) in (torch.optim.Adam, torch.optim.AdamW)
    return adam and not any(group.get("amsgrad") or group.get("maximize") for group in optimizer.param_groups)

"""Numerical precision of training: fp32, bf16 autocast, fp16 with loss scaling, NVIDIA apex."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lm_experiments_tools.errors import UserError


class Precision:
    """Numerical precision of training without loss scaling: fp32, or autocast to `dtype` (bf16)."""

    scaler: Any = None  # has a state to save, if the loss is scaled
    skips_on_device = True  # only the optimizer depends on whether the gradient is finite

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self.dtype = dtype

    def initialize(
        self, model: nn.Module, optimizer: Optimizer | None, device: torch.device
    ) -> tuple[nn.Module, Optimizer]:
        return model, optimizer

    def autocast(self, device: torch.device) -> Callable[[], AbstractContextManager[None]]:
        """The mixed-precision context of a forward pass, as a function without arguments."""
        return partial(torch.autocast, device.type, dtype=self.dtype) if self.dtype else nullcontext

    def backward(self, loss: Tensor, optimizer: Optimizer, *, last: bool, reduce: Callable[[bool], None]) -> None:
        loss.backward()
        reduce(last)

    def parameters(self, optimizer: Optimizer) -> list[nn.Parameter]:
        """Parameters whose gradients (`.grad`) are clipped."""
        return [p for group in optimizer.param_groups for p in group["params"]]

    def step(self, optimizer: Optimizer, finite: bool) -> None:
        """Step the optimizer if the gradient is finite."""
        if finite:
            optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        return {} if self.scaler is None else self.scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state and self.scaler is not None:
            self.scaler.load_state_dict(state)


class LossScaledFp16(Precision):
    """fp16 autocast with torch's dynamic loss scaling, clamped to `min_scale` and `max_scale`.

    A step with non-finite gradients is skipped and the scale halved; 2000 good steps double it (torch's defaults).
    """

    skips_on_device = False

    def __init__(self, min_scale: float | None = None, max_scale: float | None = None) -> None:
        super().__init__(torch.float16)
        self.min_scale, self.max_scale = min_scale or 0.0, max_scale or float("inf")

    def initialize(
        self, model: nn.Module, optimizer: Optimizer | None, device: torch.device
    ) -> tuple[nn.Module, Optimizer]:
        initial = min(max(2.0**16, self.min_scale), self.max_scale)
        self.scaler = torch.amp.GradScaler(device.type, init_scale=initial)
        return model, optimizer

    def backward(self, loss: Tensor, optimizer: Optimizer, *, last: bool, reduce: Callable[[bool], None]) -> None:
        self.scaler.scale(loss).backward()
        reduce(last)
        if last:
            self.scaler.unscale_(optimizer)

    def step(self, optimizer: Optimizer, finite: bool) -> None:
        # The norm can overflow where each gradient is finite, so what `unscale_` found is not enough: without the mark
        # `update` would count the skipped step as a good one.
        if finite:
            self.scaler.step(optimizer)
        else:
            for found_inf in self.scaler._found_inf_per_device(optimizer).values():
                found_inf.fill_(1.0)
        self.scaler.update()
        scale = self.scaler.get_scale()
        allowed = min(max(scale, self.min_scale), self.max_scale)
        if allowed != scale:
            self.scaler.update(allowed)


class ApexAmp(Precision):
    """NVIDIA apex.amp (O0 to O3), which upstream has deprecated in favour of torch.amp."""

    skips_on_device = False

    def __init__(self, opt_level: str, min_scale: float | None = None, max_scale: float | None = None) -> None:
        super().__init__(None)
        try:
            self.amp = self.scaler = importlib.import_module("apex.amp")
        except ImportError as error:
            raise UserError(
                f"--apex_opt_lvl {opt_level}: NVIDIA's apex.amp is not installed ({error}); leave the flag out to "
                "use torch.amp, or build an apex of 2024 from source."
            ) from error
        self.opt_level, self.scales = opt_level, {"min_loss_scale": min_scale, "max_loss_scale": max_scale}

    def initialize(
        self, model: nn.Module, optimizer: Optimizer | None, device: torch.device
    ) -> tuple[nn.Module, Optimizer]:
        scales = {k: v for k, v in self.scales.items() if v is not None}
        if optimizer is None:
            return self.amp.initialize(model, opt_level=self.opt_level, verbosity=0), None
        return self.amp.initialize(model, optimizer, opt_level=self.opt_level, verbosity=0, **scales)

    def backward(self, loss: Tensor, optimizer: Optimizer, *, last: bool, reduce: Callable[[bool], None]) -> None:
        with self.amp.scale_loss(loss, optimizer, delay_unscale=not last) as scaled:
            scaled.backward()
            reduce(last)

    def parameters(self, optimizer: Optimizer) -> list[nn.Parameter]:
        return list(self.amp.master_params(optimizer))

    def step(self, optimizer: Optimizer, finite: bool) -> None:
        # apex has patched `step` to skip after an overflow.
        optimizer.step()


def get_precision(
    *,
    fp16: bool,
    bf16: bool,
    apex_opt_lvl: str | None = None,
    min_loss_scale: float | None = None,
    max_loss_scale: float | None = None,
) -> Precision:
    """Create the precision that the flags select; limits of the fp16 loss scale may be None. Raises UserError.

    `apex_opt_lvl` is the optimization level of NVIDIA apex, O0 to O3; None does not use apex.
    """
    if fp16 and apex_opt_lvl:
        return ApexAmp(apex_opt_lvl, min_loss_scale, max_loss_scale)
    if fp16:
        return LossScaledFp16(min_loss_scale, max_loss_scale)
    if bf16 and torch.cuda.is_available() and not torch.cuda.is_bf16_supported():
        raise UserError(f"--bf16: {torch.cuda.get_device_name()} has no bfloat16; use --fp16 or neither")
    return Precision(torch.bfloat16 if bf16 else None)

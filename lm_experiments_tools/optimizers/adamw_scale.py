"""AdamWScale, nanoT5's optimizer: AdamW whose step size is multiplied by each parameter's root mean square."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from lm_experiments_tools.modules.devices import has_kernels
from lm_experiments_tools.optimizers.state import (
    Float32StateOptimizer,
    Skip,
    float32_of,
    local,
    on_host,
    root_mean_square,
    root_mean_squares,
    round_into,
    unless,
)

MIN_SCALE = 1e-3
Tensors = tuple[Tensor, Tensor, Tensor, Tensor]  # weights, gradient and both moments, plain fp32
Scalars = dict[tuple, Tensor]  # scalars of one step on a device, shared by all parameters


class AdamWScale(Float32StateOptimizer):
    """AdamW with Adafactor's parameter scale (nanoT5, arXiv 2309.02373, section 3).

    The step size is multiplied by RMS(p), the root mean square of the parameter p. With m and v the first and second
    moments after step t, c1 = 1 - beta1^t and c2 = 1 - beta2^t, a step computes

        p <- p - lr * max(1e-3, RMS(p)) * sqrt(c2) / c1 * m / (sqrt(v) + eps)
        p <- p * (1 - lr * weight_decay)

    As in nanoT5, eps is added before the bias correction, and weight decay uses the unscaled lr. One lr of about 1e-2
    fits embeddings (RMS 1) and projections (RMS d_model ** -0.5).

    The first line is torch's fused AdamW with eps / sqrt(c2) and lr * max(1e-3, RMS(p)). On a GPU with Triton one
    kernel updates all fp32 parameters.

    Args:
        params: parameters or parameter groups; fp32, or fp16/bf16 (computed in fp32, rounded to the parameter).
        lr: step size before scaling.
        betas: decay of the first and second moments.
        eps: added to sqrt(v).
        weight_decay: decoupled weight decay, times lr.

    Attributes:
        grad_factor: 0-dim fp32 tensor that multiplies the gradients of the next steps; None for 1. The kernel of a GPU
            applies it as it reads them, which saves a pass over all gradients to clip their norm.

    Raises:
        ValueError: lr, eps or weight_decay below 0, or a beta outside [0, 1).
    """

    grad_factor: Tensor | None = None

    def __init__(
        self,
        params: Iterable,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
    ) -> None:
        if lr < 0 or eps < 0 or weight_decay < 0:
            raise ValueError(f"lr={lr}, eps={eps} and weight_decay={weight_decay} must not be negative")
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas={betas} must lie in [0, 1)")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def update(self, work: list[tuple[list[Tensor], dict]]) -> None:
        known: Scalars = {}
        scales = root_mean_squares([p for parameters, _ in work for p in parameters])
        for parameters, group in work:
            for parameter in self._update_together(parameters, group, scales):
                if self.grad_factor is not None:
                    local(parameter.grad).mul_(self.grad_factor.to(parameter.device, non_blocking=True))
                # on the CPU just before the update, when the weights are still in the cache
                scale = scales[parameter] if parameter in scales else float(root_mean_square(parameter))
                self._update(parameter, group, scale, known)

    def _update_together(self, parameters: list[Tensor], group: dict, scales: dict[Tensor, Tensor]) -> list[Tensor]:
        """One step of all parameters that the Triton kernel takes; returns the others."""
        if not any(map(has_kernels, {p.device for p in parameters})) or is_in_torch_dispatch_mode():
            return parameters  # also in a memory estimate, whose tensors have no data
        from lm_experiments_tools.optimizers import adamw_kernel

        others, batches = [], {}
        for parameter in parameters:
            state = self._state_of(parameter)
            tensors = [local(x) for x in (parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"])]
            if parameter not in scales or not adamw_kernel.takes(tensors):
                others.append(parameter)
                continue
            state["step"] += 1
            device, step = tensors[0].device, int(state["step"])
            batches.setdefault((device, step), []).append((tensors, scales[parameter]))
        settings = {name: group[name] for name in ("lr", "betas", "weight_decay")}
        for (device, step), batch in batches.items():
            skip, eps = self.skip_on(device), _corrected_eps(group, step)
            found_inf = None if skip is None else skip.found_inf
            options = {**settings, "eps": eps, "least": MIN_SCALE, "step": step, "found_inf": found_inf}
            if self.grad_factor is not None:
                options["grad_factor"] = self.grad_factor.to(device, non_blocking=True)
            adamw_kernel.adamw_scale_(*zip(*batch, strict=True), **options)
        return others

    def _state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"] = torch.zeros_like(parameter, dtype=torch.float32)
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=torch.float32)
        return state

    def _update(self, parameter: Tensor, group: dict, scale: Tensor | float | None, known: Scalars) -> None:
        """One step of one parameter; with scale None that of torch.optim.AdamW, by its fused kernel."""
        state = self._state_of(parameter)
        state["step"] += 1
        shard = local(parameter)
        weights = float32_of(shard)
        tensors = weights, local(parameter.grad).float(), local(state["exp_avg"]), local(state["exp_avg_sq"])
        skip = self.skip_on(weights.device)
        if weights.numel() == 0:  # a rank may hold an empty shard of a small parameter
            return
        if scale is None:
            options = {key: group[key] for key in ("lr", "weight_decay", "eps")}
            _call_adamw(tensors, state["step"], skip, known, group, **options)
        else:
            _scaled_update(tensors, state["step"], scale, group, skip, known)
        round_into(shard, weights)


def _corrected_eps(group: dict, step: int) -> float:
    """eps' of the class's docstring."""
    return group["eps"] / math.sqrt(1.0 - group["betas"][1] ** step)


def _scaled_update(
    tensors: Tensors, step: Tensor, scale: Tensor | float, group: dict, skip: Skip | None, known: Scalars
) -> None:
    """One step with the learning rate multiplied by the parameter's scale."""
    weights, decay = tensors[0], group["lr"] * group["weight_decay"]
    if on_host(weights):
        # the kernel decays before the update, nanoT5 after it: (p - u)(1 - d) = p (1 - d) - u (1 - d), in one pass
        lr: Tensor | float = group["lr"] * max(MIN_SCALE, float(scale)) * (1.0 - decay)
        kernel_decay = decay / lr if lr > 0 else 0.0
    else:
        lr, kernel_decay = scale.clamp(min=MIN_SCALE).mul_(group["lr"]), 0.0
    eps = _corrected_eps(group, int(step))
    _call_adamw(tensors, step, skip, known, group, lr=lr, weight_decay=kernel_decay, eps=eps)
    if decay != 0 and kernel_decay == 0:
        key = weights.device, "decay", decay
        if key not in known:
            known[key] = unless(skip, 1.0 - decay, instead=1)
        weights.mul_(known[key])


def _call_adamw(
    tensors: Tensors,
    step: Tensor,
    skip: Skip | None,
    known: Scalars,
    group: dict,
    *,
    lr: Tensor | float,
    weight_decay: float,
    eps: float,
) -> None:
    """torch's fused AdamW kernel on one plain fp32 tensor; `step` is on the host and not counted here."""
    device = tensors[0].device
    if not on_host(tensors[0]):
        key = device, "step", int(step)
        if key not in known:
            known[key] = torch.full((), int(step), dtype=torch.float32, device=device)
        step = known[key]
    weights, grad, exp_avg, exp_avg_sq = ([x] for x in tensors)
    options = {"lr": lr, "beta1": group["betas"][0], "beta2": group["betas"][1], "weight_decay": weight_decay}
    options |= {"eps": eps, "amsgrad": False, "maximize": False}
    found_inf = None if skip is None else skip.found_inf
    torch._fused_adamw_(weights, grad, exp_avg, exp_avg_sq, [], [step], **options, found_inf=found_inf)

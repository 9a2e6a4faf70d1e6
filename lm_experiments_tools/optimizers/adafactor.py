"""Adafactor (Shazeer and Stern 2018, arXiv 1804.04235): second moments of a matrix kept as a row and a column."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from lm_experiments_tools.optimizers.state import LOW_PRECISION, Float32StateOptimizer, root_mean_square


class Adafactor(Float32StateOptimizer):
    """Adafactor with the options and the update rule of `transformers.optimization.Adafactor`.

    For a parameter with two or more dimensions the second moment is the outer product of the means over its last two
    dimensions (Algorithm 4); a vector keeps it whole. The update U = G / sqrt(V) is divided by
    max(1, RMS(U) / clip_threshold) and multiplied by the step size

        lr * max(eps[1], RMS(parameter))     with scale_parameter, else lr,

    where with relative_step lr = min(1e-2, 1 / sqrt(step)), with warmup_init min(1e-6 * step, 1 / sqrt(step)).

    After each step `param_groups[i]["scaled_lr"]` is the mean of these step sizes over the parameters of the group
    that had a gradient: a float, or a 0-dim tensor where it lives on the device (`float()` it when logging; nothing
    here waits for the device). It is for logging only and not part of the state_dict.

    Args:
        params: parameters or parameter groups; fp32, or fp16/bf16 (computed in fp32, rounded to the parameter).
        lr: step size; None with relative_step.
        eps: (added to the squared gradient, floor of the parameter scale).
        clip_threshold: largest RMS of an update before the step size.
        decay_rate: the second moment at step t decays by 1 - t ** decay_rate.
        beta1: decay of a first moment; None keeps none.
        weight_decay: parameters shrink by weight_decay * step size, before the update.

    Raises:
        ValueError: lr given together with relative_step, or neither, or negative; warmup_init without relative_step.
    """

    def __init__(
        self,
        params: Iterable,
        lr: float | None = None,
        eps: tuple[float, float] = (1e-30, 1e-3),
        clip_threshold: float = 1.0,
        decay_rate: float = -0.8,
        beta1: float | None = None,
        weight_decay: float = 0.0,
        scale_parameter: bool = True,
        relative_step: bool = True,
        warmup_init: bool = False,
    ) -> None:
        if lr is not None and relative_step:
            raise ValueError(f"lr={lr} has no effect with relative_step=True: give one of the two")
        if lr is None and not relative_step:
            raise ValueError("lr is needed unless relative_step=True")
        if lr is not None and lr < 0:
            raise ValueError(f"lr={lr} must not be negative")
        if warmup_init and not relative_step:
            raise ValueError("warmup_init=True is a form of relative_step=True, which is off")
        self._memory = torch.empty(0)  # see _work_space
        super().__init__(
            params,
            {
                "lr": lr,
                "eps": eps,
                "clip_threshold": clip_threshold,
                "decay_rate": decay_rate,
                "beta1": beta1,
                "weight_decay": weight_decay,
                "scale_parameter": scale_parameter,
                "relative_step": relative_step,
                "warmup_init": warmup_init,
            },
        )

    def update(self, parameters: list[Tensor], group: dict) -> None:
        step_sizes = [self._update(parameter, group) for parameter in parameters]
        if step_sizes and isinstance(step_sizes[0], Tensor):
            group["scaled_lr"] = torch.stack([size.to(step_sizes[0].device) for size in step_sizes]).mean()
        elif step_sizes:
            group["scaled_lr"] = sum(step_sizes) / len(step_sizes)

    def state_dict(self) -> dict:
        state = super().state_dict()
        for group in state["param_groups"]:
            group.pop("scaled_lr", None)
        return state

    def _update(self, parameter: Tensor, group: dict) -> Tensor | float:
        """One step of one parameter; returns its step size."""
        grad = parameter.grad.float()
        state = self.state[parameter]
        if not state:
            self._init_state(state, grad, group["beta1"] is not None)
        state["step"] += 1
        step = int(state["step"])

        weights = parameter.float() if parameter.dtype in LOW_PRECISION else parameter
        step_size = _relative_step(step, group) if group["relative_step"] else group["lr"]
        if group["scale_parameter"]:
            step_size = root_mean_square(weights).clamp_(min=group["eps"][1]).mul_(step_size)

        update = _precondition(grad, state, 1.0 - step ** group["decay_rate"], group["eps"][0], self._work_space(grad))
        factor = step_size / (root_mean_square(update) / group["clip_threshold"]).clamp_(min=1.0)
        if group["weight_decay"] != 0:
            weights.mul_(1.0 - group["weight_decay"] * step_size)
        if group["beta1"] is not None:
            moment = state["exp_avg"].mul_(group["beta1"])
            weights.sub_(moment.addcmul_(update, factor, value=1.0 - group["beta1"]))
        else:
            weights.addcmul_(update, factor, value=-1.0)
        if weights is not parameter:
            parameter.copy_(weights)
        return step_size

    def _work_space(self, grad: Tensor) -> Tensor | None:
        """Memory for one matrix of this shape, on the CPU only, where fresh pages cost more than the arithmetic.

        One buffer of the size of the largest matrix serves all; other devices have caching allocators.
        """
        if grad.device.type != "cpu" or grad.ndim < 2 or hasattr(grad, "placements"):
            return None
        if self._memory.numel() < grad.numel():
            self._memory = torch.empty(grad.numel())
        return self._memory[: grad.numel()].view(grad.shape)

    @staticmethod
    def _init_state(state: dict, grad: Tensor, first_moment: bool) -> None:
        state["step"] = torch.zeros(())
        if first_moment:
            state["exp_avg"] = torch.zeros_like(grad)
        if grad.ndim >= 2:
            state["exp_avg_sq_row"] = _zeros(grad.sum(dim=-1))
            state["exp_avg_sq_col"] = _zeros(grad.sum(dim=-2))
        else:
            state["exp_avg_sq"] = torch.zeros_like(grad)


def _zeros(tensor: Tensor) -> Tensor:
    """Zeros of this shape; of a DTensor, whole on every rank (small, and so summed in one order, resumed or not)."""
    if hasattr(tensor, "placements"):
        from torch.distributed.tensor import Replicate

        tensor = tensor.redistribute(placements=[Replicate()] * len(tensor.placements))
    return torch.zeros_like(tensor)


def _relative_step(step: int, group: dict) -> float:
    """Section 8 of the paper: a step size that depends on the step alone."""
    ceiling = 1e-6 * step if group["warmup_init"] else 1e-2
    return min(ceiling, 1.0 / math.sqrt(step))


def _precondition(grad: Tensor, state: dict, beta2: float, eps: float, work: Tensor | None) -> Tensor:
    """grad / sqrt(second moment), the moment in `state` updated with decay beta2; written to `work` if given."""
    squared = torch.mul(grad, grad, out=work)
    if grad.ndim < 2:
        moment = state["exp_avg_sq"].mul_(beta2).add_(squared.add_(eps), alpha=1.0 - beta2)
        return moment.rsqrt().mul_(grad)
    rows, columns = grad.shape[-2:]
    # sums, not means: over unevenly sharded dimensions only the sum of the shards' sums is right
    row = state["exp_avg_sq_row"].mul_(beta2).add_(squared.sum(dim=-1) / columns + eps, alpha=1.0 - beta2)
    column = state["exp_avg_sq_col"].mul_(beta2).add_(squared.sum(dim=-2) / rows + eps, alpha=1.0 - beta2)
    row_factor = (row / (row.sum(dim=-1, keepdim=True) / rows)).rsqrt_()
    update = torch.mul(grad, row_factor.unsqueeze(-1), out=work).mul_(column.rsqrt().unsqueeze(-2))
    if hasattr(update, "placements"):  # DTensor makes a replica of what is broadcast along a dimension of size 1
        update = update.redistribute(placements=grad.placements)
    return update

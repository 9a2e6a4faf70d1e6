"""Adafactor (Shazeer and Stern 2018, arXiv 1804.04235), which factors second moments into rows and columns."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from lm_experiments_tools.optimizers.state import (
    Float32StateOptimizer,
    Skip,
    decay_into,
    float32_of,
    is_sharded,
    local,
    local_slice,
    on_host,
    replica,
    restored_if_skipped,
    root_mean_square,
    roots_of,
    round_into,
    squares_of,
    sums_over_slices,
    unless,
)


class Adafactor(Float32StateOptimizer):
    """Adafactor with the options and the update rule of `transformers.optimization.Adafactor`.

    For a parameter with two or more dimensions the second moment V is the outer product of the means over its last two
    dimensions (Algorithm 4 of the paper); a vector stores it in full. With gradient G, the update U = G / sqrt(V) is
    divided by max(1, RMS(U) / clip_threshold), where RMS is the root mean square, and multiplied by the step size

        lr * max(eps[1], RMS(parameter))     with scale_parameter, else lr,

    where with relative_step lr = min(1e-2, 1 / sqrt(step)), with warmup_init min(1e-6 * step, 1 / sqrt(step)).

    After each step `param_groups[i]["scaled_lr"]` is the mean of these step sizes over parameters with a gradient, a
    float or a 0-dim tensor on the device. It is for logging and not part of the state_dict.

    Args:
        params: parameters or parameter groups; fp32, or fp16/bf16 (computed in fp32, rounded to the parameter).
        lr: step size; None with relative_step.
        eps: (added to the squared gradient, floor of the parameter scale).
        clip_threshold: largest RMS of an update before the step size.
        decay_rate: the second moment at step t decays by 1 - t ** decay_rate.
        beta1: decay of a first moment; None keeps none.
        weight_decay: parameters shrink by weight_decay * step size, before the update.
        scale_parameter, relative_step, warmup_init: choose the step size, see above.

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
        defaults = {"lr": lr, "eps": eps, "clip_threshold": clip_threshold, "decay_rate": decay_rate, "beta1": beta1}
        defaults |= {"weight_decay": weight_decay, "scale_parameter": scale_parameter}
        super().__init__(params, {**defaults, "relative_step": relative_step, "warmup_init": warmup_init})

    def update(self, work: list[tuple[list[Tensor], dict]]) -> None:
        sharded = [(p, group) for parameters, group in work for p in parameters if is_sharded(p)]
        sizes = self._update_sharded(sharded) if sharded else {}
        for parameters, group in work:
            step_sizes = [sizes[p] if p in sizes else self._update(p, group) for p in parameters]
            if step_sizes and isinstance(step_sizes[0], Tensor) and not on_host(step_sizes[0]):
                group["scaled_lr"] = torch.stack([size.to(step_sizes[0].device) for size in step_sizes]).mean()
            elif step_sizes:
                group["scaled_lr"] = float(sum(step_sizes)) / len(step_sizes)

    def _update_sharded(self, work: list[tuple[Tensor, dict]]) -> dict[Tensor, Tensor | float]:
        """One step of DTensors, in two collectives for all of them; returns their step sizes.

        The update is computed twice, for its norm and to be applied, to save a gradient's memory.
        """
        weights = [p for p, _ in work]
        local_sums = zip(squares_of([local(p) for p in weights]), map(_row_and_column_sums, weights), strict=True)
        sums = sums_over_slices(weights, [torch.cat([square.view(1), both]) for square, both in local_sums])
        scales = roots_of([both[0] for both in sums])
        sizes: dict[Tensor, Tensor | float] = {}
        for (parameter, group), both, norm in zip(work, sums, scales, strict=True):
            state = self._advanced(parameter, parameter.grad, group)
            step = int(state["step"])
            size = _relative_step(step, group) if group["relative_step"] else group["lr"]
            if group["scale_parameter"]:
                size = _scaled(size, norm / parameter.numel() ** 0.5, group["eps"][1])
            sizes[parameter] = size
            beta2, skip = 1.0 - step ** group["decay_rate"], self.skip_on(norm.device)
            _advance_second_moment(parameter, both[1:], state, beta2, group["eps"][0], skip)
        squares = [squares_of([_sharded_update(p, self.state[p])])[0] for p in weights]
        for (parameter, group), norm in zip(work, roots_of(sums_over_slices(weights, squares)), strict=True):
            moment = local(self.state[parameter]["exp_avg"]) if group["beta1"] is not None else None
            update = _sharded_update(parameter, self.state[parameter])
            shard = local(parameter)
            updated = float32_of(shard)
            norm, skip = norm / parameter.numel() ** 0.5, self.skip_on(shard.device)
            _apply(updated, update, sizes[parameter], norm, group, moment, skip)
            round_into(shard, updated)
        return sizes

    def state_dict(self) -> dict:
        state = super().state_dict()
        for group in state["param_groups"]:
            group.pop("scaled_lr", None)
        return state

    def _update(self, parameter: Tensor, group: dict) -> Tensor | float:
        """One step of one parameter; returns its step size."""
        grad = parameter.grad.float()
        state = self._advanced(parameter, grad, group)
        step, skip = int(state["step"]), self.skip_on(grad.device)
        beta2, work = 1.0 - step ** group["decay_rate"], self._work_space(grad)
        update = _precondition(grad, state, beta2, group["eps"][0], work, skip)
        norm = root_mean_square(update)
        # last, so that `_apply` finds the weights in the cache
        step_size = _relative_step(step, group) if group["relative_step"] else group["lr"]
        weights = float32_of(parameter)
        if group["scale_parameter"]:
            step_size = _scaled(step_size, root_mean_square(weights), group["eps"][1])
        moment = state["exp_avg"] if group["beta1"] is not None else None
        _apply(weights, update, step_size, norm, group, moment, skip)
        round_into(parameter, weights)
        return step_size

    def _advanced(self, parameter: Tensor, grad: Tensor, group: dict) -> dict:
        """The parameter's state, made at its first step, with the step counted."""
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros(())
            if group["beta1"] is not None:
                state["exp_avg"] = torch.zeros_like(grad, dtype=torch.float32)
            if grad.ndim >= 2:
                state["exp_avg_sq_row"] = _zeros(grad, grad.shape[:-1])
                state["exp_avg_sq_col"] = _zeros(grad, grad.shape[:-2] + grad.shape[-1:])
            else:
                state["exp_avg_sq"] = torch.zeros_like(grad, dtype=torch.float32)
        state["step"] += 1
        return state

    def _work_space(self, grad: Tensor) -> Tensor | None:
        """A buffer that all matrices share, on the CPU only, which has no caching allocator."""
        if not on_host(grad) or grad.ndim < 2:
            return None
        if self._memory.numel() < grad.numel():
            self._memory = torch.empty(grad.numel())
        return self._memory[: grad.numel()].view(grad.shape)


def _zeros(grad: Tensor, shape: torch.Size) -> Tensor:
    """Zeros of this shape, replicated for a DTensor."""
    zeros = torch.zeros(shape, dtype=torch.float32, device=grad.device)
    return replica(zeros, grad) if is_sharded(grad) else zeros


def _scaled(step_size: float, norm: Tensor, floor: float) -> Tensor:
    """The step size times the root mean square of a parameter, or the floor of it, in fp32."""
    return norm.clamp(min=floor).mul_(step_size)


def _apply(
    weights: Tensor,
    update: Tensor,
    step_size: Tensor | float,
    norm: Tensor,
    group: dict,
    moment: Tensor | None,
    skip: Skip | None,
) -> None:
    """Subtract an update whose root mean square over the full parameter is `norm` from the (fp32) weights."""
    factor = unless(skip, step_size / (norm / group["clip_threshold"]).clamp_(min=1.0))
    if group["weight_decay"] != 0:
        shrink = 1.0 - group["weight_decay"] * step_size
        weights.mul_(unless(skip, shrink, instead=1))
    if moment is not None:
        with restored_if_skipped(skip, [weights, moment]):
            moment.mul_(group["beta1"])
            weights.sub_(moment.addcmul_(update, factor, value=1.0 - group["beta1"]))
    else:
        weights.addcmul_(unless(skip, update), factor, value=-1.0)


def _relative_step(step: int, group: dict) -> float:
    """Section 8 of the paper: a step size that depends on the step alone."""
    ceiling = 1e-6 * step if group["warmup_init"] else 1e-2
    return min(ceiling, 1.0 / math.sqrt(step))


def _precondition(
    grad: Tensor, state: dict, beta2: float, eps: float, work: Tensor | None, skip: Skip | None
) -> Tensor:
    """grad / sqrt(second moment), the moment in `state` updated with decay beta2; written to `work` if given."""
    if grad.ndim < 2:
        squared = grad * grad
        moment = decay_into(state["exp_avg_sq"], squared.add_(eps), beta2, skip)
        return moment.rsqrt().mul_(grad)
    rows, columns = grad.shape[-2:]
    squared = torch.mul(grad, grad, out=work)
    # sums, not means, because shards may have different sizes
    by_row, by_column = squared.sum(dim=-1).div_(columns).add_(eps), squared.sum(dim=-2).div_(rows).add_(eps)
    row = decay_into(state["exp_avg_sq_row"], by_row, beta2, skip)
    column = decay_into(state["exp_avg_sq_col"], by_column, beta2, skip)
    row_factor = (row / (row.sum(dim=-1, keepdim=True) / rows)).rsqrt_()
    return torch.mul(grad, row_factor.unsqueeze(-1), out=work).mul_(column.rsqrt().unsqueeze(-2))


def _row_and_column_sums(parameter: Tensor) -> Tensor:
    """Sums of this rank's squared gradients along both of the last dimensions, in one vector of the full sizes."""
    grad, shape = local(parameter.grad).float(), parameter.shape
    if len(shape) < 2:
        return grad.new_zeros(0)  # each rank has its shard of a vector's second moment
    row, column = grad.new_zeros(shape[:-1]), grad.new_zeros(shape[:-2] + shape[-1:])
    place, squared = local_slice(parameter), grad.square()
    row[place[:-1]] = squared.sum(dim=-1)
    column[place[:-2] + place[-1:]] = squared.sum(dim=-2)
    return torch.cat([row.reshape(-1), column.reshape(-1)])


def _advance_second_moment(
    parameter: Tensor, both: Tensor, state: dict, beta2: float, eps: float, skip: Skip | None
) -> None:
    """Update the second moment with `_row_and_column_sums` summed over ranks."""
    shape = parameter.shape
    if len(shape) < 2:
        squared = local(parameter.grad).float().square()
        decay_into(local(state["exp_avg_sq"]), squared.add_(eps), beta2, skip)
        return
    row, column = local(state["exp_avg_sq_row"]), local(state["exp_avg_sq_col"])
    sums = both.split([row.numel(), column.numel()])
    decay_into(row, sums[0].view(row.shape) / shape[-1] + eps, beta2, skip)
    decay_into(column, sums[1].view(column.shape) / shape[-2] + eps, beta2, skip)


def _sharded_update(parameter: Tensor, state: dict) -> Tensor:
    """grad / sqrt(second moment) of this rank's shard."""
    grad = local(parameter.grad).float()
    if parameter.ndim < 2:
        return local(state["exp_avg_sq"]).rsqrt().mul_(grad)
    row, column = local(state["exp_avg_sq_row"]), local(state["exp_avg_sq_col"])
    row_factor = (row / (row.sum(dim=-1, keepdim=True) / parameter.shape[-2])).rsqrt_()
    place = local_slice(parameter)
    return (grad * row_factor[place[:-1]].unsqueeze(-1)).mul_(column[place[:-2] + place[-1:]].rsqrt().unsqueeze(-2))

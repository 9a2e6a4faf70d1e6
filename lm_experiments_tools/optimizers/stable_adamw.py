"""StableAdamW: AdamW with Adafactor's update clipping, the optimizer of ModernBERT."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from lm_experiments_tools.optimizers.adamw_scale import AdamWScale, Scalars
from lm_experiments_tools.optimizers.state import is_sharded, local, on_host, sums_over_slices


class StableAdamW(AdamWScale):
    """StableAdamW (Wortsman et al. 2023, arXiv 2304.13013, algorithm 2), which replaces AdamW without further changes.

    A gradient that is large against its running mean makes a smaller step, so gradients need no clipping. With m, v
    the bias-corrected first and second moments of the parameter p after a step with gradient g,

        RMS = sqrt(mean(g^2 / max(v, eps^2)))           over the full parameter
        lr' = lr / max(1, RMS)
        p <- p * (1 - lr' * weight_decay) - lr' * m / (sqrt(v) + eps)

    Args:
        params: parameters or parameter groups; fp32, or fp16/bf16 (computed in fp32, rounded to the parameter).
        lr: step size.
        betas: decay of the first and second moments.
        eps: added to sqrt(v).
        weight_decay: decoupled weight decay, times lr'.

    Raises:
        ValueError: lr, eps or weight_decay below 0, or a beta outside [0, 1).
    """

    def __init__(
        self,
        params: Iterable,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.99),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay)

    def update(self, work: list[tuple[list[Tensor], dict]]) -> None:
        pairs = [(parameter, group) for parameters, group in work for parameter in parameters]
        squares = [self._squared_update(parameter, group) for parameter, group in pairs]
        sharded = [i for i, (parameter, _) in enumerate(pairs) if is_sharded(parameter)]
        sums = sums_over_slices([pairs[i][0] for i in sharded], [squares[i] for i in sharded])
        for i, total in zip(sharded, sums, strict=True):
            squares[i] = total
        known: Scalars = {}
        for (parameter, group), square in zip(pairs, squares, strict=True):
            divisor = (square / parameter.numel()).sqrt().clamp(min=1)
            lr = group["lr"] / (divisor.item() if on_host(divisor) else divisor)
            self._update(parameter, {**group, "lr": lr}, None, known)

    def _squared_update(self, parameter: Tensor, group: dict) -> Tensor:
        """Sum of g^2 / max(v, eps^2) over this rank's shard, with v as after the step; 0-dim fp32."""
        state, beta = self.state[parameter], group["betas"][1]
        grad = local(parameter.grad).float()
        square = grad.square()
        after = square * (1 - beta)
        if state:
            after.add_(local(state["exp_avg_sq"]), alpha=beta)
        correction = 1 - beta ** (int(state["step"]) + 1 if state else 1)
        return square.div_(after.div_(correction).clamp_(min=group["eps"] ** 2)).sum(dtype=torch.float32)

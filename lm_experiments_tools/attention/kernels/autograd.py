"""Autograd support for the attention backends "blocks" and "triton", which have their own backward pass.

The module of such a backend has four functions:

- `prepare(inputs, seed)` returns the settings of a call, then q, k, v and the bias in the form that its kernels read.
- `run_forward` and `run_backward` compute from these values.
- `kernel_bias` converts a bias to that form by differentiable operations.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from lm_experiments_tools.attention.kernels.bias import T5Table, values_of, with_values
from lm_experiments_tools.attention.kernels.spec import AttentionInputs


class KernelAttention(torch.autograd.Function):
    """Autograd function of an attention call, computed by a backend module's forward and backward kernels."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, call: Any, module: ModuleType) -> Tensor:
        output, lse = module.run_forward(call, q, k, v, bias)
        ctx.save_for_backward(q, k, v, bias, *((output, lse) if lse is not None else (None, None)))
        ctx.call, ctx.module = call, module
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        gradients = ctx.module.run_backward(ctx.call, *ctx.saved_tensors, grad, ctx.needs_input_grad[3])
        return *gradients, None, None


def backward_without_autograd(
    module: ModuleType,
    inputs: AttentionInputs,
    seed: int,
    output: Tensor,
    lse: Tensor,
    grad: Tensor,
    trains_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Compute the gradients of q, k, v and the bias; the custom attention operator for torch.compile calls it.

    Args:
        module: the backend's module, "blocks" or "triton".
        inputs: the same inputs as in the forward pass.
        seed: the dropout seed of the forward pass.
        output, lse: results of `run_forward`; lse is the log-sum-exp of each query's scores.
        grad: gradient of the output.
        trains_bias: False returns None for the bias.
    """
    call, *tensors = module.prepare(inputs, seed)
    *gradients, d_bias = module.run_backward(call, *tensors, output, lse, grad, trains_bias)
    if d_bias is None:
        return *gradients, None
    bias = inputs.spec.bias
    if isinstance(bias, T5Table) and d_bias.shape == bias.values.shape:  # "blocks" has the gradient of tiles
        return *gradients, d_bias.to(bias.values.dtype)
    pull = torch.func.vjp(lambda values: module.kernel_bias(inputs, with_values(bias, values)), values_of(bias))[1]
    return *gradients, *pull(d_bias)

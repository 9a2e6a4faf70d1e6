"""Attention with a backward pass of its own: an autograd function, and a custom operator for torch.compile.

The operator breaks no graph, and one graph serves all lengths. Inputs are validated when it runs, not when it is
traced, and "auto" gives "triton" or else "blocks". A graph refers to a block-sparse layout by a number, because an
operator's arguments cannot be Python objects.

The modules of the backends "blocks" and "triton" have four functions for both:

- `prepare(inputs, seed)` returns the settings of a call, then q, k, v and the bias in the form that its kernels read.
- `run_forward` and `run_backward` compute from these values. The latter writes to given tensors, or to new ones.
- `kernel_bias` converts a bias to that form by differentiable operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from lm_experiments_tools.attention.kernels import call as calls
from lm_experiments_tools.attention.kernels.bias import T5Table, values_of, with_values
from lm_experiments_tools.attention.kernels.call import BIASES, AttentionInputs, AttentionSpec


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


_INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? mask, Tensor? key_padding_mask, Tensor? query_segments, "
    "Tensor? key_segments, Tensor? seed, Tensor? packed, SymInt layout, str backend, SymInt kind, SymInt[] options, "
    "bool causal, float? scale, float dropout_p"
)
_BACKWARD_INPUTS = _INPUTS.replace("Tensor? packed, ", "") + ", bool packed, bool wants_bias"
_NUM_TENSORS = 9  # that the kernels read: all but `packed`


def _selected(
    tensors: Sequence[Tensor | None], settings: Sequence
) -> tuple[AttentionInputs, ModuleType, Tensor | None]:
    """Validated inputs, their backend, and the seed. The choice does not depend on gradients: both passes make it."""
    *qkv, bias, mask, key_padding_mask, queries, keys, seed = tensors
    layout, backend, kind, options, causal, scale, dropout_p = settings
    if kind:
        bias = BIASES[kind](bias, *options)
    segments = None if queries is None else (queries, keys)
    spec = AttentionSpec(mask, key_padding_mask, segments, bias, calls.layouts[layout], causal, scale, dropout_p)
    inputs = calls.validate(AttentionInputs(*qkv, spec))
    if backend == "auto":
        backend = "triton" if calls.refusal("triton", inputs) is None else "blocks"
    return inputs, calls.choose(inputs, backend), seed


@torch.library.custom_op(
    "lm_experiments_tools::block_sparse_attention", mutates_args=(), schema=f"({_INPUTS}) -> (Tensor, Tensor)"
)
def operator(q: Tensor, *others: object) -> tuple[Tensor, Tensor]:
    """Compute attention as a custom operator of torch.compile, by the backend that is chosen when it runs.

    Returns the output [batch, heads, query_length, v_dim] and the log-sum-exp of each query's scores. If q, k and v
    are detached parts of `packed`, it gets the gradients of all three.
    """
    inputs, module, seed = _selected((q, *others[: _NUM_TENSORS - 1]), others[_NUM_TENSORS:])
    with torch.no_grad():
        output, lse = module.run_forward(*module.prepare(inputs, seed))
    return _by_token(output), q.new_zeros(q.shape[:3], dtype=torch.float32) if lse is None else lse


def _by_token(x: Tensor) -> Tensor:
    """x [batch, heads, length, dim] with the heads of a token adjacent in memory, as the next layer reads it."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


@operator.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *others: object) -> tuple[Tensor, Tensor]:
    output = _by_token(q.new_empty(*q.shape[:3], v.shape[3]))
    return output, q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op(
    "lm_experiments_tools::block_sparse_attention_backward",
    mutates_args=(),
    schema=f"(Tensor grad, Tensor output, Tensor lse, {_BACKWARD_INPUTS}) -> (Tensor, Tensor, Tensor, Tensor)",
)
def operator_backward(grad: Tensor, output: Tensor, lse: Tensor, *others: object) -> tuple[Tensor, ...]:
    """Compute the gradients of the custom attention operator with respect to q, k, v and the bias.

    The bias gets an empty tensor unless `wants_bias` is true; `output` and `lse` are results of `operator`. With
    `packed` the first result is the gradient of all three, and those of k and v are empty.
    """
    *settings, packed, wants_bias = others[_NUM_TENSORS:]
    inputs, module, seed = _selected(others[:_NUM_TENSORS], settings)
    with torch.no_grad():
        results, written = _new_gradients(*others[:3], packed)
        call, *tensors = module.prepare(inputs, seed)
        *_, d_bias = module.run_backward(call, *tensors, output, lse, grad, wants_bias, written)
    return *results, _of_values(d_bias, inputs, module) if wants_bias else grad.new_empty(0)


def _new_gradients(q: Tensor, k: Tensor, v: Tensor, packed: bool) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """The operator's results, and the same memory as gradients of q, k and v, with a token's heads adjacent."""
    if not packed:
        gradients = [x.new_empty(x.transpose(1, 2).shape).transpose(1, 2) for x in (q, k, v)]
        return gradients, gradients
    batch, heads, length, dim = q.shape
    whole = q.new_empty(batch, length, 3, heads, dim)
    return (whole.flatten(2), q.new_empty(0), q.new_empty(0)), whole.permute(2, 0, 3, 1, 4).unbind()


def _of_values(d_bias: Tensor, inputs: AttentionInputs, module: ModuleType) -> Tensor:
    """Gradient of a bias's values from that of what the kernels read."""
    bias = inputs.spec.bias
    if isinstance(bias, T5Table) and d_bias.shape == bias.values.shape:  # "blocks" has the gradient of tiles
        return d_bias.to(bias.values.dtype)
    pull = torch.func.vjp(lambda values: module.kernel_bias(inputs, with_values(bias, values)), values_of(bias))[1]
    return pull(d_bias)[0].contiguous()


@operator_backward.register_fake
def _(
    grad: Tensor, output: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, *others: object
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *_, packed, wants_bias = others
    gradients, _ = _new_gradients(q, k, v, packed)
    return *gradients, bias.new_empty(bias.shape) if wants_bias else q.new_empty(0)


def _setup_context(ctx, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    packed, *settings = inputs[_NUM_TENSORS:]
    ctx.settings = *settings, packed is not None
    ctx.save_for_backward(*output, *inputs[:_NUM_TENSORS])


def _backward(ctx, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    wanted = ctx.needs_input_grad
    *found, d_bias = operator_backward(grad, *ctx.saved_tensors, *ctx.settings, wanted[3])
    gradients = dict(zip((_NUM_TENSORS,) if ctx.settings[-1] else (0, 1, 2), found, strict=False)) | {3: d_bias}
    return tuple(gradients.get(place) if is_wanted else None for place, is_wanted in enumerate(wanted))


operator.register_autograd(_backward, setup_context=_setup_context)

"""Attention as a custom operator for torch.compile: it breaks no graph, and one graph serves all lengths.

Inputs are validated and a backend is chosen when the operator runs, not when it is traced. A graph refers to a
block-sparse layout by a number, because an operator's arguments cannot be Python objects.

Custom operators run without autograd. In the backward pass, backends with kernels of their own call `run_backward`;
torch.func differentiates the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import ModuleType

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from lm_experiments_tools.attention.kernels.autograd import backward_without_autograd
from lm_experiments_tools.attention.kernels.bias import (
    AlibiBias,
    Bias,
    T5Bias,
    T5Table,
    values_of,
    wants_gradient,
    with_values,
)
from lm_experiments_tools.attention.kernels.choice import select
from lm_experiments_tools.attention.kernels.layout_cache import AnyLayout
from lm_experiments_tools.attention.kernels.spec import AttentionInputs, AttentionSpec
from lm_experiments_tools.errors import UserError

_BIASES = None, T5Bias, AlibiBias, T5Table  # kinds of bias, by number; None is a matrix or no bias

_layouts: list[AnyLayout] = []  # of all graphs; never deleted, because compiled code refers to them by number
_numbers: dict[int, int] = {}  # id of a layout -> its number, equal in all processes, as cached graphs need


def attend_in_graph(inputs: AttentionInputs, backend: str) -> Tensor:
    """Compute attention while torch.compile traces a model; the graph gets it as one operator."""
    q, k, v, (mask, key_padding_mask, segment_ids, bias, layout, causal, scale, dropout_p, softcap) = inputs
    if softcap is not None:
        raise UserError("softcap has no operator for compiled graphs of block-sparse attention: leave the layout out.")
    blocks, layout = (layout, None) if isinstance(layout, Tensor) else (None, layout)
    queries, keys = (segment_ids, segment_ids) if isinstance(segment_ids, Tensor | None) else segment_ids
    values, kind, options = _bias_arguments(bias)
    trained = [torch.is_grad_enabled() and x.requires_grad for x in (q, k, v)]
    is_causal = True if causal else False  # a comparison of symbolic lengths becomes a constant of the graph
    seed = torch.randint(1 << 62, (), dtype=torch.int64, device="cpu") if dropout_p else None
    number = layout if isinstance(layout, int) else number_of_layout(layout)
    tensors = q, k, v, values, mask, key_padding_mask, queries, keys, blocks, seed
    settings = number, backend, kind, options, is_causal, scale, dropout_p, [*trained, wants_gradient(bias)]
    return torch.ops.lm_experiments_tools.block_sparse_attention(*tensors, *settings)[0]


@torch.compiler.assume_constant_result  # evaluated once a graph, which is guarded by the identity of the layout
def number_of_layout(layout: AnyLayout) -> int:
    """Number that stands for a block-sparse layout in compiled graphs; `attend_in_graph` accepts it as the layout."""
    if id(layout) not in _numbers:
        _numbers[id(layout)] = len(_layouts)
        _layouts.append(layout)
    return _numbers[id(layout)]


def _bias_arguments(bias: Bias | None) -> tuple[Tensor | None, int, list[int]]:
    """The tensor of a bias, its kind, and the other arguments of its class."""
    if isinstance(bias, T5Bias):
        return bias.weight, 1, [int(bias.bidirectional), bias.num_buckets, bias.max_distance]
    return values_of(bias), _BIASES.index(type(bias)) if isinstance(bias, (AlibiBias, T5Table)) else 0, []


def _selected(tensors: Sequence[Tensor | None], settings: Sequence) -> tuple[AttentionInputs, ModuleType, int]:
    """Validated inputs, which require gradients if they do in training, their backend, and the seed."""
    *leaves, mask, key_padding_mask, queries, keys, blocks, seed = tensors
    layout, backend, kind, options, causal, scale, dropout_p, trained = settings
    leaves = [x if x is None else x.detach().requires_grad_(y) for x, y in zip(leaves, trained, strict=True)]
    *qkv, bias = leaves
    if kind:
        bias = _BIASES[kind](bias, *options)
    segments = None if queries is None else (queries, keys)
    layout = _layouts[layout] if blocks is None else blocks
    spec = AttentionSpec(mask, key_padding_mask, segments, bias, layout, causal, scale, dropout_p)
    with torch.set_grad_enabled(any(trained)):  # in both passes, so that the same backend is chosen
        inputs, module = select(AttentionInputs(*qkv, spec), backend)
    return inputs, module, 0 if seed is None else int(seed)


@contextmanager
def _seeded(inputs: AttentionInputs, module: ModuleType, seed: int) -> Iterator[None]:
    """Seed the device's generator for backends that draw from it, so that both passes draw the same numbers."""
    device = inputs.q.device
    if not (inputs.spec.dropout_p and getattr(module, "DRAWS_FROM_DEVICE", False)):
        yield
        return
    is_cuda = device.type == "cuda"
    with torch.random.fork_rng([device] if is_cuda else []):
        generator = torch.cuda.default_generators[device.index] if is_cuda else torch.default_generator
        generator.manual_seed(seed)
        yield


_INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? mask, Tensor? key_padding_mask, Tensor? query_segments, "
    "Tensor? key_segments, Tensor? blocks, Tensor? seed, SymInt layout, str backend, SymInt kind, SymInt[] options, "
    "bool causal, float? scale, float dropout_p, bool[] trained"
)
_NUM_TENSORS, _NUM_INPUTS = 10, 18


@torch.library.custom_op(
    "lm_experiments_tools::block_sparse_attention", mutates_args=(), schema=f"({_INPUTS}) -> (Tensor, Tensor)"
)
def operator(q: Tensor, *others: object) -> tuple[Tensor, Tensor]:
    """Compute attention as a custom operator of torch.compile, by the backend that is chosen when it runs.

    Returns:
        The output [batch, heads, query_length, v_dim], and the log-sum-exp of each query's scores [batch, heads,
        query_length].
    """
    tensors, settings = (q, *others[: _NUM_TENSORS - 1]), others[_NUM_TENSORS - 1 :]
    with torch.set_grad_enabled(any(settings[-1])):
        inputs, module, seed = _selected(tensors, settings)
        if hasattr(module, "run_forward"):
            output, lse = module.run_forward(*module.prepare(inputs, seed))
        else:
            # Outside of operators PyTorch does so by itself, because the mask requires gradients.
            takes_math = inputs.trains_bias and inputs.q.is_cpu
            with _seeded(inputs, module, seed), sdpa_kernel(SDPBackend.MATH) if takes_math else nullcontext():
                output, lse = module.attend(inputs, seed), None
    lse = q.new_zeros(q.shape[:3], dtype=torch.float32) if lse is None else lse
    return _by_token(output.detach()), lse


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
    schema=f"(Tensor grad, Tensor output, Tensor lse, {_INPUTS}, bool[] wanted) -> (Tensor, Tensor, Tensor, Tensor)",
)
def operator_backward(grad: Tensor, output: Tensor, lse: Tensor, *others: object) -> tuple[Tensor, ...]:
    """Compute the gradients of the custom attention operator with respect to q, k, v and the bias.

    Tensors that need no gradient (not in the argument `wanted`) get an empty tensor.

    Args:
        grad: gradient of the output.
        output, lse: results of `operator`.
    """
    *settings, wanted = others[_NUM_TENSORS:]
    with torch.no_grad():
        inputs, module, seed = _selected(others[:_NUM_TENSORS], settings)
        if hasattr(module, "run_backward"):
            found = backward_without_autograd(module, inputs, seed, output, lse, grad, wanted[3])
            found = [x if is_wanted else None for x, is_wanted in zip(found, wanted, strict=True)]
        else:
            found = _dense_gradients(inputs, module, seed, grad, wanted)
    d_q, d_k, d_v, d_bias = (grad.new_empty(0) if x is None else x for x in found)
    return *(_by_token(x) if x.dim() == 4 else x for x in (d_q, d_k, d_v)), d_bias.contiguous()


def _dense_gradients(
    inputs: AttentionInputs, module: ModuleType, seed: int, grad: Tensor, wanted: Sequence[bool]
) -> list[Tensor | None]:
    """Gradients of q, k, v and the bias values by torch.func; None where none is wanted."""
    leaves = [*inputs[:3], values_of(inputs.spec.bias)]

    def attend(*chosen: Tensor) -> Tensor:
        given = iter(chosen)
        *qkv, values = (next(given) if is_wanted else x for x, is_wanted in zip(leaves, wanted, strict=True))
        bias = with_values(inputs.spec.bias, values)
        return module.attend(AttentionInputs(*qkv, inputs.spec._replace(bias=bias)), seed)

    with _seeded(inputs, module, seed):
        primals = [x for x, is_wanted in zip(leaves, wanted, strict=True) if is_wanted]
        pull = torch.func.vjp(attend, *primals)[1]
    found = iter(pull(grad))
    return [next(found) if is_wanted else None for is_wanted in wanted]


@operator_backward.register_fake
def _(
    grad: Tensor, output: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, *others: object
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *wanted, wants_bias = others[-1]
    chosen = zip((q, k, v), wanted, strict=True)
    d_q, d_k, d_v = (_by_token(x.new_empty(x.shape)) if is_wanted else q.new_empty(0) for x, is_wanted in chosen)
    return d_q, d_k, d_v, bias.new_empty(bias.shape) if wants_bias else q.new_empty(0)


def _setup_context(ctx, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    ctx.settings = inputs[_NUM_TENSORS:]
    ctx.save_for_backward(*output, *inputs[:_NUM_TENSORS])


def _backward(ctx, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    wanted = list(ctx.needs_input_grad[:4])
    found = operator_backward(grad, *ctx.saved_tensors, *ctx.settings, wanted)
    return *(x if is_wanted else None for x, is_wanted in zip(found, wanted, strict=True)), *[None] * (_NUM_INPUTS - 4)


operator.register_autograd(_backward, setup_context=_setup_context)

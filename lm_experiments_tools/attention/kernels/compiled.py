"""The attention call as one operator of torch.compile's graphs, which then have no break and serve any length.

A graph holds the operator's tensors and a number, which stands for the non-tensor arguments (`Settings`). Validation
and the choice of a backend happen when the operator runs: no graph depends on them.

PyTorch switches autograd off inside operators. Backends with kernels have a `backward` of their own; torch.func
differentiates the dense ones.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from lm_experiments_tools.attention.kernels.bias import (
    AlibiBias,
    Bias,
    T5Bias,
    TableBias,
    values_of,
    vjp,
    wants_gradient,
    with_values,
)
from lm_experiments_tools.attention.kernels.plan import AnyLayout
from lm_experiments_tools.attention.kernels.spec import AttentionInputs, AttentionSpec
from lm_experiments_tools.errors import UserError

_NONE, _MATRIX, _TABLE, _T5, _ALIBI = range(5)  # kinds of bias; the operator is given its tensor

Select = Callable[[AttentionInputs, str], tuple[AttentionInputs, ModuleType]]  # validated inputs, and their backend


class Settings(NamedTuple):
    """The non-tensor arguments of a call."""

    select: Select
    layout: Callable[[], AnyLayout]  # the object if it is alive; None for a tensor, which the operator is given
    backend: str
    bias: tuple[int, bool, int, int]  # its kind; T5's has bidirectional, num_buckets and max_distance too
    causal: bool
    scale: float | None
    dropout_p: float
    trained: tuple[bool, bool, bool, bool]  # which of q, k, v and bias require gradients


# A graph is guarded by its layout's identity, and so runs only while that is alive: settings are deleted with their
# layout. But the backward pass may come later, and a layout made inside a graph has no other owner: recent ones are
# held.
_MAX_HELD = 256

_layouts: list[AnyLayout] = []  # of configurations, by the number that the graph has for them
_settings: dict[int, Settings] = {}
_numbers: dict[tuple, int] = {}
_held: dict[int, AnyLayout] = {}  # layouts by the number of their settings, most recently used last
_next_number = itertools.count()


def attend_in_graph(inputs: AttentionInputs, backend: str, select: Select) -> Tensor:
    """Attention while torch.compile traces: one operator, with the gradients of the uncompiled call."""
    if backend == "flex":  # it is compiled already
        return _attend_outside(inputs, backend, select)
    q, k, v, (mask, key_padding_mask, segment_ids, bias, layout, causal, scale, dropout_p) = inputs
    blocks, layout = (layout, None) if isinstance(layout, Tensor) else (None, layout)
    queries, keys = (segment_ids, segment_ids) if isinstance(segment_ids, Tensor | None) else segment_ids
    values, kind, shape = _tensor_of(bias, max(q.shape[2], k.shape[2]))
    trained = [torch.is_grad_enabled() and x.requires_grad for x in (q, k, v)]
    is_causal = True if causal else False  # a comparison of symbolic lengths becomes a constant of the graph
    number = _number_of(
        select, layout, backend, kind, *shape, is_causal, scale, dropout_p, *trained, wants_gradient(bias)
    )
    seed = torch.randint(1 << 62, (), dtype=torch.int64, device="cpu") if dropout_p else None
    return torch.ops.lm_experiments_tools.block_sparse_attention(
        q, k, v, values, mask, key_padding_mask, queries, keys, blocks, seed, number
    )[0]


@torch.compiler.disable
def _attend_outside(inputs: AttentionInputs, backend: str, select: Select) -> Tensor:
    inputs, module = select(inputs, backend)
    return module.attend(inputs, 0)


def number_of_layout(layout: AnyLayout) -> int:
    """A number that `attend_in_graph` takes for a layout that a function outside of the graph returned."""
    for number, known in enumerate(_layouts):
        if layout is known:
            return number
    _layouts.append(layout)
    return len(_layouts) - 1


def _tensor_of(bias: Bias | None, length: int) -> tuple[Tensor | None, int, tuple[bool, int, int]]:
    """The tensor of a bias, its kind, and the other settings of a T5Bias."""
    if type(bias) is T5Bias:
        return bias.weight, _T5, (bias.bidirectional, bias.num_buckets, bias.max_distance)
    if type(bias) is AlibiBias:
        return bias.slopes, _ALIBI, (False, 0, 0)
    if bias is None or isinstance(bias, Tensor):
        return bias, _NONE if bias is None else _MATRIX, (False, 0, 0)
    return bias.table(length), _TABLE, (False, 0, 0)


def _bias_of(settings: Settings, values: Tensor | None) -> Bias | None:
    kind, bidirectional, num_buckets, max_distance = settings.bias
    if kind == _T5:
        return T5Bias(values, bidirectional, num_buckets, max_distance)
    if kind == _ALIBI:
        return AlibiBias(values)
    return TableBias(values) if kind == _TABLE else values


@torch.compiler.assume_constant_result  # evaluated once a graph, which is guarded by the identity of the layout
def _number_of(select: Select, layout: AnyLayout | int, backend: str, *others: bool | float | None) -> int:
    """The number that stands for settings, as long as their layout is alive."""
    layout = _layouts[layout] if isinstance(layout, int) else layout
    kind, bidirectional, num_buckets, max_distance, causal, scale, dropout_p, *trained = others
    bias = kind, bidirectional, num_buckets, max_distance
    key = id(select), id(layout), backend, *others
    if key not in _numbers:
        number, reference = next(_next_number), (lambda: None) if layout is None else weakref.ref(layout)
        _settings[number] = Settings(select, reference, backend, bias, causal, scale, dropout_p, tuple(trained))
        _numbers[key] = number
        if layout is not None:
            weakref.finalize(layout, _forget, key)
    _hold(_numbers[key], layout)
    return _numbers[key]


def _hold(number: int, layout: AnyLayout) -> None:
    """Keep the layout of settings alive until _MAX_HELD others have been used."""
    if layout is not None:
        _held.pop(number, None)
        _held[number] = layout
        if len(_held) > _MAX_HELD:
            del _held[next(iter(_held))]


def _forget(key: tuple) -> None:
    """Delete settings whose layout is gone; another layout may get its id."""
    del _settings[_numbers.pop(key)]


def _settings_of(number: int) -> tuple[Settings, AnyLayout]:
    """The settings that a number in a graph stands for, and their layout."""
    settings = _settings.get(number)
    if settings is None:
        raise UserError(
            f"The layout of a compiled attention call is gone, after {_MAX_HELD} others: keep the object as long as "
            "the compiled function and the outputs that are to be differentiated."
        )
    layout = settings.layout()
    _hold(number, layout)
    return settings, layout


class _Call(NamedTuple):
    """A call in the operator: validated inputs, which require gradients as in training, and their backend."""

    inputs: AttentionInputs
    module: ModuleType
    seed: int

    @contextmanager
    def seeded(self) -> Iterator[None]:
        """Reset a generator that the backend's dropout draws from, so that both passes draw the same numbers."""
        device = self.inputs.q.device
        if not (self.inputs.spec.dropout_p and getattr(self.module, "DRAWS_FROM_DEVICE", False)):
            yield
            return
        is_cuda = device.type == "cuda"
        with torch.random.fork_rng([device] if is_cuda else []):
            generator = torch.cuda.default_generators[device.index] if is_cuda else torch.default_generator
            generator.manual_seed(self.seed)
            yield

    def forward(self) -> tuple[Tensor, Tensor | None]:
        """The output, and the backend's log-sum-exp of each row if it needs that for backward."""
        if hasattr(self.module, "forward"):
            return self.module.forward(self.inputs, self.seed)
        # Outside of operators PyTorch does so by itself, because the mask requires gradients.
        takes_math = self.inputs.trains_bias and self.inputs.q.is_cpu
        with self.seeded(), sdpa_kernel(SDPBackend.MATH) if takes_math else nullcontext():
            return self.module.attend(self.inputs, self.seed), None

    def backward(self, output: Tensor, lse: Tensor, grad: Tensor, wanted: Sequence[bool]) -> list[Tensor | None]:
        """Gradients of q, k, v and the bias values; None where none is wanted."""
        if hasattr(self.module, "backward"):
            found = self.module.backward(self.inputs, self.seed, output, lse, grad, wanted[3])
            return [x if is_wanted else None for x, is_wanted in zip(found, wanted, strict=True)]
        spec = self.inputs.spec
        leaves = [*self.inputs[:3], values_of(spec.bias)]

        def attend(*chosen: Tensor) -> Tensor:
            given = iter(chosen)
            q, k, v, values = (next(given) if is_wanted else x for x, is_wanted in zip(leaves, wanted, strict=True))
            inputs = AttentionInputs(q, k, v, spec._replace(bias=with_values(spec.bias, values)))
            return self.module.attend(inputs, self.seed)

        with self.seeded():
            _, pull = vjp(attend, *(x for x, is_wanted in zip(leaves, wanted, strict=True) if is_wanted))
        found = iter(pull(grad))
        return [next(found) if is_wanted else None for is_wanted in wanted]


def _call_of(number: int, tensors: Sequence[Tensor | None]) -> _Call:
    settings, layout = _settings_of(number)
    *leaves, mask, key_padding_mask, queries, keys, blocks, seed = tensors
    trained = settings.trained  # as in the forward pass, so that the same backend is chosen
    leaves = [x if x is None else x.detach().requires_grad_(y) for x, y in zip(leaves, trained, strict=True)]
    segments = None if queries is None else (queries, keys)
    spec = AttentionSpec(
        mask,
        key_padding_mask,
        segments,
        _bias_of(settings, leaves.pop()),
        layout if blocks is None else blocks,
        settings.causal,
        settings.scale,
        settings.dropout_p,
    )
    with torch.set_grad_enabled(any(trained)):
        inputs, module = settings.select(AttentionInputs(*leaves, spec), settings.backend)
    return _Call(inputs, module, 0 if seed is None else int(seed))


_INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? mask, Tensor? key_padding_mask, Tensor? query_segments, "
    "Tensor? key_segments, Tensor? blocks, Tensor? seed, SymInt number"
)  # as a string, because torch 2.6 infers fewer annotations than later versions


@torch.library.custom_op(
    "lm_experiments_tools::block_sparse_attention", mutates_args=(), schema=f"({_INPUTS}) -> (Tensor, Tensor)"
)
def operator(q: Tensor, *others: Tensor | int | None) -> tuple[Tensor, Tensor]:
    """The output [batch, heads, query_length, v's last dimension], and the log-sum-exp of its rows."""
    *tensors, number = q, *others
    with torch.set_grad_enabled(any(_settings_of(number)[0].trained)):
        output, lse = _call_of(number, tensors).forward()
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
def operator_backward(
    grad: Tensor, output: Tensor, lse: Tensor, *inputs: Tensor | int | Sequence[bool] | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and the bias; an empty tensor where none is wanted."""
    *tensors, number, wanted = inputs
    with torch.no_grad():
        found = _call_of(number, tensors).backward(output, lse, grad, wanted)
    d_q, d_k, d_v, d_bias = (tensors[0].new_empty(0) if x is None else x for x in found)
    return *(_by_token(x) if x.dim() == 4 else x for x in (d_q, d_k, d_v)), d_bias.contiguous()


@operator_backward.register_fake
def _(
    grad: Tensor, output: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, *others: object
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *wanted, wants_bias = others[-1]
    chosen = zip((q, k, v), wanted, strict=True)
    d_q, d_k, d_v = (_by_token(x.new_empty(x.shape)) if is_wanted else q.new_empty(0) for x, is_wanted in chosen)
    return d_q, d_k, d_v, bias.new_empty(bias.shape) if wants_bias else q.new_empty(0)


def _setup_context(ctx, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.number = inputs
    ctx.save_for_backward(*output, *tensors)


def _backward(ctx, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    wanted = list(ctx.needs_input_grad[:4])
    found = operator_backward(grad, *ctx.saved_tensors, ctx.number, wanted)
    return *(x if is_wanted else None for x, is_wanted in zip(found, wanted, strict=True)), *([None] * 7)


operator.register_autograd(_backward, setup_context=_setup_context)

"""The attention call as one operator of torch.compile's graphs, which then have no break and serve any length.

A graph holds the operator's tensors and a number; what that stands for (layout, kind of bias, backend and so on) is
kept here as `Settings`. Checks and the choice of a backend are made when the operator runs: no graph depends on them.

The operator computes gradients with autograd, which PyTorch switches off in operators: it is switched on by functions
of torch that are not public. In a torch without them the call breaks the graph instead.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lm_experiments_tools.attention.kernels.bias import AlibiBias, Bias, T5Bias, wants_gradient
from lm_experiments_tools.attention.kernels.plan import AnyLayout
from lm_experiments_tools.attention.kernels.request import Kept, Request
from lm_experiments_tools.errors import UserError

_NONE, _MATRIX, _TABLE, _T5, _ALIBI = range(5)  # kinds of bias, of which the operator is given the tensor

_LOCAL = "_dispatch_tls_local_include_set", "_dispatch_tls_local_exclude_set"
_CAN_DIFFERENTIATE = all(hasattr(torch._C, name) for name in ("_ForceDispatchKeyGuard", "DispatchKey", *_LOCAL))

Run = Callable[[Request, str, int | None, Kept], Tensor]  # of a request, a backend's name, dropout's seed


class Settings(NamedTuple):
    """All of a call that is no tensor."""

    run: Run
    layout: Callable[[], AnyLayout]  # the object if it lives; None too where it is a tensor: the operator is given it
    backend: str
    bias: tuple[int, bool, int, int]  # its kind; of T5's also bidirectional, num_buckets and max_distance
    causal: bool
    scale: float | None
    dropout_p: float
    trained: tuple[bool, bool, bool, bool]  # which of q, k, v and bias want gradients


# A graph is guarded by its layout's identity, and so runs only while that lives: settings may go with their layout.
# But its backward pass may come later, and a layout that a graph makes for itself has no other owner.
_MAX_HELD = 256

_layouts: list[AnyLayout] = []  # that are numbers in the graph already, of configurations: one for the same settings
_settings: dict[int, Settings] = {}
_numbers: dict[tuple, int] = {}
_held: dict[int, AnyLayout] = {}  # of the settings used last, which come last
_next_number = itertools.count()


def attend_in_graph(request: Request, backend: str, run: Run) -> Tensor:
    """`run` of a request while torch.compile traces: as one operator, whose gradients are those of the call."""
    if not _CAN_DIFFERENTIATE or backend == "flex":  # which is compiled already
        return _attend_outside(request, backend, run)
    q, k, v, layout, bias, key_padding_mask, segment_ids, causal, scale, dropout_p = request
    blocks, layout = (layout, None) if isinstance(layout, Tensor) else (None, layout)
    queries, keys = (segment_ids, segment_ids) if isinstance(segment_ids, Tensor | None) else segment_ids
    values, kind, shape = _tensor_of(bias, max(q.shape[2], k.shape[2]))
    trained = [torch.is_grad_enabled() and x.requires_grad for x in (q, k, v)]
    is_causal = True if causal else False  # a comparison of lengths becomes its value, which the graph then stands on
    number = _number_of(
        run, layout, backend, kind, *shape, is_causal, scale, dropout_p, *trained, wants_gradient(bias)
    )
    seed = torch.randint(1 << 62, (), dtype=torch.int64, device="cpu") if dropout_p else None
    return torch.ops.lm_experiments_tools.block_sparse_attention(
        q, k, v, values, key_padding_mask, queries, keys, blocks, seed, number
    )[0]


@torch.compiler.disable
def _attend_outside(request: Request, backend: str, run: Run) -> Tensor:
    layout = request.layout
    return run(request._replace(layout=_layouts[layout] if isinstance(layout, int) else layout), backend)


def number_of_layout(layout: AnyLayout) -> int:
    """A number that `attend_in_graph` takes for the layout, where that comes of a function that is not traced."""
    for number, known in enumerate(_layouts):
        if layout is known:
            return number
    _layouts.append(layout)
    return len(_layouts) - 1


def _tensor_of(bias: Bias | None, length: int) -> tuple[Tensor | None, int, tuple[bool, int, int]]:
    """The tensor of a bias, its kind, and what else a T5Bias is made of."""
    if type(bias) is T5Bias:
        return bias.weight, _T5, (bias.bidirectional, bias.num_buckets, bias.max_distance)
    if type(bias) is AlibiBias:
        return bias.slopes, _ALIBI, (False, 0, 0)
    if bias is None or isinstance(bias, Tensor):
        return bias, _NONE if bias is None else _MATRIX, (False, 0, 0)
    return bias.table(length), _TABLE, (False, 0, 0)


@torch.compiler.assume_constant_result  # asked once a graph, which is guarded by the identity of the layout
def _number_of(run: Run, layout: AnyLayout | int, backend: str, *others: bool | float | None) -> int:
    """The number that stands for settings, as long as their layout lives."""
    layout = _layouts[layout] if isinstance(layout, int) else layout
    kind, bidirectional, num_buckets, max_distance, causal, scale, dropout_p, *trained = others
    bias = kind, bidirectional, num_buckets, max_distance
    key = id(run), id(layout), backend, *others
    if key not in _numbers:
        number, reference = next(_next_number), (lambda: None) if layout is None else weakref.ref(layout)
        _settings[number] = Settings(run, reference, backend, bias, causal, scale, dropout_p, tuple(trained))
        _numbers[key] = number
        if layout is not None:
            weakref.finalize(layout, _forget, key)
    _hold(_numbers[key], layout)
    return _numbers[key]


def _hold(number: int, layout: AnyLayout) -> None:
    """Keep the layout of settings for a while."""
    if layout is not None:
        _held.pop(number, None)
        _held[number] = layout
        if len(_held) > _MAX_HELD:
            del _held[next(iter(_held))]


def _forget(key: tuple) -> None:
    """Settings whose layout is no more, so that another one may have its id."""
    del _settings[_numbers.pop(key)]


def _settings_of(number: int) -> tuple[Settings, AnyLayout]:
    """What a number in a graph stands for, and its layout."""
    settings = _settings.get(number)
    if settings is None:
        raise UserError(
            f"The layout of a compiled attention call is gone, after {_MAX_HELD} others: keep the object as long as "
            "the compiled function and the outputs that are to be differentiated."
        )
    layout = settings.layout()
    _hold(number, layout)
    return settings, layout


@dataclass(eq=False)
class _Table:
    """A bias of distances -s..s by its values [heads, 2 * s + 1]."""

    values: Tensor

    @property
    def num_heads(self) -> int:
        return self.values.shape[0]

    def table(self, length: int) -> Tensor:
        return self.values


def _autograd() -> AbstractContextManager[None]:
    """Autograd, which PyTorch switches off where it has come to an operator's own function."""
    included, excluded = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    for key in ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor", "ADInplaceOrView"):
        excluded = excluded.remove(getattr(torch._C.DispatchKey, key))
    return torch._C._ForceDispatchKeyGuard(included, excluded)


def _attend(
    number: int, tensors: Sequence[Tensor | None], wanted: Sequence[bool] | None, kept: Kept
) -> tuple[Tensor, list[Tensor]]:
    """The output, and those of q, k, v and the bias of which gradients are wanted (None: as in training)."""
    settings, layout = _settings_of(number)
    *trainable, key_padding_mask, queries, keys, blocks, seed = tensors
    trained = settings.trained  # as in the forward pass, so that the same backend is chosen
    leaves = [x if x is None else x.detach().requires_grad_(y) for x, y in zip(trainable, trained, strict=True)]
    q, k, v, values = leaves
    kind, bidirectional, num_buckets, max_distance = settings.bias
    bias = {
        _TABLE: lambda: _Table(values),
        _T5: lambda: T5Bias(values, bidirectional, num_buckets, max_distance),
        _ALIBI: lambda: AlibiBias(values),
    }.get(kind, lambda: values)()
    layout = layout if blocks is None else blocks
    segments = None if queries is None else (queries, keys)
    request = Request(
        q, k, v, layout, bias, key_padding_mask, segments, settings.causal, settings.scale, settings.dropout_p
    )
    with _autograd(), torch.set_grad_enabled(any(trained)):
        output = settings.run(request, settings.backend, None if seed is None else int(seed), kept)
    return output, [x for x, is_wanted in zip(leaves, wanted or trained, strict=True) if is_wanted]


_INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? key_padding_mask, Tensor? query_segments, "
    "Tensor? key_segments, Tensor? blocks, Tensor? seed, SymInt number"
)  # written out, as torch 2.6 reads fewer annotations than later ones


@torch.library.custom_op(
    "lm_experiments_tools::block_sparse_attention", mutates_args=(), schema=f"({_INPUTS}) -> (Tensor, Tensor)"
)
def operator(q: Tensor, *others: Tensor | int | None) -> tuple[Tensor, Tensor]:
    """The output [batch, heads, query_length, v's last dimension], and the logarithms of the sums of its rows."""
    *tensors, number = q, *others
    kept = Kept()
    output, _ = _attend(number, tensors, None, kept)
    lse = q.new_zeros(q.shape[:3], dtype=torch.float32) if kept.lse is None else kept.lse
    return _by_token(output.detach()), lse


def _by_token(x: Tensor) -> Tensor:
    """x [batch, heads, length, dim] with the heads of a token side by side in memory: as layers go on with it."""
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
    q = tensors[0]
    again, leaves = _attend(number, tensors, wanted, Kept(output, lse))
    with _autograd():
        found = iter(torch.autograd.grad(again, leaves, grad))
    gradients = [next(found) if is_wanted else q.new_empty(0) for is_wanted in wanted]
    d_q, d_k, d_v = (_by_token(x) if is_wanted else x for x, is_wanted in zip(gradients, wanted[:3], strict=False))
    return d_q, d_k, d_v, gradients[3].contiguous()


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
    return *(x if is_wanted else None for x, is_wanted in zip(found, wanted, strict=True)), *([None] * 6)


operator.register_autograd(_backward, setup_context=_setup_context)

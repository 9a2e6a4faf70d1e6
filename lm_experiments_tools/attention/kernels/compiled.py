"""The attention call as one operator of torch.compile's graphs, which then have no break and serve any length.

A graph holds the operator's tensors and a number; what that stands for (layout, kind of bias, backend and so on) is
kept here as `Settings`. Checks and the choice of a backend are made when the operator runs: no graph depends on them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lm_experiments_tools.attention.kernels.bias import AlibiBias, Bias, T5Bias, wants_gradient
from lm_experiments_tools.attention.kernels.plan import AnyLayout
from lm_experiments_tools.attention.kernels.request import Kept, Request

_NONE, _MATRIX, _TABLE, _T5, _ALIBI = range(5)  # kinds of bias, of which the operator is given the tensor

Run = Callable[[Request, str, int | None, Kept], Tensor]  # of a request, a backend's name, dropout's seed


class Settings(NamedTuple):
    """All of a call that is no tensor."""

    run: Run
    layout: AnyLayout  # None too where it is a tensor, which the operator is given
    backend: str
    bias: tuple[int, bool, int, int]  # its kind; of T5's also bidirectional, num_buckets and max_distance
    causal: bool
    scale: float | None
    dropout_p: float
    trained: tuple[bool, bool, bool, bool]  # which of q, k, v and bias want gradients


_layouts: list[AnyLayout] = []  # that are numbers in the graph already
_settings: list[Settings] = []
_numbers: dict[tuple, int] = {}


def attend_in_graph(request: Request, backend: str, run: Run) -> Tensor:
    """`run` of a request while torch.compile traces: as one operator, whose gradients are those of the call."""
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


def number_of_layout(layout: AnyLayout) -> int:
    """A number that `attend_in_graph` takes for the layout, where that comes of a function that is not traced."""
    if not any(layout is known for known in _layouts):
        _layouts.append(layout)
    return next(number for number, known in enumerate(_layouts) if layout is known)


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
    """The number that stands for settings. They keep the layout alive, so that no other comes to have its id."""
    layout = _layouts[layout] if isinstance(layout, int) else layout
    kind, bidirectional, num_buckets, max_distance, causal, scale, dropout_p, *trained = others
    bias = kind, bidirectional, num_buckets, max_distance
    key = id(run), id(layout), backend, *others
    if key not in _numbers:
        _settings.append(Settings(run, layout, backend, bias, causal, scale, dropout_p, tuple(trained)))
        _numbers[key] = len(_settings) - 1
    return _numbers[key]


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
    settings: Settings, tensors: Sequence[Tensor | None], wanted: Sequence[bool], kept: Kept
) -> tuple[Tensor, list[Tensor]]:
    """The output, and those of q, k, v and the bias of which gradients are wanted."""
    *trainable, key_padding_mask, queries, keys, blocks, seed = tensors
    leaves = [x if x is None else x.detach().requires_grad_(y) for x, y in zip(trainable, wanted, strict=True)]
    q, k, v, values = leaves
    kind, bidirectional, num_buckets, max_distance = settings.bias
    bias = {
        _TABLE: lambda: _Table(values),
        _T5: lambda: T5Bias(values, bidirectional, num_buckets, max_distance),
        _ALIBI: lambda: AlibiBias(values),
    }.get(kind, lambda: values)()
    layout = settings.layout if blocks is None else blocks
    segments = None if queries is None else (queries, keys)
    request = Request(
        q, k, v, layout, bias, key_padding_mask, segments, settings.causal, settings.scale, settings.dropout_p
    )
    with _autograd(), torch.set_grad_enabled(any(wanted)):
        output = settings.run(request, settings.backend, None if seed is None else int(seed), kept)
    return output, [x for x, is_wanted in zip(leaves, wanted, strict=True) if is_wanted]


@torch.library.custom_op("lm_experiments_tools::block_sparse_attention", mutates_args=())
def operator(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    key_padding_mask: Tensor | None,
    query_segments: Tensor | None,
    key_segments: Tensor | None,
    blocks: Tensor | None,
    seed: Tensor | None,
    number: int,
) -> tuple[Tensor, Tensor]:
    """The output [batch, heads, query_length, v's last dimension], and the logarithms of the sums of its rows."""
    kept, settings = Kept(), _settings[number]
    tensors = q, k, v, bias, key_padding_mask, query_segments, key_segments, blocks, seed
    output, _ = _attend(settings, tensors, settings.trained, kept)
    lse = q.new_zeros(q.shape[:3], dtype=torch.float32) if kept.lse is None else kept.lse
    return output.detach().contiguous(), lse


@operator.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *others: object) -> tuple[Tensor, Tensor]:
    return q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("lm_experiments_tools::block_sparse_attention_backward", mutates_args=())
def operator_backward(
    grad: Tensor,
    output: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    key_padding_mask: Tensor | None,
    query_segments: Tensor | None,
    key_segments: Tensor | None,
    blocks: Tensor | None,
    seed: Tensor | None,
    number: int,
    wanted: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and the bias; an empty tensor where none is wanted."""
    tensors = q, k, v, bias, key_padding_mask, query_segments, key_segments, blocks, seed
    again, leaves = _attend(_settings[number], tensors, wanted, Kept(output, lse))
    with _autograd():
        found = iter(torch.autograd.grad(again, leaves, grad))
    gradients = [next(found).contiguous() if is_wanted else q.new_empty(0) for is_wanted in wanted]
    return gradients[0], gradients[1], gradients[2], gradients[3]


@operator_backward.register_fake
def _(
    grad: Tensor, output: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, *others: object
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    chosen = zip((q, k, v, bias), others[-1], strict=True)
    gradients = [x.new_empty(x.shape) if is_wanted else q.new_empty(0) for x, is_wanted in chosen]
    return gradients[0], gradients[1], gradients[2], gradients[3]


def _setup_context(ctx, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.number = inputs
    ctx.save_for_backward(*output, *tensors)


def _backward(ctx, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    wanted = list(ctx.needs_input_grad[:4])
    found = operator_backward(grad, *ctx.saved_tensors, ctx.number, wanted)
    return *(x if is_wanted else None for x, is_wanted in zip(found, wanted, strict=True)), *([None] * 6)


operator.register_autograd(_backward, setup_context=_setup_context)

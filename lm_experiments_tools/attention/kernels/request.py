"""One attention call: its arguments, checked once, which every backend is given."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from numbers import Real
from typing import NamedTuple

import torch
from torch import Tensor

from lm_experiments_tools.attention.kernels.bias import AlibiBias, Bias, T5Bias, wants_gradient
from lm_experiments_tools.attention.kernels.plan import AnyLayout, cached, describe, resolve_layout
from lm_experiments_tools.errors import UserError

Segments = Tensor | tuple[Tensor, Tensor]
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class Request(NamedTuple):
    """Arguments of `block_sparse_attention`, as given or checked.

    `check` makes the one of the other: its `layout` holds the blocks for these lengths and heads, its segments are a
    pair, its scale is a number. The properties below `scores_shape` are those of a checked one.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    layout: AnyLayout = None
    bias: Bias | None = None
    key_padding_mask: Tensor | None = None
    segment_ids: Segments | None = None
    causal: bool = False
    scale: float | None = None
    dropout_p: float = 0.0

    @property
    def scores_shape(self) -> tuple[int, int, int, int]:
        """(batch, heads, query_length, key_length)."""
        return (*self.q.shape[:3], self.k.shape[2])

    @property
    def density(self) -> float:
        """Fraction of blocks that the layout keeps and causality leaves."""
        return cached(self.layout, ("density", self.causal), self._density)

    def _density(self) -> float:
        blocks = self.layout.blocks.tril() if self.causal else self.layout.blocks
        return blocks.count_nonzero().item() / blocks.numel()

    @property
    def is_dense(self) -> bool:
        """True if the layout keeps every block (causality may still leave some out)."""
        return cached(self.layout, ("dense",), lambda: bool(self.layout.blocks.all()))

    @property
    def trains_bias(self) -> bool:
        """True if the bias wants a gradient."""
        return wants_gradient(self.bias)

    @property
    def same_segments(self) -> Tensor:
        """Keys of a query's own segment, bool [batch, 1, query_length, key_length]."""
        queries, keys = self.segment_ids
        return queries[:, None, :, None] == keys[:, None, None, :]

    @property
    def compute_dtype(self) -> torch.dtype:
        """Of scores and sums: float32, or float64 for float64 inputs."""
        return torch.float64 if self.q.dtype == torch.float64 else torch.float32


@dataclass
class Kept:
    """What the forward pass of a call found and its backward pass needs, where autograd does not bring it there.

    A backend fills in what is None. What is not None it returns without computing it again, for its gradients alone.
    """

    output: Tensor | None = None
    lse: Tensor | None = None  # logarithms of the rows' sums, float32 [batch, heads, query_length]


def check(request: Request) -> Request:
    """The request as backends take it, or a UserError that names the argument at fault."""
    q, k, v, layout, bias, key_padding_mask, segment_ids, causal, scale, dropout_p = request
    _check_tensors(q, k, v)
    batch, num_heads, query_length, head_dim = q.shape
    key_length = k.shape[2]
    if not (_is_number(dropout_p) and 0.0 <= dropout_p < 1.0):
        raise UserError(f"dropout_p is {dropout_p!r}; it must be a number of at least 0 and below 1.")
    if scale is not None and not (_is_number(scale) and abs(scale) <= sys.float_info.max):
        raise UserError(f"scale is {scale!r}; it must be a finite number (a learned one is multiplied into q).")
    if not isinstance(causal, int) or causal not in (True, False):
        raise UserError(f"causal is {causal!r}; it must be True or False.")
    _check_bias(bias, q, key_length)
    if key_padding_mask is not None:
        if not _is_bool(key_padding_mask) or key_padding_mask.shape != (batch, key_length):
            raise UserError(
                f"key_padding_mask is {describe(key_padding_mask)}; it must be bool [{batch}, {key_length}] (batch, "
                "key_length), True where keys are attended to."
            )
        _check_device("key_padding_mask", key_padding_mask, q)
        if key_padding_mask.device.type == "cpu" and key_padding_mask.all():  # looking would make a GPU wait
            key_padding_mask = None
    return request._replace(
        layout=resolve_layout(layout, num_heads, query_length, key_length),
        key_padding_mask=key_padding_mask,
        segment_ids=_check_segments(segment_ids, q, key_length),
        causal=bool(causal),
        scale=head_dim**-0.5 if scale is None else float(scale),
        dropout_p=float(dropout_p),
    )


def _is_number(x: object) -> bool:
    return isinstance(x, Real) and not isinstance(x, bool)


def _is_bool(x: object) -> bool:
    return isinstance(x, Tensor) and x.dtype == torch.bool


def _check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor) or x.dim() != 4 or x.dtype not in _FLOATS or 0 in x.shape:
            raise UserError(
                f"{name} is {describe(x)}; it must be float [batch, heads, length, head_dim], none of them 0."
            )
    if k.shape[:3] != v.shape[:3] or q.shape[:2] != k.shape[:2] or q.shape[3] != k.shape[3]:
        raise UserError(
            f"q {list(q.shape)}, k {list(k.shape)} and v {list(v.shape)} do not belong together: batch and heads must "
            "be equal in all, length in k and v, head_dim in q and k."
        )
    if not (q.dtype == k.dtype == v.dtype and q.device == k.device == v.device):
        raise UserError(f"q, k and v must share dtype and device; they are {_home(q)}, {_home(k)} and {_home(v)}.")


def _home(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} on {x.device}"


def _check_bias(bias: Bias | None, q: Tensor, key_length: int) -> None:
    if bias is None:
        return
    batch, num_heads, query_length, _ = q.shape
    if not isinstance(bias, Tensor):
        if not callable(getattr(bias, "table", None)) or isinstance(bias, type):
            raise UserError(f"bias is {describe(bias)}; it must be a T5Bias, an AlibiBias, a matrix or None.")
        if getattr(bias, "num_heads", None) != num_heads:
            raise UserError(
                f"The bias has values for {getattr(bias, 'num_heads', 'an unknown number of')} heads, but q has "
                f"{num_heads}."
            )
        values = bias.weight if isinstance(bias, T5Bias) else bias.slopes if isinstance(bias, AlibiBias) else None
        if values is not None:
            _check_device(f"{type(bias).__name__}'s tensor", values, q)
        return
    if (
        bias.dim() != 4
        or bias.shape[0] not in (1, batch)
        or bias.shape[1] not in (1, num_heads)
        or bias.shape[2:] != (query_length, key_length)
        or bias.dtype not in _FLOATS
    ):
        raise UserError(
            f"bias is {describe(bias)}; it must be float [1 or {batch}, 1 or {num_heads}, {query_length}, "
            f"{key_length}] (batch, heads, query_length, key_length)."
        )
    _check_device("bias", bias, q)


def _check_device(name: str, x: Tensor, q: Tensor) -> None:
    if x.device != q.device:
        raise UserError(f"{name} is on {x.device}, but q is on {q.device}: move it there.")


def _check_segments(segment_ids: Segments | None, q: Tensor, key_length: int) -> tuple[Tensor, Tensor] | None:
    if segment_ids is None:
        return None
    batch, _, query_length, _ = q.shape
    if isinstance(segment_ids, Tensor):
        if query_length != key_length:
            raise UserError(
                f"segment_ids is one tensor, but there are {query_length} queries and {key_length} keys: give a pair, "
                f"[{batch}, {query_length}] for queries and [{batch}, {key_length}] for keys."
            )
        segment_ids = segment_ids, segment_ids
    if not (isinstance(segment_ids, tuple | list) and len(segment_ids) == 2):
        raise UserError(
            f"segment_ids is {describe(segment_ids)}; it must be an integer tensor [batch, length], or a pair, "
            f"[{batch}, {query_length}] for queries and [{batch}, {key_length}] for keys."
        )
    for ids, length, what in zip(segment_ids, (query_length, key_length), ("queries", "keys"), strict=True):
        if not isinstance(ids, Tensor) or ids.shape != (batch, length) or ids.dtype not in _INTEGERS:
            raise UserError(f"segment_ids of {what} is {describe(ids)}; it must be integer [{batch}, {length}].")
        _check_device(f"segment_ids of {what}", ids, q)
    return tuple(segment_ids)

"""Entry points of attention, for layers and for users: `attend`, `block_sparse_attention` and `explain`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from lm_experiments_tools.attention.kernels import choice, eager, sdpa
from lm_experiments_tools.attention.kernels.bias import Bias
from lm_experiments_tools.attention.kernels.layout_cache import AnyLayout
from lm_experiments_tools.attention.kernels.operator import attend_in_graph
from lm_experiments_tools.attention.kernels.spec import AttentionInputs, AttentionSpec, SegmentIds, validate
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.modules.devices import has_kernels

_IMPLEMENTATIONS = {"eager": "eager", "sdpa": "sdpa", "block_sparse": "auto"}  # transformers' names -> backends
_TRACEABLE = {"eager": eager, "sdpa": sdpa}  # torch.compile traces these; other backends are one operator to it


def backend_of(implementation: str, fused_on: torch.device | None = None) -> str:
    """Map transformers' `attn_implementation` to the name of an attention backend of this package.

    Args:
        implementation: "eager", "sdpa" or "block_sparse".
        fused_on: the model's device if it trains by its fused path (`use_fast_step`), else None. If Triton's kernels
            run there, "sdpa" gives "auto", which needs less memory for the gradient of a position bias.

    Raises:
        UserError: the implementation is another one.
    """
    if implementation not in _IMPLEMENTATIONS:
        raise UserError(f"attn_implementation={implementation!r} is none of {', '.join(_IMPLEMENTATIONS)}.")
    if implementation == "sdpa" and fused_on is not None and has_kernels(fused_on):
        return "auto"
    return _IMPLEMENTATIONS[implementation]


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    backend: str = "auto",
    *,
    is_fast: bool = False,
    output_attentions: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Compute the attention of a layer by the chosen backend. Queries without an allowed key give zeros.

    Args:
        q: [batch, heads, query_length, head_dim].
        k, v: [batch, heads, key_length, head_dim].
        spec: masks, bias, layout and settings. They are not checked if the backend is "eager" or "sdpa" without a
            layout.
        backend: a name as in `block_sparse_attention`; `backend_of` gives it for transformers' names.
        is_fast: use eager's variant for training on a CPU if it supports this call.
        output_attentions: also return attention weights; uses the backend "eager".

    Returns:
        The output [batch, heads, query_length, head_dim], and the weights [batch, heads, query_length, key_length] or
        None.

    Raises:
        UserError: the backend is unknown, or arguments do not fit each other.
    """
    inputs = AttentionInputs(q, k, v, spec)
    if output_attentions:
        return eager.attend_with_weights(inputs if spec.layout is None else validate(inputs))
    if spec.layout is None:
        if spec.softcap is not None:
            return eager.attend(inputs), None
        if is_fast and eager.has_fast(inputs):
            return eager.attend_fast(inputs), None
        if backend in _TRACEABLE:
            return _TRACEABLE[backend].attend(inputs), None
    return _attend(inputs, backend), None


def block_sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: AnyLayout = None,
    bias: Bias | None = None,
    key_padding_mask: Tensor | None = None,
    segment_ids: SegmentIds | None = None,
    causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
    backend: str = "auto",
) -> Tensor:
    """Compute softmax(q k^T * scale + bias) v over the keys that the layout and the masks allow.

    Gradients are exact, including that of the bias. Queries without an allowed key give zeros and get zero gradients.
    Masked inputs must be finite too, because 0 times NaN is NaN. Pass the same layout object to many calls: lists
    derived from it are cached with the object.

    Args:
        q: [batch, heads, query_length, head_dim], float16, bfloat16, float32 or float64.
        k: [batch, heads, key_length, head_dim].
        v: [batch, heads, key_length, any].
        layout: blocks of keys that each block of queries attends to; None for dense attention. It is a configuration
            such as `BigBirdSparsityConfig` (self-attention only), a `Layout`, or a tensor [heads or 1, query_blocks,
            key_blocks] of 0 and 1. Lengths need not be multiples of the block. A tensor's block is query_length /
            query_blocks, rounded up, and must be a power of two.
        bias: `T5Bias`, `AlibiBias` or a matrix [1 or batch, 1 or heads, query_length, key_length], added to the scaled
            scores. Only dense backends expand the first two to a matrix.
        key_padding_mask: bool [batch, key_length], True for keys that may be attended to.
        segment_ids: document IDs of packed rows, int [batch, length], or a pair for queries and keys. Tokens attend
            within their document.
        causal: query i attends to keys 0..i, token by token, in addition to the layout.
        scale: head_dim ** -0.5 if None; 1.0 in T5.
        dropout_p: probability of dropping an attention weight. "blocks" rounds it to a multiple of 2 ** -16. "triton"
            rounds it up or down to a multiple of 2 ** -8 at random, so that it is exact on average. Both draw a seed
            from torch's CPU generator; dense backends use the device's generator.
        backend: "auto", "blocks" (for a CPU), "triton" (for a GPU, deterministic), or the dense "sdpa" and "eager".
            `explain` reports the choice of "auto".

    Returns:
        [batch, heads, query_length, v's last dimension] in q's dtype.

    Raises:
        UserError: arguments do not fit each other, or the named backend cannot compute them.
    """
    spec = AttentionSpec(None, key_padding_mask, segment_ids, bias, layout, causal, scale, dropout_p)
    return _attend(AttentionInputs(q, k, v, spec), backend)


def _attend(inputs: AttentionInputs, backend: str) -> Tensor:
    # one operator in a compiled graph, and in a memory estimate, which has FakeTensors outside of any graph
    if torch.compiler.is_compiling() != isinstance(inputs.q, FakeTensor):
        return attend_in_graph(inputs, backend)
    inputs, module = choice.select(inputs, backend)
    seed = 0
    if inputs.spec.dropout_p and not getattr(module, "DRAWS_FROM_DEVICE", False):
        seed = int(torch.randint(1 << 62, (), dtype=torch.int64, device="cpu"))
    return module.attend(inputs, seed)


class Explanation(NamedTuple):
    """Report of `explain`: the backend of an attention call, the reason, and the fraction of blocks computed."""

    backend: str
    reason: str
    density: float  # fraction of blocks that layout and causality leave

    def __str__(self) -> str:
        return f"{self.backend}: {self.reason}; density {self.density:.3f}"


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: AnyLayout = None,
    bias: Bias | None = None,
    key_padding_mask: Tensor | None = None,
    *,
    backend: str = "auto",
    **settings: object,
) -> Explanation:
    """Report which backend `block_sparse_attention` would use for these arguments, and why.

    The arguments are those of `block_sparse_attention`.

    >>> print(explain(q, k, v, BigBirdSparsityConfig(num_heads=12)))
    sdpa: 128 tokens are few (at most 256); density 0.578
    """
    inputs = validate(
        AttentionInputs(q, k, v, AttentionSpec(None, key_padding_mask, bias=bias, layout=layout, **settings))
    )
    module, reason = choice.choose(inputs, backend)
    return Explanation(module.__name__.rpartition(".")[2], reason, inputs.density)

"""An attention call: its arguments and their checks, the choice of a backend, and the entry points.

A backend is a module with a function `attend(inputs, seed)`. The seed of dropout is an int64 scalar on the inputs'
device, None without dropout. If a backend cannot compute all inputs, its function `refusal(inputs)` gives the reason.
In a backend with `DRAWS_FROM_DEVICE = True`, dropout uses the device's random generator and gets no seed. operator.py
lists the functions of backends with a backward pass of their own.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from lm_experiments_tools.attention.kernels.bias import (
    SHORT,
    SHORT_DENSE,
    AlibiBias,
    Bias,
    DistanceBias,
    T5Bias,
    T5Table,
    values_of,
    wants_gradient,
)
from lm_experiments_tools.attention.kernels.layout_cache import AnyLayout, cached, describe, resolve_layout
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.modules.devices import has_kernels

_logger = logging.getLogger(__name__)

SegmentIds = Tensor | tuple[Tensor, Tensor]  # for queries and keys alike, or `Segments`
BACKENDS: dict[str, ModuleType] = {}  # filled by kernels/__init__.py, since backends import this module
NAMES = "eager", "sdpa", "blocks", "triton"
BIASES = None, T5Bias, AlibiBias, T5Table  # kinds of bias of the operator, by number; None is a matrix or no bias
_IMPLEMENTATIONS = {"eager": "eager", "sdpa": "sdpa", "block_sparse": "auto"}  # transformers' names -> backends
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_CACHED_BYTES = 1 << 22  # largest layout or causal mask that is cached for the next layer
_DENSE = 0.5  # share of the blocks from which on skipping the others gains less than SDPA's fused loop


class AttentionSpec(NamedTuple):
    """Masks, bias, layout and settings of an attention call; layers of an encoder or decoder share the masks.

    Args:
        mask: bool [1 or batch, 1 or heads, query_length, key_length], True where allowed.
        key_padding_mask: bool [batch, key_length], True for keys that may be attended to.
        segment_ids: document IDs of packed rows, integers [batch, length], or a pair for queries and keys. Tokens
            attend within their document.
        bias: `T5Bias`, `AlibiBias` or a matrix [1 or batch, 1 or heads, query_length, key_length], added to the scaled
            scores.
        layout: which blocks of keys each block of queries attends to, in self-attention; None for dense attention.
        causal: query i attends to keys 0..i. With a key-value cache, pass `mask` instead.
        scale: factor of the scores; head_dim ** -0.5 if None, 1.0 in T5.
        dropout_p: probability of dropping an attention weight; 0 outside training.
        softcap: replace scaled scores s by softcap * tanh(s / softcap) (Gemma 2, arXiv 2408.00118); None for no cap.
            Only the backend "eager" supports it.
        packed: [batch, length, 3 * heads * head_dim], if q, k and v are views of this tensor. Compiled graphs then
            compute its gradient as one tensor.
    """

    mask: Tensor | None = None
    key_padding_mask: Tensor | None = None
    segment_ids: SegmentIds | None = None
    bias: Bias | None = None
    layout: AnyLayout = None
    causal: bool = False
    scale: float | None = None
    dropout_p: float = 0.0
    softcap: float | None = None
    packed: Tensor | None = None


class AttentionInputs(NamedTuple):
    """Queries, keys, values and settings of an attention call, as every backend receives them.

    `validate` completes the settings: the layout becomes a `Layout` for these lengths, segment IDs become a pair, the
    scale becomes a number. `density` and `is_dense` need validated inputs.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    spec: AttentionSpec

    @property
    def scores_shape(self) -> tuple[int, int, int, int]:
        """Shape of the attention scores: (batch, heads, query_length, key_length)."""
        return (*self.q.shape[:3], self.k.shape[2])

    @property
    def density(self) -> float:
        """Fraction of the blocks of scores that layout and causality leave to compute."""
        layout, causal = self.spec.layout, self.spec.causal
        share = (lambda: layout.blocks.tril().double().mean().item()) if causal else layout.blocks.double().mean().item
        return cached(layout, ("density", causal), share)

    @property
    def is_dense(self) -> bool:
        """True if the layout excludes no block (causality may still exclude some)."""
        layout = self.spec.layout
        return layout is None or cached(layout, ("dense",), lambda: bool(layout.blocks.all()))

    @property
    def trains_bias(self) -> bool:
        return wants_gradient(self.spec.bias)

    @property
    def trains(self) -> bool:
        return torch.is_grad_enabled() and any(x.requires_grad for x in (self.q, self.k, self.v))

    @property
    def compute_dtype(self) -> torch.dtype:
        """Dtype in which scores and sums are computed: float32, or float64 for float64 inputs."""
        return torch.float64 if self.q.dtype == torch.float64 else torch.float32

    def allowed(self, ignores_padding: bool = False) -> Tensor | None:
        """Combine layout, causality and masks to one attention mask, True where a query may attend to a key.

        Returns:
            bool, broadcastable to [batch, heads, query_length, key_length]; None if every key is allowed.
        """
        spec, (q, k) = self.spec, self[:2]
        parts = [] if spec.mask is None else [spec.mask]
        if spec.key_padding_mask is not None and not ignores_padding:
            rows, num_keys = spec.key_padding_mask.shape  # one row may hold for all of the batch
            parts.append(spec.key_padding_mask.view(rows, 1, 1, num_keys))  # a third of the time of indexing by None
        if spec.causal:
            parts.append(causal_mask(q.shape[2], k.shape[2], q.device))
        if not self.is_dense:
            parts.append(self._layout_mask())
        if spec.segment_ids is not None:
            queries, keys = spec.segment_ids
            parts.append(queries[:, None, :, None] == keys[:, None, None, :])
        allowed = parts[0] if parts else None
        for part in parts[1:]:
            allowed = allowed & part
        return allowed

    def _layout_mask(self) -> Tensor:
        """Keys that the layout allows, bool [1, 1 or heads, query_length, key_length]."""

        @torch.inference_mode(False)  # cached for training too, whoever comes first
        def make() -> Tensor:
            return layout.tokens(self.q.device)  # one mask for all lengths that fill the blocks

        layout, (query_length, key_length) = self.spec.layout, self.scores_shape[2:]
        is_small = layout.blocks.numel() * layout.block**2 <= _CACHED_BYTES
        mask = cached(layout, ("mask", self.q.device), make) if is_small else make()
        return mask[..., :query_length, :key_length]


def causal_mask(query_length: int, key_length: int, device: torch.device) -> Tensor:
    """Causal mask: True where key <= query, bool [query_length, key_length]."""
    is_cached = not torch.compiler.is_compiling() and query_length * key_length <= _CACHED_BYTES
    make = _cached_causal_mask if is_cached else _make_causal_mask
    return make(query_length, key_length, device)


def _make_causal_mask(query_length: int, key_length: int, device: torch.device) -> Tensor:
    return torch.ones(query_length, key_length, dtype=torch.bool, device=device).tril()


_cached_causal_mask = lru_cache(maxsize=8)(torch.inference_mode(False)(_make_causal_mask))


def limit_float16(x: Tensor) -> Tensor:
    """Clamp float16 values to the finite range; tensors of another dtype are returned unchanged.

    T5's activations overflow float16, and an infinity would soon become NaN. Clamped values have zero gradient.
    """
    if x.dtype != torch.float16:
        return x
    limit = torch.finfo(torch.float16).max - 1000  # the margin that transformers' T5 leaves
    return x.clamp(-limit, limit)


# ---- checks ---------------------------------------------------------------------------------------------------------
def validate(inputs: AttentionInputs) -> AttentionInputs:
    """Check the arguments of an attention call, and complete its settings. Raises UserError."""
    q, k, v, spec = inputs
    fits = q.dtype in _FLOATS and all(x.dim() == 4 and x.dtype == q.dtype and x.device == q.device for x in (q, k, v))
    if not fits or k.shape[:3] != v.shape[:3] or k.shape[:2] != q.shape[:2] or k.shape[3] != q.shape[3]:
        raise UserError(
            f"q is {describe(q)}, k {describe(k)} and v {describe(v)}; they must be float [batch, heads, length, "
            "head_dim] on one device, with equal batch and heads, length equal in k and v, head_dim in q and k."
        )
    batch, num_heads, query_length, head_dim = q.shape
    key_length, mask, layout, segments = k.shape[2], spec.mask, spec.layout, spec.segment_ids
    key_padding_mask = spec.key_padding_mask
    if key_padding_mask is not None:
        _check("key_padding_mask", key_padding_mask, q, (torch.bool,), (batch,), (key_length,))
        if key_padding_mask.device.type == "cpu" and key_padding_mask.all():  # on a GPU this would synchronize
            key_padding_mask = None
    if segments is not None:
        segments = (segments, segments) if isinstance(segments, Tensor) else tuple(segments)
        for ids, length in zip(segments, (query_length, key_length), strict=True):
            _check("segment_ids", ids, q, _INTEGERS, (batch,), (length,))
    if isinstance(spec.bias, DistanceBias):
        if spec.bias.num_heads != num_heads:
            raise UserError(f"bias has values for {spec.bias.num_heads} heads, but q has {num_heads}.")
    elif spec.bias is not None:
        _check("bias", spec.bias, q, _FLOATS, {1, batch}, {1, num_heads}, (query_length,), (key_length,))
    if mask is not None and layout is not None:  # with a cache the queries are the last of the keys
        blocks = resolve_layout(layout, num_heads, key_length, key_length).tokens(q.device)
        mask, layout = mask & blocks[..., key_length - query_length : key_length, :key_length], None
    resolved = spec._replace(
        mask=mask,
        key_padding_mask=key_padding_mask,
        segment_ids=segments,
        layout=resolve_layout(layout, num_heads, query_length, key_length),
        scale=head_dim**-0.5 if spec.scale is None else spec.scale,
    )
    return AttentionInputs(q, k, v, resolved)


def _check(name: str, x: Tensor, q: Tensor, dtypes: Sequence[torch.dtype], *sizes: Sequence[int] | set[int]) -> None:
    """Check the type, the allowed sizes of each dimension, and the device of a tensor."""
    is_one = isinstance(x, Tensor) and x.dtype in dtypes and x.dim() == len(sizes) and x.device == q.device
    if not is_one or not all(size in allowed for size, allowed in zip(x.shape, sizes, strict=True)):
        kind, shape = str(dtypes[-1]).removeprefix("torch."), [" or ".join(map(str, size)) for size in sizes]
        raise UserError(f"{name} is {describe(x)}; it must be {kind} [{', '.join(shape)}] on {q.device}.")


# ---- choice of the backend ------------------------------------------------------------------------------------------
forced: str | None = None


@contextmanager
def force_backend(backend: str) -> Iterator[None]:
    """Inside a `with` block, make "auto" choose this attention backend for every call that it supports.

    For example, a FLOP counter sees only PyTorch's own operators, so it needs "blocks" instead of "triton".
    """
    global forced
    before, forced = forced, backend
    try:
        yield
    finally:
        forced = before


def select(inputs: AttentionInputs, backend: str) -> tuple[AttentionInputs, ModuleType]:
    """Validate the inputs of an attention call and return the backend module that computes them (`choose`)."""
    if isinstance(inputs.q, FakeTensor):
        raise UserError('torch.export cannot trace block-sparse attention: use attn_implementation="sdpa" instead.')
    inputs = validate(inputs)
    module, spec = choose(inputs, backend), inputs.spec
    if module is BACKENDS["sdpa"] and isinstance(spec.bias, Tensor) and not inputs.q.is_cpu:
        finite = spec.bias != -torch.inf  # a user's matrix may leave a query without any key
        inputs = inputs._replace(spec=spec._replace(mask=finite if spec.mask is None else finite & spec.mask))
    return inputs, module


def choose(inputs: AttentionInputs, backend: str) -> ModuleType:
    """Choose the backend of a call with validated inputs: the one named, or "auto" by device, sizes and settings."""
    if backend == "auto":
        if inputs.spec.softcap is not None:
            return BACKENDS["eager"]
        if forced is not None and refusal(forced, inputs) is None:
            return _module(forced)
        return _choose_on_gpu(inputs) if inputs.q.device.type == "cuda" else _choose_on_cpu(inputs)
    if backend not in NAMES:
        raise UserError(f'backend is {backend!r}; it must be "auto" or one of {", ".join(NAMES)}.')
    if refused := refusal(backend, inputs):
        raise UserError(f'backend "{backend}" cannot do this: {refused}; "auto" finds one that can.')
    return _module(backend)


def _module(backend: str) -> ModuleType:
    return BACKENDS.get(backend) or importlib.import_module(f"{__package__}.{backend}")


def refusal(backend: str, inputs: AttentionInputs) -> str | None:
    """Reason why a backend cannot compute these inputs; None if it can."""
    if inputs.spec.softcap is not None and backend != "eager":
        return "it has no softcap"
    module = _module(backend)
    return module.refusal(inputs) if hasattr(module, "refusal") else None


def _choose_on_cpu(inputs: AttentionInputs) -> ModuleType:
    length = max(inputs.scores_shape[2:])
    if inputs.spec.mask is not None or length <= SHORT:
        return BACKENDS["sdpa"]
    # SDPA would write out the matrix of a long bias, and of its gradient
    skips = inputs.density <= _DENSE or (inputs.spec.bias is not None and length > SHORT_DENSE)
    return BACKENDS["blocks" if skips else "sdpa"]


def _choose_on_gpu(inputs: AttentionInputs) -> ModuleType:
    sdpa = BACKENDS["sdpa"]
    # PyTorch has a fused kernel for dense calls without masks or bias.
    if inputs.spec.mask is not None or (inputs.is_dense and not sdpa.needs_matrix(inputs)):
        return sdpa
    triton = _module("triton")
    refused = triton.refusal(inputs)
    if refused is not None and triton.refusal_of_device(inputs) == refused:
        _warn_once(f"attention takes SDPA instead of Triton's kernels, which is slower: {refused}.")
    return triton if refused is None else sdpa


@lru_cache(maxsize=64)
def _warn_once(message: str) -> None:
    _logger.warning(message)


def backend_of(implementation: str, fused_on: torch.device | None = None) -> str:
    """Map transformers' `attn_implementation` to the name of an attention backend of this package. Raises UserError.

    Args:
        fused_on: the model's device if it trains by its fused path (`use_fast_step`), else None. If Triton's kernels
            run there, "sdpa" gives "auto", which needs less memory for the gradient of a position bias.
    """
    if implementation not in _IMPLEMENTATIONS:
        raise UserError(f"attn_implementation={implementation!r} is none of {', '.join(_IMPLEMENTATIONS)}.")
    if implementation == "sdpa" and fused_on is not None and fused_on.type == "cuda" and has_kernels(fused_on):
        return "auto"
    return _IMPLEMENTATIONS[implementation]


# ---- entry points ---------------------------------------------------------------------------------------------------
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
        None. Raises UserError.
    """
    inputs, eager = AttentionInputs(q, k, v, spec), BACKENDS["eager"]
    if output_attentions:
        return eager.attend_with_weights(inputs if spec.layout is None else validate(inputs))
    if spec.layout is None:
        if spec.softcap is not None:
            return eager.attend(inputs), None
        if is_fast and eager.has_fast(inputs):
            return eager.attend_fast(inputs), None
        if backend in ("eager", "sdpa"):
            return BACKENDS[backend].attend(inputs), None
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
    """Compute softmax(q k^T * scale + bias) v over the keys that the layout and the masks allow. Raises UserError.

    Gradients are exact, including that of the bias. Queries without an allowed key give zeros and get zero gradients.
    Masked inputs must be finite too, because 0 times NaN is NaN. Pass the same layout object to many calls, and do not
    change it: lists derived from it are cached with the object.

    Args:
        q: [batch, heads, query_length, head_dim], float16, bfloat16, float32 or float64.
        k: [batch, heads, key_length, head_dim].
        v: [batch, heads, key_length, any].
        layout: blocks of keys that each block of queries attends to; None for dense attention. It is a configuration
            such as `BigBirdSparsityConfig` (self-attention only) or a `Layout`. Lengths need not be multiples of the
            block.
        bias, key_padding_mask, segment_ids, causal, scale: as in `AttentionSpec`.
        dropout_p: probability of dropping an attention weight. "blocks" rounds it to a multiple of 2 ** -16. "triton"
            rounds it up or down to a multiple of 2 ** -8 at random, so that it is exact on average. The seed and
            the dropout of dense backends are drawn from the device's generator.
        backend: "auto", "blocks" (for a CPU), "triton" (for a GPU, deterministic), or the dense "sdpa" and "eager".

    Returns:
        [batch, heads, query_length, v's last dimension] in q's dtype.
    """
    spec = AttentionSpec(None, key_padding_mask, segment_ids, bias, layout, causal, scale, dropout_p)
    return _attend(AttentionInputs(q, k, v, spec), backend)


def _attend(inputs: AttentionInputs, backend: str) -> Tensor:
    # A compiled graph gets one operator, and so does a memory estimate, which has FakeTensors outside of any graph.
    if torch.compiler.is_compiling() != isinstance(inputs.q, FakeTensor):
        return _attend_in_graph(inputs, backend)
    inputs, module = select(inputs, backend)
    draws = inputs.spec.dropout_p > 0 and not getattr(module, "DRAWS_FROM_DEVICE", False)
    return module.attend(inputs, _new_seed(inputs.q.device) if draws else None)


def _new_seed(device: torch.device) -> Tensor:
    """Draw a seed for dropout, as a tensor: a number would be a constant of a recorded CUDA graph."""
    return torch.randint(1 << 62, (), dtype=torch.int64, device=device)


# ---- torch.compile --------------------------------------------------------------------------------------------------
layouts: list[AnyLayout] = []  # of all graphs; never deleted, because compiled code refers to them by number
_numbers: dict[int, int] = {}  # id of a layout -> its number, equal in all processes, as cached graphs need


@torch.compiler.assume_constant_result  # evaluated once a graph, which is guarded by the identity of the layout
def number_of_layout(layout: AnyLayout) -> int:
    """Number that stands for a block-sparse layout in compiled graphs, where `_attend` accepts it as the layout."""
    if id(layout) not in _numbers:
        _numbers[id(layout)] = len(layouts)
        layouts.append(layout)
    return _numbers[id(layout)]


def _attend_in_graph(inputs: AttentionInputs, backend: str) -> Tensor:
    """Compute attention while torch.compile traces a model; the graph gets it as one operator (operator.py)."""
    q, k, v, (mask, key_padding_mask, segment_ids, bias, layout, causal, scale, dropout_p, softcap, packed) = inputs
    if softcap is not None:
        raise UserError("softcap has no operator for compiled graphs of block-sparse attention: leave the layout out.")
    queries, keys = (segment_ids, segment_ids) if isinstance(segment_ids, Tensor | None) else segment_ids
    has_matrix = mask is not None or isinstance(bias, Tensor)
    if backend == "auto" and layout is None and torch.compiler.is_compiling():
        # as `choose`, which gives dense calls with a matrix, or with nothing at all, to SDPA
        if has_matrix or (bias is None and key_padding_mask is None and queries is None):
            backend = "sdpa"
    if backend in ("eager", "sdpa"):
        if layout is not None:
            raise UserError(f'backend "{backend}" has no layouts in compiled graphs: leave the backend out.')
        pair = None if queries is None else (queries, keys)
        return BACKENDS[backend].attend(inputs._replace(spec=inputs.spec._replace(segment_ids=pair)))
    kind, options = BIASES.index(type(bias)) if isinstance(bias, DistanceBias) else 0, []
    if isinstance(bias, T5Bias):
        options = [int(bias.bidirectional), bias.num_buckets, bias.max_distance]
    is_causal = True if causal else False  # a comparison of symbolic lengths becomes a constant of the graph
    seed = _new_seed(q.device) if dropout_p else None
    number = layout if isinstance(layout, int) else number_of_layout(layout)
    packed = packed if torch.compiler.is_compiling() else None  # memory estimates are of the eager pass
    if packed is not None:
        q, k, v = q.detach(), k.detach(), v.detach()
    tensors = q, k, v, values_of(bias), mask, key_padding_mask, queries, keys, seed, packed
    settings = number, backend, kind, options, is_causal, scale, dropout_p
    return torch.ops.lm_experiments_tools.block_sparse_attention(*tensors, *settings)[0]

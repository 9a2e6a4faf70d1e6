"""Arguments of an attention call, their validation, and the attention mask that follows from them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from numbers import Real
from typing import NamedTuple

import torch
from torch import Tensor

from lm_experiments_tools.attention.kernels.bias import Bias, DistanceBias, values_of, wants_gradient
from lm_experiments_tools.attention.kernels.layout_cache import AnyLayout, cached, describe, resolve_layout
from lm_experiments_tools.errors import UserError

SegmentIds = Tensor | tuple[Tensor, Tensor]  # for queries and keys alike, or `Segments`
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_CACHED_BYTES = 1 << 22  # largest layout or causal mask that is cached for the next layer


class AttentionSpec(NamedTuple):
    """Masks, bias, layout and settings of an attention call; layers of an encoder or decoder share the masks.

    Args:
        mask: bool [1 or batch, 1 or heads, query_length, key_length], True where allowed; dense backends only.
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
        return cached(self.spec.layout, ("density", self.spec.causal), self._density)

    def _density(self) -> float:
        blocks = self.spec.layout.blocks.tril() if self.spec.causal else self.spec.layout.blocks
        return blocks.count_nonzero().item() / blocks.numel()

    @property
    def is_dense(self) -> bool:
        """True if the layout excludes no block (causality may still exclude some)."""
        layout = self.spec.layout
        return layout is None or cached(layout, ("dense",), lambda: bool(layout.blocks.all()))

    @property
    def trains_bias(self) -> bool:
        """True if the position bias requires a gradient."""
        return wants_gradient(self.spec.bias)

    @property
    def trains(self) -> bool:
        """True if q, k or v requires a gradient."""
        return torch.is_grad_enabled() and any(x.requires_grad for x in (self.q, self.k, self.v))

    @property
    def compute_dtype(self) -> torch.dtype:
        """Dtype in which scores and sums are computed: float32, or float64 for float64 inputs."""
        return torch.float64 if self.q.dtype == torch.float64 else torch.float32

    def allowed(self, ignores_padding: bool = False) -> Tensor | None:
        """Combine layout, causality and masks to one attention mask, True where a query may attend to a key.

        Args:
            ignores_padding: leave out the padding mask.

        Returns:
            bool, broadcastable to [batch, heads, query_length, key_length]; None if every key is allowed.
        """
        spec, (q, k) = self.spec, self[:2]
        allowed = spec.mask
        if spec.key_padding_mask is not None and not ignores_padding:
            rows, num_keys = spec.key_padding_mask.shape  # one row may hold for all of the batch
            keys = spec.key_padding_mask.view(rows, 1, 1, num_keys)  # a third of the time of indexing by None
            allowed = keys if allowed is None else allowed & keys
        if spec.causal:
            past = causal_mask(q.shape[2], k.shape[2], q.device)
            allowed = past if allowed is None else allowed & past
        if not self.is_dense:
            blocks = self._layout_mask()
            allowed = blocks if allowed is None else allowed & blocks
        if spec.segment_ids is not None:
            queries, keys = spec.segment_ids
            same = queries[:, None, :, None] == keys[:, None, None, :]
            allowed = same if allowed is None else allowed & same
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


def validate(inputs: AttentionInputs) -> AttentionInputs:
    """Check the arguments of an attention call, and complete its settings.

    The layout becomes a `Layout` for these lengths, segment IDs become a pair, and the scale becomes a number.

    Raises:
        UserError: an argument has a wrong type, shape or device.
    """
    q, k, v, spec = inputs
    mask, key_padding_mask, segment_ids, bias, layout, causal, scale, dropout_p, softcap = spec
    _check_tensors(q, k, v)
    batch, num_heads, query_length, head_dim = q.shape
    key_length = k.shape[2]
    if not (isinstance(dropout_p, Real) and 0.0 <= dropout_p < 1.0):
        raise UserError(f"dropout_p is {dropout_p!r}; it must be a number from 0 to below 1.")
    if not (scale is None or isinstance(scale, Real)):
        raise UserError(f"scale is {describe(scale)}; it must be a number (multiply a learned one into q).")
    check_bias(bias, q, key_length)
    if key_padding_mask is not None:
        _check("key_padding_mask", key_padding_mask, q, (torch.bool,), (batch,), (key_length,))
        if key_padding_mask.device.type == "cpu" and key_padding_mask.all():  # on a GPU this would synchronize
            key_padding_mask = None
    if mask is not None and layout is not None:  # with a cache the queries are the last of the keys
        blocks = resolve_layout(layout, num_heads, key_length, key_length).tokens(q.device)
        mask, layout = mask & blocks[..., key_length - query_length : key_length, :key_length], None
    resolved = AttentionSpec(
        mask,
        key_padding_mask,
        _check_segments(segment_ids, q, key_length),
        bias,
        resolve_layout(layout, num_heads, query_length, key_length),
        bool(causal),
        head_dim**-0.5 if scale is None else float(scale),
        float(dropout_p),
        softcap,
    )
    return AttentionInputs(q, k, v, resolved)


def _check(name: str, x: object, q: Tensor, dtypes: Sequence[torch.dtype], *sizes: Sequence[int]) -> None:
    """Check the type, the allowed sizes of each dimension, and the device of a tensor."""
    if (
        not isinstance(x, Tensor)
        or x.dtype not in dtypes
        or x.dim() != len(sizes)
        or not all(size in allowed for size, allowed in zip(x.shape, sizes, strict=True))
    ):
        kind, shape = str(dtypes[-1]).removeprefix("torch."), [" or ".join(map(str, size)) for size in sizes]
        raise UserError(f"{name} is {describe(x)}; it must be {kind} [{', '.join(shape)}].")
    if x.device != q.device:
        raise UserError(f"{name} is on {x.device}, but q is on {q.device}.")


def _check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor) or x.dim() != 4 or x.dtype not in _FLOATS or 0 in x.shape:
            raise UserError(f"{name} is {describe(x)}; it must be float [batch, heads, length, head_dim].")
    if k.shape[:3] != v.shape[:3] or q.shape[:2] != k.shape[:2] or q.shape[3] != k.shape[3]:
        raise UserError(
            f"q {list(q.shape)}, k {list(k.shape)} and v {list(v.shape)} do not fit: batch and heads must be equal in "
            "all, length in k and v, head_dim in q and k."
        )
    if not (q.dtype == k.dtype == v.dtype and q.device == k.device == v.device):
        found = ", ".join(f"{x.dtype} on {x.device}" for x in (q, k, v))
        raise UserError(f"q, k and v must share dtype and device; they are {found}.")


def check_bias(bias: Bias | None, q: Tensor, key_length: int, name: str = "bias") -> None:
    """Raise UserError unless a position bias fits the queries and the number of keys.

    Args:
        q: queries [batch, heads, query_length, head_dim].
        name: the argument's name in the error message.
    """
    batch, num_heads, query_length, _ = q.shape
    if isinstance(bias, Tensor):
        sizes = sorted({1, batch}), sorted({1, num_heads}), (query_length,), (key_length,)
        _check(name, bias, q, _FLOATS, *sizes)
    elif bias is not None:
        if not isinstance(bias, DistanceBias):
            raise UserError(f"{name} is {describe(bias)}; it must be a T5Bias, an AlibiBias, a matrix or None.")
        if bias.num_heads != num_heads:
            raise UserError(f"{name} has values for {bias.num_heads} heads, but q has {num_heads}.")
        if values_of(bias).device != q.device:
            raise UserError(f"{name} is on {values_of(bias).device}, but q is on {q.device}.")


def _check_segments(segment_ids: SegmentIds | None, q: Tensor, key_length: int) -> tuple[Tensor, Tensor] | None:
    if segment_ids is None:
        return None
    pair = (segment_ids, segment_ids) if isinstance(segment_ids, Tensor) else segment_ids
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise UserError(
            f"segment_ids is {describe(segment_ids)}; it must be a tensor, or a pair for queries and keys."
        )
    for ids, length, name in zip(pair, (q.shape[2], key_length), ("queries", "keys"), strict=True):
        _check(f"segment_ids of {name}", ids, q, _INTEGERS, (q.shape[0],), (length,))
    return pair[0], pair[1]


def limit_float16(x: Tensor) -> Tensor:
    """Clamp float16 values to the finite range; tensors of another dtype are returned unchanged.

    T5's activations overflow float16, and an infinity would soon become NaN. Clamped values have zero gradient.
    """
    if x.dtype != torch.float16:
        return x
    limit = torch.finfo(torch.float16).max - 1000  # the margin that transformers' T5 leaves
    return x.clamp(-limit, limit)

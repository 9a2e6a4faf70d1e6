"""The attention call, and the one place that chooses its backend.

A backend is a module with `refusal(inputs)`, `cost(inputs)` and `attend(inputs, seed)`. One with kernels of its own
also has `forward` and `backward`, which the operator of torch.compile's graphs runs without autograd. If the module's
`DRAWS_FROM_DEVICE` is True, dropout draws from the device's generator and ignores the seed.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from lm_experiments_tools.attention.kernels import eager, gather, products, sdpa
from lm_experiments_tools.attention.kernels.bias import Bias, T5Bias, dense_bias, wants_gradient
from lm_experiments_tools.attention.kernels.compiled import attend_in_graph
from lm_experiments_tools.attention.kernels.plan import AnyLayout
from lm_experiments_tools.attention.kernels.spec import AttentionInputs, AttentionSpec, Segments, validate
from lm_experiments_tools.errors import UserError

_logger = logging.getLogger(__name__)

_BACKENDS = "reference", "gather", "sdpa", "flex", "triton", "eager", "products"
_IMPLEMENTATIONS = {"eager": "eager", "sdpa": "sdpa", "block_sparse": "auto"}  # transformers' names -> backends
_TRACEABLE = {"eager": eager, "sdpa": sdpa}  # torch.compile traces these; other backends are one operator to it

# Lengths and densities at which two backends take equally long, forward and backward, on a CPU.
_SHORT = 256  # up to here a dense call costs less than splitting it into chunks
_DENSE = 0.5  # from this density on, skipping blocks gains less than SDPA's fused loop does
# SDPA has no fused loop for a trained bias: dense calls are overtaken at some length, sparse ones from _SHORT on.
_SHORT_DENSE = 768
_NEARLY_DENSE = 0.75
_MATRIX_BYTES = 1 << 30  # of masks, biases and scores that SDPA may materialize
# 1 / 8 of a GPU's memory may hold SDPA's matrices for a bias that is one; gather launches thousands of kernels.
_MEMORY_FRACTION = 8


def backend_of(implementation: str) -> str:
    """The backend for transformers' `attn_implementation`."""
    if implementation not in _IMPLEMENTATIONS:
        raise UserError(f"attn_implementation={implementation!r} is none of {', '.join(_IMPLEMENTATIONS)}.")
    return _IMPLEMENTATIONS[implementation]


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    backend: str = "auto",
    *,
    prefers_products: bool = False,
    output_attentions: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Attention of a layer. Queries without any allowed key give zeros.

    Args:
        q: [batch, heads, query_length, head_dim].
        k, v: [batch, heads, key_length, head_dim].
        spec: masks, bias, layout and settings. The caller guarantees that they fit q, k and v for "eager" and "sdpa"
            without a layout, which torch.compile can trace; any other call is validated.
        backend: as of `block_sparse_attention`; `backend_of` maps transformers' `attn_implementation` to one.
        prefers_products: use the backend "products" where it can compute this call.
        output_attentions: return the weights too, computed by the backend "eager".

    Returns:
        [batch, heads, query_length, head_dim], and the weights [batch, heads, query_length, key_length] or None.

    Raises:
        UserError: an unknown backend, or arguments that do not fit each other.
    """
    inputs = AttentionInputs(q, k, v, spec)
    if output_attentions:
        return eager.attend_with_weights(inputs if spec.layout is None else validate(inputs))
    if prefers_products and spec.layout is None and products.refusal(inputs) is None:
        return products.attend(inputs), None
    if spec.layout is None and backend in _TRACEABLE:
        return _TRACEABLE[backend].attend(inputs), None
    return _attend(inputs, backend), None


def block_sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: AnyLayout = None,
    bias: Bias | None = None,
    key_padding_mask: Tensor | None = None,
    segment_ids: Segments | None = None,
    causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
    backend: str = "auto",
) -> Tensor:
    """softmax(q k^T * scale + bias) v over the keys that layout and masks allow, with exact gradients, of bias too.

    Lengths need not be multiples of the layout's block. Queries that may attend to nothing, or have a bias of -inf at
    all that they may, give zeros and get zero gradients. Inputs must be finite, also where masks hide them: 0 times
    NaN is NaN, as in PyTorch's own attention. Lists made from a layout are cached with the object: use one object for
    many calls.

    Args:
        q: [batch, heads, query_length, head_dim], float16, bfloat16, float32 or float64.
        k: [batch, heads, key_length, head_dim].
        v: [batch, heads, key_length, any].
        layout: a configuration of `layouts` (self-attention), a `Layout`, a tensor [heads or 1, query_blocks,
            key_blocks] of 0 and 1 whose block, query_length / query_blocks rounded up, is a power of two, or None for
            all blocks.
        bias: `T5Bias`, `AlibiBias` (neither becomes an N x N matrix outside the dense backends), or a matrix
            [1 or batch, 1 or heads, query_length, key_length]. Added after scaling.
        key_padding_mask: bool [batch, key_length], True where keys are attended to.
        segment_ids: int [batch, length], or a pair for queries and keys; tokens attend only within equal ids, as
            documents packed into one row must.
        causal: query i attends to keys 0..i only, token by token whatever the layout.
        scale: head_dim ** -0.5 if None; T5 takes 1.0.
        dropout_p: probability of dropping an attention weight; "gather" rounds it to a multiple of 2 ** -16, "triton"
            takes one of the two nearest multiples of 2 ** -8 for each head, at random, and so is right on average.
            The seed is drawn from torch's CPU generator and saved for backward (dense backends use the device's).
        backend: "auto", or one of "gather" (PyTorch alone, any device), "triton" (GPU, deterministic), "sdpa", "eager"
            and "products" (dense), "flex" (FlexAttention, GPU) and "reference" (dense float64). `explain` says what
            "auto" takes, and why.

    Returns:
        [batch, heads, query_length, v's last dimension] in q's dtype.

    Raises:
        UserError: arguments that do not fit each other, or a named backend that cannot compute them.
    """
    spec = AttentionSpec(None, key_padding_mask, segment_ids, bias, layout, causal, scale, dropout_p)
    return _attend(AttentionInputs(q, k, v, spec), backend)


def _attend(inputs: AttentionInputs, backend: str) -> Tensor:
    # one operator in a compiled graph, and in a memory estimate, which has FakeTensors outside of any graph
    if torch.compiler.is_compiling() != isinstance(inputs.q, FakeTensor):
        return attend_in_graph(inputs, backend, select)
    signature = _signature(inputs) if backend == "auto" and _forced is None else None
    if signature in _sdpa_signatures:
        return sdpa.attend(inputs)
    selected, module = select(inputs, backend)
    if module is sdpa and signature is not None and len(_sdpa_signatures) < _MAX_SIGNATURES:
        # validation removes a mask that hides nothing; the next one may hide something
        spec = selected.spec._replace(key_padding_mask=inputs.spec.key_padding_mask)
        if _choose(selected._replace(spec=spec), backend)[0] is sdpa:
            _sdpa_signatures.add(signature)
    seed = 0
    if selected.spec.dropout_p and not getattr(module, "DRAWS_FROM_DEVICE", False):
        seed = int(torch.randint(1 << 62, (), dtype=torch.int64, device="cpu"))
    return module.attend(selected, seed)


# Signatures of validated calls that SDPA computes. Validation and choice take as long as attention of 32 tokens.
_sdpa_signatures: set[tuple] = set()
_MAX_SIGNATURES = 4096


def _signature(inputs: AttentionInputs) -> tuple | None:
    """Everything that validation and choice depend on in a dense call on a CPU; None for other calls and types.

    Each line costs every call a tenth of a microsecond or two.
    """
    q, k, v, (mask, key_padding_mask, segment_ids, bias, layout, causal, scale, dropout_p) = inputs
    if layout is not None or segment_ids is not None or mask is not None:
        return None
    if type(causal) is not bool or type(dropout_p) is not float or not (scale is None or type(scale) is float):
        return None
    if not (type(q) is type(k) is type(v) is Tensor and q.is_cpu and k.is_cpu and v.is_cpu):
        return None
    signature = q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, causal, scale, dropout_p
    if bias is not None:
        weight = bias.weight if type(bias) is T5Bias else bias
        if not (isinstance(weight, Tensor) and weight.is_cpu):
            return None
        signature += weight.shape, weight.dtype, type(bias), wants_gradient(bias)
    if key_padding_mask is not None:
        if not (isinstance(key_padding_mask, Tensor) and key_padding_mask.is_cpu):
            return None
        signature += key_padding_mask.shape, key_padding_mask.dtype
    return signature


def select(inputs: AttentionInputs, backend: str) -> tuple[AttentionInputs, ModuleType]:
    """Validated inputs, and the module that computes them."""
    if isinstance(inputs.q, FakeTensor):
        raise UserError(
            "torch.export's tensors hold no numbers, and lists of blocks are made from numbers: export the model with "
            'another attention, such as attn_implementation="sdpa".'
        )
    inputs = validate(inputs)
    if inputs.q.is_meta:
        raise UserError("q, k and v are on the meta device and hold no numbers: move them to a CPU or GPU.")
    module, _ = _choose(inputs, backend)
    spec = inputs.spec
    if module is sdpa and isinstance(spec.bias, Tensor) and not inputs.q.is_cpu:
        finite = spec.bias != -torch.inf  # a user's matrix may leave a query without any key
        inputs = inputs._replace(spec=spec._replace(mask=finite if spec.mask is None else finite & spec.mask))
    return inputs, module


@dataclass(frozen=True)
class Explanation:
    """The backend that computes a call, and what it costs."""

    backend: str
    reason: str
    density: float  # blocks of the score matrix that layout and causality leave
    effective_density: float  # scores computed by the backend, per score of the full matrix
    memory_bytes: int  # in addition to inputs, output and their gradients, an estimate

    def __str__(self) -> str:
        return (
            f"{self.backend}: {self.reason}; density {self.density:.3f}, computed {self.effective_density:.3f} of the "
            f"full score matrix, about {self.memory_bytes / 2**20:,.0f} MiB in addition to inputs and outputs"
        )


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: AnyLayout = None,
    bias: Bias | None = None,
    key_padding_mask: Tensor | None = None,
    segment_ids: Segments | None = None,
    causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
    backend: str = "auto",
) -> Explanation:
    """The backend that `block_sparse_attention` takes for these arguments; `print(explain(...))` is a sentence."""
    spec = AttentionSpec(None, key_padding_mask, segment_ids, bias, layout, causal, scale, dropout_p)
    inputs = validate(AttentionInputs(q, k, v, spec))
    module, reason = _choose(inputs, backend)
    effective_density, memory_bytes = module.cost(inputs)
    name = module.__name__.rpartition(".")[2]
    return Explanation(name, reason, inputs.density, effective_density, memory_bytes)


_forced: str | None = None


@contextmanager
def force_backend(backend: str) -> Iterator[None]:
    """Have "auto" take this backend wherever it can compute the call.

    "gather" consists of PyTorch's operators alone, which dispatch modes such as FLOP counters see.
    """
    global _forced
    before, _forced = _forced, backend
    try:
        yield
    finally:
        _forced = before


def _choose(inputs: AttentionInputs, backend: str) -> tuple[ModuleType, str]:
    """The backend's module and why it was taken."""
    if backend == "auto" and _forced is not None and _module(_forced).refusal(inputs) is None:
        return _module(_forced), "forced"
    if backend == "auto":
        return _choose_on_gpu(inputs) if inputs.q.device.type == "cuda" else _choose_on_cpu(inputs)
    if backend not in _BACKENDS:
        raise UserError(f'backend is {backend!r}; it must be "auto" or one of {", ".join(_BACKENDS)}.')
    module = _module(backend)
    refused = module.refusal(inputs)
    if refused:
        raise UserError(f'backend "{backend}" cannot do this: {refused}; "auto" finds one that can.')
    return module, "asked for"


def _module(backend: str) -> ModuleType:
    return importlib.import_module(f"{__package__}.{backend}")


def _choose_on_cpu(inputs: AttentionInputs) -> tuple[ModuleType, str]:
    if inputs.spec.mask is not None:
        return sdpa, "the mask is a matrix already"
    length = max(inputs.scores_shape[2:])
    size = sdpa.cost(inputs)[1]
    if size > _MATRIX_BYTES:
        return gather, f"masks, bias and scores of a dense call would take {size / 2**30:.1f} GiB"
    if length <= _SHORT:
        return sdpa, f"{length} tokens are few (at most {_SHORT})"
    if inputs.trains_bias:
        if length <= _SHORT_DENSE and inputs.density > _NEARLY_DENSE:
            return sdpa, f"{length} tokens at density {inputs.density:.2f} are few (at most {_SHORT_DENSE})"
        return gather, "the bias is trained, and a dense call would write its gradient out as a matrix"
    if inputs.density > _DENSE:
        return sdpa, f"density {inputs.density:.2f} is above {_DENSE}"
    return gather, f"density {inputs.density:.2f} is at most {_DENSE}"


def _choose_on_gpu(inputs: AttentionInputs) -> tuple[ModuleType, str]:
    if inputs.spec.mask is not None:
        return sdpa, "the mask is a matrix already"
    if inputs.is_dense and not sdpa.needs_matrix(inputs):
        return sdpa, "a dense call without masks or bias has a fused kernel in PyTorch"
    triton = _module("triton")
    refused = triton.refusal(inputs)
    if refused is None:
        return triton, "its kernels skip blocks and train the bias without atomics"
    size, of_device = sdpa.cost(inputs)[1], triton.refusal_of_device(inputs) == refused
    if of_device:
        _warn_once(f"attention takes SDPA or gather instead of Triton's kernels, which is slower: {refused}.")
    if (of_device or isinstance(inputs.spec.bias, Tensor)) and size <= _memory_of(inputs.q.device) // _MEMORY_FRACTION:
        why = refused if of_device else "the bias is a matrix already"
        return sdpa, f"{why}, and a dense call takes {size / 2**30:.1f} GiB at most"
    if max(inputs.scores_shape[2:]) <= _SHORT and size <= _MATRIX_BYTES:
        return sdpa, f"few tokens (at most {_SHORT}), and Triton's kernels cannot: {refused}"
    return gather, f"Triton's kernels cannot: {refused}"


@lru_cache(maxsize=64)
def _warn_once(message: str) -> None:
    _logger.warning(message)


@lru_cache(maxsize=64)
def _memory_of(device: torch.device) -> int:
    """Bytes of a GPU."""
    return torch.cuda.get_device_properties(device).total_memory


def shared_bias(
    bias: Bias | None,
    query_length: int,
    key_length: int,
    backend: str,
    device: torch.device | None = None,
    is_dense: bool = False,
    training: bool = True,
) -> Bias | None:
    """The bias that layers share: as a matrix where the backend would make one in each layer, else unchanged.

    In `training` the answer is that for a trained bias, also where gradients are off: reentrant checkpoints run
    without and then with gradients, and both passes must agree.

    Args:
        device: of the model, for "auto"; None keeps the bias unchanged.
        is_dense: no layer has a layout.
        training: of the model, which may have checkpoints.
    """
    if bias is None or isinstance(bias, Tensor):
        return bias
    if backend == "auto":
        # In a graph the answer must not depend on the length: it would be compiled once for short and once for long.
        if device is None or device.type != "cpu" or torch.compiler.is_compiling():
            return bias
        length = max(query_length, key_length)
        if training or wants_gradient(bias):
            is_short = is_dense and length <= _SHORT_DENSE
        else:
            is_short = is_dense and bias.num_heads * query_length * key_length * 4 <= _MATRIX_BYTES // 8
        if not is_short and length > _SHORT:
            return bias
    return dense_bias(bias, query_length, key_length)

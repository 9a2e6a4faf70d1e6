"""Attention over a block-sparse layout with a trainable position bias: one call, and the choice of who computes it."""

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

from lm_experiments_tools.attention.kernels import gather, sdpa
from lm_experiments_tools.attention.kernels.bias import Bias, DistanceBias, T5Bias, wants_gradient
from lm_experiments_tools.attention.kernels.compiled import attend_in_graph
from lm_experiments_tools.attention.kernels.plan import AnyLayout
from lm_experiments_tools.attention.kernels.request import Kept, Request, Segments, check
from lm_experiments_tools.errors import UserError

_logger = logging.getLogger(__name__)

# Each is a module with refusal(request), cost(request) and attend(request, seed); imported when it is first needed.
# One that in a compiled model computes its backward pass alone has attend_kept(request, seed, kept) as well.
_BACKENDS = "reference", "gather", "sdpa", "flex", "triton"

# Lengths and densities at which two backends take equally long, forward and backward, on a CPU.
_SHORT = 256  # up to here a dense call costs less than making pieces of it
_DENSE = 0.5  # from this density on, skipping blocks gains less than SDPA's fused loop does
# A trained bias keeps SDPA from its fused loop: dense calls are overtaken at some length, sparse ones from _SHORT on.
_SHORT_DENSE = 768
_NEARLY_DENSE = 0.75
_MATRIX_BYTES = 1 << 30  # of masks, biases and scores that SDPA may write out
_OF_MEMORY = 8  # a GPU's memory over what SDPA may write out for a bias that is a matrix; gather is thousands of calls


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
    """softmax(q k^T * scale + bias) v over the keys that layout and masks leave, with exact gradients, of bias too.

    Lengths need not be multiples of the layout's block. Queries that may attend to nothing, or have a bias of -inf at
    all that they may, give zeros and get zero gradients. Inputs must be finite, also where masks hide them: 0 times
    NaN is NaN, as in PyTorch's own attention. Lists made from a layout are kept with the object: use one object for
    many calls.

    Args:
        q: [batch, heads, query_length, head_dim], float16, bfloat16, float32 or float64.
        k: [batch, heads, key_length, head_dim].
        v: [batch, heads, key_length, any].
        layout: a configuration of `layouts` (self-attention), a `Layout`, a tensor [heads or 1, query_blocks,
            key_blocks] of 0 and 1 whose block, query_length / query_blocks rounded up, is a power of two, or None for
            all blocks.
        bias: `T5Bias`, `AlibiBias` (neither becomes an N x N matrix outside the backends "reference" and "sdpa"),
            or a matrix [1 or batch, 1 or heads, query_length, key_length]. Added after scaling.
        key_padding_mask: bool [batch, key_length], True where keys are attended to.
        segment_ids: int [batch, length], or a pair for queries and keys; tokens attend only within equal ids, as
            documents packed into one row must.
        causal: query i attends to keys 0..i only, token by token whatever the layout.
        scale: head_dim ** -0.5 if None; T5 takes 1.0.
        dropout_p: probability of dropping an attention weight; "gather" rounds it to a multiple of 2 ** -16, "triton"
            takes one of the two multiples of 2 ** -8 beside it for each head, by chance, and so is right on average.
            The seed is drawn from torch's CPU generator and kept for the backward pass ("sdpa" uses the device's).
        backend: "auto", or one of "gather" (PyTorch alone, any device), "triton" (GPU, deterministic), "sdpa" (dense),
            "flex" (FlexAttention, GPU) and "reference" (dense float64). `explain` says what "auto" takes, and why.

    Returns:
        [batch, heads, query_length, v's last dimension] in q's dtype.

    Raises:
        UserError: arguments that do not fit each other, or a named backend that cannot do what is asked.
    """
    request = Request(q, k, v, layout, bias, key_padding_mask, segment_ids, causal, scale, dropout_p)
    if torch.compiler.is_compiling() and not isinstance(q, FakeTensor):
        return attend_in_graph(request, backend, _attend)
    signature = _signature(request) if backend == "auto" else None
    return sdpa.attend_dense(request) if signature in _PLAIN else _attend(request, backend, signature=signature)


# Signatures of calls that have been checked once and are SDPA's. To check a call and choose takes as long as computing
# attention of 32 tokens.
_PLAIN: set[tuple] = set()
_MAX_PLAIN = 4096


def _signature(request: Request) -> tuple | None:
    """All that check and choice go by in a dense call on a CPU; None for any other call, and for odd types.

    Each line costs every call a tenth of a microsecond or two.
    """
    q, k, v, layout, bias, key_padding_mask, segment_ids, causal, scale, dropout_p = request
    if layout is not None or segment_ids is not None:
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


def _attend(
    request: Request,
    backend: str,
    seed: int | None = None,
    kept: Kept | None = None,
    signature: tuple | None = None,
) -> Tensor:
    """Attention of a request that is not checked yet.

    Args:
        seed: of dropout; drawn here if None.
        kept: what a backward pass needs, where that is another call.
        signature: of the request, for later ones that need no check.
    """
    if isinstance(request.q, FakeTensor):
        if not torch.compiler.is_compiling():  # a memory estimate, which needs shapes alone
            return attend_in_graph(request, backend, _attend)
        raise UserError(
            "torch.export's tensors hold no numbers, and lists of blocks are made from numbers: export the model with "
            'another attention, such as attn_implementation="sdpa".'
        )
    checked = check(request)
    if checked.q.is_meta:
        raise UserError("q, k and v are on the meta device and hold no numbers: move them to a CPU or GPU.")
    module, _ = _choose(checked, backend)
    if module is sdpa and signature is not None and len(_PLAIN) < _MAX_PLAIN:
        with_mask = checked._replace(key_padding_mask=request.key_padding_mask)  # the next one may not be all True
        if _choose(with_mask, backend)[0] is sdpa:
            _PLAIN.add(signature)
    if module is sdpa and seed is not None:  # it draws itself, here as in calls that are checked no more
        device = checked.q.device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            generator = (
                torch.cuda.default_generators[device.index] if device.type == "cuda" else torch.default_generator
            )
            generator.manual_seed(seed)
            return module.attend(checked, seed)
    if seed is None and checked.dropout_p and module is not sdpa:
        seed = int(torch.randint(1 << 62, (), dtype=torch.int64, device="cpu"))
    if kept is not None and hasattr(module, "attend_kept"):
        return module.attend_kept(checked, seed or 0, kept)
    return module.attend(checked, seed or 0)


@dataclass(frozen=True)
class Explanation:
    """The backend that serves a call, and what it costs."""

    backend: str
    reason: str
    density: float  # blocks of the score matrix that layout and causality leave
    effective_density: float  # scores computed by the backend, per score of the full matrix
    memory_bytes: int  # beside inputs, output and their gradients, an estimate

    def __str__(self) -> str:
        return (
            f"{self.backend}: {self.reason}; density {self.density:.3f}, computed {self.effective_density:.3f} of the "
            f"full score matrix, about {self.memory_bytes / 2**20:,.0f} MiB beside inputs and outputs"
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
    request = check(Request(q, k, v, layout, bias, key_padding_mask, segment_ids, causal, scale, dropout_p))
    module, reason = _choose(request, backend)
    effective_density, memory_bytes = module.cost(request)
    name = module.__name__.rpartition(".")[2]
    return Explanation(name, reason, request.density, effective_density, memory_bytes)


_plain = False


@contextmanager
def plain_kernels() -> Iterator[None]:
    """Compute attention by operators of PyTorch alone: its dispatch modes see no kernels of others."""
    global _plain
    before, _plain = _plain, True
    try:
        yield
    finally:
        _plain = before


def _choose(request: Request, backend: str) -> tuple[ModuleType, str]:
    """The backend's module and why it was taken."""
    if _plain and backend in ("auto", "triton", "flex"):
        return gather, "its operators are PyTorch's"
    if backend != "auto":
        if backend not in _BACKENDS:
            raise UserError(f'backend is {backend!r}; it must be "auto" or one of {", ".join(_BACKENDS)}.')
        module = _module(backend)
        refused = module.refusal(request)
        if refused:
            raise UserError(f'backend "{backend}" cannot do this: {refused}; "auto" finds one that can.')
        return module, "asked for"
    return _choose_on_gpu(request) if request.q.device.type == "cuda" else _choose_on_cpu(request)


def _module(backend: str) -> ModuleType:
    return importlib.import_module(f"{__package__}.{backend}")


def _choose_on_cpu(request: Request) -> tuple[ModuleType, str]:
    length = max(request.scores_shape[2:])
    size = sdpa.cost(request)[1]
    if size > _MATRIX_BYTES:
        return gather, f"masks, bias and scores of a dense call would take {size / 2**30:.1f} GiB"
    if length <= _SHORT:
        return sdpa, f"{length} tokens are few (at most {_SHORT})"
    if request.trains_bias:
        if length <= _SHORT_DENSE and request.density > _NEARLY_DENSE:
            return sdpa, f"{length} tokens at density {request.density:.2f} are few (at most {_SHORT_DENSE})"
        return gather, "the bias is trained, and a dense call would write its gradient out as a matrix"
    if request.density > _DENSE:
        return sdpa, f"density {request.density:.2f} is above {_DENSE}"
    return gather, f"density {request.density:.2f} is at most {_DENSE}"


def shares_matrix(
    bias: DistanceBias, query_length: int, key_length: int, device: torch.device, is_dense: bool, training: bool
) -> bool:
    """True if all layers of a model should share this bias as one matrix, as implementations of T5 do: where "auto"
    takes SDPA, for which each layer would make the matrix for itself.

    In `training` the answer is that for a trained bias, also where gradients are off: reentrant checkpoints ask twice,
    without and with them, and must be told the same.
    """
    if torch.compiler.is_compiling():  # a graph of a short length and another of a long one, if it depended on that
        return False
    length = max(query_length, key_length)
    if device.type != "cpu" or length <= _SHORT:
        return device.type == "cpu"
    if training or wants_gradient(bias):
        return is_dense and length <= _SHORT_DENSE
    return is_dense and bias.num_heads * query_length * key_length * 4 <= _MATRIX_BYTES // 8


@lru_cache(maxsize=64)
def _say_once(sentence: str) -> None:
    _logger.warning(sentence)


@lru_cache(maxsize=64)
def _memory_of(device: torch.device) -> int:
    """Bytes of a GPU."""
    return torch.cuda.get_device_properties(device).total_memory


def _choose_on_gpu(request: Request) -> tuple[ModuleType, str]:
    if request.is_dense and not sdpa.needs_matrix(request):
        return sdpa, "a dense call without masks or bias has a fused kernel in PyTorch"
    triton = _module("triton")
    refused = triton.refusal(request)
    if refused is None:
        return triton, "its kernels skip blocks and train the bias without atomics"
    size, of_device = sdpa.cost(request)[1], triton.refusal_of_device(request) == refused
    if of_device:
        _say_once(f"attention takes SDPA or gather in place of Triton's kernels, at a cost in time: {refused}.")
    if (of_device or isinstance(request.bias, Tensor)) and size <= _memory_of(request.q.device) // _OF_MEMORY:
        why = refused if of_device else "the bias is a matrix already"
        return sdpa, f"{why}, and a dense call takes {size / 2**30:.1f} GiB at most"
    if max(request.scores_shape[2:]) <= _SHORT and size <= _MATRIX_BYTES:
        return sdpa, f"few tokens (at most {_SHORT}), and Triton's kernels cannot: {refused}"
    return gather, f"Triton's kernels cannot: {refused}"

"""Choice of the backend (implementation) that computes an attention call.

A backend is a module with a function `attend(inputs, seed)`. If it cannot compute all inputs, its function
`refusal(inputs)` gives the reason. autograd.py lists the functions of backends with kernels of their own. In a backend
with `DRAWS_FROM_DEVICE = True`, dropout uses the device's random generator and ignores the seed.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from types import ModuleType

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from lm_experiments_tools.attention.kernels import blocks, sdpa
from lm_experiments_tools.attention.kernels.bias import SHORT, SHORT_DENSE
from lm_experiments_tools.attention.kernels.spec import AttentionInputs, validate
from lm_experiments_tools.errors import UserError

_logger = logging.getLogger(__name__)

_BACKENDS = "eager", "sdpa", "blocks", "triton"

_DENSE = 0.5  # share of the blocks from which on skipping the others gains less than SDPA's fused loop
_MATRIX_BYTES = 1 << 30  # of masks, biases and scores that SDPA may materialize on a CPU


def select(inputs: AttentionInputs, backend: str) -> tuple[AttentionInputs, ModuleType]:
    """Validate the inputs of an attention call and return the backend module that computes them.

    Args:
        backend: a backend's name, or "auto" to choose one by device, sizes and settings.
    """
    if isinstance(inputs.q, FakeTensor):
        raise UserError('torch.export cannot trace block-sparse attention: use attn_implementation="sdpa" instead.')
    inputs = validate(inputs)
    if inputs.q.is_meta:
        raise UserError("q, k and v are on the meta device: move them to a CPU or GPU.")
    module, _ = choose(inputs, backend)
    spec = inputs.spec
    if module is sdpa and isinstance(spec.bias, Tensor) and not inputs.q.is_cpu:
        finite = spec.bias != -torch.inf  # a user's matrix may leave a query without any key
        inputs = inputs._replace(spec=spec._replace(mask=finite if spec.mask is None else finite & spec.mask))
    return inputs, module


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


def choose(inputs: AttentionInputs, backend: str) -> tuple[ModuleType, str]:
    """Choose the backend of an attention call; returns its module and the reason for the choice.

    Args:
        backend: a backend's name, or "auto" to choose one by device, sizes and settings.

    Raises:
        UserError: a named backend is unknown, or cannot compute these inputs.
    """
    if inputs.spec.softcap is not None and backend == "auto":
        return _module("eager"), "softcap has no fused kernel"
    if backend == "auto" and forced is not None and _refusal(_module(forced), inputs) is None:
        return _module(forced), "forced"
    if backend == "auto":
        return _choose_on_gpu(inputs) if inputs.q.device.type == "cuda" else _choose_on_cpu(inputs)
    if backend not in _BACKENDS:
        raise UserError(f'backend is {backend!r}; it must be "auto" or one of {", ".join(_BACKENDS)}.')
    refused = _refusal(_module(backend), inputs)
    if refused:
        raise UserError(f'backend "{backend}" cannot do this: {refused}; "auto" finds one that can.')
    return _module(backend), "asked for"


def _module(backend: str) -> ModuleType:
    return importlib.import_module(f"{__package__}.{backend}")


def _refusal(module: ModuleType, inputs: AttentionInputs) -> str | None:
    if inputs.spec.softcap is not None and not module.__name__.endswith(".eager"):
        return "it has no softcap"
    return module.refusal(inputs) if hasattr(module, "refusal") else None


def _choose_on_cpu(inputs: AttentionInputs) -> tuple[ModuleType, str]:
    if inputs.spec.mask is not None:
        return sdpa, "the mask is a matrix already"
    length, size = max(inputs.scores_shape[2:]), sdpa.matrix_bytes(inputs)
    if size > _MATRIX_BYTES:
        return blocks, f"masks, bias and scores of a dense call would take {size / 2**30:.1f} GiB"
    if length <= SHORT:
        return sdpa, f"{length} tokens are few (at most {SHORT})"
    if inputs.density <= _DENSE:
        return blocks, f"density {inputs.density:.2f} is at most {_DENSE}"
    if inputs.trains_bias and length > SHORT_DENSE:
        return blocks, "the bias is trained, and a dense call would write its gradient out as a matrix"
    return sdpa, f"density {inputs.density:.2f} is above {_DENSE}"


def _choose_on_gpu(inputs: AttentionInputs) -> tuple[ModuleType, str]:
    if inputs.spec.mask is not None:
        return sdpa, "the mask is a matrix already"
    if inputs.is_dense and not sdpa.needs_matrix(inputs):
        return sdpa, "a dense call without masks or bias has a fused kernel in PyTorch"
    triton = _module("triton")
    refused = triton.refusal(inputs)
    if refused is None:
        return triton, "its kernels skip blocks and train the bias without atomics"
    if triton.refusal_of_device(inputs) == refused:
        _warn_once(f"attention takes SDPA instead of Triton's kernels, which is slower: {refused}.")
    return sdpa, f"Triton's kernels cannot: {refused}"


@lru_cache(maxsize=64)
def _warn_once(message: str) -> None:
    _logger.warning(message)

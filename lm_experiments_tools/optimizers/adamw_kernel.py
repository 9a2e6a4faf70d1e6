"""A Triton kernel that applies the optimizer AdamWScale to many parameters in one launch.

torch's fused AdamW takes one learning rate for all tensors. AdamWScale has one for each parameter, so it would need a
launch per parameter.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096  # elements of a program


@triton.jit
def _kernel(
    addresses, sizes, owners, starts, scales, found_inf, factor, lr, least, beta1, rest1, beta2, rest2, eps,
    correction1, correction2, kept, num_tensors, HAS_SKIP: tl.constexpr, HAS_FACTOR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    owner, start = tl.load(owners + tl.program_id(0)), tl.load(starts + tl.program_id(0))
    places = start + tl.arange(0, BLOCK)
    size = tl.load(sizes + owner)
    if HAS_SKIP:
        size = tl.where(tl.load(found_inf) == 0.0, size, 0)
    inside = places < size
    row = addresses + owner
    weights = tl.load(row).to(tl.pointer_type(tl.float32)) + places
    gradients = tl.load(row + num_tensors).to(tl.pointer_type(tl.float32)) + places
    means = tl.load(row + 2 * num_tensors).to(tl.pointer_type(tl.float32)) + places
    squares = tl.load(row + 3 * num_tensors).to(tl.pointer_type(tl.float32)) + places
    gradient = tl.load(gradients, mask=inside, other=0.0)
    if HAS_FACTOR:
        gradient *= tl.load(factor)
    mean = beta1 * tl.load(means, mask=inside, other=0.0) + rest1 * gradient
    square = beta2 * tl.load(squares, mask=inside, other=0.0) + rest2 * gradient * gradient
    step_size = lr * tl.maximum(tl.load(scales + owner), least) / correction1
    update = step_size * mean / (tl.sqrt(square) / correction2 + eps)
    tl.store(means, mean, mask=inside)
    tl.store(squares, square, mask=inside)
    tl.store(weights, (tl.load(weights, mask=inside, other=0.0) - update) * kept, mask=inside)


@lru_cache(maxsize=16)
@torch.inference_mode(False)
def _programs(sizes: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Elements of each tensor; and the tensor and the first element of each program."""
    programs = [(owner, start) for owner, size in enumerate(sizes) for start in range(0, size, _BLOCK)]
    columns = (sizes, *zip(*programs, strict=True))
    return tuple(torch.tensor(column, dtype=torch.int64).to(device) for column in columns)


def takes(tensors: Sequence[Tensor]) -> bool:
    """True if the Triton kernel of AdamWScale supports these tensors: weights, gradient and moments of a parameter."""
    return all(x.is_cuda and x.dtype == torch.float32 and x.is_contiguous() and x.numel() for x in tensors)


def adamw_scale_(
    tensors: Sequence[Sequence[Tensor]],
    scales: Sequence[Tensor],
    *,
    lr: float,
    least: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    step: int,
    found_inf: Tensor | None,
    grad_factor: Tensor | None = None,
) -> None:
    """Apply a step of AdamWScale to weights and moments in place, by one Triton kernel for many parameters.

    Args:
        tensors: (weights, gradient, first moment, second moment) of each parameter, contiguous, fp32, on one device.
        scales: root mean square of each parameter, 0-dim; it multiplies the step size.
        least: lower bound of the scales.
        eps: added to the square root of the bias-corrected second moment.
        step: number of this step, from 1.
        found_inf: 0-dim fp32 on the device; nothing is written unless it is 0. None always writes.
        grad_factor: 0-dim fp32 on the device that multiplies the gradients as they are read; None for 1.
    """
    device = tensors[0][0].device
    sizes, owners, starts = _programs(tuple(weights.numel() for weights, *_ in tensors), device)
    pointers = [x.data_ptr() for x in itertools.chain.from_iterable(zip(*tensors, strict=True))]
    addresses = torch.tensor(pointers, dtype=torch.int64)
    if device.type == "cuda":
        addresses = addresses.pin_memory().to(device, non_blocking=True)
    factors = torch.stack(list(scales))
    decays = betas[0], 1 - betas[0], betas[1], 1 - betas[1]  # 1 - 0.999 has three digits less in fp32
    corrections = 1 - betas[0] ** step, (1 - betas[1] ** step) ** 0.5
    constants: dict[str, Any] = {"HAS_SKIP": found_inf is not None, "HAS_FACTOR": grad_factor is not None}
    constants |= {"BLOCK": _BLOCK, "num_warps": 8}
    # A pointer that the kernel does not read is replaced by one that exists.
    pointers_read = [factors if x is None else x for x in (found_inf, grad_factor)]
    with torch.cuda.device_of(tensors[0][0]):
        _kernel[(len(owners),)](
            addresses, sizes, owners, starts, factors, *pointers_read, lr, least, *decays, eps, *corrections,
            1 - lr * weight_decay, len(tensors), **constants,
        )  # fmt: skip
    torch.autograd.graph.increment_version(tuple(x for one in tensors for x in (one[0], *one[2:])))

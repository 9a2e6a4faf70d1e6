"""Sums over the slices of DTensors (FSDP2), all tensors in one collective: each would otherwise wait for its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor (shares memory with it); a plain tensor is returned as it is."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def is_sharded(tensor: Tensor) -> bool:
    """True for a DTensor."""
    return hasattr(tensor, "to_local")


def on_host(tensor: Tensor) -> bool:
    """True if to read a tensor's elements is no wait for a device, and numbers may be taken out of it."""
    return tensor.device.type == "cpu"


def sums_over_slices(tensors: Sequence[Tensor], parts: Sequence[Tensor]) -> list[Tensor]:
    """The sum over all slices of what each rank computed of its own: one collective for all tensors of a mesh.

    Args:
        tensors: DTensors.
        parts: one fp32 tensor for each of them, of this rank's slice, with the same shape on all ranks; overwritten.

    Returns:
        As `parts`, the same numbers on every rank.
    """
    kinds: dict[tuple, list[int]] = {}
    for i, tensor in enumerate(tensors):
        cut = tuple(dim for dim, placement in enumerate(tensor.placements) if placement.is_shard())
        kinds.setdefault((tensor.device_mesh, cut), []).append(i)
    sums = list(parts)
    for (mesh, cut), indices in kinds.items():
        flat = torch.cat([parts[i].reshape(-1) for i in indices])
        for dim in cut:
            dist.all_reduce(flat, group=mesh.get_group(dim))
        pieces = flat.split([parts[i].numel() for i in indices])
        for i, piece in zip(indices, pieces, strict=True):
            sums[i] = piece.view(parts[i].shape)
    return sums


def root_mean_squares(tensors: Sequence[Tensor]) -> dict[Tensor, Tensor]:
    """sqrt(mean(x^2)) over the whole of each DTensor and of each tensor of a device, 0-dim fp32, in a few kernels.

    One collective for all DTensors. Plain tensors on the CPU are left out: there one after another is faster.
    """
    sharded = [tensor for tensor in tensors if is_sharded(tensor)]
    plain = [tensor for tensor in tensors if not is_sharded(tensor) and not on_host(tensor)]
    norms = roots_of(sums_over_slices(sharded, squares_of([local(tensor) for tensor in sharded]))) + _norms_of(plain)
    if norms:
        torch._foreach_div_(norms, [tensor.numel() ** 0.5 for tensor in sharded + plain])
    return dict(zip(sharded + plain, norms, strict=True))


def squares_of(tensors: list[Tensor]) -> list[Tensor]:
    """Sum of squares of each tensor, 0-dim fp32."""
    norms = _norms_of(tensors)
    return list(torch._foreach_mul(norms, norms)) if norms else []


def roots_of(squares: list[Tensor]) -> list[Tensor]:
    """Square root of each tensor."""
    return list(torch._foreach_sqrt(squares)) if squares else []


def _norms_of(tensors: list[Tensor]) -> list[Tensor]:
    return list(torch._foreach_norm(tensors, 2.0, torch.float32)) if tensors else []


def own_slice(tensor: Tensor) -> tuple[slice, ...]:
    """Where this rank's part of a DTensor stands in the whole, by dimension."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    # a rank without rows is said to start beyond the end
    ends = zip(shape, offset, tensor.shape, strict=True)
    return tuple(slice(min(start, whole), min(start, whole) + size) for size, start, whole in ends)


def replica(whole: Tensor, like: Tensor) -> Tensor:
    """The DTensor, whole on every rank, of a tensor that is equal on all of them."""
    from torch.distributed.tensor import DTensor, Replicate

    placements = [Replicate()] * len(like.placements)
    return DTensor.from_local(whole, like.device_mesh, placements, run_check=False)

"""Sums over the shards of DTensors (FSDP2): one collective for all tensors instead of one each."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


def local(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor, sharing its memory; a plain tensor is returned unchanged."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def is_sharded(tensor: Tensor) -> bool:
    """True for a DTensor."""
    return hasattr(tensor, "to_local")


def on_host(tensor: Tensor) -> bool:
    """True if reading a tensor's elements does not synchronize with a device."""
    return tensor.device.type == "cpu"


def sums_over_slices(tensors: Sequence[Tensor], parts: Sequence[Tensor]) -> list[Tensor]:
    """Per-rank tensors summed over all shards: one collective for all tensors of a mesh.

    Args:
        tensors: DTensors.
        parts: one fp32 tensor for each, computed from this rank's shard, of the same shape on all ranks; overwritten.

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
        for i, summed in zip(indices, flat.split([parts[i].numel() for i in indices]), strict=True):
            sums[i] = summed.view(parts[i].shape)
    return sums


def root_mean_squares(tensors: Sequence[Tensor]) -> dict[Tensor, Tensor]:
    """sqrt(mean(x^2)) of each full DTensor and of each plain tensor on a device, 0-dim fp32, in a few kernels.

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


def local_slice(tensor: Tensor) -> tuple[slice, ...]:
    """Position of this rank's shard in the full tensor, by dimension."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    # the offset of a rank without rows is beyond the end
    ends = zip(shape, offset, tensor.shape, strict=True)
    return tuple(slice(min(start, whole), min(start, whole) + size) for size, start, whole in ends)


def replica(full: Tensor, like: Tensor) -> Tensor:
    """A replicated DTensor from a tensor that is equal on all ranks."""
    from torch.distributed.tensor import DTensor, Replicate

    placements = [Replicate()] * len(like.placements)
    return DTensor.from_local(full, like.device_mesh, placements, run_check=False)

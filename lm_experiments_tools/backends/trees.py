"""Trees of tensors (dicts, lists, tuples of tensors and plain values) sent from rank 0 to every worker."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

CARRIERS = {torch.bfloat16: torch.float16, torch.bool: torch.uint8}  # same width: types some libraries cannot send


def as_carrier(tensor: Tensor) -> Tensor:
    """A contiguous tensor of the same bits in a type that Horovod and gloo can broadcast; a view where it can be."""
    return tensor.detach().view(CARRIERS.get(tensor.dtype, tensor.dtype)).contiguous()


def put_back(carrier: Tensor, tensor: Tensor) -> None:
    """Undo `as_carrier`: write what arrived into `tensor`, unless it is there already."""
    if carrier.data_ptr() != tensor.data_ptr() or carrier.device != tensor.device:
        tensor.detach().copy_(carrier.view(tensor.dtype))


@dataclass(frozen=True)
class _Leaf:
    """Stands for a tensor in a tree that is sent without its tensors."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def map_tensors(tree: Any, function: Callable[[Tensor], Any]) -> Any:
    """The tree with `function` applied to its tensors, in an order that depends on the tree's structure alone."""
    return _map_leaves(tree, function, Tensor)


def _map_leaves(tree: Any, function: Callable[[Any], Any], kind: type) -> Any:
    if isinstance(tree, kind):
        return function(tree)
    if isinstance(tree, dict):
        return {key: _map_leaves(value, function, kind) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(_map_leaves(value, function, kind) for value in tree)
    return tree


def broadcast_tree(
    tree: Any,
    is_main: bool,
    broadcast: Callable[[Any], Any],
    broadcast_tensors: Callable[[list[Tensor]], None],
) -> Any:
    """Rank 0's tree on every worker, its tensors on the CPU.

    The structure travels as one object and each tensor by itself, so no copy of the whole tree is ever serialized.

    Args:
        tree: read on rank 0 only.
        broadcast: sends rank 0's picklable value to all.
        broadcast_tensors: overwrites CPU tensors with rank 0's.
    """
    tensors: list[Tensor] = []

    def strip(tensor: Tensor) -> _Leaf:
        tensors.append(tensor.detach().cpu().contiguous())
        return _Leaf(tuple(tensor.shape), tensor.dtype)

    skeleton = broadcast(map_tensors(tree, strip) if is_main else None)
    if not is_main:
        _map_leaves(skeleton, lambda leaf: tensors.append(torch.empty(leaf.shape, dtype=leaf.dtype)), _Leaf)
    broadcast_tensors(tensors)
    received = iter(tensors)
    return _map_leaves(skeleton, lambda leaf: next(received), _Leaf)

"""Trees of tensors (dicts, lists, tuples of tensors and plain values) sent from rank 0 to every worker."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

HOW = ("fused", "foreach", "capturable", "differentiable")  # how torch's optimizers compute; what is the same
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

    The structure travels as one object and each tensor by itself, so no copy of the whole tree is ever serialized. The
    tensors are copies on rank 0 too, whose own may lie in a file.

    Args:
        tree: read on rank 0 only.
        broadcast: sends rank 0's picklable value to all.
        broadcast_tensors: overwrites CPU tensors with rank 0's.
    """
    tensors: list[Tensor] = []

    def strip(tensor: Tensor) -> _Leaf:
        tensors.append(tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format))
        return _Leaf(tuple(tensor.shape), tensor.dtype)

    skeleton = broadcast(map_tensors(tree, strip) if is_main else None)
    if not is_main:
        _map_leaves(skeleton, lambda leaf: tensors.append(torch.empty(leaf.shape, dtype=leaf.dtype)), _Leaf)
    broadcast_tensors(tensors)
    received = iter(tensors)
    return _map_leaves(skeleton, lambda leaf: next(received), _Leaf)


def to_parameter(parameter: Tensor, tensor: Tensor) -> Tensor:
    """State on its parameter's device; a scalar, such as the number of steps, stays where it is."""
    return tensor.to(parameter.device) if tensor.dim() else tensor


def load_optimizer_tree(
    optimizer: Optimizer,
    tree: dict[str, Any] | None,
    is_main: bool,
    broadcast: Callable[[Any], Any],
    broadcast_tensors: Callable[[list[Tensor]], None],
    place: Callable[[Tensor, Tensor], Tensor] = to_parameter,
) -> None:
    """`optimizer.load_state_dict` of rank 0's tree on every worker, sent and put in place by one parameter's state.

    So no worker ever holds more beside its optimizer than the state of one parameter. Trees of optimizers that have a
    form of their own are sent whole.

    How the optimizer computes stays its own: one that is fused now has other state than one that was not.

    Args:
        tree: read on rank 0 only.
        place: f(parameter, tensor of its state, whole and on the CPU) -> the tensor as the optimizer holds it.
    """

    def sent(part: Any) -> Any:
        return broadcast_tree(part, is_main, broadcast, broadcast_tensors)

    keys = broadcast(list(tree["state"]) if is_main and set(tree) == {"state", "param_groups"} else None)
    if keys is None:
        optimizer.load_state_dict(sent(tree))
        return
    groups = sent(tree["param_groups"] if is_main else None)
    for group, own in zip(groups, optimizer.param_groups, strict=False):
        group.update({name: own[name] for name in HOW if name in own})
    numbers = [number for group in groups for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    of_number = dict(zip(numbers, parameters, strict=False))  # where they differ in number, the optimizer says so
    state = {}
    for key in keys:
        whole = sent(tree["state"][key] if is_main else None)
        if (parameter := of_number.get(key)) is not None:
            whole = map_tensors(whole, lambda tensor, parameter=parameter: place(parameter, tensor))
        state[key] = whole
    optimizer.load_state_dict({"state": state, "param_groups": groups})

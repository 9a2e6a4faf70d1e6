"""Tensors sent between workers: rank 0's optimizer state, and gradients as fp16."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

if TYPE_CHECKING:
    from lm_experiments_tools.backends.backend import Backend

_IMPLEMENTATION = ("fused", "foreach", "capturable", "differentiable")  # settings of torch's optimizers
_CARRIERS = {torch.bfloat16: torch.float16, torch.bool: torch.uint8}  # of the same width; some libraries need them


def as_carrier(tensor: Tensor) -> Tensor:
    """Reinterpret a tensor in a dtype that Horovod and gloo can broadcast; contiguous, and a view if possible."""
    return tensor.detach().view(_CARRIERS.get(tensor.dtype, tensor.dtype)).contiguous()


def put_back(carrier: Tensor, tensor: Tensor) -> None:
    """Undo `as_carrier`: copy a received carrier into `tensor`, unless it is a view of it."""
    if carrier.data_ptr() != tensor.data_ptr() or carrier.device != tensor.device:
        tensor.detach().copy_(carrier.view(tensor.dtype))


def load_optimizer_tree(backend: Backend, tree: dict[str, Any] | None) -> None:
    """`optimizer.load_state_dict` of rank 0's tree on every worker.

    The state of one parameter is sent and placed at a time. A tree of another form is sent as one. Settings
    such as `fused` stay those of the optimizer.
    """
    optimizer, is_main = backend.whole_optimizer, backend.is_main

    def received(part: Any) -> Any:
        """Broadcast rank 0's part to every worker, as CPU tensors; only its structure is pickled."""
        structure = tree_map_only(Tensor, lambda t: t.detach().to("meta"), part)
        copies = tree_map_only(Tensor, lambda t: torch.empty(t.shape, dtype=t.dtype), backend.broadcast(structure))
        tensors = [leaf for leaf in tree_leaves(copies) if isinstance(leaf, Tensor)]
        if is_main:
            for copy, tensor in zip(tensors, (t for t in tree_leaves(part) if isinstance(t, Tensor)), strict=True):
                copy.copy_(tensor.detach())
        backend.broadcast_tensors(tensors)
        return copies

    keys = backend.broadcast(list(tree["state"]) if is_main and set(tree) == {"state", "param_groups"} else None)
    if keys is None:
        optimizer.load_state_dict(received(tree))
        return
    groups = received(tree["param_groups"] if is_main else None)
    for group, own in zip(groups, optimizer.param_groups, strict=False):
        group.update({name: own[name] for name in _IMPLEMENTATION if name in own})
    numbers = [number for group in groups for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    by_number = dict(zip(numbers, parameters, strict=False))  # the optimizer reports another number of parameters
    state = {}
    for key in keys:
        state[key] = received(tree["state"][key] if is_main else None)
        if (parameter := by_number.get(key)) is not None:
            place = partial(backend.place_state, parameter)
            state[key] = tree_map_only(Tensor, place, state[key])
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def send_as_fp16(world_size, bucket):  # DDP refuses annotations that are strings
    """Average a bucket of gradients over workers as fp16; a hook for DDP's `register_comm_hook`.

    torch's own hook divides by the number of workers in fp16, which flushes all below 6e-8 to zero. Here the largest
    element of all workers is scaled by a power of two so that the sum just fits, and the division is done in fp32:
    elements down to 2^-29 / world_size of the largest keep 11 bits.
    """
    buffer = bucket.buffer()
    largest = torch.linalg.vector_norm(buffer, torch.inf).float()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    available = 15 - math.ceil(math.log2(world_size))
    # largest < 2^exponent; inf and nan have an arbitrary exponent and stay what they are
    exponent = torch.frexp(largest).exponent.clamp(-100, 100)
    scale = torch.ldexp(torch.ones_like(largest), available - exponent)
    sent = (buffer * scale).half()

    def average(future: torch.futures.Future[list[Tensor]]) -> Tensor:
        return buffer.copy_(future.value()[0].float().div_(scale * world_size))

    return dist.all_reduce(sent, async_op=True).get_future().then(average)

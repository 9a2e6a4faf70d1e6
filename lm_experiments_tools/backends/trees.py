"""Helpers for the state of models and optimizers: names of saved tensors, and how they are sent between workers."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map_only

from lm_experiments_tools.backends.collective import Workers
from lm_experiments_tools.backends.slices import SlicedTensor, full
from lm_experiments_tools.errors import UserError

_IMPLEMENTATION = ("fused", "foreach", "capturable", "differentiable")  # settings of torch's optimizers
_CARRIERS = {torch.bfloat16: torch.float16, torch.bool: torch.uint8}  # of the same width; some libraries need them


def check_keys(state: dict[str, Tensor] | None, names: dict[str, Tensor]) -> None:
    """Check that a state has the names and full shapes of the model's `saved_state`. Raises UserError."""
    if state is None:
        raise UserError("no model state to load; the checkpoint holds no weights")
    shapes = {name: getattr(tensor, "ds_shape", tensor.shape) for name, tensor in names.items()}
    wrong = [name for name in shapes if name in state and state[name].shape != shapes[name]]
    missing, unexpected = shapes.keys() - state.keys(), state.keys() - shapes.keys()
    if missing or unexpected or wrong:
        raise UserError(
            f"the weights do not fit the model: {len(missing)} missing {sorted(missing)[:3]}, {len(unexpected)} "
            f"unexpected {sorted(unexpected)[:3]}, {len(wrong)} of another shape {wrong[:3]}"
        )


def as_carrier(tensor: Tensor) -> Tensor:
    """View a tensor in a dtype that Horovod and gloo can broadcast: bf16 as fp16, bool as uint8.

    A tensor that is not contiguous is copied. After the broadcast, `put_back` writes the values into the original.
    """
    return tensor.detach().view(_CARRIERS.get(tensor.dtype, tensor.dtype)).contiguous()


def put_back(carrier: Tensor, tensor: Tensor) -> None:
    """Copy the broadcast `as_carrier(tensor)` into the tensor; nothing is copied if both share memory."""
    if carrier.data_ptr() != tensor.data_ptr() or carrier.device != tensor.device:
        tensor.detach().copy_(carrier.view(tensor.dtype))


def load_optimizer_tree(
    optimizer: Optimizer,
    tree: dict[str, Any] | None,
    workers: Workers,
    place_state: Callable[[Tensor, Tensor | SlicedTensor], Tensor],
    *,
    is_shared: bool,
) -> None:
    """Load an optimizer state dict on every worker; collective.

    To save memory, the state of one parameter is sent at a time. Settings such as `fused` keep the optimizer's values.
    `place_state(parameter, saved tensor)` gives this worker's tensor, for example a shard. With `is_shared` every
    worker has the tree; otherwise rank 0 sends its own.
    """
    is_main = workers.is_main

    def received(part: Any) -> Any:
        """Broadcast rank 0's part to every worker, as CPU tensors; only its structure is pickled."""
        # The tensors are mapped from files, which may be removed, so they are copied.
        if is_shared:
            return tree_map_only(Tensor, torch.clone, part)
        part = tree_map_only(SlicedTensor, full, part)
        structure = tree_map_only(Tensor, lambda t: t.detach().to("meta"), part)
        copies = tree_map_only(Tensor, lambda t: torch.empty(t.shape, dtype=t.dtype), workers.broadcast(structure))
        tensors = [leaf for leaf in tree_leaves(copies) if isinstance(leaf, Tensor)]
        if is_main:
            for copy, tensor in zip(tensors, (t for t in tree_leaves(part) if isinstance(t, Tensor)), strict=True):
                copy.copy_(tensor.detach())
        workers.broadcast_tensors(tensors)
        return copies

    keys = workers.broadcast(list(tree["state"]) if is_main and set(tree) == {"state", "param_groups"} else None)
    if keys is None:
        optimizer.load_state_dict(tree_map_only(SlicedTensor, full, received(tree)))
        return
    groups = received(tree["param_groups"] if tree else None)
    for group, own in zip(groups, optimizer.param_groups, strict=False):
        group.update({name: own[name] for name in _IMPLEMENTATION if name in own})
    numbers = [number for group in groups for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    # If the numbers of parameters differ, the optimizer reports it.
    by_number = dict(zip(numbers, parameters, strict=False))
    state = {}
    for key in keys:
        state[key] = received(tree["state"][key] if tree else None)
        if (parameter := by_number.get(key)) is not None:
            place = partial(place_state, parameter)
            state[key] = tree_map_only((Tensor, SlicedTensor), place, state[key])
    optimizer.load_state_dict({"state": state, "param_groups": groups})


# DDP refuses annotations that are strings, as all of this module's are.
def send_as_fp16(world_size, bucket):
    """Average a bucket of gradients over workers in fp16; a hook for DDP's `register_comm_hook`.

    The bucket is scaled by a power of two so that the sum just fits, and divided in fp32: values down to
    2^-29 / world_size of the largest keep 11 bits. torch's own hook divides in fp16 and flushes all below 6e-8 to 0.
    """
    buffer = bucket.buffer()
    largest = torch.linalg.vector_norm(buffer, torch.inf).float()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    scale = fp16_scales(largest, world_size)
    sent = (buffer * scale).half()

    def average(future: torch.futures.Future[list[Tensor]]) -> Tensor:
        return buffer.copy_(future.value()[0].float().div_(scale * world_size))

    return dist.all_reduce(sent, async_op=True).get_future().then(average)


def fp16_scales(largest: Tensor, world_size: int) -> Tensor:
    """Powers of two by which sums of all workers' gradients of these largest magnitudes just fit into fp16."""
    available = 15 - math.ceil(math.log2(world_size))
    # largest < 2^exponent; inf and nan have an arbitrary exponent and stay what they are
    exponent = torch.frexp(largest).exponent.clamp(-100, 100)
    return torch.ldexp(torch.ones_like(largest), available - exponent)

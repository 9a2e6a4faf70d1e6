"""Helpers around FSDP2 (torch's fully_shard): shared modules joined, and state in and out by tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.optim import Optimizer

from lm_experiments_tools.backends.trees import map_tensors


def join_shared_modules(model: nn.Module) -> int:
    """Make one module of leaf modules that are alike and hold the very same parameters; returns how many it replaced.

    HF's T5 reaches one embedding table as `shared`, `encoder.embed_tokens` and `decoder.embed_tokens`. As three
    modules they fall into three FSDP groups, which torch refuses for a shared parameter; as one module they do not.
    Names in the state dict stay as they are. Modules that differ in more than identity are left alone.
    """
    first: dict[tuple, nn.Module] = {}
    replaced = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            parameters = tuple(id(p) for p in child.parameters())
            if not parameters or any(True for _ in child.buffers()) or any(True for _ in child.children()):
                continue
            keeper = first.setdefault((type(child), child.extra_repr(), parameters), child)
            if keeper is not child:
                setattr(parent, name, keeper)
                replaced += 1
    return replaced


def unit_classes(model: nn.Module, names: Sequence[str]) -> list[str]:
    """The module classes among `names` that can be sharded as units of their own.

    A class that shares a parameter with other modules (BERT's embeddings, with its output layer) is left out, and so
    sharded with the rest: torch refuses a parameter of two units.
    """
    apart = {type(module).__name__ for module in model.modules() if _is_shared(model, [module])}
    return [name for name in names if name not in apart]


@contextmanager
def ends_in_one_unit(model: nn.Module, units: Sequence[str]) -> Iterator[None]:
    """Around accelerate's `prepare`, which makes a unit of the first and the last layer alone.

    The bias of BERT's last layer also belongs to the module around it, which would be in another unit; and the token
    table of a BERT classifier lies inside a unit already, whose parameters torch cannot shard again. Accelerate is not
    told of these layers then, and leaves them to the unit around them, with all their owners.

    Args:
        units: names of the module classes that are units.
    """
    getters = [name for name in ("get_input_embeddings", "get_output_embeddings") if hasattr(model, name)]
    ends = [module for module in (getattr(model, name)() for name in getters) if module is not None]
    inside = {inner for module in model.modules() if type(module).__name__ in units for inner in module.modules()}
    hidden = getters if _is_shared(model, ends) or any(end in inside for end in ends) else []
    for name in hidden:
        setattr(model, name, lambda: None)
    try:
        yield
    finally:
        for name in hidden:
            delattr(model, name)


def mixed_precision(dtype: torch.dtype | None) -> MixedPrecisionPolicy | None:
    """Weights gathered in `dtype`, gradients reduced in fp32; None where weights stay as they are."""
    if dtype is None:
        return None
    return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)


@contextmanager
def set_for_now(holder: Any, values: dict[str, Any]) -> Iterator[None]:
    """Set attributes of the user's own object for one call: the next model may need others."""
    before = {name: getattr(holder, name) for name in values}
    try:
        for name, value in values.items():
            setattr(holder, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(holder, name, value)


def _is_shared(model: nn.Module, modules: Sequence[nn.Module]) -> bool:
    """True if another module has a parameter of these."""
    inside = {inner for module in modules for inner in module.modules()}
    own = {id(p) for module in inside for p in module.parameters(recurse=False)}
    others = (module for module in model.modules() if module not in inside)
    return any(id(p) in own for module in others for p in module.parameters(recurse=False))


def reshard(model: nn.Module) -> None:
    """Cut the parameters that FSDP left whole after a forward pass (the root's) into slices again."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@torch.no_grad()
def load_state(
    names: dict[str, Tensor],
    state: dict[str, Tensor] | None,
    is_main: bool,
    broadcast_tensors: Callable[[list[Tensor]], None],
) -> None:
    """Put rank 0's whole tensors into a model's sharded ones, one at a time; tied names once. Collective.

    torch's own set_model_state_dict(broadcast_from_rank0=True) fails on tied names.

    Args:
        names: the model's `state_dict(keep_vars=True)`.
        state: read on rank 0 only; must have the same names and shapes.
    """
    done = set()
    for name, tensor in names.items():
        if id(tensor) in done:
            continue
        done.add(id(tensor))
        whole = state[name].to(tensor.dtype, copy=True) if is_main else torch.empty(tensor.shape, dtype=tensor.dtype)
        broadcast_tensors([whole])
        tensor.copy_(shard_like(tensor, whole))


def optimizer_tree(optimizer: Optimizer, is_main: bool) -> dict[str, Any] | None:
    """`optimizer.state_dict()` with whole tensors on rank 0: the same tree as without sharding; collective."""

    def whole(tensor: Tensor) -> Tensor | None:
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        return full.detach().cpu() if is_main else None

    tree = map_tensors(optimizer.state_dict(), whole)
    return tree if is_main else None


def shard_like(parameter: Tensor, tensor: Tensor) -> Tensor:
    """The DTensor of a whole tensor: sharded as its parameter if it has its shape, else replicated; a scalar stays."""
    if not isinstance(parameter, DTensor) or not tensor.dim():
        return tensor
    mesh = parameter.device_mesh
    placements = parameter.placements if tensor.shape == parameter.shape else [Replicate()] * mesh.ndim
    return distribute_tensor(tensor.to(mesh.device_type), mesh, placements, src_data_rank=None)

"""Helpers around FSDP2 (torch's fully_shard): shared modules joined, and state in and out by tensor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only


def join_shared_modules(model: nn.Module) -> int:
    """Replace leaf modules that share their parameters by one module; returns the number of replaced modules.

    HF's T5 has one embedding matrix in three modules. They would be in three FSDP groups, which torch refuses for a
    shared parameter. Names in the state dict do not change.
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
    """The module classes among `names` that share no parameter with other modules, so that they can be units."""
    apart = {type(module).__name__ for module in model.modules() if _is_shared(model, [module])}
    return [name for name in names if name not in apart]


@contextmanager
def ends_in_one_unit(model: nn.Module, units: Sequence[str]) -> Iterator[None]:
    """Hide embeddings and output layer from accelerate's `prepare`, which would make them an FSDP unit.

    torch cannot shard a parameter of two units: the bias of BERT's output layer also belongs to the module around it,
    and the embedding of a BERT classifier is inside a unit already.

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
    """Set attributes of an object temporarily, inside the block."""
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
    """Shard the parameters again that FSDP left full after a forward pass (the root's)."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def full_tensor(tensor: Tensor, is_main: bool) -> Tensor | None:
    """The full CPU tensor of a sharded (or plain) one, on rank 0 alone; collective."""
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().cpu() if is_main else None


def optimizer_tree(optimizer: Optimizer, is_main: bool) -> dict[str, Any] | None:
    """`optimizer.state_dict()` with full tensors on rank 0: the same tree as without sharding; collective."""
    tree = tree_map_only(Tensor, lambda tensor: full_tensor(tensor, is_main), optimizer.state_dict())
    return tree if is_main else None


def shard_like(parameter: Tensor, tensor: Tensor) -> Tensor:
    """The DTensor of a full tensor: sharded as its parameter if it has its shape, else replicated; a scalar stays."""
    if not isinstance(parameter, DTensor) or not tensor.dim():
        return tensor
    mesh = parameter.device_mesh
    placements = parameter.placements if tensor.shape == parameter.shape else [Replicate()] * mesh.ndim
    return distribute_tensor(tensor.to(mesh.device_type), mesh, placements, src_data_rank=None)

"""Helpers for FSDP2 (torch's fully_shard): shared modules, and full tensors to and from shards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils._pytree import tree_map_only

from lm_experiments_tools.backends.backend import State
from lm_experiments_tools.backends.slices import SlicedTensor, elements, full


def join_shared_modules(model: nn.Module) -> int:
    """Replace leaf modules that share a parameter by one of them, because FSDP2 refuses shared parameters.

    An example is the embedding that HF's T5 holds in three modules. Names in the state dict do not change. Returns the
    number of replaced modules.
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
    """Select the module classes that FSDP can wrap on their own: those that share no parameter with other modules."""
    apart = {type(module).__name__ for module in model.modules() if _is_shared(model, [module])}
    return [name for name in names if name not in apart]


@contextmanager
def ends_in_one_unit(model: nn.Module, units: Sequence[str]) -> Iterator[None]:
    """Context in which accelerate's `prepare` does not let FSDP wrap embeddings and output layer on their own.

    torch cannot shard a parameter that two wrapped modules share, such as the bias of BERT's output layer.
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
    """Create FSDP's precision policy: weights are gathered in `dtype`, and gradients are reduced in fp32."""
    if dtype is None:
        return None
    return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)


@contextmanager
def set_for_now(holder: Any, values: dict[str, Any]) -> Iterator[None]:
    """Context in which the attributes of an object have other values."""
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
    """Free the full parameters that FSDP's root module keeps after a forward pass."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def own_slice(tensor: Tensor) -> Tensor | SlicedTensor:
    """This worker's slice of a DTensor that is sharded by its first dimension; any other tensor, unsharded."""
    if not isinstance(tensor, DTensor):
        return tensor
    # Factors of second moments may be sums over workers that have not been reduced yet.
    if not all(placement in (Shard(0), Replicate()) for placement in tensor.placements):
        return tensor.full_tensor()
    sharded = [dim for dim, placement in enumerate(tensor.placements) if placement.is_shard()]
    if not sharded:
        return tensor.to_local()
    # With replicas (HSDP) the first ones alone write.
    coordinate = tensor.device_mesh.get_coordinate()
    is_first = not any(place for dim, place in enumerate(coordinate) if dim not in sharded)
    start, _ = _range_of(tensor)
    return SlicedTensor(tensor.shape, ((start, tensor.to_local().detach().flatten()),) if is_first else ())


def _range_of(tensor: DTensor) -> tuple[int, int]:
    """First and last + 1 element of this worker's shard of the first dimension."""
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    width = tensor.shape[1:].numel()
    return offset[0] * width, (offset[0] + shape[0]) * width


def shard_like(parameter: Tensor, value: Tensor | SlicedTensor) -> Tensor:
    """Convert a full or saved tensor of optimizer state to a DTensor on the devices of `parameter`.

    A tensor of the parameter's shape is sharded like it; any other is replicated.
    """
    if not isinstance(parameter, DTensor) or not value.shape:
        return full(value)
    mesh = parameter.device_mesh
    if value.shape != parameter.shape:
        replicated = [Replicate()] * mesh.ndim
        return distribute_tensor(full(value).to(mesh.device_type), mesh, replicated, src_data_rank=None)
    local = torch.empty_like(parameter.to_local(), dtype=value.dtype)
    local.copy_(elements(value, *_range_of(parameter)).view(local.shape))
    return DTensor.from_local(
        local, mesh, parameter.placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )


class FullyShardedState(State):
    """State of a model whose parameters are DTensors: full weights are gathered, optimizer state is sliced."""

    is_sharded = shards_weights = True

    def model_state(self, writers: Mapping[str, int] | None = None) -> dict[str, Tensor]:
        reshard(self.backend.unwrap())
        return super().model_state(writers)

    def _get_weight(self, name: str, tensor: Tensor, rank: int) -> Tensor | None:
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        return whole.detach().to("cpu", copy=True) if rank == self.backend.rank else None

    def load_model_state(self, state: dict[str, Tensor] | None) -> None:
        reshard(self.backend.unwrap())
        super().load_model_state(state)

    def _put_weight(self, name: str, tensor: Tensor, value: Tensor) -> None:
        tensor.copy_(shard_like(tensor, value.to(tensor.dtype)))

    def _optimizer_tree(self) -> dict[str, Any]:
        return tree_map_only(Tensor, own_slice, self.backend.optimizer.state_dict())

    def place_state(self, parameter: Tensor, value: Tensor | SlicedTensor) -> Tensor:
        return shard_like(parameter, value)

    def weights_norm(self) -> float:
        reshard(self.backend.unwrap())
        return super().weights_norm()

"""Base class of this package's optimizers: fp32 state, skipped steps, and parameters sharded by FSDP2 (DTensor).

Whether a step is skipped is decided on the device, without a synchronization.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lm_experiments_tools.modules.devices import read_later

_LOW_PRECISION = (torch.float16, torch.bfloat16)


class Skip(NamedTuple):
    """Decision whether to skip an optimizer step, kept on the device as 0-dim tensors to avoid a synchronization.

    Attributes:
        here: the decision as a bool.
        found_inf: the decision as 0 or 1 in fp32, as torch's fused optimizers expect.
        numbers: the constants 0 and 1.
    """

    here: Tensor
    found_inf: Tensor
    numbers: tuple[Tensor, Tensor]


class Float32StateOptimizer(Optimizer):
    """Base class of optimizers whose state stays fp32, whatever the dtype of their parameters.

    `torch.optim.Optimizer.load_state_dict` casts state to the parameter's dtype, which rounds the moments of bf16
    parameters. State is `step` (0-dim fp32 on the CPU) and fp32 tensors on the parameter's device.

    DTensor parameters (FSDP2) are supported; flattened parameters (DeepSpeed ZeRO, FSDP1) are not, because step sizes
    depend on the root mean square of each full parameter.

    As in torch's fused optimizers, a step is skipped on the device if the attribute `found_inf` (0-dim, on the device)
    is not 0: weights and state stay unchanged without synchronizing. The next `step` or `state_dict` corrects the
    state's `step`.
    """

    _step_supports_amp_scaling = True  # the loop and torch.amp.GradScaler set found_inf and grad_scale
    _skips: dict[torch.device, Skip] | None = None  # see skip_on
    _last: tuple[Callable[[], float | bool], list[Tensor]] | None = None  # was it skipped, and the parameters counted

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        """Update every parameter that has a gradient; a closure computes gradients and the loss, which is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        work = []
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if any(p.grad.is_sparse for p in parameters):
                raise RuntimeError(f"{type(self).__name__} does not support sparse gradients")
            work.append((parameters, group))
        self._uncount_skipped_step()
        found_inf, scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        if found_inf is not None and on_host(found_inf):
            if found_inf.item():
                return loss
            found_inf = None
        counted = [p for parameters, _ in work for p in parameters]
        if scale is not None:
            for gradient in [local(p.grad) for p in counted]:
                gradient.div_(scale.to(gradient.device, non_blocking=True))
        self._skips = None if found_inf is None else {}
        try:
            self.update(work)
        finally:
            self._skips = None
        if found_inf is not None:
            self._last = read_later(found_inf), counted
        return loss

    def skip_on(self, device: torch.device) -> Skip | None:
        """Decision of a device whether to skip this optimizer step; None if steps are not skipped on the device."""
        if self._skips is None:
            return None
        if device not in self._skips:
            here = self.found_inf.to(device, non_blocking=True) != 0
            numbers = torch.zeros((), device=device), torch.ones((), device=device)
            self._skips[device] = Skip(here, here.float(), numbers)
        return self._skips[device]

    def _uncount_skipped_step(self) -> None:
        """Subtract the count of the last step if it was skipped."""
        last, self._last = self._last, None
        if last is not None and last[0]():
            for state in [self.state[parameter] for parameter in last[1]]:
                if "step" in state:
                    state["step"] -= 1

    def state_dict(self) -> dict:
        self._uncount_skipped_step()
        return super().state_dict()

    @abstractmethod
    def update(self, work: list[tuple[list[Tensor], dict]]) -> None:
        """Apply the optimizer's update rule to pairs of parameters with a gradient and their parameter group."""

    def load_state_dict(self, state_dict: dict) -> None:
        super().load_state_dict(state_dict)
        self._last = None
        saved_ids = [index for group in state_dict["param_groups"] for index in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for index, parameter in zip(saved_ids, parameters, strict=True):
            for key, value in state_dict["state"].get(index, {}).items():
                if key == "step":
                    self.state[parameter][key] = torch.as_tensor(value, dtype=torch.float32, device="cpu").clone()
                elif isinstance(value, Tensor) and parameter.dtype is not torch.float32:
                    self.state[parameter][key] = value.detach().to(parameter.device, torch.float32, copy=True)


def float32_of(weights: Tensor) -> Tensor:
    """Copy fp16 or bf16 weights to fp32 for an update; `round_into` writes the result back."""
    return weights.float() if weights.dtype in _LOW_PRECISION else weights


def round_into(weights: Tensor, updated: Tensor) -> None:
    """Write updated fp32 weights back to fp16 or bf16 weights, from which `float32_of` copied them."""
    if updated is not weights:
        weights.copy_(updated)


def unless(skip: Skip | None, value: Tensor | float, instead: int = 0) -> Tensor | float:
    """Return `value`, or the number `instead` (0 or 1) if the device decides to skip the optimizer step."""
    return value if skip is None else torch.where(skip.here, skip.numbers[instead], value)


def decay_into(moment: Tensor, value: Tensor, beta: float, skip: Skip | None) -> Tensor:
    """Update a running mean in place, unless the step is skipped: moment = beta * moment + (1 - beta) * value."""
    if skip is None:
        return moment.mul_(beta).add_(value, alpha=1.0 - beta)
    return torch.where(skip.here, moment, moment.mul(beta).add_(value, alpha=1.0 - beta), out=moment)


@contextmanager
def restored_if_skipped(skip: Skip | None, tensors: Sequence[Tensor]) -> Iterator[None]:
    """Context whose updates of tensors are undone at its end if the device decides to skip this step."""
    before = [] if skip is None else [tensor.clone() for tensor in tensors]
    yield
    for tensor, saved in zip(tensors, before, strict=False):
        torch.where(skip.here, saved, tensor, out=tensor)


def root_mean_square(tensor: Tensor) -> Tensor:
    """Root mean square sqrt(mean(x^2)) of a tensor x that is not sharded, in fp32, 0-dim."""
    return torch.linalg.vector_norm(tensor, dtype=torch.float32) / tensor.numel() ** 0.5


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a sharded tensor (DTensor), sharing its memory; other tensors stay unchanged."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def is_sharded(tensor: Tensor) -> bool:
    """True for a tensor whose elements are distributed over ranks (a DTensor)."""
    return hasattr(tensor, "to_local")


def on_host(tensor: Tensor) -> bool:
    """True if reading a tensor's elements needs no synchronization with a device."""
    return tensor.device.type == "cpu"


def sums_over_slices(tensors: Sequence[Tensor], parts: Sequence[Tensor]) -> list[Tensor]:
    """Sum tensors over the ranks that shard parameters (DTensors), in one collective per device mesh.

    `parts` are fp32 tensors computed from this rank's shards, which are overwritten. The sums are equal on all ranks.
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
    """Root mean square sqrt(mean(x^2)) of each parameter x, in a few GPU kernels and one collective: 0-dim fp32 each.

    Sharded parameters (DTensors) count in full. CPU tensors that are not sharded are left out, because
    `root_mean_square` is faster for them.
    """
    sharded = [tensor for tensor in tensors if is_sharded(tensor)]
    plain = [tensor for tensor in tensors if not is_sharded(tensor) and not on_host(tensor)]
    norms = roots_of(sums_over_slices(sharded, squares_of([local(tensor) for tensor in sharded]))) + _norms_of(plain)
    if norms:
        torch._foreach_div_(norms, [tensor.numel() ** 0.5 for tensor in sharded + plain])
    return dict(zip(sharded + plain, norms, strict=True))


def squares_of(tensors: list[Tensor]) -> list[Tensor]:
    """Sum the squared elements of each tensor: 0-dim fp32 each."""
    norms = _norms_of(tensors)
    return list(torch._foreach_mul(norms, norms)) if norms else []


def roots_of(squares: list[Tensor]) -> list[Tensor]:
    """Square root of each 0-dim tensor, as `squares_of` returns them."""
    return list(torch._foreach_sqrt(squares)) if squares else []


def _norms_of(tensors: list[Tensor]) -> list[Tensor]:
    return list(torch._foreach_norm(tensors, 2.0, torch.float32)) if tensors else []


def local_slice(tensor: Tensor) -> tuple[slice, ...]:
    """Position of this rank's shard in the full tensor, as a slice for each dimension."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    # the offset of a rank without rows is beyond the end
    ends = zip(shape, offset, tensor.shape, strict=True)
    return tuple(slice(min(start, full), min(start, full) + size) for size, start, full in ends)


def replica(full: Tensor, like: Tensor) -> Tensor:
    """Make a tensor that is equal on all ranks a DTensor, replicated over the device mesh of `like`."""
    from torch.distributed.tensor import DTensor, Replicate

    placements = [Replicate()] * len(like.placements)
    return DTensor.from_local(full, like.device_mesh, placements, run_check=False)

"""The base of our optimizers: fp32 state that survives a reload."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

_LOW_PRECISION = (torch.float16, torch.bfloat16)


class Float32StateOptimizer(Optimizer):
    """An optimizer whose state stays fp32, whatever the dtype of its parameters.

    `torch.optim.Optimizer.load_state_dict` casts every state tensor to its parameter's dtype, which would round the
    second moments of bf16 parameters to 8 bits at each resume. State is `step` (0-dim fp32 on the CPU, as torch keeps
    it) and fp32 tensors on the parameter's device, so a state_dict is tensors and plain scalars.

    The learning rates depend on the root mean square of a whole parameter: DTensor shards (FSDP2) are handled, flat
    partitions that mix parameters (DeepSpeed ZeRO, FSDP1) cannot be seen from here and must be refused by the backend.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        """Update every parameter that has a gradient; returns the closure's loss, if there is a closure."""
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
        self.update(work)
        return loss

    @abstractmethod
    def update(self, work: list[tuple[list[Tensor], dict]]) -> None:
        """Update the parameters of each group that have a gradient; of all at once, for sums over workers."""

    def load_state_dict(self, state_dict: dict) -> None:
        super().load_state_dict(state_dict)
        saved_ids = [index for group in state_dict["param_groups"] for index in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for index, parameter in zip(saved_ids, parameters, strict=True):
            for key, value in state_dict["state"].get(index, {}).items():
                if key == "step":
                    self.state[parameter][key] = torch.as_tensor(value, dtype=torch.float32, device="cpu").clone()
                elif isinstance(value, Tensor) and parameter.dtype is not torch.float32:
                    self.state[parameter][key] = value.detach().to(parameter.device, torch.float32, copy=True)


def float32_of(weights: Tensor) -> Tensor:
    """The fp32 copy of fp16 or bf16 weights, to be updated and then given to `round_into`; others as they are."""
    return weights.float() if weights.dtype in _LOW_PRECISION else weights


def round_into(weights: Tensor, updated: Tensor) -> None:
    """Write what `float32_of` gave of these weights back to them."""
    if updated is not weights:
        weights.copy_(updated)


def root_mean_square(tensor: Tensor) -> Tensor | np.float32:
    """sqrt(mean(x^2)) of a plain tensor, in fp32: 0-dim on its device; of a CPU tensor a number, which has the same
    bits and is calculated with in a tenth of the time."""
    norm = torch.linalg.vector_norm(tensor, dtype=torch.float32)
    if norm.device.type == "cpu":
        return np.float32(norm.item()) / np.float32(tensor.numel() ** 0.5)
    return norm / tensor.numel() ** 0.5

"""A DeepSpeed ZeRO optimizer seen by unflattened parameters, so that its state is saved and loaded like any other.

ZeRO flattens the parameters of a group into one vector, and each worker holds a shard of the vector.
"""

from __future__ import annotations

from copy import deepcopy
from functools import cached_property
from itertools import count
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lm_experiments_tools.backends.slices import SlicedTensor, elements


class _Shard(NamedTuple):
    """The part of a flattened parameter that a worker holds, in elements."""

    vector: int  # among the worker's flat vectors
    start: int  # in that vector
    offset: int  # in the parameter
    length: int


def _is_flat(value: Any) -> bool:
    """True for per-element state of a vector, False for a scalar such as the number of steps."""
    return isinstance(value, Tensor) and value.dim() > 0


def take_groups(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return copies of the parameter groups, and remove frozen and empty parameters, as DeepSpeed requires."""
    groups = [{**group, "params": list(group["params"])} for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["params"] = list(_optimized(group["params"]).values())
    return groups


def _optimized(parameters: list[Tensor]) -> dict[int, Tensor]:
    """Those that DeepSpeed optimizes, by their index in `parameters`."""
    sizes = [getattr(parameter, "ds_numel", parameter.numel()) for parameter in parameters]
    return {i: p for i, (p, size) in enumerate(zip(parameters, sizes, strict=True)) if p.requires_grad and size}


class UnshardedOptimizer:
    """View of a DeepSpeed ZeRO optimizer with the parameter groups and state that it would have without ZeRO.

    `groups` are those of `take_groups`, called before DeepSpeed flattened the parameters.
    """

    def __init__(self, zero: Any, groups: list[dict[str, Any]], device: torch.device) -> None:
        self.zero, self.groups, self.device = zero, groups, device
        self._optimized = [_optimized(group["params"]) for group in groups]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Current settings of each group, with its unflattened parameters."""
        own = iter(self.zero.optimizer.param_groups)
        pairs = zip(self.groups, self._optimized, strict=True)
        return [{**(next(own) if optimized else group), "params": group["params"]} for group, optimized in pairs]

    def state_dict(self) -> dict[str, Any]:
        """The state as `torch.optim.Optimizer.state_dict` would return it, in fp32 slices of this worker."""
        state, groups, held_by = {}, [], self.zero.optimizer.state
        numbers, index = count(), count()
        for group, optimized in zip(self.param_groups, self._optimized, strict=True):
            of_group = [next(numbers) for _ in group["params"]]
            groups.append({**group, "params": of_group})
            if not optimized:
                continue
            vectors = self._vectors(next(index))
            is_held = bool(held_by.get(next(iter(vectors.values()))))
            for i, parameter in optimized.items() if is_held else ():
                own = self._shard(parameter)
                state[of_group[i]] = {
                    name: self._slice(parameter, own, value) if _is_flat(value) else deepcopy(value)
                    for name, value in held_by[vectors[own.vector]].items()
                }
        return {"state": state, "param_groups": groups}

    def _slice(self, parameter: Tensor, own: _Shard, vector: Tensor) -> SlicedTensor:
        values = vector.narrow(0, own.start, own.length).float()
        return SlicedTensor(getattr(parameter, "ds_shape", parameter.shape), ((own.offset, values),))

    def cut(self, parameter: Tensor, value: Tensor | SlicedTensor) -> Tensor:
        """Select this worker's shard of a saved tensor of a parameter's state; a scalar is returned unchanged.

        ValueError for another shape than the parameter's, or a frozen parameter.
        """
        if not value.shape:
            return value
        if not parameter.requires_grad:
            raise ValueError("state for a parameter that is frozen now")
        if value.shape != (shape := getattr(parameter, "ds_shape", parameter.shape)):
            raise ValueError(f"state of shape {tuple(value.shape)} for a parameter of shape {tuple(shape)}")
        own = self._shard(parameter) if value.shape.numel() else _Shard(0, 0, 0, 0)
        return elements(value, own.offset, own.offset + own.length)

    def load_state_dict(self, tree: dict[str, Any]) -> None:
        """Load a result of `state_dict` whose tensors went through `cut`. Raises ValueError."""
        groups, base = tree["param_groups"], self.zero.optimizer
        if [len(group["params"]) for group in groups] != [len(own["params"]) for own in self.groups]:
            raise ValueError("loaded state dict has other parameter groups")
        states: dict[int, Any] = {}
        loaded = []
        taken = [pair for pair in zip(groups, self._optimized, strict=True) if pair[1]]
        for index, ((group, optimized), own) in enumerate(zip(taken, base.param_groups, strict=True)):
            vectors = self._vectors(index)
            saved = [(parameter, tree["state"].get(group["params"][i])) for i, parameter in optimized.items()]
            entries = [(parameter, state) for parameter, state in saved if state]
            states.update(self._join(vectors, entries))
            settings = {name: value for name, value in group.items() if name in own}
            loaded.append({**own, **settings, "params": list(vectors)})
            # ZeRO 3 puts the vectors there only for the moment of a step.
            own["params"] = list(vectors.values())
        base.load_state_dict({"state": states, "param_groups": loaded})
        # torch has cast the state to the vector's type.
        for number, vector in self._vectors().items():
            flat = {name: value for name, value in states.get(number, {}).items() if _is_flat(value)}
            base.state.get(vector, {}).update(flat)
        if self._is_stage_3:
            for group in base.param_groups:
                group["params"] = []
        # ZeRO 1 and 2 link the new state for `safe_get_full_optimizer_state`.
        self.zero._hp_optimizer_states_linked = False

    @torch.no_grad()
    def weight(self, parameter: Tensor, rank: int) -> Tensor | None:
        """Gather the fp32 weight of a parameter to the CPU of `rank`, None elsewhere; collective."""
        shape = getattr(parameter, "ds_shape", parameter.shape)
        own, buffer = self._shard(parameter), torch.zeros(shape.numel(), device=self.device)
        vector = self._vectors()[own.vector]
        buffer.narrow(0, own.offset, own.length).copy_(vector.narrow(0, own.start, own.length))
        # Bits are added, because -0.0 + 0.0 is 0.0.
        dist.reduce(buffer.view(torch.int32), rank)
        return buffer.view(shape).to("cpu", copy=True) if rank == dist.get_rank() else None

    @torch.no_grad()
    def put_weight(self, parameter: Tensor, full: Tensor) -> None:
        """Overwrite the fp32 weight of a parameter by an unsharded one, the same on every worker."""
        own = self._shard(parameter)
        vector = self._vectors()[own.vector].narrow(0, own.start, own.length)
        vector.copy_(full.flatten().narrow(0, own.offset, own.length))

    # ---- positions of shards
    @property
    def _is_stage_3(self) -> bool:
        return hasattr(self.zero, "fp32_partitioned_groups_flat")

    def _vectors(self, group: int | None = None) -> dict[int, Tensor]:
        """This worker's flat fp32 vectors by their number, of a group or of all. ZeRO 3 may cut a group in several."""
        if not self._is_stage_3:
            vectors = dict(enumerate(self.zero.single_partition_of_fp32_groups))
            return vectors if group is None else {group: vectors[group]}
        of_group = self.zero.sub_group_to_group_id
        vectors = enumerate(self.zero.fp32_partitioned_groups_flat)
        return {number: vector for number, vector in vectors if group in (None, of_group[number])}

    def _shard(self, parameter: Tensor) -> _Shard:
        # Stage 3 gives each worker as many elements of each parameter, and pads the last ones.
        if self._is_stage_3:
            number, start, length = self.zero.grad_position[self.zero.get_param_id(parameter)]
            offset = min(dist.get_rank() * length, parameter.ds_numel)
            return _Shard(number, start, offset, min(length, parameter.ds_numel - offset))
        number, at = self._offsets[parameter]
        # Stages 1 and 2 give each worker as many elements of all parameters joined.
        size = len(self._vectors(number)[number])
        first = dist.get_rank() * size
        begin, end = max(at, first), min(at + parameter.numel(), first + size)
        return _Shard(number, begin - first, begin - at, end - begin) if begin < end else _Shard(number, 0, 0, 0)

    @cached_property
    def _offsets(self) -> dict[Tensor, tuple[int, int]]:
        """The flat vector of each parameter, and where it begins in all workers' parts of it joined, for ZeRO 1 and 2.

        DeepSpeed's `_hp_mapping` does not know the order that `round_robin_gradients` makes.
        """
        places = enumerate(zip(self.zero.round_robin_bit16_groups, self.zero.round_robin_bit16_offsets, strict=True))
        return {p: (number, at) for number, (group, offsets) in places for p, at in zip(group, offsets, strict=True)}

    def _join(self, vectors: dict[int, Tensor], entries: list[tuple[Tensor, dict[str, Any]]]) -> dict[int, Any]:
        """The state of a group's flat vectors, from shards of the states of its parameters."""
        if not entries:
            return {}
        first = entries[0][1]
        flat = [name for name in first if any(_is_flat(state.get(name)) for _, state in entries)]
        common, *others = ({n: v for n, v in state.items() if n not in flat} for _, state in entries)
        if any(other != common for other in others):
            raise ValueError("parameters of one group have different numbers of steps, of which ZeRO keeps one")
        # DeepSpeed's CPU optimizers count steps in Python.
        if type(self.zero.optimizer).__module__.startswith("deepspeed."):
            common = {name: int(value) for name, value in common.items()}
        in_fp32, joined = getattr(self.zero.optimizer, "fp32_optimizer_states", False), {}
        for number, vector in vectors.items():
            zeros = torch.zeros_like(vector, dtype=torch.float32 if in_fp32 else vector.dtype)
            joined[number] = {name: zeros.clone() if name in flat else deepcopy(common[name]) for name in first}
        for parameter, state in entries:
            own = self._shard(parameter)
            for name in flat if own.length else ():
                if isinstance(shard := state.get(name), Tensor):
                    joined[own.vector][name].narrow(0, own.start, own.length).copy_(shard.flatten())
        return joined


class LossScale:
    """DeepSpeed's dynamic loss scale, saved and loaded like a `torch.amp.GradScaler`."""

    def __init__(self, loss_scaler: Any) -> None:
        self.loss_scaler = loss_scaler

    def state_dict(self) -> dict[str, Any]:
        """State of the loss scale, with the entries of `torch.amp.GradScaler`, and `good_steps` and `hysteresis`."""
        scaler = self.loss_scaler
        good_steps = scaler.cur_iter - scaler.last_overflow_iter - 1
        return {
            "scale": float(scaler.cur_scale),
            "growth_factor": float(scaler.scale_factor),
            "backoff_factor": 1 / scaler.scale_factor,
            "growth_interval": scaler.scale_window,
            "_growth_tracker": good_steps % scaler.scale_window,
            "good_steps": good_steps,
            "hysteresis": scaler.cur_hysteresis,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state of DeepSpeed's or torch.amp's loss scale; the state of another scaler is ignored."""
        if "scale" not in state:
            return
        scaler = self.loss_scaler
        scaler.cur_scale, scaler.last_overflow_iter = state["scale"], -1
        scaler.cur_iter = state.get("good_steps", state["_growth_tracker"])
        scaler.cur_hysteresis = state.get("hysteresis", scaler.delayed_shift)

"""State of a backend's model and optimizer, in and out: full weights, and the optimizer's state or slices of it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lm_experiments_tools.backends.collective import total_norm
from lm_experiments_tools.backends.slices import SlicedTensor, full
from lm_experiments_tools.backends.trees import check_keys, load_optimizer_tree
from lm_experiments_tools.modules.inspection import saved_state, untied

if TYPE_CHECKING:
    from lm_experiments_tools.backends.backend import Backend


class State:
    """State of a backend's model and optimizer; every worker calls its methods at the same time.

    Args:
        backend: of which the state is; weights and optimizer are those of its `setup`.
        setup_shares_weights: True if `setup` gives all workers rank 0's weights before any are needed.
    """

    def __init__(self, backend: Backend, *, setup_shares_weights: bool = False) -> None:
        self.backend, self.setup_shares_weights = backend, setup_shares_weights

    def model_state(self, writers: Mapping[str, int] | None = None) -> dict[str, Tensor]:
        """Gather the full tensors that a checkpoint stores of the model (`saved_state`), one by one; collective.

        Args:
            writers: {name: rank that gets the tensor}; None: rank 0 gets all.

        Returns:
            {name: tensor} of this rank. If the backend shards, the tensors are copies in host memory.
        """
        names, gathered = saved_state(self.backend.unwrap()), {}
        for name, tensor in untied(names).items():
            rank = 0 if writers is None else writers[name]
            value = self._get_weight(name, tensor, rank)
            if rank == self.backend.rank:
                gathered[id(tensor)] = value
        return {name: gathered[id(tensor)] for name, tensor in names.items() if id(tensor) in gathered}

    @torch.no_grad()
    def load_model_state(self, state: dict[str, Tensor] | None) -> None:
        """Load the weights that rank 0 passes into the model of every worker; collective.

        Args:
            state: result of `model_state`; only rank 0's is read.
        """
        backend, names = self.backend, saved_state(self.backend.unwrap())
        if backend.is_main:
            check_keys(state, names)
        kinds = backend.broadcast({name: (value.shape, value.dtype) for name, value in (state or {}).items()})
        for name, tensor in untied(names).items():
            shape, dtype = kinds[name]
            value = (state[name] if backend.is_main else torch.empty(shape, dtype=dtype)).to(backend.device, copy=True)
            backend.broadcast_tensors([value])
            self._put_weight(name, tensor, value)

    def _get_weight(self, name: str, tensor: Tensor, rank: int) -> Tensor | None:
        """The full tensor of `saved_state`'s `tensor`, on `rank` at least; collective."""
        return tensor.detach()

    def _put_weight(self, name: str, tensor: Tensor, value: Tensor) -> None:
        """The inverse of `_get_weight`, with the full tensor on every worker."""
        tensor.copy_(value)

    def optimizer_state(self) -> dict[str, Any]:
        """State of optimizer and loss scaler. Where a backend shards it, each worker's tensors are its slices."""
        precision, reduction = self.backend.precision, self.backend.reduction
        state = {"optimizer": self._optimizer_tree(), "precision": precision.state_dict()}
        state["names"], state["shapes"] = self._optimized()
        return {**state, "exponents": reduction.exponents} if reduction.is_exact else state

    def _optimizer_tree(self) -> dict[str, Any]:
        """The optimizer's `state_dict`, with each sharded tensor as a `SlicedTensor`."""
        return self.whole_optimizer.state_dict()

    def _optimized(self) -> tuple[list[str], list[list[int]]]:
        """Names ("" for copies of parameters) and full shapes of the parameters, in the order of the optimizer."""
        names = {id(tensor): name for name, tensor in untied(saved_state(self.backend.unwrap())).items()}
        parameters = [p for group in self.whole_optimizer.param_groups for p in group["params"]]
        shapes = [list(getattr(p, "ds_shape", p.shape)) for p in parameters]
        return [names.get(id(parameter), "") for parameter in parameters], shapes

    @property
    def whole_optimizer(self) -> Optimizer:
        """The optimizer as it would be without sharding: with full parameter groups and state."""
        return self.backend.optimizer

    @property
    def optimizer_kind(self) -> str:
        """Class name of the optimizer that was passed to `setup`."""
        return type(self.backend.optimizer).__name__

    def load_optimizer_state(self, tree: Any) -> None:
        """Load an optimizer state; collective.

        A run with another backend or number of workers may have saved the state.

        Args:
            tree: a state that `save_tree` has saved, whose tensors all workers can read if the backend shards;
                otherwise only rank 0's is read, and sent to the others.

        Raises:
            ValueError: the state belongs to other parameters, for example because `--freeze` changed.
        """
        tree, backend = tree or {}, self.backend
        saved = backend.broadcast({name: value for name, value in tree.items() if name != "optimizer"})
        names, shapes = self._optimized()
        for number, (then, now) in enumerate(zip(saved.get("names", []), names, strict=False)):
            if then != now and then and now:
                raise ValueError(f"its parameter {number} is {then}, and that of this run is {now}")
        for name, then, now in zip(names, saved.get("shapes", []), shapes, strict=False):
            if then != now:
                raise ValueError(f"{name} has shape {tuple(then)} there and {tuple(now)} here")
        # Only rank 0 reads the checkpoints of other programs.
        optimizer, is_shared = self.whole_optimizer, backend.shards_state and all(backend.gather(bool(tree)))
        load_optimizer_tree(optimizer, tree.get("optimizer"), backend, self.place_state, is_shared=is_shared)
        backend.precision.load_state_dict(saved["precision"])
        exponents = saved.get("exponents", [])
        # A checkpoint of a run without `--reproducible` has none.
        if backend.reduction.is_exact and len(exponents) == len(backend.reduction.exponents):
            backend.reduction.exponents = exponents

    def load_optimizer_state_by_name(self, tree: Any, *, same_kind: bool) -> int:
        """Load saved optimizer state only for parameters that have the same name and shape as in the saving run.

        Other parameters start without state. The optimizer's settings do not change.

        Args:
            tree: see `load_optimizer_state`.
            same_kind: False if another optimizer class saved it; then only the loss scaler is loaded.

        Returns:
            The number of parameters whose state was loaded.
        """
        names, shapes = self._optimized()
        here = {name: (number, shape) for number, (name, shape) in enumerate(zip(names, shapes, strict=True)) if name}
        states, counter = {}, itertools.count()
        if tree:
            saved = tree["optimizer"]["state"] if same_kind else {}
            for number, (name, shape) in enumerate(zip(tree["names"], tree["shapes"], strict=True)):
                if number in saved and here.get(name, (0, None))[1] == shape:
                    states[here[name][0]] = saved[number]
        groups = [
            {**group, "params": [next(counter) for _ in group["params"]]}
            for group in self.whole_optimizer.param_groups
        ]
        precision = tree["precision"] if tree else None
        renumbered = {"optimizer": {"state": states, "param_groups": groups}, "precision": precision}
        # A worker without a tree receives rank 0's.
        self.load_optimizer_state(renumbered if tree else None)
        return self.backend.broadcast(len(states))

    def share_weights(self, model: nn.Module) -> None:
        """Copy rank 0's weights to all workers, for a model that `setup` has not got yet, unless `setup` does."""
        if not self.setup_shares_weights:
            self.backend.broadcast_tensors(list(untied(saved_state(model)).values()))

    def place_state(self, parameter: Tensor, value: Tensor | SlicedTensor) -> Tensor:
        """Convert a saved tensor of a parameter's optimizer state to this worker's device, or to its shard."""
        # A scalar is a number of steps, which optimizers keep on the host.
        return full(value).to(parameter.device) if value.shape else value

    def weights_norm(self) -> float:
        """Global L2 norm of the weights; collective where weights are sharded."""
        parameters = self.backend.unwrap().parameters()
        # Quantized weights are integers, whose norm means nothing.
        return float(total_norm(p.detach() for p in parameters if p.is_floating_point()))

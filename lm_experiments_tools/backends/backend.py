"""The methods that the trainer calls on a backend, and the backend for one process.

A backend wraps the model, averages gradients over workers, and sets precision. A subclass overrides the methods that
differ from those of one process. One training step of M micro-batches calls::

    for m in range(M):
        is_last = m == M - 1
        with backend.reduction.passes(is_last):
            with backend.autocast():
                loss = backend.model(**micro_batch)["loss"]
            backend.backward(loss, is_last)
    grad_norm, applied = backend.clip_and_step(max_norm).result()

The gradient is that of the sum of all these losses, over micro-batches and workers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lm_experiments_tools.backends.collective import Reduction, Workers, norms_of, total_norm
from lm_experiments_tools.backends.exact_sum import ExactSum, check_buffers, check_exact, use_ordered_kernels
from lm_experiments_tools.backends.precision import Precision, get_precision
from lm_experiments_tools.backends.slices import SlicedTensor, full
from lm_experiments_tools.backends.trees import check_keys, load_optimizer_tree
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.modules.devices import HostEmbedding, read_later
from lm_experiments_tools.modules.inspection import is_spread, saved_state, untied

if TYPE_CHECKING:
    from lm_experiments_tools.config.training import TrainerArgs


@dataclass(frozen=True)
class PendingStep:
    """An optimizer step that may still run on the device, and whose result can be read later.

    `result` waits for the step and returns (gradient norm, applied): the global L2 norm before clipping, and False if
    the step was skipped because the norm was not finite. `is_done`: it does not wait. `non_finite` waits too, and
    returns the names of the parameters whose gradient on this worker is not finite.
    """

    result: Callable[[], tuple[float, bool]]
    is_done: bool
    non_finite: Callable[[], list[str]] = list


class State:
    """State of a backend's model and optimizer; every worker calls its methods at the same time.

    `setup_shares_weights`: the backend's `setup` gives all workers rank 0's weights before any are needed.

    Attributes:
        is_sharded: True if each worker holds, reads and writes its own part of the state (FSDP, ZeRO).
        shards_weights: True for FSDP and ZeRO-3, where all workers must run the same number of forward passes.
    """

    is_sharded = shards_weights = False

    def __init__(self, backend: Backend, *, setup_shares_weights: bool = False) -> None:
        self.backend, self.setup_shares_weights = backend, setup_shares_weights

    def model_state(self, writers: Mapping[str, int] | None = None) -> dict[str, Tensor]:
        """Gather the full tensors that a checkpoint stores of the model (`saved_state`), one by one; collective.

        `writers` names the rank that gets each tensor; None: rank 0 gets all. Returns those of this rank. If the
        backend shards, they are copies in host memory.
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
        """Load the weights that rank 0 passes, as of `model_state`, into the model of every worker; collective."""
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
        """Load an optimizer state that any backend and number of workers has saved; collective.

        If the backend shards, all workers must be able to read the tensors of `tree`; otherwise only rank 0's is read,
        and sent to the others. ValueError for the state of other parameters, for example because `--freeze` changed.
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
        optimizer, is_shared = self.whole_optimizer, self.is_sharded and all(backend.gather(bool(tree)))
        load_optimizer_tree(optimizer, tree.get("optimizer"), backend, self.place_state, is_shared=is_shared)
        backend.precision.load_state_dict(saved["precision"])
        exponents = saved.get("exponents", [])
        # A checkpoint of a run without `--reproducible` has none.
        if backend.reduction.is_exact and len(exponents) == len(backend.reduction.exponents):
            backend.reduction.exponents = exponents

    def load_optimizer_state_by_name(self, tree: Any, *, same_kind: bool) -> int:
        """Load saved optimizer state only for parameters that have the same name and shape as in the saving run.

        Other parameters start without state, and the optimizer's settings do not change. If another optimizer class
        saved it (`same_kind` False), only the loss scaler is loaded. Returns the number of parameters whose state was
        loaded.
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


class Backend(Workers):
    """Base class of the backends; itself the backend for one process on one device.

    Args:
        precision: autocast and loss scaling.
        device: default: the GPU if there is one, else the CPU.

    Attributes:
        model: the wrapped model; call it for a forward pass.
        optimizer: the wrapped optimizer, whose `param_groups` hold the learning rates.
        autocast: f() -> the mixed-precision context of a forward pass.
        reduction: how gradients are reduced, from `setup` on.
        state: state of model and optimizer, in and out.
    """

    name: str
    model: nn.Module
    optimizer: Optimizer

    def __init__(self, precision: Precision | None = None, device: torch.device | None = None) -> None:
        self.device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._runs_ahead = self.device.type == "cuda"  # a step may be launched asynchronously
        self.precision = precision or Precision()
        self.autocast = self.precision.autocast(self.device)
        self.reduction, self.state, self._inner = Reduction(), State(self), None
        self._reproducible: list[Any] = ["off", None]
        self._addends: int | None = None  # micro-batches of an update over all workers, where they are summed exactly

    def reproduce(self, args: TrainerArgs) -> None:
        """Prepare sums of gradients that do not depend on the number of workers, if `--reproducible` is set.

        Call this method before data is read.

        Raises:
            UserError: another flag or this backend rules it out, or the workers do not divide the virtual ranks.
        """
        if args.reproducible == "off" or self._addends is not None:
            return
        shards = self.state.is_sharded
        check_exact(args, getattr(self, "wrapping", self.name) if shards else None)
        use_ordered_kernels(self.device)
        args.shares(self.world_size)
        virtual = args.virtual_size(self.world_size)
        self._reproducible = [args.reproducible, virtual]
        if not shards:
            self._addends, self._runs_ahead = virtual * args.gradient_accumulation_steps, False

    # ---- training step
    def setup(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        """Move the model to the device, wrap it, and give all workers rank 0's weights.

        Args:
            optimizer: None to evaluate only.
        """
        self._inner = model if is_spread(model) else model.to(self.device)
        # The hooks of a reduction belong to the model's own parameters, so they are made before apex copies these.
        self.reduction = self._make_reduction(optimizer)
        model, self.optimizer = self.precision.initialize(self._inner, optimizer, self.device)
        self.model = self.reduction.wrap(model)

    def _make_reduction(self, optimizer: Optimizer | None) -> Reduction:
        """The object that reduces the gradients of `setup`'s model."""
        if self._addends is None:
            return Reduction(self.world_size, self._reproducible)
        if optimizer is not None:
            check_buffers(self._inner, self._reproducible[0])
        parameters = [p for group in optimizer.param_groups for p in group["params"]] if optimizer is not None else []
        return ExactSum(parameters, self._addends, self, self._reproducible)

    def release(self, *, forget: bool = False) -> None:
        """Unwrap the model after training, so that `setup` can be called with it again.

        A sharded model stays sharded: it can be set up again for evaluation, not for training.

        Args:
            forget: drop model and optimizer and undo `reproduce`, so that another model can be set up.
        """
        self.model = self._inner
        self.reduction.release()
        if forget:
            self.model = self._inner = self.optimizer = self._addends = None
            self.reduction = Reduction()

    def backward(self, loss: Tensor, last: bool = True) -> None:
        """Accumulate the gradient of a scalar loss, a summand of the step's; call inside `reduction.passes`.

        Args:
            last: True for the last micro-batch of a step.
        """
        scaled = loss * self.reduction.averaged_over
        self.precision.backward(scaled, self.optimizer, last=last, reduce=self.reduction.after_backward)

    def clip_and_step(
        self,
        max_norm: float | None = None,
        max_value: float | None = None,
        *,
        wait: bool = True,
    ) -> PendingStep:
        """Clip the gradients, step the optimizer and clear the gradients.

        All workers skip the step if the gradient is not finite; weights and optimizer then stay unchanged.

        Args:
            max_norm: largest global L2 norm of the gradient; None does not clip the norm.
            max_value: largest magnitude of a gradient's entries; None does not clip them.
            wait: True to wait for the result. With False a GPU launches the step asynchronously and decides by itself
                whether to skip it. This needs an optimizer that supports `found_inf` like torch's fused ones and has
                `_step_supports_amp_scaling`; for any other optimizer the result is waited for.
        """
        parameters = [p for p in self.precision.parameters(self.optimizer) if p.grad is not None]
        norms, norm = norms_of(p.grad for p in parameters)
        names = partial(self._non_finite_names, parameters, norms)
        if not wait and self._can_skip_on_device():
            return self._launch_step(parameters, norm, max_norm, max_value, names)
        # This waits for the device, once a step.
        grad_norm = norm.item()
        finite = math.isfinite(grad_norm)
        # Where the norm is small enough, torch would multiply all gradients by 1.
        if finite and not (max_norm and max_norm >= grad_norm + 1e-6):
            _clip(parameters, norm, max_norm, max_value)
        self.precision.step(self.optimizer, finite)
        self.optimizer.zero_grad(set_to_none=True)
        return PendingStep(lambda: (grad_norm, finite), is_done=True, non_finite=names)

    def _can_skip_on_device(self) -> bool:
        if not (self._runs_ahead and self.precision.skips_on_device):
            return False
        if not getattr(self.optimizer, "_step_supports_amp_scaling", False):
            return False
        return all(p.device.type == self.device.type for p in self.precision.parameters(self.optimizer))

    def _launch_step(
        self,
        parameters: list[nn.Parameter],
        norm: Tensor,
        max_norm: float | None,
        max_value: float | None,
        names: Callable[[], list[str]],
    ) -> PendingStep:
        multiplies = hasattr(self.optimizer, "grad_factor")
        if max_norm and multiplies:
            # The optimizer multiplies gradients as it reads them: the factor of torch's clip_grads_with_norm_.
            self.optimizer.grad_factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        else:
            _clip(parameters, norm, max_norm, max_value)
        self.optimizer.found_inf, self.optimizer.grad_scale = (~norm.isfinite()).float(), None
        try:
            self.precision.step(self.optimizer, True)
        finally:
            del self.optimizer.found_inf, self.optimizer.grad_scale
            if multiplies:
                self.optimizer.grad_factor = None
        self.optimizer.zero_grad(set_to_none=True)
        read = read_later(norm)
        return PendingStep(lambda: (read(), math.isfinite(read())), is_done=False, non_finite=names)

    def _non_finite_names(self, parameters: list[nn.Parameter], norms: list[Tensor]) -> list[str]:
        """Names of the parameters whose gradient has a norm that is not finite, on this worker's shard if sharded."""
        names = {id(parameter): name for name, parameter in self.unwrap().named_parameters()}
        local = [norm.to_local() if hasattr(norm, "to_local") else norm for norm in norms]
        return [
            names.get(id(parameter), f"optimizer's parameter {number}")
            for number, (parameter, norm) in enumerate(zip(parameters, local, strict=True))
            if not math.isfinite(norm.item())
        ]

    # ---- workers
    def close(self) -> None:
        """Leave the group of workers; call once at the end of a successful run."""

    # ---- the model
    def unwrap(self) -> nn.Module:
        """Return the user's model without the backend's wrappers."""
        return self._inner

    # ---- for the log
    def __str__(self) -> str:
        kind = type(self.model).__name__ if hasattr(self, "model") else "nothing set up"
        return f"backend {self.name}, {self.world_size} worker(s), device {self.device}, model wrapped as {kind}"


class LocalBackend(Backend):
    """The backend for one process, which refuses flags for several workers."""

    name = "local"

    @classmethod
    def from_args(cls, args: TrainerArgs) -> LocalBackend:
        """Create the backend with the precision that `args` select. Raises UserError."""
        if args.fp16_allreduce:
            raise UserError("--fp16_allreduce is for several workers, and this run has only one: leave it out")
        return cls(get_precision(**args.precision_options()))


def check_whole(model: nn.Module, name: str, *, shards: bool = False) -> None:
    """Check that a backend called `name` can train a model. Raises UserError.

    Refused are models with `--device_map`, which are spread over devices, and parameters that a sharding backend does
    not support (`shards`).
    """
    if is_spread(model):
        raise UserError(f"--device_map is for one process, not for {name}: use --backend local, or leave it out.")
    if any(isinstance(module, HostEmbedding) for module in model.modules()):
        raise UserError(f"--embeddings_on_cpu is for one process, not for {name}: use --backend local.")
    if shards and getattr(model, "is_quantized", False):
        raise UserError(f"--quantize does not work with {name}, which shards weights: use Horovod or DDP.")
    scalars = [name for name, parameter in model.named_parameters() if not parameter.dim()]
    if shards and scalars:
        raise UserError(
            f"{name} cannot shard a parameter without dimensions, as {', '.join(scalars[:3])}: give it the "
            "shape (1,), or use Horovod or DDP."
        )


def check_not_trained_again(name: str, optimizer: Optimizer | None) -> None:
    """Refuse to train a model that an earlier `setup` has sharded; evaluation is allowed. Raises UserError."""
    if optimizer is not None:
        raise UserError(
            f"under {name} a model is sharded by its first training or evaluation, and cannot be trained again: train "
            "first and evaluate then, or save it and load it in a new process."
        )


def _clip(parameters: list[nn.Parameter], norm: Tensor, max_norm: float | None, max_value: float | None) -> None:
    if max_norm:
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    elif max_value:
        torch.nn.utils.clip_grad_value_(parameters, max_value)

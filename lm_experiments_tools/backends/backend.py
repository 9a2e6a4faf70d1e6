"""The methods that the trainer calls, and the backend for one process.

A backend owns everything that depends on how many workers there are and how they talk: the wrapped model, the
reduction of gradients, mixed precision, and the few collectives the trainer needs. The trainer (`training/trainer.py`)
never names a backend; a new one overrides the methods that differ from those of one process.

Order of calls in one training step of M micro-batches::

    for m in range(M):
        with backend.accumulate(sync=m == M - 1):
            with backend.autocast():
                loss = backend.model(**micro_batch)["loss"]
            backend.backward(loss)
    grad_norm, applied = backend.clip_and_step(max_norm).result()

Gradients are averaged over workers, so a loss that is to be summed over workers is multiplied by `averaged_over` first
(the trainer does that).
"""

from __future__ import annotations

import math
import resource
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lm_experiments_tools.backends.exact_sum import ExactSum, check_buffers, check_exact, use_ordered_kernels
from lm_experiments_tools.backends.precision import Precision, get_precision
from lm_experiments_tools.backends.trees import load_optimizer_tree, to_parameter
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.modules.devices import HostEmbedding, read_later
from lm_experiments_tools.modules.inspection import is_adapted, is_spread, trained_parameters

if TYPE_CHECKING:
    from lm_experiments_tools.config.training import TrainerArgs


STALL_SECONDS = 1800  # --stall_timeout: rank 0 may tokenize, save or measure while the others wait


@dataclass(frozen=True)
class PendingStep:
    """An optimizer step whose result the host may not know yet.

    Attributes:
        result: returns the global L2 norm of the reduced gradient before clipping, and True if the step was applied.
        is_done: `result` does not wait for the device.
    """

    result: Callable[[], tuple[float, bool]]
    is_done: bool

    @classmethod
    def done(cls, grad_norm: float, applied: bool) -> PendingStep:
        return cls(lambda: (grad_norm, applied), is_done=True)


class Backend:
    """The methods that the trainer calls, for one process on one device; the base of every backend. Ranks are global.

    Args:
        precision: forward autocast and loss scaling.
        device: default the GPU if there is one.

    Attributes:
        local_rank: counts within one machine.
        model: the wrapped model; call it for a forward pass.
        optimizer: the wrapped optimizer; read its param_groups, set their lr.
        shards_model: forward passes are collective (FSDP, ZeRO-3), so every worker runs equally many.
        shards_optimizer: each worker's `optimizer` holds slices of flat vectors.
        shares: virtual ranks that this worker computes, 1 but for `--reproducible elastic`: it reads the rows of all.
        reproducible: [--reproducible, virtual ranks], which a run keeps.
        exact: what gradients are summed by, with `--reproducible`, once set up for training.
        before_update: called by `clip_and_step` when gradients are reduced, neither clipped nor applied.
        runs_ahead: the device works through a queue, so that steps may be asynchronous (see `clip_and_step`).
    """

    name: str
    rank = local_rank = 0
    world_size = 1
    model: nn.Module
    optimizer: Optimizer
    planned_mib: float | None = None  # of this worker's memory
    shards_model = shards_optimizer = False
    shares = 1
    reproducible: list[Any] = ["off", None]  # noqa: RUF012  (replaced as a whole)
    exact: ExactSum | None = None
    before_update: Callable[[], None] | None = None

    def __init__(self, precision: Precision | None = None, device: torch.device | None = None) -> None:
        self.device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.runs_ahead = self.device.type == "cuda"
        self.precision = precision or Precision()
        self._sync = True
        self._addends: int | None = None  # micro-batches of an update over all workers, where they are summed exactly

    def reproduce(self, args: TrainerArgs) -> None:
        """Do as `--reproducible` says; before data is read, as it decides how much of it each worker reads.

        Raises:
            UserError: this backend or another flag cannot be exact, or the workers do not divide the virtual ranks.
        """
        if args.reproducible == "off" or self._addends is not None:
            return
        shards = self.shards_model or self.shards_optimizer
        check_exact(args, getattr(self, "wrapping", self.name) if shards else None)
        use_ordered_kernels(self.device)
        args.check_shares(self.world_size)
        virtual = args.virtual_size(self.world_size)
        self.shares = virtual // self.world_size
        self.reproducible = [args.reproducible, virtual]
        if not shards:
            self._addends, self.runs_ahead = virtual * args.gradient_accumulation_steps, False

    # ---- training step
    def setup(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        """Move, wrap and broadcast the model and (None: evaluation only) its optimizer; sets `model`, `optimizer`."""
        self._inner = model if is_spread(model) else model.to(self.device)
        self.model, self.optimizer = self.precision.initialize(self._inner, optimizer, self.device)
        self.exact = None
        if self._addends is not None and optimizer is not None:
            check_buffers(self._inner, self.reproducible[0])
            parameters = self.precision.parameters(self.optimizer)
            self.exact = ExactSum(parameters, self._addends, self.world_size, self._sum_in_place, self.gather)

    def release(self) -> None:
        """Take the wrapping off the model after its training or evaluation, so that it can be set up once more.

        What shards the model keeps it: that is for good. It can be evaluated again, but not be trained.
        """
        self.model = self._inner

    def holds(self, model: nn.Module) -> bool:
        """True if `model` is the one that was set up last."""
        return getattr(self, "_inner", None) is model

    def autocast(self) -> AbstractContextManager[None]:
        """The mixed-precision context of a forward pass."""
        return self.precision.autocast(self.device)

    @contextmanager
    def accumulate(self, sync: bool) -> Iterator[None]:
        """Context of one micro-batch; gradients are reduced over workers only where `sync` is True (the last one)."""
        self._sync = sync
        yield

    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradient of a scalar loss; call inside `accumulate`."""
        if self.exact is None:
            self.precision.backward(loss, self.optimizer, last=self._sync, reduce=self._reduce_gradients)
            return
        loss.backward()
        self.exact.add()
        if self._sync:
            self.exact.finish()

    def must_repeat(self) -> bool:
        """True, on all workers, if the micro-batches of this step have to be computed once more; see `ExactSum`."""
        return self.exact is not None and self.exact.must_repeat()

    def clip_and_step(
        self, max_norm: float | None = None, max_value: float | None = None, *, wait: bool = True
    ) -> PendingStep:
        """Clip, step the optimizer and clear the gradients.

        The step is skipped on all workers where the gradient is not finite: weights and optimizer stay untouched.

        Args:
            wait: read the result before returning. False: a GPU decides by itself whether to skip the step, and the
                host reads the result later. This needs an optimizer that, like torch's fused ones, has
                `_step_supports_amp_scaling` and leaves weights and state alone where its attribute `found_inf`, a
                scalar on the device, is 1; any other is waited for.
        """
        if not wait and self._can_skip_on_device():
            return self._launch_step(max_norm, max_value)
        if self.before_update is not None:
            self.before_update()
        parameters = self.precision.parameters(self.optimizer)
        norm = global_gradient_norm(parameters)
        grad_norm = norm.item()  # waits for the device, once a step
        finite = math.isfinite(grad_norm)
        if finite:
            if max_norm:
                if max_norm < grad_norm + 1e-6:  # otherwise torch would go over all gradients to multiply them by 1
                    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
            elif max_value:
                torch.nn.utils.clip_grad_value_(parameters, max_value)
        applied = self.precision.step(self.optimizer, finite, self._step_optimizer)
        self.optimizer.zero_grad(set_to_none=True)
        return PendingStep.done(grad_norm, applied)

    def _can_skip_on_device(self) -> bool:
        if not (self.runs_ahead and self.precision.skips_on_device):
            return False
        if not getattr(self.optimizer, "_step_supports_amp_scaling", False):
            return False
        return all(p.device.type == self.device.type for p in self.precision.parameters(self.optimizer))

    def _launch_step(self, max_norm: float | None, max_value: float | None) -> PendingStep:
        parameters = self.precision.parameters(self.optimizer)
        norm = global_gradient_norm(parameters)
        if max_norm:
            torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        elif max_value:
            torch.nn.utils.clip_grad_value_(parameters, max_value)
        self.optimizer.found_inf, self.optimizer.grad_scale = (~norm.isfinite()).float(), None
        try:
            self.precision.step(self.optimizer, True, self._step_optimizer)
        finally:
            del self.optimizer.found_inf, self.optimizer.grad_scale
        self.optimizer.zero_grad(set_to_none=True)
        read = read_later(norm)
        return PendingStep(lambda: (read(), math.isfinite(read())), is_done=False)

    def _reduce_gradients(self) -> None:
        """Average gradients over workers; nothing to do for one process."""

    def _step_optimizer(self) -> AbstractContextManager[None] | None:
        """A context in which `optimizer.step()` must run, if any."""
        return None

    # ---- talking to the other workers
    def sum(self, values: Tensor) -> Tensor:
        """Sum of a float64 or int64 CPU tensor over all workers, on all workers."""
        return values

    def _sum_in_place(self, values: Tensor) -> None:
        """`values`, an int64 tensor on the device, becomes its sum over all workers."""

    def gather(self, value: Any) -> list[Any]:
        """The picklable `value` of every worker in rank order, on all workers."""
        return [value]

    def broadcast(self, value: Any) -> Any:
        """Rank 0's picklable `value`, on all workers."""
        return value

    def barrier(self) -> None:
        """Return when every worker has arrived."""

    def missing(self) -> list[int] | None:
        """Ranks that do not answer after a collective has failed; None where none can be asked.

        Raises:
            ConnectionError: what they answer through cannot be reached.
        """
        return None

    def close(self) -> None:
        """Leave the group of workers; call once at the end of a successful run."""

    # ---- state in and out; collective: every worker calls them
    def unwrap(self) -> nn.Module:
        """The user's model under all wrappers."""
        return self._inner

    def model_state(self) -> dict[str, Tensor] | None:
        """The whole tensors that `saved_state` names, on rank 0 at least (None on workers that do not hold them)."""
        return {name: tensor.detach() for name, tensor in saved_state(self.unwrap()).items()}

    def load_model_state(self, state: dict[str, Tensor] | None) -> None:
        """The inverse of `model_state`: rank 0's whole tensors into the model on every worker."""
        check_keys(state, saved_state(self.unwrap()))
        self.unwrap().load_state_dict(state, strict=False)  # of an adapted model it is a part

    def optimizer_state(self) -> Any:
        """The tree (dicts, lists, scalars, whole tensors) of optimizer and loss-scaler state, on rank 0 at least."""
        state = {"optimizer": self._optimizer_tree(), "precision": self.precision.state_dict()}
        state["names"], state["shapes"] = self._optimized_names(), self._optimized_shapes()
        return state if self.exact is None else {**state, "exponents": self.exact.exponents}

    def _optimizer_tree(self) -> dict[str, Any] | None:
        """The optimizer's `state_dict`, of whole tensors, on rank 0 at least; collective."""
        return self.whole_optimizer.state_dict()

    def _optimized_names(self) -> list[str]:
        """Of the parameters in the order of the optimizer, whose state has numbers; "" for copies of them."""
        names: dict[int, str] = {}
        for name, tensor in saved_state(self.unwrap()).items():  # the first name of a tied weight
            names.setdefault(id(tensor), name)
        groups = self.whole_optimizer.param_groups
        return [names.get(id(parameter), "") for group in groups for parameter in group["params"]]

    def _optimized_shapes(self) -> list[list[int]]:
        """Full shapes of the parameters in the order of the optimizer; its state may have any other."""
        parameters = (p for group in self.whole_optimizer.param_groups for p in group["params"])
        return [list(getattr(p, "ds_shape", p.shape)) for p in parameters]

    @property
    def whole_optimizer(self) -> Optimizer:
        """The optimizer, or what shows one of flat slices as one of whole parameters: its groups and its state."""
        return self.optimizer

    @property
    def optimizer_kind(self) -> str:
        """The class of the optimizer that `setup` was given, by which a checkpoint knows whose state it holds."""
        return type(self.optimizer).__name__

    def load_optimizer_state(self, tree: Any) -> None:
        """The inverse of `optimizer_state`, of any backend on any number of workers; only rank 0's tree is read.

        Raises:
            ValueError: it is of other parameters, as where `--freeze` has changed.
        """
        theirs = self.broadcast(tree.get("names", []) if self.is_main else None)
        for number, (then, now) in enumerate(zip(theirs, self._optimized_names(), strict=False)):
            if then != now and then and now:
                raise ValueError(f"its parameter {number} is {then}, and that of this run is {now}")
        shapes = self.broadcast(tree.get("shapes", []) if self.is_main else None)
        for name, then, now in zip(self._optimized_names(), shapes, self._optimized_shapes(), strict=False):
            if then != now:
                raise ValueError(f"{name} has shape {tuple(then)} there and {tuple(now)} here")
        ours, send = tree["optimizer"] if self.is_main else None, self._broadcast_tensors
        load_optimizer_tree(self.whole_optimizer, ours, self.is_main, self.broadcast, send, self._place)
        self.precision.load_state_dict(self.broadcast(tree["precision"] if self.is_main else None))
        if self.exact is not None:
            exponents = self.broadcast(tree.get("exponents", []) if self.is_main else None)
            if len(exponents) == len(self.exact.exponents):  # else of other parameters, or of a run without
                self.exact.exponents = exponents

    def share_weights(self, model: nn.Module) -> None:
        """Give every worker rank 0's weights of a model that is not set up yet; for `setup` to do where it does."""

    def _broadcast_tensors(self, tensors: list[Tensor]) -> None:
        """Overwrite tensors with rank 0's."""

    def _place(self, parameter: Tensor, tensor: Tensor) -> Tensor:
        """A whole tensor of a parameter's optimizer state, as this worker's optimizer holds it."""
        return to_parameter(parameter, tensor)

    def weights_norm(self) -> float:
        """Global L2 norm of the weights, for the log; collective where weights are sharded."""
        whole = [p.detach() for p in self.unwrap().parameters() if p.is_floating_point()]  # others are quantised
        return float(total_norm(whole))

    def peak_memory_mib(self) -> float:
        """This worker's largest memory so far, MiB: of tensors on its GPU, or of the whole process on a CPU."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated() / 2**20
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10

    def memory(self) -> dict[str, float]:
        """For the log: `peak_memory_mib`, and what was planned as its multiple, where there is a plan."""
        found = {"memory_mib": self.peak_memory_mib()}
        if self.planned_mib is not None:
            found["memory_predicted_over_measured"] = self.planned_mib / found["memory_mib"]
        return found

    def describe(self) -> str:
        """One line for the log: what is really running."""
        kind = type(self.model).__name__ if hasattr(self, "model") else "nothing set up"
        return f"backend {self.name}, {self.world_size} worker(s), device {self.device}, model wrapped as {kind}"

    @property
    def averaged_over(self) -> int:
        """The number of workers that gradients become the mean over; 1 where they are summed."""
        return self.world_size if self.exact is None else 1

    @property
    def sums_exactly(self) -> bool:
        """True with `--reproducible` where sums are the same in any order, also if nothing is trained."""
        return self._addends is not None

    @property
    def is_main(self) -> bool:
        return self.rank == 0


class LocalBackend(Backend):
    """One process alone."""

    name = "local"

    @classmethod
    def from_args(cls, args: TrainerArgs) -> LocalBackend:
        """The backend with the precision that the flags name."""
        if args.fp16_allreduce:
            raise UserError("--fp16_allreduce is about gradients sent between workers, but this run has only one")
        return cls(get_precision(**args.precision_options()))


class DataParallelBackend(Backend, ABC):
    """Base of backends whose workers each hold the whole model and optimizer: rank 0's state goes to all."""

    @abstractmethod
    def _broadcast_tensors(self, tensors: list[Tensor]) -> None:
        """Overwrite tensors with rank 0's."""

    def load_model_state(self, state: dict[str, Tensor] | None) -> None:
        if self.is_main:
            super().load_model_state(state)
        self._broadcast_tensors(list(saved_state(self.unwrap()).values()))

    def share_weights(self, model: nn.Module) -> None:
        self._broadcast_tensors(list({id(tensor): tensor for tensor in saved_state(model).values()}.values()))


def saved_state(model: nn.Module) -> dict[str, Tensor]:
    """Name -> tensor of what checkpoints hold: the state dict, or of a model with an adapter what is trained.

    The tensors are the model's own: parameters, not copies.
    """
    if is_adapted(model):
        return dict(trained_parameters(model))
    return model.state_dict(keep_vars=True)


def check_keys(state: dict[str, Tensor] | None, names: dict[str, Tensor]) -> None:
    """A state to load has exactly the names and shapes of `saved_state`, whose tensors may be slices (ZeRO)."""
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


def check_whole(model: nn.Module, name: str, *, shards: bool = False) -> None:
    """Raises UserError where `model` is held in a way that the backend `name` cannot train."""
    if is_spread(model):
        raise UserError(
            f"--device_map spreads the layers over several devices, which is for one process: leave {name} out "
            "(--backend local), or --device_map."
        )
    if any(isinstance(module, HostEmbedding) for module in model.modules()):
        raise UserError(
            f"--embeddings_on_cpu is for one process, not for {name}: use --backend local, or leave it out."
        )
    if shards and getattr(model, "is_quantized", False):
        raise UserError(
            f"--quantize does not work with {name}, which cannot cut quantised weights into slices: use Horovod or "
            "DDP, or leave --quantize out."
        )
    scalars = [name for name, parameter in model.named_parameters() if not parameter.dim()]
    if shards and scalars:
        raise UserError(
            f"{name} cannot cut a parameter without dimensions into slices, as {', '.join(scalars[:3])}: give it the "
            "shape (1,), or use Horovod or DDP."
        )


def check_unprepared(model: nn.Module, optimizer: Optimizer | None) -> None:
    """Raises UserError for what an Accelerator has prepared."""
    for thing in (model, optimizer):
        if getattr(thing, "_is_accelerate_prepared", False):
            raise UserError(f"the {type(thing).__name__} was prepared already: give the trainer the plain one")


def check_not_trained_again(name: str, optimizer: Optimizer | None) -> None:
    """Raises UserError where a model that `name` has cut into slices is to be trained."""
    if optimizer is not None:
        raise UserError(
            f"under {name} a model is cut into slices by its first training or evaluation, and cannot be trained from "
            "there: train first and evaluate then; to train once more, save it and load that in a new process."
        )


def global_gradient_norm(parameters: list[nn.Parameter]) -> Tensor:
    """L2 norm over the gradients of all parameters, a scalar tensor (0 without gradients)."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    return total_norm(gradients) if gradients else torch.zeros(())


def total_norm(tensors: list[Tensor]) -> Tensor:
    """L2 norm over all tensors, a plain scalar tensor also where they are sharded (DTensor); then collective."""
    norm = torch.nn.utils.get_total_norm(tensors)
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm

"""Data parallelism over Accelerate: DDP, FSDP2 and DeepSpeed ZeRO 1 to 3, under torchrun or `accelerate launch`.

Accelerate connects the workers and wraps the model. This package controls precision, gradient accumulation, clipping
and the learning rate, so that a run gives the same numbers as under Horovod. `Accelerator.prepare` never gets the
schedule and the data loaders.
"""

from __future__ import annotations

import atexit
import math
import os
import weakref
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.optim import Optimizer

from lm_experiments_tools.backends import deepspeed_config, fsdp, launch
from lm_experiments_tools.backends.backend import Backend, PendingStep, State, check_not_trained_again, check_whole
from lm_experiments_tools.backends.collective import STALL_SECONDS, START_SECONDS, Reduction
from lm_experiments_tools.backends.precision import ApexAmp, Precision, get_precision
from lm_experiments_tools.backends.process_groups import (
    host_group,
    leave_group,
    meeting,
    restarts_store,
    set_timeouts,
)
from lm_experiments_tools.backends.slices import SlicedTensor
from lm_experiments_tools.backends.trees import as_carrier, put_back, send_as_fp16
from lm_experiments_tools.backends.zero import LossScale, UnshardedOptimizer, take_groups
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.modules.inspection import saved_state

try:
    from accelerate import Accelerator, DeepSpeedPlugin, DistributedDataParallelKwargs, InitProcessGroupKwargs
    from accelerate.state import PartialState
    from accelerate.utils import DDPCommunicationHookType
except ImportError as error:
    raise UserError(f"Accelerate cannot be imported ({error}); `pip install accelerate`") from None

if TYPE_CHECKING:
    from lm_experiments_tools.config.training import TrainerArgs

CLIPS_BY_NORM = "--clip_grad_value does not work with DeepSpeed, which clips by norm: use --clip_grad_norm"


def _syncs_always(accelerator: Accelerator) -> bool:
    """True if every backward pass reduces gradients, not only the last one of a step."""
    return accelerator.num_processes == 1 or accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False)


class DDPReduction(Reduction):
    """Reduction by torch's DistributedDataParallel, during the last backward pass of a step; optionally as fp16."""

    def __init__(self, accelerator: Accelerator, reproducible: list[Any], *, trains: bool, as_fp16: bool) -> None:
        super().__init__(accelerator.num_processes, reproducible)
        self.accelerator, self.as_fp16 = accelerator, as_fp16 and trains and accelerator.num_processes > 1
        self.trains, self._sync_always = trains, _syncs_always(accelerator)

    def wrap(self, model: nn.Module) -> nn.Module:
        self._inner = model
        self.model = self.accelerator.prepare_model(model, evaluation_mode=not self.trains)
        if self.as_fp16:
            self.model.register_comm_hook(self.averaged_over, send_as_fp16)
        self._is_checked = not self.trains or self.averaged_over == 1
        return self.model

    def passes(self, last: bool) -> AbstractContextManager[None]:
        return nullcontext() if last or self._sync_always else self.model.no_sync()

    def after_backward(self, last: bool) -> None:
        """At the first step, refuse what DDP would only report at the second, after an update without reduction."""
        if not last or self._is_checked:
            return
        self._is_checked, handler = True, self.accelerator.ddp_handler
        unused = [n for n, p in self._inner.named_parameters() if p.requires_grad and p.grad is None]
        if unused and not (handler is not None and handler.find_unused_parameters):
            raise UserError(
                f"{len(unused)} parameters take no part in the loss ({', '.join(unused[:3])}, ...), which DDP cannot "
                "reduce: freeze them, or pass an Accelerator with find_unused_parameters=True"
            )

    def release(self) -> None:
        self.model = None
        # Accelerate holds a reference to DDP, whose hooks would reduce gradients once more.
        self.accelerator.free_memory()
        vars(self._inner).pop("_is_accelerate_prepared", None)


class FSDPReduction(Reduction):
    """Reduction by FSDP2, which scatters averaged gradients to their shards."""

    def __init__(self, accelerator: Accelerator, model: nn.Module, reproducible: list[Any]) -> None:
        super().__init__(accelerator.num_processes, reproducible)
        self._model, self._sync_always = model, _syncs_always(accelerator)

    def passes(self, last: bool) -> AbstractContextManager[None]:
        self._model.set_requires_gradient_sync(last or self._sync_always)
        return nullcontext()


class ZeROReduction(Reduction):
    """Reduction by DeepSpeed's engine."""

    def __init__(self, engine: Any, world_size: int, reproducible: list[Any]) -> None:
        super().__init__(world_size, reproducible)
        self._engine = engine

    def passes(self, last: bool) -> AbstractContextManager[None]:
        self._engine.set_gradient_accumulation_boundary(last)
        return nullcontext()


class AccelerateBackend(Backend):
    """One worker of an Accelerate job with DDP, or a single process; base class of FSDP and DeepSpeed.

    Args:
        precision: autocast and loss scaling.
        fp16_allreduce: send gradients between workers as fp16. This halves the traffic and rounds to 11 bits.
    """

    name = "accelerate"
    wrapping = "DDP"
    stall_seconds: float | None = None  # to wait for a worker from the first step on; None leaves the groups' timeouts

    def __init__(
        self, accelerator: Accelerator, precision: Precision | None = None, *, fp16_allreduce: bool = False
    ) -> None:
        launch.check_accelerator(accelerator)
        super().__init__(precision, accelerator.device)
        self.accelerator, self.fp16_allreduce = accelerator, fp16_allreduce
        self.rank, self.world_size = accelerator.process_index, accelerator.num_processes
        if self.world_size > 1:
            atexit.register(leave_group, weakref.WeakMethod(self._drop_wrapper))
        self._host_group = host_group(self.world_size, self.device, STALL_SECONDS)

    @staticmethod
    def from_args(args: TrainerArgs) -> AccelerateBackend:
        """Create the backend with a new Accelerator, from `args` and the launcher's environment. Raises UserError."""
        return AccelerateBackend.from_accelerator(make_accelerator(args), args, STALL_SECONDS)

    @staticmethod
    def from_accelerator(
        accelerator: Accelerator, args: TrainerArgs, stall_seconds: float | None = None
    ) -> AccelerateBackend:
        """Create the backend for an Accelerator, of the user or of `from_args`.

        Args:
            stall_seconds: default of `args.stall_timeout`; None leaves the timeouts of the process groups as they are.

        Raises:
            UserError: `args` contradict the Accelerator.
        """
        check_agreement(accelerator, args)
        kind = str(accelerator.distributed_type.value)
        precision = get_precision(**args.precision_options()) if kind != "DEEPSPEED" else None
        if precision is None:
            backend = DeepSpeedBackend(accelerator, args)
        elif kind == "FSDP":
            backend = FullyShardedBackend(accelerator, precision)
        else:
            backend = AccelerateBackend(accelerator, precision, fp16_allreduce=args.fp16_allreduce)
        backend.stall_seconds = args.stall_timeout or stall_seconds
        backend.wait_long()
        return backend

    def setup(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        _check_unprepared(model, optimizer)
        check_whole(model, "Accelerate")
        super().setup(model, optimizer)
        # With exact sums there is no DDP wrapper, which would have sent rank 0's weights.
        if self.reduction.is_exact:
            self.broadcast_tensors([*model.parameters(), *model.buffers()])

    def _make_reduction(self, optimizer: Optimizer | None) -> Reduction:
        if self._addends is not None:
            return super()._make_reduction(optimizer)
        trains = optimizer is not None
        return DDPReduction(self.accelerator, self._reproducible, trains=trains, as_fp16=self.fp16_allreduce)

    def release(self, *, forget: bool = False) -> None:
        super().release(forget=forget)
        if forget:
            self.accelerator.free_memory()
            self.wait_long()

    # ---- collectives
    def sum(self, values: Tensor) -> Tensor:
        if self.world_size == 1:
            return values
        total = values.clone()
        dist.all_reduce(total, group=self._host_group if total.device.type == "cpu" else None)
        return total

    def gather(self, value: Any) -> list[Any]:
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def broadcast(self, value: Any) -> Any:
        if self.world_size == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0, device=self.device)
        return values[0]

    def wait_long(self) -> None:
        """Let collectives wait for as long as rank 0 may work alone before the first step."""
        if self.stall_seconds is not None:
            set_timeouts(START_SECONDS)

    def limit_waiting(self) -> None:
        if self.stall_seconds is not None:
            # A barrier: a worker that has the new limit must not wait for one that is still in its first step.
            self.sum(torch.zeros(1, dtype=torch.int64))
            set_timeouts(self.stall_seconds)

    def close(self) -> None:
        # DDP first, which holds the group from C++: a gloo group freed through it keeps the GIL while it waits for a
        # thread that may want it, and then the process never ends.
        self._drop_wrapper()
        PartialState().destroy_process_group()

    def _drop_wrapper(self) -> None:
        self.model, self._host_group = self._inner, None
        # `DDPReduction` holds a reference to the DDP wrapper too.
        self.reduction = Reduction()
        self.accelerator.free_memory()

    def broadcast_tensors(self, tensors: list[Tensor]) -> None:
        if self.world_size == 1:
            return
        for tensor in tensors:
            carrier = as_carrier(tensor).to(self.device)
            dist.broadcast(carrier, src=0)
            put_back(carrier, tensor)

    def __str__(self) -> str:
        kind = self.accelerator.distributed_type.value
        return f"{super().__str__()}, Accelerate distributed_type {kind} ({self.wrapping})"


class FullyShardedBackend(AccelerateBackend):
    """FSDP2: each worker holds a shard of the parameters, gradients and optimizer state, as DTensors."""

    wrapping = "FSDP2"

    def __init__(self, accelerator: Accelerator, precision: Precision | None = None) -> None:
        super().__init__(accelerator, precision)
        if isinstance(self.precision, ApexAmp):
            raise UserError("--apex_opt_lvl does not work with FSDP: use --fp16 or --bf16 alone")
        plugin = accelerator.state.fsdp_plugin
        if plugin.fsdp_version != 2:
            raise UserError(f"FSDP version {plugin.fsdp_version} is not supported: set fsdp_version: 2")
        self.state = fsdp.FullyShardedState(self, setup_shares_weights=True)

    def setup(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        if self._inner is model:
            check_not_trained_again("FSDP", optimizer)
            return
        _check_unprepared(model, optimizer)
        check_whole(model, "FSDP", shards=True)
        fsdp.join_shared_modules(model)
        plugin = self.accelerator.state.fsdp_plugin
        named = plugin.transformer_cls_names_to_wrap or getattr(model, "_no_split_modules", None) or []
        units = fsdp.unit_classes(model, named)
        settings = {
            "transformer_cls_names_to_wrap": units,
            "mixed_precision_policy": plugin.mixed_precision_policy or fsdp.mixed_precision(self.precision.dtype),
        }
        # With efficient loading only rank 0 has weights, and Accelerate sends them.
        if not plugin.cpu_ram_efficient_loading:
            self.broadcast_tensors([*model.parameters(), *model.buffers()])
        # Accelerate prepares a model for FSDP2 only together with an optimizer.
        stepped = optimizer or torch.optim.SGD(model.parameters(), lr=0.0)
        with fsdp.ends_in_one_unit(model, units), fsdp.set_for_now(plugin, settings):
            self.model, _ = self.accelerator.prepare(model, stepped)
        # `generate` calls parts of the model, whose weights only the root module gathers.
        if hasattr(model, "generate"):
            register_fsdp_forward_method(model, "generate")
        self._inner = model
        self.reduction = FSDPReduction(self.accelerator, self.model, self._reproducible)
        _, self.optimizer = self.precision.initialize(model, optimizer, self.device)

    def release(self, *, forget: bool = False) -> None:
        if forget:
            super().release(forget=True)


class DeepSpeedBackend(AccelerateBackend):
    """DeepSpeed with ZeRO stage 1, 2 or 3. DeepSpeed casts the model, scales the loss and clips gradients.

    Checkpoints hold full weights and slices of the optimizer's state, so any other backend can load them.
    """

    def __init__(self, accelerator: Accelerator, args: TrainerArgs) -> None:
        # The engine casts the model, so forward passes need no autocast.
        super().__init__(accelerator, Precision())
        # DeepSpeed's step waits for the device.
        self._runs_ahead = False
        from deepspeed.accelerator import get_accelerator

        if args.fp16 and not get_accelerator().is_fp16_supported():
            raise UserError(f"--fp16: DeepSpeed finds no float16 on {self.device}; use --bf16")
        self.stage = accelerator.state.deepspeed_plugin.deepspeed_config["zero_optimization"]["stage"]
        self.wrapping = f"ZeRO stage {self.stage}"
        self.scales = (args.min_loss_scale or 0.0, args.max_loss_scale or math.inf)
        self.dtype = torch.float16 if args.fp16 else torch.bfloat16 if args.bf16 else torch.float32
        self.state = ZeROState(self)

    def setup(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        # A model that was set up before is inside an engine.
        if self._inner is model and self.model is not model:
            check_not_trained_again("DeepSpeed", optimizer)
            return
        _check_unprepared(model, optimizer)
        check_whole(model, "DeepSpeed", shards=True)
        self._inner, self.state.frozen = model, {}
        if optimizer is None:
            # ZeRO 1 and 2 shard nothing that evaluation needs; ZeRO 3 shards the weights, optimizer or not. The engine
            # would cast the model, so without one we do.
            self.optimizer = None
            is_full = self.stage < 3
            with deepspeed_config.refusals():
                self.model = model.to(self.device, self.dtype) if is_full else self.accelerator.prepare(model)
            self.reduction = Reduction(self.world_size, self._reproducible)
            return
        deepspeed_config.check_optimizer(optimizer)
        config = self.accelerator.state.deepspeed_plugin.deepspeed_config
        config["zero_force_ds_cpu_optimizer"] = deepspeed_config.has_cpu_version(optimizer)
        # Parameters created inside `zero.Init` are sharded already.
        made_whole = not any(hasattr(parameter, "ds_id") for parameter in model.parameters())
        cast = self.dtype != torch.float32 and made_whole
        given = {n: tensor.detach() for n, tensor in saved_state(model).items()} if cast and self.is_main else None
        groups = take_groups(optimizer)
        with deepspeed_config.refusals():
            self.model, _ = self.accelerator.prepare(model, optimizer)
        self.reduction = ZeROReduction(self.model, self.world_size, self._reproducible)
        # The engine has created process groups of its own, whose timeouts are set here.
        self.wait_long()
        self.optimizer = self.model.optimizer
        # The training loop decides how many skipped steps are too many.
        self.optimizer.loss_scaler.raise_error_at_min_scale = False
        self.state.kind = type(optimizer).__name__
        self.state.unsharded = UnshardedOptimizer(self.optimizer, groups, self.device)
        self.precision.scaler = LossScale(self.optimizer.loss_scaler) if self.optimizer.loss_scaler.dynamic else None
        # The engine has copied its fp32 weights from the model after casting it, so the given ones are put back.
        if cast:
            self.state.load_model_state(given)

    def release(self, *, forget: bool = False) -> None:
        if forget:
            super().release(forget=True)

    def backward(self, loss: Tensor, last: bool = True) -> None:
        # The loss is divided by the token count of the whole step already, so DeepSpeed must not divide it again.
        self.model.backward(loss * self.reduction.averaged_over, scale_wrt_gas=False)

    def clip_and_step(
        self,
        max_norm: float | None = None,
        max_value: float | None = None,
        *,
        wait: bool = True,
    ) -> PendingStep:
        if max_value:
            raise UserError(CLIPS_BY_NORM)
        self.optimizer.clip_grad = max_norm or 0.0
        self.model.step()
        applied = self.model.was_step_applied()
        loss_scale = min(max(self.optimizer.loss_scale, self.scales[0]), self.scales[1])
        if self.model.fp16_enabled() and loss_scale != self.optimizer.loss_scale:
            self.optimizer.loss_scale = loss_scale
        grad_norm = float(self.model.get_global_grad_norm())
        return PendingStep(lambda: (grad_norm, applied), is_done=True)


class ZeROState(State):
    """State under DeepSpeed: full fp32 weights, from the optimizer's shards where the model's are rounded or sharded.

    `kind` is the optimizer's class name before DeepSpeed wrapped it. `frozen` weights, on rank 0 by name, are not
    rounded to the model's dtype.
    """

    backend: DeepSpeedBackend
    is_sharded = True

    def __init__(self, backend: DeepSpeedBackend) -> None:
        super().__init__(backend)
        self.shards_weights = backend.stage == 3
        self.unsharded: UnshardedOptimizer | None = None
        self.kind, self.frozen = "", {}

    @property
    def optimizer_kind(self) -> str:
        return self.kind

    @property
    def whole_optimizer(self) -> UnshardedOptimizer:
        return self.unsharded

    def place_state(self, parameter: Tensor, value: Tensor | SlicedTensor) -> Tensor:
        return self.unsharded.cut(parameter, value)

    def model_state(self, writers: Mapping[str, int] | None = None) -> dict[str, Tensor]:
        # Only rank 0 has the fp32 values of frozen weights.
        return super().model_state(writers and {**writers, **dict.fromkeys(self.frozen, 0)})

    def _get_weight(self, name: str, tensor: Tensor, rank: int) -> Tensor | None:
        """The fp32 weight, from the optimizer's shards where the model's own is rounded to 16 bits."""
        if self._is_sharded(tensor):
            return self.unsharded.weight(tensor, rank)
        if name in self.frozen:
            return self.frozen[name]
        with _gathered(tensor, None):
            return tensor.detach().to("cpu", copy=True) if rank == self.backend.rank else None

    def _put_weight(self, name: str, tensor: Tensor, value: Tensor) -> None:
        with _gathered(tensor, 0):
            if not hasattr(tensor, "ds_id") or self.backend.is_main:
                tensor.detach().copy_(value)
        if self._is_sharded(tensor):
            self.unsharded.put_weight(tensor, value)
        elif (
            self.backend.optimizer is not None
            and isinstance(tensor, nn.Parameter)
            and self.backend.dtype != torch.float32
        ):
            self.frozen[name] = value.to("cpu", copy=True) if self.backend.is_main else None

    def _is_sharded(self, tensor: Tensor) -> bool:
        """True if the optimizer holds fp32 shards of this parameter."""
        if self.backend.optimizer is None or not tensor.requires_grad:
            return False
        return hasattr(tensor, "_z3_optimizer") or hasattr(tensor, "_hp_mapping")

    def weights_norm(self) -> float:
        if self.backend.stage < 3:
            return super().weights_norm()
        total = torch.zeros((), dtype=torch.float64)
        for parameter in self.backend.unwrap().parameters():
            own = parameter.ds_tensor.detach().flatten()
            # DeepSpeed pads the parameter to equal shards, and padding does not count.
            length = max(0, min(own.numel(), parameter.ds_numel - self.backend.rank * own.numel()))
            total += own[:length].double().square().sum().cpu()
        return math.sqrt(self.backend.sum(total).item())


def _gathered(tensor: Tensor, modifier_rank: int | None) -> AbstractContextManager[None]:
    """A context in which a parameter of ZeRO 3 is full on every worker."""
    from deepspeed.runtime.zero import GatheredParameters

    return GatheredParameters([tensor] if hasattr(tensor, "ds_id") else [], modifier_rank=modifier_rank)


def make_accelerator(args: TrainerArgs) -> Accelerator:
    """Create an Accelerator from `args` and the launcher's environment. Raises UserError."""
    initialized = PartialState._shared_state != {}
    launch.check_device(initialized)
    sharding, ours = launch.wanted_sharding(), _precision_name(args)
    _check_equal("accelerate launch", "mixed_precision", os.environ.get("ACCELERATE_MIXED_PRECISION", "no"), ours)
    seconds = args.stall_timeout or STALL_SECONDS
    handlers = [InitProcessGroupKwargs(init_method=restarts_store(), timeout=timedelta(seconds=seconds))]
    if sharding == "DEEPSPEED":
        launch.open_deepspeed_settings()
        options = {"mixed_precision": ours, "deepspeed_plugin": DeepSpeedPlugin()}
    else:
        cpu = launch.cpu_asked() or (not torch.accelerator.is_available() and not initialized)
        options = {"mixed_precision": "no", "cpu": cpu}
    if sharding is None:
        handlers.append(DistributedDataParallelKwargs(gradient_as_bucket_view=True))
    with meeting(seconds):
        return Accelerator(kwargs_handlers=handlers, **options)


def check_agreement(accelerator: Accelerator, args: TrainerArgs) -> None:
    """Check that an Accelerator does not contradict `args`, which fill a DeepSpeed file. Raises UserError."""
    kind = str(accelerator.distributed_type.value)
    _check_equal("the Accelerator", "mixed_precision", accelerator.mixed_precision, _precision_name(args))
    steps = args.gradient_accumulation_steps
    if accelerator.gradient_accumulation_steps not in (1, steps):
        raise UserError(
            f"the Accelerator says gradient_accumulation_steps {accelerator.gradient_accumulation_steps} but "
            f"--gradient_accumulation_steps is {steps}: leave it out of the Accelerator"
        )
    hook = getattr(accelerator.ddp_handler, "comm_hook", DDPCommunicationHookType.NO)
    if args.fp16_allreduce and (kind in ("FSDP", "DEEPSPEED") or hook != DDPCommunicationHookType.NO):
        raise UserError("--fp16_allreduce works with Horovod, and with DDP where the Accelerator sets no comm_hook")
    if kind != "DEEPSPEED":
        return
    if args.apex_opt_lvl:
        raise UserError("--apex_opt_lvl does not work with DeepSpeed: use --fp16 or --bf16 alone")
    if args.clip_grad_value:
        raise UserError(CLIPS_BY_NORM)
    source = f"the DeepSpeed configuration {os.environ.get('ACCELERATE_DEEPSPEED_CONFIG_FILE', '')}".strip()
    config = accelerator.state.deepspeed_plugin.deepspeed_config
    deepspeed_config.fill_config(config, args, accelerator.num_processes, source)
    accelerator.gradient_accumulation_steps = steps


def _precision_name(args: TrainerArgs) -> str:
    return "fp16" if args.fp16 else "bf16" if args.bf16 else "no"


def _check_equal(who: str, name: str, theirs: str, ours: str) -> None:
    if theirs.lower() not in ("no", ours):
        raise UserError(f"{who} says {name} {theirs} but the arguments say {ours}: make them equal, or leave it out")


def _check_unprepared(model: nn.Module, optimizer: Optimizer | None) -> None:
    for thing in (model, optimizer):
        if getattr(thing, "_is_accelerate_prepared", False):
            raise UserError(f"the {type(thing).__name__} was prepared already: pass the plain one")

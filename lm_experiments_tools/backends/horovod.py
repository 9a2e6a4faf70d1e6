"""Data parallelism over Horovod: `horovodrun -np 8 python run_t5_pretraining.py ...`, or `mpirun` with an MPI build.

Horovod's DistributedOptimizer reduces gradients during the backward pass.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.profiler import record_function

from lm_experiments_tools.backends.backend import Backend, State, check_whole
from lm_experiments_tools.backends.collective import START_SECONDS, Reduction
from lm_experiments_tools.backends.launch import wanted_processes
from lm_experiments_tools.backends.precision import Precision, get_precision
from lm_experiments_tools.backends.trees import as_carrier, fp16_scales, put_back
from lm_experiments_tools.errors import UserError

try:
    import horovod
    import horovod.torch as hvd
except ImportError as error:
    raise UserError(
        f"Horovod's PyTorch part cannot be imported ({error}); build it with `lmtools build-horovod` "
        "(scripts/build_horovod.py), or use torchrun or accelerate launch"
    ) from None

if TYPE_CHECKING:
    from lm_experiments_tools.config.training import TrainerArgs

_NEVER = 1 << 30  # backward passes: more than any step has


class HorovodReduction(Reduction):
    """Reduction by Horovod, of each gradient after its last backward pass in a step; as fp16 after all of them."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, as_fp16: bool, reproducible: list[Any]) -> None:
        super().__init__(hvd.size(), reproducible)
        self._as_fp16, self._reducer = as_fp16, None
        self._reduced = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        if as_fp16 or not self._reduced:
            return
        names = {parameter: name for name, parameter in model.named_parameters()}
        named = [(names.get(p, f"parameter.{i}"), p) for i, p in enumerate(self._reduced)]
        # It re-creates the optimizer that it wraps and loses some of its arguments, so it gets a placeholder, whose
        # `step` is never called.
        self._reducer = hvd.DistributedOptimizer(torch.optim.SGD(self._reduced, lr=0.0), named_parameters=named)

    def release(self) -> None:
        if self._reducer is not None:
            # Horovod's hooks live on the accumulators, and would send each gradient a second time.
            self._reducer._grad_accs.clear()
            self._reducer = None

    def passes(self, last: bool) -> AbstractContextManager[None]:
        # Horovod sends a gradient after its n-th backward pass: never, until the last micro-batch makes it the next.
        if self._reducer is not None:
            self._reducer.set_backward_passes_per_step(1 if last else _NEVER)
        return nullcontext()

    def after_backward(self, last: bool) -> None:
        if last and self._reduced:
            self._reduce()

    @record_function("communication")
    def _reduce(self) -> None:
        """Average gradients; one that no worker has stays None, where Horovod gives zeros and AdamW would decay."""
        present = torch.tensor([p.grad is not None for p in self._reduced], dtype=torch.float32)
        handle = hvd.allreduce_async_(present, op=hvd.Sum, name="gradient_present")
        if self._reducer is None:
            self._average_as_fp16()
        else:
            self._reducer.synchronize()
        hvd.synchronize(handle)
        for parameter, count in zip(self._reduced, present.tolist(), strict=True):
            if not count:
                parameter.grad = None

    def _average_as_fp16(self) -> None:
        """Average gradients in fp16, scaled by one factor for each parameter; Horovod's compression has no scale."""
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._reduced]
        largest = torch.stack([torch.linalg.vector_norm(gradient, torch.inf).float() for gradient in gradients])
        scales = fp16_scales(hvd.allreduce(largest, op=hvd.Max, name="largest_gradients"), self.averaged_over)
        sent = [(gradient * scale).half() for gradient, scale in zip(gradients, scales, strict=True)]
        handles = [hvd.allreduce_async_(half, op=hvd.Sum, name=f"gradient.{i}") for i, half in enumerate(sent)]
        for i, (parameter, gradient) in enumerate(zip(self._reduced, gradients, strict=True)):
            average = hvd.synchronize(handles[i]).float().div_(scales[i] * self.averaged_over)
            parameter.grad = gradient.copy_(average)


class HorovodBackend(Backend):
    """One worker of a Horovod job. On GPUs each worker uses the one of its local rank.

    Args:
        precision: autocast and loss scaling.
        fp16_allreduce: send gradients between workers as fp16. This halves the traffic and rounds to 11 bits.
        stall_timeout: seconds to wait for a worker that does not answer; None: Horovod's 30. A late worker that still
            answers is waited for START_SECONDS, or HOROVOD_STALL_SHUTDOWN_TIME_SECONDS.

    Raises:
        UserError: an elastic job; the launcher started more workers than Horovod sees, or more than GPUs.
    """

    name = "horovod"

    def __init__(
        self, precision: Precision | None = None, *, fp16_allreduce: bool = False, stall_timeout: int | None = None
    ) -> None:
        if os.environ.get("HOROVOD_ELASTIC") == "1":
            raise UserError(
                "elastic horovodrun cannot be used: start the job again by the same command, or use torchrun "
                "--max-restarts, both with --reproducible elastic"
            )
        # A killed, suspended or cut-off worker does not answer Horovod's thread, which ends the job after this time.
        if stall_timeout is not None:
            os.environ["HOROVOD_GLOO_TIMEOUT_SECONDS"] = str(stall_timeout)
        # A worker that is only late still answers. Horovod warns after a minute and names it. It reads this limit only
        # once, so the limit must be long enough for what rank 0 does before the first step.
        os.environ.setdefault("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", str(START_SECONDS))
        # otherwise the host waits for the reduction of a GPU's gradients
        os.environ.setdefault("HOROVOD_ENABLE_ASYNC_COMPLETION", "1")
        hvd.init()
        super().__init__(precision, _local_device())
        self.rank, self.world_size = hvd.rank(), hvd.size()
        self.fp16_allreduce, self.state = fp16_allreduce, State(self, setup_shares_weights=True)
        _check_launch(self.world_size)

    @classmethod
    def from_args(cls, args: TrainerArgs) -> HorovodBackend:
        return cls(
            get_precision(**args.precision_options()),
            fp16_allreduce=args.fp16_allreduce,
            stall_timeout=args.stall_timeout,
        )

    def setup(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        """Prepare model and optimizer for training over Horovod; see `Backend.setup`.

        UserError for a bfloat16 parameter, or an optimizer that Horovod already wraps.
        """
        _check_supported(model, optimizer)
        check_whole(model, "Horovod")
        model.to(self.device)
        # A gradient has its parameter's strides, and Horovod sends only contiguous ones.
        for parameter in model.parameters():
            parameter.data = parameter.data.contiguous()
        self.broadcast_tensors([*model.parameters(), *model.buffers()])
        super().setup(model, optimizer)

    def _make_reduction(self, optimizer: Optimizer | None) -> Reduction:
        if self._addends is not None or optimizer is None or self.world_size == 1:
            return super()._make_reduction(optimizer)
        return HorovodReduction(self._inner, optimizer, self.fp16_allreduce, self._reproducible)

    @record_function("communication")
    def sum(self, values: Tensor) -> Tensor:
        return hvd.allreduce(values, op=hvd.Sum, name="sum")

    def gather(self, value: Any) -> list[Any]:
        return hvd.allgather_object(value, name="gather")

    def broadcast(self, value: Any) -> Any:
        return hvd.broadcast_object(value, root_rank=0, name="broadcast")

    def close(self) -> None:
        hvd.shutdown()

    def broadcast_tensors(self, tensors: list[Tensor]) -> None:
        """Overwrite the tensors of every worker with those of rank 0."""
        sent = []
        for i, tensor in enumerate(tensors):
            carrier = as_carrier(tensor)
            sent.append((carrier, tensor, hvd.broadcast_async_(carrier, root_rank=0, name=f"state.{i}")))
        for carrier, tensor, handle in sent:
            hvd.synchronize(handle)
            put_back(carrier, tensor)

    def __str__(self) -> str:
        wire = "fp16" if self.fp16_allreduce else "their own type"
        return f"{super().__str__()}, gradients reduced by Horovod {horovod.__version__} as {wire}"


def _local_device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if hvd.local_size() > torch.cuda.device_count():
        raise UserError(
            f"{hvd.local_size()} workers on this machine but {torch.cuda.device_count()} GPU(s): start at most one "
            "worker per GPU, or hide the GPUs with CUDA_VISIBLE_DEVICES= to train on the CPU"
        )
    torch.cuda.set_device(hvd.local_rank())
    return torch.device("cuda", hvd.local_rank())


def _check_launch(world_size: int) -> None:
    """Refuse to be one of several workers that each train alone."""
    wanted, source = wanted_processes()
    if wanted > world_size:
        raise UserError(
            f"the launcher started {wanted} workers ({source}) but Horovod sees {world_size}, so each would train "
            f"alone; use `horovodrun -np {wanted} python ...` (mpirun and srun need a Horovod built with MPI), or for "
            "torchrun and accelerate launch TrainerAccelerate in place of Trainer"
        )


def _check_supported(model: nn.Module, optimizer: Optimizer | None) -> None:
    bf16 = [name for name, p in model.named_parameters() if p.dtype is torch.bfloat16 and p.requires_grad]
    if bf16:
        raise UserError(
            f"{len(bf16)} parameters are bfloat16 ({bf16[0]}, ...), which Horovod {horovod.__version__} cannot "
            "reduce: keep the model in fp32 and use --bf16"
        )
    if hasattr(optimizer, "skip_synchronize"):
        raise UserError("pass the plain optimizer, not a Horovod DistributedOptimizer, which the trainer makes")

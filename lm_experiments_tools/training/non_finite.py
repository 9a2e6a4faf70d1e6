"""Non-finite tracing: run a skipped step again to find the first module that gave NaN or infinity."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lm_experiments_tools.training.generators import preserved_random_state, set_torch_random_state

if TYPE_CHECKING:
    from lm_experiments_tools.backends.backend import Backend
    from lm_experiments_tools.training.micro_batches import MicroBatch
    from lm_experiments_tools.training.trainer import InFlightStep, TrainingLoop

logger = logging.getLogger(__name__)

MOST_TRACES = 3  # of a run: each costs a step
_SEARCH = 4  # skips in a row before a loss scale that halves at each is suspected of more than being too high


def trace_non_finite(trainer: TrainingLoop, step: InFlightStep, position: int) -> None:
    """Find and log the first module with a non-finite output or gradient in a skipped step; collective.

    The module is that of the first worker that has one. Weights, gradients, buffers and random states do not change.

    The first skipped steps of a run are traced. With loss scaling only the fourth in a row is, because the initial
    scale is too large by design.

    Args:
        step: the skipped step, whose passes are run again.
        position: samples consumed over all workers before the step.
    """
    backend, state = trainer.backend, trainer.state
    scaled = backend.precision.scaler is not None
    if (state.skipped_in_a_row != _SEARCH) if scaled else (state.skipped_updates > MOST_TRACES):
        return
    if (reason := _refusal(backend)) is not None:
        trainer.say(f"the first module that is not finite is not looked for: {reason}")
        return
    try:
        found = _first_non_finite(trainer, step, position)
    except torch.OutOfMemoryError:
        found = "the step could not be run again to look for the first module that is not finite: out of memory"
    bad = [(rank, found) for rank, found in enumerate(backend.gather(found)) if found is not None]
    if bad and backend.is_main:
        logger.warning("step %d, rank %d: first not finite: %s", state.step + 1, *bad[0])
    elif not bad:
        trainer.say(
            f"step {state.step + 1}: run again, all is finite in every micro-batch of every worker; their sum"
            + (" or the loss scale" if scaled else "") + " was too large"
        )  # fmt: skip


def _refusal(backend: Backend) -> str | None:
    if backend.shards_model or backend.shards_optimizer:
        return "the weights or the optimizer are sharded over the workers (FSDP, DeepSpeed); try DDP"
    return "apex has changed the model" if isinstance(getattr(backend.precision, "opt_level", None), str) else None


def _first_non_finite(trainer: TrainingLoop, step: InFlightStep, position: int) -> str | None:
    """Description of the first value on this worker that is not finite."""
    model = trainer.backend.unwrap()
    for name, parameter in model.named_parameters():
        if _is_bad(parameter):
            module, _, weight = name.rpartition(".")
            return _described(module, model.get_submodule(module), f"its weights ({weight})", parameter)
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        with preserved_random_state(), torch.compiler.set_stance("force_eager"):
            set_torch_random_state(step.random_state)
            for i, micro_batch in enumerate(step.micro_batches):
                trainer.seed_noise(position, i)
                found = _trace_micro_batch(trainer, model, micro_batch, step.counts.weights)
                if found is not None:
                    return found
    finally:
        for buffer, value in buffers:
            buffer.copy_(value)
    return None


def _trace_micro_batch(
    trainer: TrainingLoop, model: nn.Module, micro_batch: MicroBatch, weights: Mapping[str, int]
) -> str | None:
    backend = trainer.backend
    scale = 1.0 if backend.precision.scaler is None else backend.precision.scaler.get_scale()
    trace = _Trace(model)
    with trace.hooked():
        with backend.autocast():
            outputs = model(**micro_batch.inputs, **trainer.forward_kwargs)
        means = trainer.loss.means(micro_batch.inputs, outputs)
        loss = trainer.loss.part(means, micro_batch.weights, weights) * backend.averaged_over * scale
        if trace.found is None and _is_bad(loss):
            trace.found = _described("", model, "the loss", loss)
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        if trace.found is None and loss.requires_grad:  # .grad stays: no worker's hooks on it are called
            gradients = torch.autograd.grad(loss, [p for _, p in trained], allow_unused=True)
            for (name, _), gradient in zip(trained, gradients, strict=True):
                trace.parameter_gradient(name, gradient)
    return trace.found


@dataclass
class _Uses:
    """Modules that return a tensor (innermost first) and that take it (innermost last); keeps it, and so its id."""

    tensor: Tensor
    producers: list[str] = field(default_factory=list)
    consumers: list[str] = field(default_factory=list)


class _Trace:
    """Hooks on every module of a forward and backward pass that note the first value that is not finite."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.found = model, None
        self._uses: dict[int, _Uses] = {}
        self._finite: set[str] = set()  # modules whose output got a finite gradient

    @contextmanager
    def hooked(self) -> Iterator[None]:
        with ExitStack() as hooks:
            for name, module in self.model.named_modules():
                before = partial(self._before, name)
                hooks.enter_context(module.register_forward_pre_hook(before, with_kwargs=True))
                hooks.enter_context(module.register_forward_hook(partial(self._after, name)))
            for name, parameter in self.model.named_parameters():
                if parameter.requires_grad:
                    hooks.enter_context(parameter.register_hook(partial(self.parameter_gradient, name)))
            yield

    def _before(self, name: str, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        for tensor in (*args, *kwargs.values()):
            if (uses := self._uses_of(tensor)) is not None:
                uses.consumers.append(name)

    def _after(self, name: str, module: nn.Module, args: tuple, output: Any) -> None:
        for tensor in _outputs(output):
            if self.found is None and _is_bad(tensor):
                self.found = _described(name, module, "its output", tensor)
            if (uses := self._uses_of(tensor)) is not None:
                uses.producers.append(name)

    def _uses_of(self, tensor: Any) -> _Uses | None:
        if not isinstance(tensor, Tensor) or not tensor.requires_grad or not torch.is_grad_enabled():
            return None
        if id(tensor) not in self._uses:
            self._uses[id(tensor)] = _Uses(tensor)
            tensor.register_hook(partial(self._gradient, self._uses[id(tensor)]))
        return self._uses[id(tensor)]

    def _gradient(self, uses: _Uses, gradient: Tensor) -> None:
        if self.found is not None:
            return
        if not _is_bad(gradient):
            self._finite.update(uses.producers)
            return
        culprits = [name for name in uses.consumers if name in self._finite]
        name = culprits[-1] if culprits else [*uses.producers, *uses.consumers][0]
        what = "the gradient of its output" if not culprits and uses.producers else "the gradient of its input"
        self.found = _described(name, self.model.get_submodule(name), what, gradient)

    def parameter_gradient(self, name: str, gradient: Tensor | None) -> None:
        if self.found is None and gradient is not None and _is_bad(gradient):
            module, _, weight = name.rpartition(".")
            self.found = _described(module, self.model.get_submodule(module), f"the gradient of {weight}", gradient)


def _outputs(output: Any) -> list[Tensor]:
    """Tensors of a module's output that are values: of a tuple the first, as masks of -inf may follow."""
    if isinstance(output, Mapping):
        return [value for value in output.values() if isinstance(value, Tensor)]
    tensors = list(output[:1]) if isinstance(output, (tuple, list)) else [output]
    return [tensor for tensor in tensors if isinstance(tensor, Tensor)]


def _is_bad(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and not bool(tensor.detach().isfinite().all())


def _described(name: str, module: nn.Module, what: str, tensor: Tensor) -> str:
    values = tensor.detach()
    finite = values[values.isfinite()]
    largest = f"{finite.abs().max().item():.3g}" if finite.numel() else "none"
    return (
        f"{name or 'the model'} ({type(module).__name__}): {what}, {str(values.dtype).removeprefix('torch.')} "
        f"{list(values.shape)}, {values.isnan().sum().item()} nan and {values.isinf().sum().item()} inf of "
        f"{values.numel()}, largest finite magnitude {largest}"
    )

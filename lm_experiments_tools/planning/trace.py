"""Count the memory of a training step on fake tensors, which have shapes but no data. No memory is allocated.

The forward and backward pass run once and the optimizer twice, because its first step creates the optimizer state.
Fake tensors have no values: a number read from one is 1, and a condition is true. Every 2000th condition is false, so
that `while` loops end.
"""

from __future__ import annotations

import gc
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from lm_experiments_tools.training.generators import preserved_random_state

_CACHES = ("lm_experiments_tools.attention", "modeling_t5", "modeling_bert")
_MAX_TRUE_BUILDING, _MAX_TRUE = 10, 2000  # conditions; weights may be drawn until they fit, masks are in each layer


class Prepared(NamedTuple):
    """Model, optimizer and inputs of the training step whose memory is measured."""

    model: nn.Module
    optimizer: Optimizer
    batch: Mapping[str, Any]  # arguments of the model's forward
    dtype: torch.dtype | None  # of autocast


class Moment(NamedTuple):
    """Bytes of gradients and activations that are in memory at one moment of a training step."""

    phase: str  # "forward", "backward" or "update"
    gradients: int
    activations: int


class Trace(NamedTuple):
    """Memory of one training step, as counted by `trace_step`, in bytes."""

    parameters: int  # and buffers
    gradients: int  # of all trained parameters
    state: int  # of the optimizer
    moments: list[Moment]  # for each phase and number of gradients, the one with the most activations


def trace_step(prepare: Callable[[], Prepared], *, casts_weights: bool = True) -> tuple[Trace, Prepared]:
    """Count the memory of one training step without allocating it, on fake tensors, which have no data.

    Exceptions of the model's code pass, for example because it reads values of tensors.

    Args:
        prepare: builds model, optimizer and batch, which are returned too; its tensors are fake.
        casts_weights: count autocast's 16-bit copies of the weights. FSDP and DeepSpeed make none.
    """
    counter = _Counter(casts_weights)
    with preserved_random_state(), _without_data(), counter, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        prepared = prepare()
        counter.start(prepared)
        run_passes(prepared, lambda phase: setattr(counter, "phase", phase))
        gc.collect()
        before, counter.phase = counter.live, None
        update(prepared)
        counter.state, counter.phase = counter.live - before, "update"
        update(prepared)
    moments = [Moment(*key, most) for key, most in counter.most.items()]
    return Trace(counter.parameters, counter.gradients, counter.state, moments), prepared


def run_passes(prepared: Prepared, enter: Callable[[str], object] = str) -> None:
    """Run forward and backward pass of a training step; `enter` is called before each with "forward" or "backward"."""
    model, _, batch, dtype = prepared
    enter("forward")
    with torch.autocast(next(model.parameters()).device.type, dtype=dtype, enabled=dtype is not None):
        loss = model(**batch)["loss"]
    enter("backward")
    loss.backward()


def update(prepared: Prepared) -> None:
    """Run the optimizer update of a training step: compute the gradient norm, then step. Gradients are not cleared."""
    torch.nn.utils.get_total_norm([p.grad for p in prepared.model.parameters() if p.grad is not None])
    prepared.optimizer.step()


class _Counter(TorchDispatchMode):
    """Counts the storages that operations make, until they are freed.

    torch's MemTracker does the same, but its hooks on modules would keep our models from their fused path, and it
    counts the sum of two gradients as a third tensor.
    """

    def __init__(self, casts_weights: bool) -> None:
        super().__init__()
        self.casts_weights = casts_weights
        self.live = self.parameters = self.gradients = self.state = self.num_true = 0
        self.phase: str | None = None
        self.most: dict[tuple[str, int], int] = {}
        self._seen = WeakIdKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            if args[0].dtype != torch.bool:
                return 1.0 if args[0].is_floating_point() else 1
            self.num_true += 1
            return self.num_true % (_MAX_TRUE_BUILDING if self.phase is None else _MAX_TRUE) != 0
        outputs = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and not self.casts_weights and isinstance(args[0], nn.Parameter):
            self._seen[outputs.untyped_storage()] = True
        self._track(tree_leaves(outputs))
        # autograd adds to a gradient in place, unless it is a view. Where a dispatch mode is active it does not, and
        # frees the old sum after this call.
        is_sum = func is torch.ops.aten.add.Tensor and self.phase == "backward" and not torch.is_grad_enabled()
        if self.phase is not None and not (is_sum and not args[0]._is_view()):
            key, state = (self.phase, self.gradients), self.state if self.phase == "update" else 0
            activations = self.live - self.parameters - self.gradients - state
            self.most[key] = max(activations, self.most.get(key, 0))
        return outputs

    def start(self, prepared: Prepared) -> None:
        """Begin to count a step of a model that has been built."""
        model = prepared.model.train()
        self._track(prepared.batch.values())
        self.parameters = self._track([*model.parameters(), *model.buffers()])
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._count_gradient)

    def _track(self, values: Iterable[Any]) -> int:
        """Count storages that are new; returns the bytes of all of them."""
        storages = {id(s): s for s in (x.untyped_storage() for x in values if isinstance(x, Tensor))}
        for storage in storages.values():
            if storage not in self._seen:
                self._seen[storage] = True
                self.live += storage.nbytes()
                weakref.finalize(storage, self._free, storage.nbytes()).atexit = False
        return sum(storage.nbytes() for storage in storages.values())

    def _free(self, size: int) -> None:
        self.live -= size

    def _count_gradient(self, parameter: Tensor) -> None:
        self.gradients += parameter.grad.nbytes


@contextmanager
def _without_data() -> Iterator[None]:
    """Tensors without data; our modules' caches are emptied, so that these never meet others."""
    _clear_caches()
    try:
        with _fake_mode():
            yield
    finally:
        _clear_caches()


def _clear_caches() -> None:
    modules = [module for name, module in list(sys.modules.items()) if name.startswith(_CACHES)]
    for function in (value for module in modules for value in vars(module).values()):
        if callable(getattr(function, "cache_clear", None)) and str(function.__module__).startswith(_CACHES):
            function.cache_clear()


class _Mode(FakeTensorMode):
    """Not copied with its tensors, as peft copies a classifier's head."""

    def __deepcopy__(self, memo: dict) -> _Mode:
        return self


@cache
def _fake_mode() -> FakeTensorMode:
    """One mode for all traces of a process, as torch keeps constants of the first."""
    return _Mode()

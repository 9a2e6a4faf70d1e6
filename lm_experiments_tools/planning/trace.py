"""Trace the memory of training steps on tensors that have shapes and no data: any model class, nothing allocated.

torch's MemTracker counts what the operations of forward pass, backward pass and optimizer hold. State of the optimizer
appears in the first step, so the peak is that of the second. A value read from a tensor (`.item()`) is 1; a condition
is True, until it has been asked so often that it must be that of a loop.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker, _MemRefType
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

_KEEPERS = ("lm_experiments_tools.attention", "modeling_t5", "modeling_bert")
_KINDS = {
    "parameters": _MemRefType.PARAM,
    "buffers": _MemRefType.BUFFER,
    "state": _MemRefType.OPT,
    "total": "Total",
}
_MOST_TRUE, _MOST_TRUE_BUILDING = 2000, 10  # conditions of two steps (masks in each layer), and of building a model


class Traced(NamedTuple):
    """Memory of the tensors at the highest moment of two training steps, in bytes."""

    peak: int
    moment: str  # "forward", "backward" or "update"
    parts: dict[str, int]  # parameters, gradients, activations, ... as the tracker tells them apart


class Prepared(NamedTuple):
    """A model ready to train: what a step needs."""

    model: nn.Module
    optimizer: Optimizer
    batch: Mapping[str, Any]  # arguments of the model's forward
    dtype: torch.dtype | None = None  # of autocast
    micro_batches: int = 1


def trace_steps(prepare: Callable[[], Prepared], *, fake: bool = True) -> Traced:
    """The peak of two training steps of what `prepare` makes.

    Args:
        prepare: makes model, optimizer and batch; called where tensors have no data.
        fake: False computes with real tensors, for comparison.

    Raises:
        Exception: whatever the model's code raises where it cannot do without data.
    """
    with _no_data() if fake else contextlib.nullcontext(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the tracker, about modules whose inputs need no gradient
        with _Answers(_MOST_TRUE_BUILDING) if fake else contextlib.nullcontext():  # rejection sampling of weights
            prepared = prepare()
        prepared.model.train()
        tracker = _PeakTracker()
        tracker.track_external(prepared.model, prepared.optimizer)
        for parameter in prepared.model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(tracker.count_gradient)
        with tracker:
            for micro_batches in (1, min(prepared.micro_batches, 2)):  # from the second on there are gradients before
                _step(prepared, tracker, micro_batches)
    snapshots = tracker.get_tracker_snapshot("peak").values()
    kinds = {name: sum(snapshot.get(kind, 0) for snapshot in snapshots) for name, kind in _KINDS.items()}
    total, gradients = kinds.pop("total"), tracker.gradients_at_peak
    parts = {"parameters": kinds["parameters"] + kinds["buffers"], "gradients": gradients, "optimizer": kinds["state"]}
    return Traced(total, tracker.moment, {**parts, "activations": total - sum(parts.values())})


def make_steps(prepared: Prepared) -> None:
    """Two updates, the second of two micro-batches if there are more than one, as the traced ones."""
    prepared.model.train()
    for micro_batches in (1, min(prepared.micro_batches, 2)):
        _step(prepared, _PeakTracker(), micro_batches)


def _step(prepared: Prepared, tracker: _PeakTracker, micro_batches: int) -> None:
    """One update, as `TrainingLoop.train_step` makes it."""
    model, optimizer, batch, dtype, _ = prepared
    device = next(model.parameters()).device.type
    for _ in range(micro_batches):
        tracker.now = "forward"
        with torch.autocast(device, dtype=dtype, enabled=dtype is not None):
            loss = model(**batch)["loss"]
        tracker.now = "backward"
        loss.backward()
        del loss
    tracker.now = "update"
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    torch.nn.utils.get_total_norm(gradients)
    del gradients
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    tracker.forget_gradients()


@contextlib.contextmanager
def _no_data() -> Iterator[None]:
    _forget_kept()
    try:
        with _fake_mode(), _Answers(_MOST_TRUE):
            yield
    finally:
        _forget_kept()


def _forget_kept() -> None:
    """Empty what modules of ours keep from one forward pass to the next: tensors with data and such without must not
    meet."""
    for name, module in list(sys.modules.items()):
        if name.startswith(_KEEPERS):
            for value in vars(module).values():
                if callable(getattr(value, "cache_clear", None)) and getattr(value, "__module__", None) == name:
                    value.cache_clear()


class _Mode(FakeTensorMode):
    """Stays one where modules are copied with their tensors, as peft copies a classifier's head."""

    def __deepcopy__(self, memo: dict) -> _Mode:
        return self


@cache
def _fake_mode() -> FakeTensorMode:
    """One for all traces of a process, as torch keeps constants of the first."""
    return _Mode()


class _Answers(TorchDispatchMode):
    """Answers 1 where a number is read from a tensor without data, and True where a condition is.

    After `most_true` conditions it answers False and True in turn, which ends a loop that waits for either.
    """

    def __init__(self, most_true: int) -> None:
        super().__init__()
        self.asked, self.most_true = 0, most_true

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            tensor: Tensor = args[0]
            if tensor.dtype == torch.bool:
                self.asked += 1
                return self.asked <= self.most_true or (self.asked - self.most_true) % 2 == 0
            return 1.0 if tensor.is_floating_point() else 1
        return func(*args, **(kwargs or {}))


class _PeakTracker(MemTracker):
    """torch's, which looks at the whole alone: to look at each module after each operation takes four times as long,
    and its hooks on modules would keep our models from their fast step, which leaves modules with hooks alone."""

    now = moment = "forward"
    gradients = gradients_at_peak = 0

    def __init__(self) -> None:
        super().__init__()
        self._mod_tracker, self._counted = _NoModules(), set()

    def count_gradient(self, parameter: Tensor) -> None:
        """Note the first gradient of a parameter since the update before."""
        if parameter not in self._counted:
            self._counted.add(parameter)
            self.gradients += parameter.grad.nbytes

    def forget_gradients(self) -> None:
        """Note that all gradients are gone."""
        self.gradients, self._counted = 0, set()

    def _update_peak_stats(self, peak_state: Any) -> None:
        for device, snapshot in self._curr_mem_snap.items():
            if self._peak_mem.get(device, 0) < snapshot["Total"]:
                self._peak_mem[device], self._peak_mem_snap[device] = snapshot["Total"], dict(snapshot)
                self.moment, self.gradients_at_peak = self.now, self.gradients


class _NoModules:
    """In the place of the tracker's ModTracker: whether there is a backward pass, and nothing of modules."""

    parents: frozenset[str] = frozenset()

    @property
    def is_bw(self) -> bool:
        return torch._C._current_graph_task_id() != -1

    def register_user_hooks(self, *hooks: Any) -> None:
        """None are called."""

    def clear_user_hooks(self) -> None:
        """There are none."""

    def __enter__(self) -> None:
        """Nothing to begin."""

    def __exit__(self, *error: object) -> None:
        """Nothing to end."""

"""Metrics as sums and counts, added per micro-batch and reduced over workers once per log line.

The mean of batch means is wrong if batches differ in size, so sums are divided only at the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from lm_experiments_tools.files import to_jsonable
from lm_experiments_tools.modules.devices import peak_memory_mib, synchronize

if TYPE_CHECKING:
    from lm_experiments_tools.backends.backend import Backend

_GRID = 2.0**20


@dataclass(frozen=True)
class StepInfo:
    """Result of one optimizer step, equal on all workers except for the times.

    Attributes:
        step: optimizer steps applied so far.
        applied: False if the step was skipped because the gradient was not finite.
        grad_norm: global L2 norm of the reduced gradient before clipping.
        samples, tokens: numbers over all workers. Tokens are unpadded input tokens plus target tokens of a decoder.
        seconds, data_seconds: duration of the step, and of the wait for its batch.
    """

    step: int
    applied: bool
    grad_norm: float
    samples: int
    tokens: int
    seconds: float
    data_seconds: float


class MetricSums:
    """Running sum and count of each metric on one worker.

    A value is a mean over its micro-batch, weighted by the number of valid target tokens, or a pair (sum, count).
    Values stay on their device until `reduce`, so adding does not synchronize.

    Args:
        exact: round values to 2^-20, so that sums below 8e9 do not depend on the order.
    """

    def __init__(self, *, exact: bool = False) -> None:
        self._exact = exact
        self.sums: dict[str, Tensor | float] = {}
        self.counts: dict[str, Tensor | float] = {}

    def __bool__(self) -> bool:
        return bool(self.sums)

    def add(self, values: Mapping[str, Any], weight: float) -> None:
        """Add the metrics of one micro-batch, {name: mean over it, or (sum, count)}.

        The weight is the number of valid target tokens, or of rows if the batch has no labels. At 0 only pairs are
        added.
        """
        pairs = {}
        for name, value in values.items():
            if isinstance(value, tuple):
                pairs[name] = _detached(value[0]), _detached(value[1])
            elif weight:
                pairs[name] = _detached(value) * weight, float(weight)
        if self._exact:
            pairs = {name: (_on_grid(total), _on_grid(count)) for name, (total, count) in pairs.items()}
        self.merge(pairs)

    def merge(self, pairs: Mapping[str, tuple[Tensor | float, Tensor | float]]) -> None:
        """Add a sum and a count to each metric."""
        for name, (total, count) in pairs.items():
            self.sums[name] = total if name not in self.sums else self.sums[name] + total
            self.counts[name] = count if name not in self.counts else self.counts[name] + count

    def reduce(self, backend: Backend) -> dict[str, float]:
        """Mean of each metric over the workers that measured it."""
        # A worker without rows for a metric lacks its name, and sums need one order on all workers.
        names = sorted(set(chain.from_iterable(backend.gather(sorted(self.sums)))))
        local = [float(self.sums.get(n, 0.0)) for n in names] + [float(self.counts.get(n, 0.0)) for n in names]
        totals = backend.sum(torch.tensor(local, dtype=torch.float64)).tolist()
        counts = totals[len(names) :]
        return {n: totals[i] / counts[i] if counts[i] else math.nan for i, n in enumerate(names)}

    def state_dict(self) -> dict[str, dict[str, float]]:
        return {
            "sums": {k: float(v) for k, v in self.sums.items()},
            "counts": {k: float(v) for k, v in self.counts.items()},
        }

    @classmethod
    def from_state(cls, state: Mapping[str, dict[str, float]]) -> MetricSums:
        sums = cls()
        sums.sums, sums.counts = dict(state["sums"]), dict(state["counts"])
        return sums


def _detached(value: Any) -> Tensor | float:
    """A float64 copy on the value's own device: bf16 or fp32 running sums would lose the small terms."""
    if not isinstance(value, Tensor):
        return float(value)
    value = value.detach()
    # Apple's GPUs have no float64.
    if value.device.type == "mps":
        value = value.cpu()
    return value.to(torch.float64, copy=True)


def _on_grid(value: Tensor | float) -> Tensor | float:
    if isinstance(value, Tensor):
        return (value * _GRID).round() / _GRID
    # Python rounds to an int, which infinity and NaN cannot become.
    return round(value * _GRID) / _GRID if math.isfinite(value * _GRID) else value


def storable(values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert metrics to values that a checkpoint can store: numbers of Python (NaN stays), JSON or text."""
    plain = {name: value.item() if getattr(value, "ndim", None) == 0 else value for name, value in values.items()}
    return {name: float(v) if isinstance(v, float) else to_jsonable(v) for name, v in plain.items()}


class Collector(Protocol):
    """Base class of objects that collect model outputs during one evaluation and compute metrics from them."""

    def add(self, batch: Mapping[str, Any], outputs: Any) -> None:
        """Add the outputs of a micro-batch; generated tokens are in `outputs["generation_outputs"]`.

        Args:
            batch: all entries of the batch, also those that the model does not take.
        """

    def reduce(self, backend: Backend) -> dict[str, float]:
        """Compute metrics over the outputs of all workers, on every worker; collective, called once at the end."""


class AccumulatedOutputs:
    """Collector for a user's metric function: accumulates selected outputs, and computes metrics at the end."""

    def __init__(self, select: Callable | None, metrics: Callable | None) -> None:
        self.select, self.metrics = (select, metrics) if select and metrics else (None, None)
        self.data: dict[str, list[Any]] = {}

    def copy(self) -> dict[str, list[Any]]:
        """Copy the data accumulated so far; later calls of `add` do not change the copy."""
        return {name: list(values) for name, values in self.data.items()}

    def add(self, batch: Mapping[str, Any], outputs: Any) -> None:
        if self.select is None:
            return
        for name, value in self.select(batch, outputs).items():
            value = value.detach().to("cpu", non_blocking=value.is_cuda) if isinstance(value, Tensor) else value
            self.data.setdefault(name, []).append(value)

    def full_data(self, backend: Backend) -> dict[str, list[Any]]:
        """Gather the accumulated outputs of all workers on rank 0; empty on other ranks; collective."""
        if self.metrics is None:
            return {}
        every = backend.gather(self.data)
        return _joined(every) if backend.is_main else {}

    def reduce(self, backend: Backend) -> dict[str, float]:
        """Compute the user's metrics on rank 0 over the outputs of all workers, and clear these; collective."""
        if self.metrics is None:
            return {}
        # `add` copies asynchronously from a GPU.
        synchronize(backend.device)
        gathered = backend.gather(self.data)
        self.data = {}
        values: dict[str, Any] = {}
        if backend.is_main and any(gathered):
            values = self.metrics({name: _join(pieces) for name, pieces in _joined(gathered).items()})
            values = {k: v.item() if hasattr(v, "item") and math.prod(v.shape) == 1 else v for k, v in values.items()}
        return backend.broadcast(values)


def _joined(every: Sequence[Mapping[str, list[Any]]]) -> dict[str, list[Any]]:
    """The lists of all workers as one, by name."""
    names = sorted(set(chain.from_iterable(every)))
    return {name: list(chain.from_iterable(data.get(name, ()) for data in every)) for name in names}


def _join(pieces: list[Any]) -> Any:
    """One tensor where shapes allow it, else one flat list of rows."""
    if not isinstance(pieces[0], Tensor):
        rows = [p.tolist() if hasattr(p, "tolist") else p for p in pieces]
        return list(chain.from_iterable(r if isinstance(r, (list, tuple)) else [r] for r in rows))
    if pieces[0].dim() == 0:
        return torch.stack(pieces)
    if all(p.shape[1:] == pieces[0].shape[1:] for p in pieces):
        return torch.cat(pieces)
    return list(chain.from_iterable(p.tolist() for p in pieces))


class LoggingInterval:
    """Sums of metrics, times and tokens since the last log line."""

    def __init__(self) -> None:
        self.sums = MetricSums()
        self.grad_norm_sum, self.steps, self.tokens = 0.0, 0, 0
        self.seconds = self.data_seconds = 0.0

    def add(self, sums: MetricSums, info: StepInfo) -> None:
        self.seconds += info.seconds + info.data_seconds
        self.data_seconds += info.data_seconds
        self.tokens += info.tokens
        # A skipped step is counted and named elsewhere: averaged in, its NaN would hide the others.
        if info.applied:
            self.sums.merge({name: (total, sums.counts[name]) for name, total in sums.sums.items()})
            self.grad_norm_sum += info.grad_norm
            self.steps += 1

    def means(self, device: torch.device) -> dict[str, float]:
        """Compute the means for the log line, equal on all workers, and this worker's times and largest memory."""
        steps, seconds = max(self.steps, 1), max(self.seconds, 1e-9)
        return {
            "gradients_global_norm": self.grad_norm_sum / steps,
            "seconds_per_step": seconds / steps,
            "tokens_per_second": self.tokens / seconds,
            "data_wait_fraction": self.data_seconds / seconds,
            "memory_mib": peak_memory_mib(device),
        }

    def state_dict(self) -> dict[str, Any]:
        return {**vars(self), "sums": self.sums.state_dict()}

    def full_state(self, backend: Backend) -> dict[str, Any]:
        """State for a checkpoint: metric sums of all workers on rank 0, no sums on other ranks; collective."""
        total = MetricSums()
        for sums in backend.gather(self.sums.state_dict()):
            if backend.is_main:
                total.merge({name: (sums["sums"][name], count) for name, count in sums["counts"].items()})
        return {**vars(self), "sums": total.state_dict()}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> LoggingInterval:
        interval = cls()
        vars(interval).update(state, sums=MetricSums.from_state(state["sums"]))
        return interval

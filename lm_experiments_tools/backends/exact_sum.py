"""Order-independent sums of gradients for `--reproducible`.

The sum of floating-point numbers depends on their order, and so on the number of workers. A sum of integers does not.
Each gradient tensor is converted to int64 multiples of 2^(exponent - bits), summed over micro-batches and workers, and
converted back to fp32 (the idea of https://doi.org/10.1109/ARITH.2013.9). The exponent leaves room for gradients to
grow 2^12-fold in one step; if they grow more, the step is repeated with a larger exponent. The number of bits is
62 - log2(micro-batches). With 2^5 micro-batches, values more than 2^45 times smaller than the largest are lost.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lm_experiments_tools.backends.collective import Reduction, Workers
from lm_experiments_tools.errors import UserError

if TYPE_CHECKING:
    from lm_experiments_tools.config.training import TrainerArgs

_INITIAL = 6  # exponent of the first update: gradients of a mean loss are below 64
_LARGEST = 128  # above every fp32 number
_GROWTH = 12  # binary orders of magnitude that a gradient may grow by from one update to the next without a repetition
_CHUNK = 1 << 17  # elements converted at a time on a CPU, so that temporaries stay in its cache
_SENT_AT_ONCE = 1 << 23  # elements of one collective: 64 MiB


class ExactSum(Reduction):
    """Sums gradients of one optimizer step in int64, independent of order and number of workers.

    The trained parameters are in the same order on all workers; `addends` is the number of micro-batches per optimizer
    step, over all workers. Gradients must stay below 2^exponent of their parameter; checkpoints hold the `exponents`.
    """

    is_exact = True

    def __init__(
        self,
        parameters: list[nn.Parameter],
        addends: int,
        workers: Workers,
        reproducible: list[Any] | None = None,
    ) -> None:
        super().__init__(1, reproducible)
        self.parameters = [p for p in parameters if p.requires_grad]
        self._bits, self._max_added = 62 - math.ceil(math.log2(addends)), addends // workers.world_size
        self._workers = workers
        self.exponents = [_INITIAL] * len(self.parameters)
        self._sums: Tensor | None = None
        self._started = self._overflowed = False

    def add(self) -> None:
        """Add each parameter's `.grad` to the integer sums, and clear it. UserError for too many micro-batches."""
        self._start()
        self._added += 1
        if self._added > self._max_added:
            raise UserError(
                f"--reproducible sums {self._max_added} micro-batches a step on each worker, and the training data "
                "gives more: make the loader with batch_size=args.rows_per_worker()."
            )
        present = [i for i, parameter in enumerate(self.parameters) if parameter.grad is not None]
        if not present:
            return
        largest = _largest([self.parameters[i].grad for i in present])
        # `maximum` keeps a NaN.
        self._largest[present] = torch.maximum(self._largest[present], largest)
        self._counts[present] += 1
        for i in present:
            gradient, units = self.parameters[i].grad.flatten(), 2.0 ** (self._bits - self.exponents[i])
            # A product with a power of two is exact.
            for chunk in _chunks(gradient):
                integers = (gradient[chunk].to(torch.float32) * units).round_()
                if self._has_addend[i]:
                    self._parts[i][chunk] += integers.to(torch.int64)
                else:
                    self._parts[i][chunk] = integers
            self.parameters[i].grad, self._has_addend[i] = None, True

    def finish(self) -> None:
        """Sum the gradients over all workers and write the result to `.grad` in the parameter's dtype.

        `.grad` is NaN if a summand was not finite. It is None if no micro-batch used the parameter, and after an
        overflow (see `must_repeat`).
        """
        self._start()
        number = len(self.parameters)
        for part, has_addend in zip(self._parts, self._has_addend, strict=True):
            if not has_addend:
                part.zero_()
        limits = torch.tensor([2.0**e for e in self.exponents], dtype=torch.float64, device=self._largest.device)
        self._counts[number : 2 * number] = self._largest >= limits
        # The comparison is false for a NaN and for what is infinite in fp32.
        self._counts[2 * number :] = ~(self._largest < 2.0**_LARGEST)
        for chunk in self._sums.split(_SENT_AT_ONCE):
            chunk.copy_(self._workers.sum(chunk))
        used, overflowed, not_finite = (column.tolist() for column in self._counts.view(3, number))
        self._overflowed = any(overflowed) and not any(not_finite)
        if self._overflowed:
            return
        for i, parameter in enumerate(self.parameters):
            if used[i]:
                parameter.grad = self._as_gradient(i, is_finite=not not_finite[i])
        if not any(not_finite):
            self._fit_grids()
        self._started = False

    def after_backward(self, last: bool) -> None:
        self.add()
        if last:
            self.finish()

    def must_repeat(self) -> bool:
        """True, on all workers, if a gradient reached its limit 2^exponent, which has then been raised."""
        if not self._overflowed:
            return False
        largest = [max(values) for values in zip(*self._workers.gather(self._largest.tolist()), strict=True)]
        self.exponents = [max(e, _exponent(value)) for e, value in zip(self.exponents, largest, strict=True)]
        self._overflowed = self._started = False
        return True

    def _start(self) -> None:
        """Reset the sums of the last update, in the same memory, unless that has been done."""
        if self._started:
            return
        if self._sums is None:
            numbers, device = [p.numel() for p in self.parameters], self.parameters[0].device
            self._sums = torch.empty(sum(numbers) + 3 * len(numbers), dtype=torch.int64, device=device)
            *self._parts, self._counts = self._sums.split([*numbers, 3 * len(numbers)])
            self._largest = torch.empty(len(numbers), dtype=torch.float64, device=device)
        self._started, self._added = True, 0
        self._counts.zero_()
        self._largest.zero_()
        # A sum without addends still holds the bits of the last gradient.
        self._has_addend = [False] * len(self.parameters)

    def _as_gradient(self, i: int, *, is_finite: bool) -> Tensor:
        """The sum as a gradient; in fp32 it takes the first half of the sum's own memory."""
        parameter, sums, unit = self.parameters[i], self._parts[i], 2.0 ** (self.exponents[i] - self._bits)
        if parameter.dtype == torch.float32:
            flat = sums.view(torch.float32)[: len(sums)]
        else:
            flat = sums.new_empty(len(sums), dtype=parameter.dtype)
        # The result takes the sum's own memory, so each chunk is read before it is overwritten.
        for chunk in _chunks(sums):
            flat[chunk] = (sums[chunk].to(torch.float64) * unit).to(flat.dtype)
        if not is_finite:
            flat.fill_(math.nan)
        return flat.view(parameter.shape)

    def _fit_grids(self) -> None:
        """Choose the next update's grids by this update's gradients."""
        present = [i for i, p in enumerate(self.parameters) if p.grad is not None]
        largest = _largest([self.parameters[i].grad for i in present]).tolist() if present else []
        for i, value in zip(present, largest, strict=True):
            if value:
                self.exponents[i] = _exponent(value)


def _largest(tensors: list[Tensor]) -> Tensor:
    """float64[len(tensors)], the largest absolute value of each; NaN where there is one."""
    filled = [tensor if tensor.numel() else tensor.new_zeros(1) for tensor in tensors]
    # The two extremes take a tenth of the time of a norm.
    extremes = [torch.stack(torch.aminmax(tensor)) for tensor in filled]
    return torch.stack(extremes).abs().amax(1).to(torch.float64)


def _exponent(largest: float) -> int:
    """The exponent of a grid for gradients of this size; 2.0 ** (bits - exponent) must be an fp32 number."""
    return min(max(math.frexp(largest)[1] + _GROWTH, -60), _LARGEST) if largest else _INITIAL


def _chunks(flat: Tensor) -> Iterator[slice]:
    step = _CHUNK if flat.device.type == "cpu" else max(flat.numel(), 1)
    return (slice(start, end) for start, end in pairwise([*range(0, flat.numel(), step), flat.numel()]))


def check_exact(args: TrainerArgs, sharded_by: str | None) -> None:
    """Refuse flags that rule out exact sums; `sharded_by` FSDP or DeepSpeed reduces by itself. Raises UserError."""
    how = args.reproducible
    if sharded_by and how == "elastic":
        raise UserError(
            f"--reproducible elastic does not work with {sharded_by}, whose sums of gradients depend on the number of "
            "workers: use --reproducible fixed, or DDP or Horovod."
        )
    if args.fp16 and not sharded_by:
        raise UserError(f"--reproducible {how} does not work with --fp16, whose loss scale moves: use --bf16.")
    if args.fp16_allreduce:
        raise UserError(f"--reproducible {how} sums gradients exactly, and --fp16_allreduce rounds them: choose one.")


def check_buffers(model: nn.Module, how: str) -> None:
    """Refuse BatchNorm under `--reproducible elastic`: its running means are a worker's. Raises UserError."""
    means = (name for name, module in model.named_modules() if getattr(module, "running_mean", None) is not None)
    if how == "elastic" and (name := next(means, None)) is not None:
        raise UserError(
            f"--reproducible elastic does not work with {name or type(model).__name__}, which keeps running means "
            "(BatchNorm) of its worker's rows: use for example LayerNorm."
        )


def use_ordered_kernels(device: torch.device) -> None:
    """Make torch use deterministic kernels on a GPU, and refuse operations without one."""
    if device.type != "cpu":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cudnn.benchmark = False
        torch.use_deterministic_algorithms(True)
        # Filling uninitialized memory costs time and only helps debugging.
        torch.utils.deterministic.fill_uninitialized_memory = False

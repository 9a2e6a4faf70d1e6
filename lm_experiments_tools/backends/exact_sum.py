"""Gradients summed as integers, so that neither the order nor the grouping of what is added changes a bit.

Floating-point sums depend on who adds what first: on the number of workers, on the ring that an all-reduce takes, on
which buckets were fused this time. Integers do not. Each gradient is rounded to a grid that all workers share, counted
in units of that grid as int64, added up over micro-batches and workers, and turned into fp32 once (the idea of
https://doi.org/10.1109/ARITH.2013.9, with one fixed-point window a tensor in place of several).

A tensor's grid is 2^(exponent - `bits`): its values must stay below 2^exponent. Where one does not, the step is
computed once more with a wider grid, which every worker decides alike. With 2^5 addends 57 bits are left, of which 12
are kept for growth: what is smaller than the largest sum by a factor of 2^45 is lost.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lm_experiments_tools.errors import UserError

if TYPE_CHECKING:
    from lm_experiments_tools.config.training import TrainerArgs

_FIRST = 6  # the exponent before anything is known: gradients of a mean loss are below 64
_LARGEST = 128  # the exponent that no fp32 number reaches
_GROWTH = 12  # binary orders of magnitude that a gradient may gain from one update to the next without a second pass
_PIECE = 1 << 17  # elements converted at once on a CPU, so that what is between lies in its cache
_SENT_AT_ONCE = 1 << 23  # elements of one collective: 64 MiB


class ExactSum:
    """The gradients of one optimizer update, in int64.

    Args:
        parameters: those to be updated, in the same order on all workers.
        addends: micro-batches of one update over all workers.
        workers: their number, each with as many of the addends.
        sum_over_workers: adds an int64 tensor up over all workers, in place.
        gather: (value) -> the values of all workers.

    Attributes:
        exponents: of each parameter's grid; equal on all workers, and part of a checkpoint.

    Raises:
        UserError: the parameters lie on more than one device.
    """

    def __init__(
        self,
        parameters: list[nn.Parameter],
        addends: int,
        workers: int,
        sum_over_workers: Callable[[Tensor], None],
        gather: Callable[[list[float]], list[list[float]]],
    ) -> None:
        self.parameters = [p for p in parameters if p.requires_grad]
        if len(devices := {str(p.device) for p in self.parameters}) > 1:
            raise UserError(
                f"--reproducible sums the gradients of a model on one device, and this one is on "
                f"{' and '.join(sorted(devices))}: leave --device_map and --embeddings_on_cpu out."
            )
        self._bits, self._most = 62 - math.ceil(math.log2(addends)), addends // workers
        self._sum_over_workers, self._gather = sum_over_workers, gather
        self.exponents = [_FIRST] * len(self.parameters)
        self._sums: Tensor | None = None
        self._begun = self._overflowed = False

    def add(self) -> None:
        """Add the `.grad` of each parameter, a micro-batch's, to the sums, and clear it.

        Raises:
            UserError: there are more micro-batches than the sums have room for.
        """
        self._begin()
        self._added += 1
        if self._added > self._most:
            raise UserError(
                f"--reproducible sums {self._most} micro-batches a step on each worker, and the training data gives "
                "more: make the loader with batch_size=args.rows_per_worker()."
            )
        gradients = [p.grad for p in self.parameters]
        there = [i for i, gradient in enumerate(gradients) if gradient is not None]
        if not there:
            return
        largest = _largest([gradients[i] for i in there])
        self._largest[there] = torch.maximum(self._largest[there], largest)  # a NaN stays one
        self._counts[there] += 1
        for i in there:
            units = 2.0 ** (self._bits - self.exponents[i])
            _put_as_integers(self._parts[i], gradients[i].flatten(), units, add=self._has_addend[i])
            self.parameters[i].grad, self._has_addend[i] = None, True

    def finish(self) -> None:
        """Sum over all workers, into `.grad` as fp32; a parameter that no micro-batch used has none.

        What is not finite anywhere is NaN everywhere. After an overflow gradients are None: see `must_repeat`.
        """
        self._begin()
        number = len(self.parameters)
        for part, has_addend in zip(self._parts, self._has_addend, strict=True):
            if not has_addend:
                part.zero_()
        limits = torch.tensor([2.0**e for e in self.exponents], dtype=torch.float64, device=self._largest.device)
        self._counts[number : 2 * number] = self._largest >= limits
        self._counts[2 * number :] = ~(self._largest < 2.0**_LARGEST)  # a NaN, or infinite in fp32
        for piece in self._sums.split(_SENT_AT_ONCE):
            self._sum_over_workers(piece)
        used, overflowed, broken = (column.tolist() for column in self._counts.view(3, number))
        self._overflowed = any(map(bool, overflowed)) and not any(map(bool, broken))
        if not self._overflowed:
            for i, parameter in enumerate(self.parameters):
                if used[i]:
                    parameter.grad = self._as_gradient(i, broken=bool(broken[i]))
            if not any(map(bool, broken)):
                self._follow()
            self._begun = False

    def must_repeat(self) -> bool:
        """True, on all workers, if a gradient left its grid: the grids are wider now, and the step is to be computed
        again from its first micro-batch."""
        if not self._overflowed:
            return False
        largest = [max(values) for values in zip(*self._gather(self._largest.tolist()), strict=True)]
        self.exponents = [max(e, _exponent(value)) for e, value in zip(self.exponents, largest, strict=True)]
        self._overflowed = self._begun = False
        return True

    def _begin(self) -> None:
        """Forget the sums of the last update; their memory stays, as touching new pages costs more than the sums."""
        if self._sums is None:
            numbers, device = [p.numel() for p in self.parameters], self.parameters[0].device
            self._sums = torch.empty(sum(numbers) + 3 * len(numbers), dtype=torch.int64, device=device)
            *self._parts, self._counts = self._sums.split([*numbers, 3 * len(numbers)])
            self._largest = torch.empty(len(numbers), dtype=torch.float64, device=device)
        if not self._begun:
            self._added = 0
            self._counts.zero_()
            self._largest.zero_()
            self._has_addend = [False] * len(self.parameters)  # else the sum holds the last gradient's bits
        self._begun = True

    def _as_gradient(self, i: int, *, broken: bool) -> Tensor:
        """The sum as a gradient; in fp32 it lies in the first half of the sum's own memory."""
        parameter, sums, unit = self.parameters[i], self._parts[i], 2.0 ** (self.exponents[i] - self._bits)
        if parameter.dtype == torch.float32:
            flat = sums.view(torch.float32)[: len(sums)]
        else:
            flat = sums.new_empty(len(sums), dtype=parameter.dtype)
        for here in _pieces(sums):  # a piece is read before what it is written over
            flat[here] = (sums[here].to(torch.float64) * unit).to(flat.dtype)
        if broken:
            flat.fill_(math.nan)
        return flat.view(parameter.shape)

    def _follow(self) -> None:
        """Fit the grids to what this update had, for the next one."""
        there = [i for i, p in enumerate(self.parameters) if p.grad is not None]
        largest = _largest([self.parameters[i].grad for i in there]).tolist() if there else []
        for i, value in zip(there, largest, strict=True):
            if value:
                self.exponents[i] = _exponent(value)


def _largest(tensors: list[Tensor]) -> Tensor:
    """float64[len(tensors)], the largest absolute value of each; NaN where there is one."""
    some = [tensor if tensor.numel() else tensor.new_zeros(1) for tensor in tensors]
    extremes = [torch.stack(torch.aminmax(tensor)) for tensor in some]  # ten times as fast as a norm
    return torch.stack(extremes).abs().amax(1).to(torch.float64)


def _exponent(largest: float) -> int:
    """The exponent of a grid for gradients of this size, within what 2.0 ** (bits - exponent) can be in fp32."""
    return min(max(math.frexp(largest)[1] + _GROWTH, -60), _LARGEST) if largest else _FIRST


def _pieces(flat: Tensor) -> Iterator[slice]:
    step = _PIECE if flat.device.type == "cpu" else max(flat.numel(), 1)
    return (slice(start, end) for start, end in pairwise([*range(0, flat.numel(), step), flat.numel()]))


def _put_as_integers(sums: Tensor, gradient: Tensor, units: float, *, add: bool) -> None:
    """Put round(gradient * units) into int64 `sums`, or add it; a product with a power of two is exact."""
    for here in _pieces(gradient):
        integers = (gradient[here].to(torch.float32) * units).round_()
        if add:
            sums[here] += integers.to(torch.int64)
        else:
            sums[here] = integers


def check_exact(args: TrainerArgs, shards: str | None) -> None:
    """Refuse what cannot be exact.

    Args:
        shards: FSDP or DeepSpeed, which reduce gradients in an order of their own.

    Raises:
        UserError: naming the flag to change.
    """
    how = args.reproducible
    if shards and how == "elastic":
        raise UserError(
            f"--reproducible elastic does not work with {shards}, whose sums of gradients depend on the number of "
            "workers: use --reproducible fixed (the same number at every start), or DDP or Horovod."
        )
    if args.fp16 and not shards:
        raise UserError(f"--reproducible {how} does not work with --fp16, whose loss scale moves: use --bf16.")
    if args.fp16_allreduce:
        raise UserError(f"--reproducible {how} sums gradients exactly, and --fp16_allreduce rounds them: choose one.")


def check_buffers(model: nn.Module, how: str) -> None:
    """Refuse running means under elastic: each worker makes them of its own rows, so their number shows in them.

    Raises:
        UserError: naming the first module that has some.
    """
    means = (name for name, module in model.named_modules() if getattr(module, "running_mean", None) is not None)
    if how == "elastic" and (name := next(means, None)) is not None:
        raise UserError(
            f"--reproducible elastic does not work with {name or type(model).__name__}, which keeps running means "
            "(BatchNorm) of the rows of its own worker: use a normalization without, as LayerNorm, or leave it out."
        )


def use_ordered_kernels(device: torch.device) -> None:
    """Have torch take kernels on a GPU that sum in one order, and refuse operations that have none."""
    if device.type != "cpu":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cudnn.benchmark = False
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # costs time, and finds mistakes only

"""`--find_micro_batch`: the fastest micro-batch that every worker can hold, of the same global batch, by real steps.

Each worker first tries a size alone, without sending gradients, so that one that runs out of memory leaves none
waiting; then the workers agree. Only sizes that fit on all of them are run as whole steps, and timed.
"""

from __future__ import annotations

import gc
import itertools
import platform
import resource
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import psutil
import torch

from lm_experiments_tools.backends.backend import PendingStep
from lm_experiments_tools.errors import RunError, UserError, first_line
from lm_experiments_tools.modules.devices import synchronize
from lm_experiments_tools.planning.fit import USABLE, is_out_of_memory, largest_size, limit_memory, memory_of
from lm_experiments_tools.recipes.lr_finder import only_steps, write_found

if TYPE_CHECKING:
    from lm_experiments_tools.backends.backend import Backend
    from lm_experiments_tools.training.trainer import TrainingLoop

_FLAG = "--find_micro_batch"
_NUM_BATCHES = 4  # of which the largest is tried
_NUM_TIMED = 3  # steps of each size
_NUM_SLOWER = 3  # sizes below the fastest that are timed


def find_micro_batch(trainer: TrainingLoop, folder: str | None) -> int:
    """Find the fastest micro-batch that fits on all workers; returns its rows.

    Every worker calls it, with a new loop, whose weights are of no use afterwards.

    Raises:
        UserError: the backend cannot try a worker alone, or not even one row fits.
        RunError: an update does not fit.
    """
    backend, rows, given = trainer.backend, trainer.args.rows_per_worker(), trainer.args.batch_size
    if backend.shards_model or backend.shards_optimizer:
        raise UserError(
            f"{_FLAG} does not work with {getattr(backend, 'wrapping', backend.name)}, where no worker can make a "
            "pass alone. Use it with DDP or Horovod, or run lmtools plan --fit with --workers and --sharding."
        )
    sizes = [size for size in range(1, rows + 1) if rows % size == 0]
    with only_steps(trainer), _limited_memory(backend):
        search = _Search(trainer, _largest_batch(trainer), sizes)
        trainer.say(f"{rows} rows of a worker and update: {len(sizes)} micro-batches are possible")
        largest = largest_size(sizes, search.fits) if _create_state(search) else None
        if largest is None:
            raise UserError(
                f"{_FLAG}: not even micro-batches of one row fit into memory on all workers. Shorten the rows, or see "
                "docs/out_of_memory.md for what to try in which order."
            )
        best = search.fastest(largest)
    speeds = {size: search.tokens / search.seconds[size] for size in sorted(search.seconds)}
    _report(trainer, speeds, rows, {"fastest": best, "largest that fits": largest, "as given": given})
    settings = {"batch_size": best, "gradient_accumulation_steps": rows // best, "workers": backend.world_size}
    fits = {str(size): held for size, held in sorted(search.tried.items())}
    tokens_per_second = {str(size): speed for size, speed in speeds.items()}
    found = {**settings, "largest_that_fits": largest, "fits": fits, "tokens_per_second": tokens_per_second}
    write_found(trainer, folder, "find_micro_batch.json", found)
    return best


@dataclass
class _Search:
    """Sizes that were tried, with the answer of all workers.

    Attributes:
        batch: this worker's rows of one step.
        sizes: divisors of these rows, ascending.
        seconds: shortest step of a size, of the slowest worker.
    """

    trainer: TrainingLoop
    batch: Mapping[str, Any]
    sizes: list[int]
    tried: dict[int, bool] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)
    tokens: int = 0

    def fits(self, size: int) -> bool:
        """True if every worker makes its part of a step in micro-batches of this size."""
        trainer, backend = self.trainer, self.trainer.backend
        self._set(size)
        trainer.backend, held = _Alone(backend), 1
        try:
            trainer.train_step(self.batch)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            held = 0
        trainer.backend = backend
        _clear(trainer, held)
        failed = backend.world_size - int(backend.sum(torch.tensor([held])))
        self.tried[size] = failed == 0
        if len(self.sizes) > 1:
            words = "fit" if not failed else f"do not fit ({failed} of {backend.world_size} worker(s) out of memory)"
            trainer.say(f"micro-batches of {size} x {self.sizes[-1] // size}: {words}")
        return failed == 0

    def step(self, size: int) -> float:
        """Make a whole step with an update; returns the seconds of the slowest worker.

        Raises:
            RunError: an update, or what is sent between workers, does not fit.
        """
        self._set(size)
        backend, started = self.trainer.backend, time.perf_counter()
        try:
            info = self.trainer.train_step(self.batch)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise RunError(
                f"{_FLAG}: out of memory in an update, after micro-batches of {size} fitted without one. The update "
                f"does not depend on them; see docs/out_of_memory.md ({first_line(error)[:120]})"
            ) from error
        synchronize(backend.device)
        self.tokens = info.tokens if info is not None else self.tokens
        return max(backend.gather(time.perf_counter() - started))

    def fastest(self, largest: int) -> int:
        """Time sizes from `largest` down, until several smaller ones are slower; returns the fastest."""
        best = largest
        for size in reversed(self.sizes[: self.sizes.index(largest) + 1]):
            self.step(size)  # the first one is a warm-up
            self.seconds[size] = min(self.step(size) for _ in range(_NUM_TIMED))
            best = min(self.seconds, key=self.seconds.get)
            if sum(other < best for other in self.seconds) == _NUM_SLOWER:
                break
        return best

    def _set(self, size: int) -> None:
        trainer, steps = self.trainer, self.sizes[-1] // size
        trainer.args = replace(trainer.args, batch_size=size, gradient_accumulation_steps=steps)
        trainer.state.step = trainer.state.schedule_start  # for each step tried: a schedule ends somewhere
        if trainer.signals.agreed:
            raise SystemExit(128 + trainer.signals.agreed)


class _Alone:
    """A backend whose steps send no gradient and change no weight, to try what this worker can hold."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def accumulate(self, sync: bool) -> AbstractContextManager[None]:
        return self._backend.accumulate(False)

    def clip_and_step(self, *clip: float | None, wait: bool = True) -> PendingStep:
        return PendingStep.done(0.0, True)


def _create_state(search: _Search) -> bool:
    """Make an update of one row, which creates the optimizer state; False if the row does not fit."""
    rows = max(len(value) for value in search.batch.values() if isinstance(value, torch.Tensor) and value.dim())
    first = {k: v[:1] if hasattr(v, "__len__") and len(v) == rows else v for k, v in search.batch.items()}
    one = _Search(search.trainer, first, [1])
    if fits := one.fits(1):
        one.step(1)
    return fits


def _report(trainer: TrainingLoop, speeds: Mapping[int, float], rows: int, named: Mapping[str, int]) -> None:
    """Print a table of sizes, and the flags of the fastest."""
    trainer.say("micro-batch  accumulation steps  tokens/s")
    for size, speed in speeds.items():
        marks = ", ".join(name for name, other in named.items() if size == other)
        trainer.say(f"{size:11d}  {rows // size:18d}  {speed:8,.0f}  {marks}".rstrip())
    best, workers = named["fastest"], trainer.backend.world_size
    trainer.say(
        f"use --batch_size {best} --gradient_accumulation_steps {rows // best}: "
        f"the global batch stays {rows * workers} rows"
    )


@contextmanager
def _limited_memory(backend: Backend) -> Iterator[None]:
    """On a CPU, limit this worker to its part of what the machine, or its container, has free."""
    if backend.device.type != "cpu":
        yield
        return
    process = psutil.Process().memory_info()
    part = USABLE * memory_of("cpu") / backend.gather(platform.node()).count(platform.node())
    limits = limit_memory(process.data + max(0, part - process.rss))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, limits)


def _largest_batch(trainer: TrainingLoop) -> Mapping[str, Any]:
    """The largest of the first steps' batches."""
    batches = [batch for batch, _ in itertools.islice(trainer.stream, _NUM_BATCHES)]
    return max(batches, key=lambda batch: sum(v.numel() for v in batch.values() if isinstance(v, torch.Tensor)))


def _clear(trainer: TrainingLoop, held: int) -> None:
    """Free what a trial has left: gradients, and all of a failed one."""
    trainer.backend.optimizer.zero_grad(set_to_none=True)
    trainer.micro_batches = []
    if not held:
        gc.collect()
    if trainer.backend.device.type == "cuda":
        torch.cuda.empty_cache()

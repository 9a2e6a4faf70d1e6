"""Settings found by real steps: the fastest micro-batch that every worker can hold, of the same global batch.

Each size is first tried by every worker for itself, without sending gradients, so that one that runs out of memory
leaves none waiting; then all tell each other. Only sizes that all can hold are run as whole steps, and timed.
"""

from __future__ import annotations

import gc
import itertools
import platform
import resource
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import psutil
import torch

from lm_experiments_tools.backends.backend import PendingStep
from lm_experiments_tools.errors import RunError, UserError
from lm_experiments_tools.planning.fit import USABLE, fit, memory_of
from lm_experiments_tools.planning.trial import is_out_of_memory
from lm_experiments_tools.planning.watch import config_of, planned_for, planning_of, watched
from lm_experiments_tools.recipes.common import close_run, train_or_validate
from lm_experiments_tools.recipes.finders import find_lr, only_steps, write_found

if TYPE_CHECKING:
    from lm_experiments_tools.backends.backend import Backend
    from lm_experiments_tools.recipes.common import RunData
    from lm_experiments_tools.training.trainer import TrainingLoop

_LOOKED_AT = 4  # steps, of which the one with the most numbers is tried
_TIMED = 3  # steps of each size, by turns
_SIZES_TIMED = 4  # the largest that fit, and smaller ones while these are faster


def find_or_train(trainer: TrainingLoop, origins: Mapping[str, str], folder: str | None, data: RunData) -> bool:
    """Train or validate; or do what `--find_lr` or `--find_micro_batch` asks for, close the run, and return True.

    Args:
        folder: run directory of the run that is to follow a finder.
    """
    args, backend = trainer.args, trainer.backend
    if not args.finds():
        with watched(args, origins, backend):
            train_or_validate(trainer)
        return False
    if args.find_micro_batch:
        find_micro_batch(trainer, origins, folder)
    else:
        find_lr(trainer, folder)
    close_run(backend, data)
    return True


@dataclass
class _Search:
    """The state of a search: sizes that were tried, with whether all workers held them.

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

    def largest(self, start: int) -> int | None:
        """Index of the largest size that all workers hold: by doubling or halving from `start`, then bisecting."""
        low, high, index = -1, len(self.sizes), start
        while high - low > 1:
            if self.holds(index):
                low = index
                beyond = next((i for i in range(index, high) if self.sizes[i] >= 2 * self.sizes[index]), high - 1)
                index = beyond if high == len(self.sizes) else (low + high) // 2
                index = max(index, low + 1)
            else:
                high = index
                below = next((i for i in range(index, low, -1) if 2 * self.sizes[i] <= self.sizes[index]), low + 1)
                index = below if low == -1 else (low + high) // 2
                index = min(index, high - 1)
        return low if low >= 0 else None

    def holds(self, index: int) -> bool:
        """True if every worker makes its part of a step in micro-batches of this size."""
        size = self.sizes[index]
        backend = self.trainer.backend
        self._set(size)
        self.trainer.backend, held = _Alone(backend), 1
        try:
            self.trainer.train_step(self.batch)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            held = 0
        self.trainer.backend = backend
        _clear(self.trainer, held)
        failed = backend.world_size - int(backend.sum(torch.tensor([held])))
        self.tried[size] = failed == 0
        if len(self.sizes) > 1:
            words = "fit" if not failed else f"do not fit ({failed} of {backend.world_size} worker(s) out of memory)"
            self.trainer.say(f"micro-batches of {size} x {self.sizes[-1] // size}: {words}")
        return failed == 0

    def step(self, size: int) -> float:
        """Make a whole step with an update; returns the seconds of the slowest worker.

        Raises:
            RunError: what is sent between workers, or the update, is too much for memory.
        """
        self._set(size)
        backend, started = self.trainer.backend, time.perf_counter()
        try:
            info = self.trainer.train_step(self.batch)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise RunError(
                f"--find_micro_batch: out of memory in an update, after micro-batches of {size} fitted without one: "
                f"what it needs does not depend on them; see docs/out_of_memory.md ({first_words(error)})"
            ) from error
        if backend.device.type == "cuda":
            torch.cuda.synchronize(backend.device)
        self.tokens = info.tokens if info is not None else self.tokens
        return max(backend.gather(time.perf_counter() - started))

    def time(self, top: int) -> int:
        """Time sizes up to index `top`; returns the fastest."""
        bottom = max(0, top + 1 - _SIZES_TIMED)
        self._time(self.sizes[bottom : top + 1])
        while bottom > 0 and self.fastest() == self.sizes[bottom]:
            bottom -= 1
            self._time([self.sizes[bottom]])
        return self.fastest()

    def fastest(self) -> int:
        return min(self.seconds, key=self.seconds.get)

    def _time(self, sizes: Sequence[int]) -> None:
        for turn, size in itertools.product(range(_TIMED + 1), sizes):
            seconds = self.step(size)
            if turn:  # the first of each size also pays for what is kept afterwards
                self.seconds[size] = min(seconds, self.seconds.get(size, seconds))

    def _set(self, size: int) -> None:
        trainer, number = self.trainer, self.sizes[-1] // size
        trainer.args = replace(trainer.args, batch_size=size, gradient_accumulation_steps=number)
        trainer.state.step = trainer.state.schedule_start  # of every step tried: a schedule ends somewhere
        if trainer.signals.agreed:
            raise SystemExit(128 + trainer.signals.agreed)

    def speed(self, size: int) -> float:
        """Tokens a second of all workers."""
        return self.tokens / self.seconds[size]


class _Alone:
    """A backend whose steps send no gradient and change no weight: what this worker can hold, and it alone."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def accumulate(self, sync: bool) -> AbstractContextManager[None]:
        return self._backend.accumulate(False)

    def clip_and_step(self, *clip: float | None, wait: bool = True) -> PendingStep:
        return PendingStep.done(0.0, True)


def find_micro_batch(trainer: TrainingLoop, origins: Mapping[str, str], folder: str | None) -> int:
    """Find the fastest micro-batch that all workers can hold; returns its rows.

    Every worker calls it, with a loop that has just been made; its weights are of no use afterwards.

    Raises:
        UserError: the backend cannot try a worker alone, or not even one row fits.
        RunError: an update does not fit.
    """
    backend, args = trainer.backend, trainer.args
    if backend.shards_model or backend.shards_optimizer:
        raise UserError(
            f"--find_micro_batch does not work with {getattr(backend, 'wrapping', backend.name)}, where no worker can "
            "make a pass alone: find it with DDP or Horovod, or ask lmtools plan --fit with --workers and --sharding"
        )
    rows = args.rows_per_worker()
    sizes = [size for size in range(1, rows + 1) if rows % size == 0]
    memory = _memory(backend)
    proposed = backend.broadcast(_proposal(trainer, origins, memory))
    with only_steps(trainer), _refusing_in_time(backend, memory):
        search = _Search(trainer, _widest(trainer), sizes)
        trainer.say(f"{rows} rows of a worker and update; the plan proposes micro-batches of {proposed}")
        top = None
        if _makes_room(search):
            top = search.largest(max(i for i, size in enumerate(sizes) if size <= proposed))
        if top is None:
            raise UserError(
                "--find_micro_batch: not even micro-batches of one row fit into memory on all workers; shorten the "
                "rows, or see docs/out_of_memory.md for what to try in which order"
            )
        best = search.time(top)
    _report(search, best, sizes[top], args.batch_size)
    speeds = {str(size): search.speed(size) for size in sorted(search.seconds)}
    settings = {"batch_size": best, "gradient_accumulation_steps": rows // best, "workers": backend.world_size}
    tried = {str(size): held for size, held in sorted(search.tried.items())}
    found = {**settings, "largest_that_fits": sizes[top], "fits": tried, "tokens_per_second": speeds}
    write_found(trainer, folder, "find_micro_batch.json", found)
    return best


def first_words(error: BaseException) -> str:
    """The beginning of an error's text."""
    return " ".join(str(error).split())[:120] or type(error).__name__


def _makes_room(search: _Search) -> bool:
    """Make an update of one row, from which on the optimizer's state is there; False if that does not fit."""
    rows = max(len(value) for value in search.batch.values() if isinstance(value, torch.Tensor) and value.dim())
    first = {k: v[:1] if hasattr(v, "__len__") and len(v) == rows else v for k, v in search.batch.items()}
    one = _Search(search.trainer, first, [1])
    if held := one.holds(0):
        one.step(1)
    return held


def _report(search: _Search, best: int, largest: int, given: int) -> None:
    say, rows = search.trainer.say, search.sizes[-1]
    say("micro-batch  accumulated  tokens/s")
    for size in sorted(search.seconds):
        marks = [
            mark for mark, of in (("fastest", best), ("largest that fits", largest), ("as given", given)) if size == of
        ]
        say(f"{size:11d}  {rows // size:11d}  {search.speed(size):8,.0f}  {', '.join(marks)}".rstrip())
    workers = search.trainer.backend.world_size
    say(
        f"use --batch_size {best} --gradient_accumulation_steps {rows // best}: still {rows} rows x {workers} "
        f"worker(s) = {rows * workers} rows an update"
    )


def _proposal(trainer: TrainingLoop, origins: Mapping[str, str], memory: float) -> int:
    """Micro-batch that the closed form says fits into this worker's memory; where it knows nothing, the given one."""
    args, backend = trainer.args, trainer.backend
    plan = planned_for(args, origins, backend)
    if plan is None:
        return args.batch_size
    try:
        found = fit(args, planning_of(backend, memory), origins, config_of(backend), plan)
    except UserError:
        return 1
    return 1 if found.changed.keys() - {"batch_size", "gradient_accumulation_steps"} else found.plan.args.batch_size


def _memory(backend: Backend) -> float:
    """Bytes that this worker may use of its GPU, or its share of what the machine has to give."""
    if backend.device.type == "cuda":
        return torch.cuda.get_device_properties(backend.device).total_memory
    return memory_of("cpu") / backend.gather(platform.node()).count(platform.node())


@contextmanager
def _refusing_in_time(backend: Backend, memory: float) -> Iterator[None]:
    """On a CPU, have memory refused that the machine does not have: Linux would promise it, and then kill."""
    if backend.device.type != "cpu":
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limits = [int(psutil.Process().memory_info().data + USABLE * memory), soft, hard]
    lowest = min(limit for limit in limits if limit != resource.RLIM_INFINITY)
    resource.setrlimit(resource.RLIMIT_DATA, (lowest, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _widest(trainer: TrainingLoop) -> Mapping[str, Any]:
    """Of the first steps' batches the one with the most numbers."""
    batches = [batch for batch, _ in itertools.islice(trainer.stream, _LOOKED_AT)]
    return max(batches, key=lambda batch: sum(v.numel() for v in batch.values() if isinstance(v, torch.Tensor)))


def _clear(trainer: TrainingLoop, held: int) -> None:
    """Let go of what a trial has left: gradients, and after one that failed whatever it was at."""
    trainer.backend.optimizer.zero_grad(set_to_none=True)
    trainer.micro_batches = []
    if not held:
        gc.collect()
    if trainer.backend.device.type == "cuda":
        torch.cuda.empty_cache()

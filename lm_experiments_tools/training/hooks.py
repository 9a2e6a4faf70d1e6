"""Hooks that run every n steps. "After step k" means: k updates have been applied; nothing fires at step 0."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from lm_experiments_tools.errors import UserError
from lm_experiments_tools.training.profile_table import DATA_WAIT, STEPS, events_of, table, time_by_line
from lm_experiments_tools.training.step import Loop, StepInfo
from lm_experiments_tools.training.watch_values import MaximaHook, NormsHook

if TYPE_CHECKING:
    from lm_experiments_tools.config.training import TrainerArgs

logger = logging.getLogger(__name__)

_WARM_UP = 5  # updates that are not typical: memory is allocated, graphs are compiled


class Hook(Protocol):
    """Called after each step that `every` divides; `every=None` never."""

    every: int | None

    def __call__(self, loop: Loop, info: StepInfo) -> None: ...


def is_due(hook: Hook, step: int) -> bool:
    return bool(hook.every) and step > 0 and step % hook.every == 0


@dataclass
class VerbHook:
    """Calls a verb of the loop."""

    every: int | None
    verb: Callable[[Loop], None]

    def __call__(self, loop: Loop, info: StepInfo) -> None:
        self.verb(loop)


class ValidateHook:
    """Validation and all that hangs on it: the best metric, patience, lr drop, the best checkpoint."""

    def __init__(self, every: int | None, *, metric: str, mode: str, save_best: bool) -> None:
        self.every, self.metric, self.mode, self.save_best = every, metric, mode, save_best

    def __call__(self, loop: Loop, info: StepInfo) -> None:
        values = loop.validate(loop.valid_dataloader)
        if values is None:  # cut short by a signal; the restarted run makes up for it
            return
        if self.metric not in values:
            loop.save()  # a mistyped name must not cost the updates made so far
            raise UserError(
                f"--optimize_metric {self.metric} is not produced by validation, which gives "
                f"{', '.join(sorted(values))}; choose one of these "
                "(metrics of generated text need --use_generate_on_valid)"
            )
        value, state = self._number(loop, values[self.metric]), loop.state
        state.last_validated_step = state.step
        improved = self._improves(state.best_metric, value)
        if improved:
            state.best_metric, state.best_step, state.patience = value, state.step, 0
            loop.say(f"step {state.step}: best {self.metric} on validation so far: {value:.4f}")
        else:
            state.patience += 1
        loop.log_patience()
        if loop.learning_rate.plateau is not None:
            loop.learning_rate.plateau.update(value)
        if improved and self.save_best:
            loop.save(is_best=True, unless_last=True)

    def _number(self, loop: Loop, value: Any) -> float:
        if isinstance(value, (int, float)):
            return value
        try:
            return float(value)
        except (TypeError, ValueError) as error:
            loop.save()
            raise UserError(
                f"--optimize_metric {self.metric} is a {type(value).__name__} ({value!s:.40}), of which none is "
                "better: name a metric that is a number"
            ) from error

    def _improves(self, best: float | None, value: float) -> bool:
        if math.isnan(value):
            return False
        return best is None or (value < best if self.mode == "min" else value > best)


class ProfileHook:
    """A torch profiler trace of `num_steps` steps after step `start`, and a table of where their time went.

    Called after step `start`, once all other hooks of that step have run; `end`, a hook of its own, is to be called
    before all others, so that what they do belongs to the steps only where it is done between them.
    """

    def __init__(self, start: int, num_steps: int, folder: Path) -> None:
        self.start, self.stop, self.folder = start, start + num_steps, folder
        self.every: int | None = start  # then never: a step with a hook waits for the device
        self.end = VerbHook(None, self._end)
        self._profiler, self._range = torch.profiler.profile(), torch.profiler.record_function(STEPS)
        self._before: tuple[int, int] = 0, 0

    def __call__(self, loop: Loop, info: StepInfo) -> None:
        self.every, self.end.every = None, self.stop
        self._before = self._counts(loop)
        self._profiler.start()
        _synchronize(loop)
        self._range.__enter__()

    def _end(self, loop: Loop) -> None:
        self.end.every = None
        _synchronize(loop)
        self._range.__exit__(None, None, None)
        self._profiler.stop()
        name, num_steps = f"steps_{self.start + 1}-{self.stop}", self.stop - self.start
        self.folder.mkdir(parents=True, exist_ok=True)
        trace = self.folder / f"{name}_rank_{loop.backend.rank}.json"
        self._profiler.export_chrome_trace(str(trace))
        times = time_by_line(events_of(self._profiler))
        self._profiler = None
        waits = loop.backend.gather(times[DATA_WAIT] / num_steps)
        heading = f"where the time of steps {self.start + 1} to {self.stop} went, on rank 0 under the profiler:"
        lines = [table(times, num_steps, heading), *self._remarks(loop, waits)]
        if loop.backend.is_main:
            (self.folder / f"{name}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
        loop.say("\n".join([*lines, f"profile of steps {self.start + 1} to {self.stop}: {trace}"]))

    @staticmethod
    def _counts(loop: Loop) -> tuple[int, int]:
        return loop.state.skipped_updates, loop.state.last_validated_step

    def _remarks(self, loop: Loop, waits: list[float]) -> list[str]:
        changed = [now != before for now, before in zip(self._counts(loop), self._before, strict=True)]
        found = []
        if len(waits) > 1:
            ends = (f"{wait:.2f} ms (rank {waits.index(wait)})" for wait in (min(waits), max(waits)))
            found.append(f"  data wait of workers: {' to '.join(ends)} a step")
        found += ["  skipped updates among them are in it"] * changed[0]
        return found + ["  a validation between them is in it: see --profile_after and --valid_interval"] * changed[1]


def _synchronize(loop: Loop) -> None:
    if loop.backend.device.type == "cuda":
        torch.cuda.synchronize(loop.backend.device)


def with_profile(hooks: list[Hook], args: TrainerArgs, step: int, say: Callable[[str], None]) -> list[Hook]:
    """Hooks of a loop that begins after `step`, with those of `--profile`, if it is asked for."""
    number = args.profiled_steps()
    if number is None or args.validate_only or step >= args.iters:
        return hooks
    start = min(step + _WARM_UP, args.iters - number) if args.profile_after is None else args.profile_after
    if start <= step or start + number > args.iters:
        say(
            f"--profile: updates {start + 1} to {start + number} were to be traced, which is left out: "
            f"this start traces from its second one, {step + 2}, to {args.iters}"
        )
        return hooks
    profile = ProfileHook(start, number, Path(args.model_path) / "profile")
    return [profile.end, *hooks, profile]


def watching_hooks(args: TrainerArgs, loop: Loop) -> list[Hook]:
    """Hooks of `--log_norms` and `--log_maxima`; none with `--validate_only`.

    Raises:
        UserError: the backend cannot be watched so.
    """
    loop.backend.before_update = None  # of an earlier training
    asked = (args.log_norms, NormsHook), (args.log_maxima, MaximaHook)
    return [] if args.validate_only else [hook(every, loop) for every, hook in asked if every is not None]

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
from lm_experiments_tools.training.step import Loop, StepInfo
from lm_experiments_tools.training.watch_values import MaximaHook, NormsHook

if TYPE_CHECKING:
    from lm_experiments_tools.config.training import TrainerArgs

logger = logging.getLogger(__name__)


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
    """A torch profiler trace of `num_steps` steps after step `start`, for Perfetto or TensorBoard's profile tab."""

    def __init__(self, start: int, folder: Path, num_steps: int = 3) -> None:
        self.start, self.stop, self.folder = start, start + num_steps, folder
        self.every: int | None = start  # then `stop`, then never: a step with a hook waits for the device
        self._profiler: torch.profiler.profile | None = None

    def __call__(self, loop: Loop, info: StepInfo) -> None:
        self.every = self.stop if info.step == self.start else None
        if info.step == self.start:
            self._profiler = torch.profiler.profile(profile_memory=True)
            self._profiler.start()
        elif info.step == self.stop and self._profiler is not None:
            self._profiler.stop()
            self.folder.mkdir(parents=True, exist_ok=True)
            trace = self.folder / f"steps_{self.start + 1}-{self.stop}_rank_{loop.backend.rank}.json"
            self._profiler.export_chrome_trace(str(trace))
            self._profiler = None
            loop.say(f"profile of steps {self.start + 1} to {self.stop}: {trace}")


def watching_hooks(args: TrainerArgs, loop: Loop) -> list[Hook]:
    """Hooks of `--log_norms` and `--log_maxima`; none with `--validate_only`.

    Raises:
        UserError: the backend cannot be watched so.
    """
    loop.backend.before_update = None  # of an earlier training
    asked = (args.log_norms, NormsHook), (args.log_maxima, MaximaHook)
    return [] if args.validate_only else [hook(every, loop) for every, hook in asked if every is not None]

"""A trace of some optimizer steps by torch's profiler, and its table of operators (`--profile`)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lm_experiments_tools.backends.collective import say
from lm_experiments_tools.modules.devices import synchronize
from lm_experiments_tools.training.callbacks import Every

if TYPE_CHECKING:
    from lm_experiments_tools.backends.backend import Backend
    from lm_experiments_tools.config.training import TrainerArgs
    from lm_experiments_tools.training.metrics import StepInfo

_WARM_UP = 5  # steps that are not typical: memory is allocated, graphs are compiled
DATA_WAIT = "data wait"
"""Range around the wait for a batch."""
_ROWS = 20  # of the table


class ProfileCallback:
    """Callback that traces `num_steps` steps after step `start` with torch's profiler, and prints its table.

    The callback must run last at step `start`, and its `end` callback first, so that no other callbacks are in the
    trace but those between the steps.
    """

    def __init__(self, start: int, num_steps: int, folder: Path) -> None:
        self.start, self.stop, self.folder = start, start + num_steps, folder
        # Afterwards it is never due, because a step with a callback waits for the device.
        self.every: int | None = start
        self.end = Every(None, self._end)
        self._profiler = torch.profiler.profile()

    def on_step_end(self, trainer: Any, info: StepInfo) -> None:
        self.every, self.end.every = None, self.stop
        self._profiler.start()
        synchronize(trainer.backend.device)

    def _end(self, trainer: Any) -> None:
        self.end.every = None
        synchronize(trainer.backend.device)
        self._profiler.stop()
        name, device = f"steps_{self.start + 1}-{self.stop}", trainer.backend.device.type
        self.folder.mkdir(parents=True, exist_ok=True)
        trace = self.folder / f"{name}_rank_{trainer.backend.rank}.json"
        self._profiler.export_chrome_trace(str(trace))
        kind = "self_cpu_time_total" if device == "cpu" else "self_device_time_total"
        table = self._profiler.key_averages().table(sort_by=kind, row_limit=_ROWS, max_name_column_width=60)
        self._profiler = None
        if trainer.backend.is_main:
            (self.folder / f"{name}.txt").write_text(table, encoding="utf-8")
        trainer.say(f"{table}profile of steps {self.start + 1} to {self.stop}, on rank 0: {trace}")


def profile_callback(args: TrainerArgs, step: int, backend: Backend) -> ProfileCallback | None:
    """Create the callback of `--profile`, in a run that starts after `step` updates; None without the flag."""
    number = args.profiled_steps()
    if number is None or args.validate_only or step >= args.iters:
        return None
    start = min(step + _WARM_UP, args.iters - number) if args.profile_after is None else args.profile_after
    if start <= step or start + number > args.iters:
        updates = f"updates {start + 1} to {start + number} are not among {step + 2} to {args.iters} of this start"
        say(backend, f"--profile traces nothing: {updates}")
        return None
    return ProfileCallback(start, number, Path(args.model_path) / "profile")

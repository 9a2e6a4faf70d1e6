"""The learning-rate range test (`--find_lr`): short training at learning rates that grow by a constant factor.

The loss of a rate is measured on the next batch, after an update at this rate. The curve is smoothed by a running
median, which does not lag like an exponential mean.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from lm_experiments_tools.backends.collective import on_all
from lm_experiments_tools.checkpoint.train_state import failures_located
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.files import dump_json, write_atomic
from lm_experiments_tools.training.callbacks import Every
from lm_experiments_tools.training.checks import LoaderCheck
from lm_experiments_tools.training.metrics import AccumulatedOutputs, LoggingInterval
from lm_experiments_tools.training.trainer import TrainingDiverged

if TYPE_CHECKING:
    from lm_experiments_tools.training.trainer import TrainingLoop

_FAR = 4.0  # times the lowest smoothed loss: the test stops
_NOISE = 3  # times the median step between two losses: a fall of less is none
_ROWS = 12  # of the table


class RangeTest(NamedTuple):
    """Result of a learning-rate range test.

    Attributes:
        rates: learning rates.
        losses: the loss after an update at each rate.
        smoothed: running medians of the losses.
        steepest: the rate at which the loss falls fastest (on a log scale of rates); None if it never falls.
        edge: the highest rate before the loss diverges; None if it does not diverge.
    """

    rates: list[float]
    losses: list[float]
    smoothed: list[float]
    steepest: float | None
    edge: float | None


def find_lr(trainer: TrainingLoop, folder: str | Path | None) -> RangeTest:
    """Run a learning-rate range test, print a table and write the curve to `folder`/find_lr.json.

    Every worker must call this function. It changes the weights of `trainer`.

    Args:
        trainer: a new training loop.
        folder: the run directory; None writes no file.

    Raises:
        UserError: the loss is not finite from the start.
        SystemExit: with 128 + signal number, after a signal.
    """
    args = trainer.args
    growth = (args.find_lr_max / args.find_lr_min) ** (1 / (args.find_lr - 1))
    rates = [args.find_lr_min * growth**i for i in range(args.find_lr)]
    losses = _losses(trainer, rates)
    if len(losses) < 2:
        raise UserError(
            f"--find_lr: the loss or its gradient is not finite from --find_lr_min {args.find_lr_min:g} on: lower it, "
            "or look at the model and the data without --find_lr"
        )
    stopped = len(losses) < args.find_lr
    test = read_range_test(rates[: len(losses)], losses, stopped)
    for line in _shown(test, stopped):
        trainer.say(line)
    if folder is not None:
        path = Path(folder) / "find_lr.json"

        def write() -> None:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, dump_json(test._asdict()))

        on_all(trainer.backend, write, only_main=True)
        trainer.say(f"written to {path}; nothing else is changed")
    return test


@contextmanager
def _only_steps(trainer: TrainingLoop) -> Iterator[None]:
    """Run the loop's steps synchronously, without logging, validation and checkpoints."""
    trainer.callbacks = [Every(1, lambda trainer: None)]
    trainer.outputs = AccumulatedOutputs(None, None)
    with trainer.signals, failures_located(trainer.state, trainer.backend):
        trainer.backend.model.train()
        yield
    if trainer.signals.agreed:
        raise SystemExit(128 + trainer.signals.agreed)


def _losses(trainer: TrainingLoop, rates: Sequence[float]) -> list[float]:
    """The global loss after an update at each rate, as far as they are finite and not far above the lowest."""
    rate, before = trainer.learning_rate, trainer.state.step
    rate.schedule, rate.plateau = (lambda step: wanted / trainer.args.lr), None
    losses: list[float] = []
    wanted, made = rates[0], 0
    with _only_steps(trainer):
        batches, check = iter(trainer.stream), LoaderCheck(trainer.stream, trainer.backend, trainer.args)
        while made <= len(rates):
            wanted = rates[min(made, len(rates) - 1)]
            trainer.interval = LoggingInterval()
            batch, _ = next(batches)
            check(batch)
            try:
                info = trainer.train_step(batch)
            except TrainingDiverged:
                break
            if info is None or not (info.applied or trainer.args.fp16):
                break
            if not info.applied:  # a loss scale that is coming down
                continue
            loss = trainer.loss.with_total(trainer.interval.sums.reduce(trainer.backend))["loss"]
            if not math.isfinite(loss):
                break
            if made:
                losses.append(loss)
            made = trainer.state.step - before
            if _is_far(losses):
                break
    return losses


def _is_far(losses: Sequence[float]) -> bool:
    smoothed = _medians(losses, 2)[:-2]  # the last ones have not all their neighbours yet
    return bool(smoothed) and smoothed[-1] > _FAR * min(smoothed) > 0


def read_range_test(rates: Sequence[float], losses: Sequence[float], stopped: bool = False) -> RangeTest:
    """Find the rate of steepest descent and the highest rate before divergence.

    Args:
        rates: learning rates, growing by a constant factor.
        losses: the loss after an update at each rate.
        stopped: True if the test ended early because the loss diverged.
    """
    reach = max(1, len(losses) // 40)
    smoothed = _medians(losses, reach)
    lowest = int(np.argmin(smoothed))
    span = max(2, len(losses) // 20)
    logs = np.log(rates)
    ends = [(max(i - span, 0), min(i + span, lowest)) for i in range(lowest + 1)]
    slopes = [(smoothed[b] - smoothed[a]) / (logs[b] - logs[a]) if b > a else 0.0 for a, b in ends]
    steepest = int(np.argmin(slopes))
    rises = stopped or lowest < len(losses) - 1 - span
    noise = float(np.median(np.abs(np.diff(losses[: lowest + 1])))) if lowest else 0.0
    falls = slopes[steepest] < 0 and smoothed[0] - smoothed[lowest] > _NOISE * noise
    return RangeTest(
        list(rates),
        list(losses),
        smoothed,
        rates[steepest] if falls else None,
        rates[lowest] if rises else None,
    )


def _medians(values: Sequence[float], reach: int) -> list[float]:
    """Medians over `reach` neighbours on each side, fewer and still symmetric at the ends."""
    reaches = [min(reach, i, len(values) - 1 - i) for i in range(len(values))]
    return [float(np.median(values[i - r : i + r + 1])) for i, r in enumerate(reaches)]


def _shown(test: RangeTest, stopped: bool) -> list[str]:
    """A table, and what follows from it."""
    rows = sorted({round(i * (len(test.rates) - 1) / (_ROWS - 1)) for i in range(_ROWS)})
    lines = ["      lr        loss    smoothed"]
    lines += [f"{test.rates[i]:8.2e}  {test.losses[i]:10.4f}  {test.smoothed[i]:10.4f}" for i in rows]
    highest = f"{test.rates[-1]:.2g}"
    if test.steepest is None:
        found = f"the loss falls by no more than its noise from lr {test.rates[0]:.2g} to {highest}: take more updates"
    else:
        found = f"try --lr {test.steepest:.2g}, where the loss falls fastest"
    if test.edge is not None:
        found += f"; it rises from lr {test.edge:.2g} on"
    elif test.steepest is not None:
        found += f"; it does not rise up to lr {highest}: raise --find_lr_max to see where it does"
    return [*lines, found + (f" (stopped at {highest}, far above its lowest)" if stopped else "")]

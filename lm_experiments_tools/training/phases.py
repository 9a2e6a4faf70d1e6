"""Training in phases, which are consecutive parts of a run with different settings.

This module chooses where a phase begins in its data, and averages the weights at the end of a phase.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lm_experiments_tools.backends.collective import on_all
from lm_experiments_tools.checkpoint.manifest import step_directory_name
from lm_experiments_tools.checkpoint.weights import mean_state
from lm_experiments_tools.checkpoint.writer import read_state
from lm_experiments_tools.config.phases import saved_before
from lm_experiments_tools.config.pretraining import MixtureArgs
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.files import to_jsonable

if TYPE_CHECKING:
    from lm_experiments_tools.checkpoint.train_state import TrainState
    from lm_experiments_tools.training.trainer import TrainingLoop


@dataclass(frozen=True)
class Phase:
    """One phase of a run: consecutive optimizer steps with settings of their own.

    Attributes:
        args: arguments of this phase; it ends at step `args.iters`.
        run: arguments of the whole run.
        number: number of the phase, from 0.
        start: step at which this phase begins.
        first_step, last_step: steps at which the run begins and ends.
        branch: checkpoint of another run from which this run starts; None without one.
    """

    args: Any
    run: Any
    number: int = 0
    start: int = 0
    first_step: int = 0
    last_step: int = 0
    branch: Path | None = None


def data_start(trainer: TrainingLoop, state: TrainState) -> tuple[int, str]:
    """Choose the position in the training data at which a phase starts to read.

    Args:
        state: trainer state at the end of the previous phase.

    Returns:
        Position in samples over all workers, and the reason, for the log.
    """
    stream, facts, args = trainer.stream, state.facts, trainer.args
    position = state.data_position()
    if stream.fingerprint == state.data_fingerprint or (state.data_order and stream.order == state.data_order):
        return position, "it goes on at its position"
    names = ["data_path", *(field.name for field in fields(MixtureArgs))]
    same_files = all(facts.get(name) == to_jsonable(getattr(args, name, None)) for name in names)
    size, size_now = state.samples_per_epoch, getattr(stream.loader, "samples_per_epoch", None)
    if same_files and size and size_now:
        return position * size_now // size, "the same files in other rows: it goes on after as many tokens"
    return 0, "it is other data: read from its beginning"


_RAMP = ("mlm_prob", "mlm_prob_end", "mlm_prob_samples")


def ramp_start(args: Any, before: TrainState) -> int:
    """Samples consumed when the masking rate began to change: a phase or run with other rates starts to count anew.

    Args:
        before: trainer state of the previous phase, or of the run that is continued.
    """
    is_same = all(before.facts.get(name) == getattr(args, name, None) for name in _RAMP)
    return before.ramp_start if is_same else before.consumed_samples


def average_weights(trainer: TrainingLoop) -> None:
    """Set the weights to a mean of checkpoints at the end of a phase, if `--average N` is set.

    The mean is that of the current weights and of the phase's last N - 1 checkpoints at multiples of
    `--save_interval`. Every worker calls this function.
    """
    args, backend, state = trainer.args, trainer.backend, trainer.state
    if not getattr(args, "average", None) or state.averaged_at == state.step:
        return
    trainer.save()  # nothing is lost if a checkpoint to average is
    start = 0 if trainer.phase is None else trainer.phase.start
    steps = saved_before(args.save_interval, start, state.step)[-(args.average - 1) :]
    trainer.saver.wait()
    weights, checkpoints = backend.model_state(), Path(args.model_path) / "checkpoints"

    def mean() -> dict[str, Tensor]:
        folders = [checkpoints / step_directory_name(step) for step in steps]
        if lost := [folder.name for folder in folders if not folder.is_dir()]:
            raise UserError(
                f"--average {args.average} needs {', '.join(lost)}, which are not in {checkpoints}: leave it out, or "
                "average fewer."
            )
        return mean_state(chain([weights], (read_state(backend.unwrap(), folder) for folder in folders)))

    backend.load_model_state(on_all(backend, mean, only_main=True))
    state.averaged_at, state.last_validated_step, trainer.saved_at = state.step, -1, None
    trainer.say(f"weights are the mean of steps {', '.join(map(str, [*steps, state.step]))}")

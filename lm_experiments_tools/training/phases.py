"""Training in phases, which are consecutive parts of a run with different settings."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm_experiments_tools.config.pretraining import MixtureArgs
from lm_experiments_tools.files import to_jsonable

if TYPE_CHECKING:
    from lm_experiments_tools.checkpoint.train_state import TrainState
    from lm_experiments_tools.training.batches import BatchStream


@dataclass(frozen=True)
class Phase:
    """One phase of a run: consecutive optimizer steps with settings of their own.

    Attributes:
        args: arguments of this phase; it ends at step `args.iters`.
        number: number of the phase, from 0.
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


def data_start(args: Any, state: TrainState, stream: BatchStream) -> tuple[int, str]:
    """Choose the position in the training data, in samples over all workers, at which a phase starts to read.

    `state` is that of the end of the previous phase. Also returns the reason, for the log.
    """
    facts, position = state.facts, state.data_position()
    if stream.fingerprint == state.data_fingerprint or (state.data_order and stream.order == state.data_order):
        return position, "it goes on at its position"
    names = ["data_path", *(field.name for field in fields(MixtureArgs))]
    same_files = all(facts.get(name) == to_jsonable(getattr(args, name, None)) for name in names)
    size, size_now = state.samples_per_epoch, getattr(stream.loader, "samples_per_epoch", None)
    if same_files and size and size_now:
        return position * size_now // size, "the same files in other rows: it goes on after as many tokens"
    return 0, "it is other data: read from its beginning"

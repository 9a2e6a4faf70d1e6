"""The training part of a script: phase after phase, or `--find_lr` or `--find_micro_batch` instead."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lm_experiments_tools.planning.finders import find_micro_batch
from lm_experiments_tools.planning.show import watched
from lm_experiments_tools.recipes.common import close_run, show_run, train_or_validate
from lm_experiments_tools.recipes.finders import find_lr

if TYPE_CHECKING:
    from lm_experiments_tools.backends.backend import Backend
    from lm_experiments_tools.recipes.common import ModelSource, RunData
    from lm_experiments_tools.tracking.run_directory import RunDirectory
    from lm_experiments_tools.training.phases import Phase
    from lm_experiments_tools.training.trainer import TrainingLoop


def train_phases(
    phases: Sequence[tuple[Phase, ModelSource]],
    build: Callable[[Phase, ModelSource], tuple[TrainingLoop, Any]],
    origins: Mapping[str, str],
    run: RunDirectory | None,
    folder: str | None,
    backend: Backend,
) -> tuple[TrainingLoop, Any] | None:
    """Train the phases that are left; returns trainer and data of the last one, None after `--find_...`.

    Args:
        build: trainer and data of a phase, at the position of the newest checkpoint.
        run: records the start of the first of them.
        folder: run directory of the run to come.
    """
    first, last = phases[0][0], phases[-1][0]
    for phase, source in phases:
        trainer, data = build(phase, source)
        show_run(phase.args, origins, run if phase is first else None, backend, backend.unwrap(), data, phase)
        if find_or_train(trainer, origins, folder, data):
            return None
        if phase is last:
            return trainer, data
        if data.train is not None:
            data.train.close()
        backend.forget()
        del trainer, data  # freed before the next ones are built


def find_or_train(trainer: TrainingLoop, origins: Mapping[str, str], folder: str | None, data: RunData) -> bool:
    """Train or validate; or run `--find_lr` or `--find_micro_batch`, close the run, and return True.

    Args:
        folder: run directory of the run to come.
    """
    args, backend = trainer.args, trainer.backend
    if not args.finds():
        with watched(args, origins, backend):
            train_or_validate(trainer)
        return False
    if args.find_micro_batch:
        find_micro_batch(trainer, folder)
    else:
        find_lr(trainer, folder)
    close_run(backend, data)
    return True

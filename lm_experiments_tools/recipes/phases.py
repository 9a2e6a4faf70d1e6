"""The remaining phases of a pre-training run, and their checks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from lm_experiments_tools.backends.collective import on_all, on_main
from lm_experiments_tools.checkpoint.train_state import read_state_file
from lm_experiments_tools.checkpoint.writer import find_resume
from lm_experiments_tools.config.lengths import in_updates
from lm_experiments_tools.config.phases import timeline
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.models.build import build_model
from lm_experiments_tools.models.freezing import train_only
from lm_experiments_tools.recipes.common import ModelSource, model_source, start_run
from lm_experiments_tools.training.phases import Phase

if TYPE_CHECKING:
    from lm_experiments_tools.backends.backend import Backend
    from lm_experiments_tools.config.bert import BertPretrainingArgs
    from lm_experiments_tools.config.pretraining import T5PretrainingArgs
    from lm_experiments_tools.tracking.run_directory import RunDirectory


def start_phases(
    args: T5PretrainingArgs | BertPretrainingArgs, backend: Backend
) -> tuple[list[Phase], RunDirectory | None]:
    """Call `start_run`; returns the remaining phases, with lengths in updates. A run without phases is one phase.

    The first phase is that of the newest checkpoint, even if only its end is left to do.

    Raises:
        UserError: as `start_run`; or there are fewer phases than the run has made.
    """
    whole = args if args.phases else in_updates(args, backend.world_size)
    run = start_run(whole, backend)
    number, first, branch = 0, 0, None
    if args.phases or args.branch_from:
        number, first, branch = on_main(backend, lambda: _place(args), takes_long=True)
    parts = timeline(args, backend.world_size, first)
    if number >= len(parts):
        raise UserError(f"--phases has {len(parts)} phases, and {args.model_path} is in phase {number + 1}.")
    starts = [first, *(part.iters for part in parts)]
    recorded, end = args if args.phases else parts[0], starts[-1]
    phases = [Phase(part, recorded, k, starts[k], first, end, branch) for k, part in enumerate(parts)][number:]
    later = [replace(phase, args=replace(phase.args, resume="auto")) for phase in phases[1:]]
    return [phases[0], *later], run


def _place(args: T5PretrainingArgs | BertPretrainingArgs) -> tuple[int, int, Path | None]:
    """Number of the phase that the run is in, the step that it began at, and for a new branch its checkpoint."""
    if args.branch_from is not None and args.model_path is not None:
        trunk, own_folder = Path(args.branch_from).resolve(), Path(args.model_path).resolve()
        if own_folder in (trunk, *trunk.parents):
            raise UserError(f"--branch_from {args.branch_from} is in --model_path: give a branch a folder of its own.")
    own = find_resume(args.resume, args.model_path)
    if own is not None:
        state = read_state_file(own)
        return state.phase, state.first_step, None
    if args.branch_from is None:
        return 0, 0, None
    branch = find_resume(args.branch_from, None, flag="branch_from")
    return 0, read_state_file(branch).step, branch


def with_models(phases: list[Phase], backend: Backend) -> list[tuple[Phase, ModelSource]]:
    """Each phase and its model, the patterns of `--trained` checked. Raises UserError."""
    found = [(phase, model_source(phase.args, backend)) for phase in phases]

    def check(phase: Phase, source: ModelSource) -> None:
        with torch.device("meta"):
            train_only(build_model(source.cls, source.config, seed=0), phase.args.trained)

    for phase, source in found:
        if phase.args.trained:
            on_all(backend, lambda phase=phase, source=source: check(phase, source))
    return found

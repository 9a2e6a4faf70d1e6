"""Print the memory estimate of a run, and settings with which it fits into a given memory."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from lm_experiments_tools.config.phases import phases_of
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.planning.estimate import MemoryEstimate, estimate_memory
from lm_experiments_tools.planning.fit import largest_fit, memory_for_tensors

if TYPE_CHECKING:
    from lm_experiments_tools.config.planning import PlanningArgs
    from lm_experiments_tools.config.training import ExperimentArgs


def show(args: ExperimentArgs, planning: PlanningArgs, origins: Mapping[str, str]) -> None:
    """Print the memory estimate of a run and, with `--fit`, settings with which it fits. Raises UserError."""
    if not (args.model_cfg or args.base_model or args.init_checkpoint or getattr(args, "from_pretrained", None)):
        raise UserError("No model is named. Pass --model_cfg, a file or a preset such as t5-small, or --base_model.")
    os.chdir(args.working_folder())

    def estimate(args: ExperimentArgs) -> MemoryEstimate:
        return estimate_memory(args, planning, origins)

    phases = phases_of(args)
    estimates = [estimate(phase) for phase in phases]
    number = max(range(len(phases)), key=lambda k: estimates[k].total)
    args, given = phases[number], estimates[number]
    if len(phases) > 1:
        print(f"phase {number + 1} of {len(phases)} needs most:")
    print("\n".join(given.lines()), flush=True)
    if not planning.fit:
        return
    memory = memory_for_tensors(planning.fit, given.device)
    print(f"\n--fit {planning.fit}: {largest_fit(args, estimate, memory)}")

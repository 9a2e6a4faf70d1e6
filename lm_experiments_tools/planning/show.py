"""Print the memory estimate of a run, and settings with which it fits into a given memory."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from lm_experiments_tools.config.phases import phases_of
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.files import human_bytes
from lm_experiments_tools.planning.estimate import MemoryEstimate, estimate_memory
from lm_experiments_tools.planning.fit import largest_fit, memory_for_tensors, try_steps

if TYPE_CHECKING:
    from lm_experiments_tools.config.planning import PlanningArgs
    from lm_experiments_tools.config.training import ExperimentArgs

_LESS = 0.9  # of an estimate that did not fit, for the next proposal


def show(args: ExperimentArgs, planning: PlanningArgs, origins: Mapping[str, str]) -> None:
    """Print the memory estimate of a run and, with `--fit`, settings with which it fits.

    `--fit auto` without sharding also runs two training steps with these settings.

    Args:
        planning: device, number of workers, sharding and `--fit`.
        origins: for each setting, where its value came from; returned by `cli.parse`.

    Raises:
        UserError: no model is named, the model cannot be traced, or no settings fit.
    """
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
    found, peak = largest_fit(args, estimate, memory), None
    print(f"\n--fit {planning.fit}: {found}", flush=True)
    while planning.fit == "auto" and planning.sharding == "none" and peak is None:
        peak = try_steps(found.estimate.args, given.device, memory)
        if peak is None:
            print(f"tried: {human_bytes(found.estimate.total)} was estimated and does not fit", flush=True)
            found = largest_fit(args, estimate, _LESS * found.estimate.total)
            print(f"--fit {planning.fit}: {found}", flush=True)
        else:
            whole = ", with what libraries load" if given.device == "cpu" else ""
            print(f"tried: two steps took {human_bytes(peak)} on this {given.device}{whole}")

"""Print the memory estimate of a run, and add it to the error message when memory runs out."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from lm_experiments_tools.config.launchers import launcher_rank
from lm_experiments_tools.config.phases import phases_of
from lm_experiments_tools.config.planning import PlanningArgs
from lm_experiments_tools.errors import RunError, UserError
from lm_experiments_tools.files import human_bytes, read_json
from lm_experiments_tools.planning.estimate import MemoryEstimate, estimate_memory
from lm_experiments_tools.planning.fit import is_out_of_memory, largest_fit, memory_for_tensors, try_steps

if TYPE_CHECKING:
    from lm_experiments_tools.backends.backend import Backend
    from lm_experiments_tools.config.training import ExperimentArgs

logger = logging.getLogger(__name__)

_LESS = 0.9  # of an estimate that did not fit, for the next proposal
_NEXT = 0.8  # the same where memory ran out in a run


def show(args: ExperimentArgs, planning: PlanningArgs, origins: Mapping[str, str]) -> None:
    """Print the memory estimate, and with `--fit` settings that fit. `--fit auto` tries them for two steps.

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


def show_run(args: ExperimentArgs, origins: Mapping[str, str]) -> None:
    """Print the memory estimate of this run on rank 0 (`--plan`), for the workers that the launcher started."""
    if launcher_rank() == 0:
        show(args, of_launcher(), origins)


def of_launcher(environ: Mapping[str, str] = os.environ) -> PlanningArgs:
    """Read the number of workers and the sharding from the launcher's environment variables."""
    counts = [environ.get(name, "") for name in ("WORLD_SIZE", "HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE")]
    workers = max((int(text) for text in counts if text.isdigit()), default=1)
    stage = environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "")
    if file := environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE"):
        zero = read_json(Path(file)).get("zero_optimization")
        stage = str(zero.get("stage", stage)) if isinstance(zero, dict) else stage
    sharding = f"zero{stage}" if stage in ("1", "2", "3") else "none"
    if environ.get("ACCELERATE_USE_FSDP", "").lower() == "true":
        sharding = "fsdp"
    return PlanningArgs(workers=workers, sharding=sharding if workers > 1 else "none")


@contextmanager
def watched(args: ExperimentArgs, origins: Mapping[str, str], backend: Backend) -> Iterator[None]:
    """Context manager for training: adds the memory estimate and advice to an out-of-memory error.

    On a GPU, rank 0 also passes the estimate to the backend, which logs it next to the measured peak.

    Raises:
        RunError: the device ran out of memory.
    """

    def estimate(args: ExperimentArgs) -> MemoryEstimate:
        return estimate_memory(args, replace(of_launcher(), device=backend.device.type), origins)

    if backend.device.type == "cuda" and backend.is_main and not args.validate_only:
        try:
            backend.planned_mib = estimate(args).total / 2**20
        except UserError as error:
            logger.info("no memory estimate: %s", error)
    try:
        yield
    except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError is a RuntimeError
        if not is_out_of_memory(error):
            raise
        reason = str(error).rpartition("DefaultCPUAllocator: ")[2].split(". ")[0] or "Python's own objects"
        message = f"out of memory ({reason}). "
        try:
            estimated = estimate(args)
            parts = ", ".join(f"{name} {human_bytes(size)}" for name, size in estimated.parts.items() if size)
            message += (
                f"The estimate was {human_bytes(estimated.total)} for micro-batches of {args.batch_size}: {parts}. "
            )
            found = largest_fit(args, estimate, _NEXT * estimated.total)
            message += (
                f"Try {found.flags}, estimated at {human_bytes(found.estimate.total)}, with the same rows per update."
            )
        except UserError as no_estimate:
            message += f"{no_estimate} Try a smaller --batch_size with more --gradient_accumulation_steps."
        raise RunError(message) from error

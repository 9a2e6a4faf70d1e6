"""Print the plan of a run: the closed form at once, then the trace that checks it, then what would fit."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm_experiments_tools.config.launchers import launcher_rank
from lm_experiments_tools.config.planning import PlanningArgs
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.files import human_bytes, read_json
from lm_experiments_tools.planning.fit import USABLE, Fit, fit, lines_of_fit, memory_of
from lm_experiments_tools.planning.plan import Plan, device_of, make_plan, model_settings, with_checkpoint
from lm_experiments_tools.planning.report import compared, lines_of, lines_of_offload

if TYPE_CHECKING:
    from lm_experiments_tools.config.training import ExperimentArgs


_LESS = 0.9  # of the predicted peak, for the next proposal after one that did not fit


def show(args: ExperimentArgs, planning: PlanningArgs, origins: Mapping[str, str]) -> None:
    """Print the plan of settings.

    Args:
        origins: of the settings, as `cli.parse` gives them.

    Raises:
        UserError: no model is named, or neither way knows it, or nothing fits.
    """
    args = with_checkpoint(args)
    config = model_settings(args)
    try:
        plan = make_plan(args, planning, origins, config)
    except UserError as error:
        if planning.fit or not planning.trace or args.model_cls is None:
            raise
        print(f"no closed form: {error}", flush=True)
        print(_trace_alone(args, planning, config))
        return
    found = fit(args, planning, origins, config, plan) if planning.fit else None
    print("\n".join(lines_of(plan)), flush=True)
    if offloaded := lines_of_offload(plan, measured=planning.trace and Path("/dev/nvidia0").exists()):
        print("\n" + "\n".join(offloaded), flush=True)
    if planning.trace:
        print("\n" + "\n".join(_traced(plan)), flush=True)
    if found is not None:
        print("\n" + "\n".join(lines_of_fit(found, args, planning.fit)), flush=True)
        if planning.trace and found.changed:
            print("\n".join(_traced(found.plan)), flush=True)
        if planning.trace and planning.fit == "auto":
            _try(found, lambda below: fit(args, planning, origins, config, plan, below), args, planning)


def _try(found: Fit, fit_below: Callable[[float], Fit], args: ExperimentArgs, planning: PlanningArgs) -> None:
    """Make two steps of what is proposed, and of less while these do not fit.

    Raises:
        UserError: nothing fits.
    """
    from lm_experiments_tools.planning.trial import try_plan

    if planning.sharding != "none":
        print(f"not tried: one process alone cannot do as --sharding {planning.sharding}")
        return
    memory = USABLE * memory_of(found.plan.device)
    while True:
        predicted = human_bytes(found.plan.peak.total)
        try:
            peak = try_plan(found.plan, memory).peak
        except UserError as error:
            print(f"not tried: {error}")
            return
        if peak is not None:
            whole = "; a CPU's is that of the process, with what libraries load" if found.plan.device == "cpu" else ""
            took = f"two steps took {human_bytes(peak)} (predicted {predicted}{whole})"
            print(f"tried on this {found.plan.device}: {took}")
            return
        print(f"tried on this {found.plan.device}: {predicted} were predicted, and it does not fit; less:", flush=True)
        found = fit_below(_LESS * found.plan.peak.total)
        print("\n".join(lines_of_fit(found, args, planning.fit)), flush=True)


def show_run(args: ExperimentArgs, origins: Mapping[str, str]) -> None:
    """Print the plan of a script's run (`--plan`), on rank 0, for the workers that its launcher has started."""
    if launcher_rank() == 0:
        show(args, of_launcher(), origins)


def of_launcher(environ: Mapping[str, str] = os.environ) -> PlanningArgs:
    """Workers and sharding as the launcher's environment tells them."""
    told = [environ.get(name, "") for name in ("WORLD_SIZE", "HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE")]
    workers = max((int(text) for text in told if text.isdigit()), default=1)
    stage, away = environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", ""), "none"
    devices = [environ.get(f"ACCELERATE_DEEPSPEED_OFFLOAD_{name}_DEVICE") for name in ("OPTIMIZER", "PARAM")]
    if file := environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE"):
        zero = _object(read_json(Path(file)).get("zero_optimization"))
        stage = str(zero.get("stage", stage))
        devices = [_object(zero.get(f"offload_{name}")).get("device") for name in ("optimizer", "param")]
    if environ.get("ACCELERATE_USE_FSDP", "").lower() == "true":
        sharding, away = "fsdp", "all" if environ.get("FSDP_OFFLOAD_PARAMS", "").lower() == "true" else "none"
    else:
        sharding = f"zero{stage}" if stage in ("1", "2", "3") else "none"
        if sharding != "none" and devices[0] == "cpu":
            away = "all" if sharding == "zero3" and devices[1] == "cpu" else "optimizer"
    if workers == 1 and away == "none":
        sharding = "none"
    return PlanningArgs(workers=workers, sharding=sharding, offload=away)


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _traced(plan: Plan) -> list[str]:
    from lm_experiments_tools.planning.build import traced  # torch, which the closed form does without

    try:
        return compared(plan, traced(plan))
    except UserError as error:
        return [f"not traced: {error}"]


def _trace_alone(args: ExperimentArgs, planning: PlanningArgs, config: Mapping[str, Any]) -> str:
    """Of a model that no formula describes. Raises UserError."""
    from lm_experiments_tools.planning.build import trace_plan

    if device_of(planning.device) != "cpu":
        raise UserError("only a CPU's tensors are traced: add --device cpu")
    target = args.target_seq_len if config.get("is_encoder_decoder") else 0
    found = trace_plan(replace(args, speed="off"), args.input_seq_len, target, None)
    parts = ", ".join(f"{name} {human_bytes(size)}" for name, size in found.parts.items() if size)
    return f"traced: {human_bytes(found.peak)} in the {found.moment} ({parts})"

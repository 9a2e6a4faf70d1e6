"""The plan beside a run: predicted over measured memory in its log, and what to try where memory did not suffice."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from lm_experiments_tools.config.planning import PlanningArgs
from lm_experiments_tools.errors import RunError, UserError
from lm_experiments_tools.files import human_bytes
from lm_experiments_tools.planning.fit import USABLE, fit
from lm_experiments_tools.planning.plan import Plan, make_plan
from lm_experiments_tools.planning.show import of_launcher
from lm_experiments_tools.planning.trial import is_out_of_memory

if TYPE_CHECKING:
    from lm_experiments_tools.backends.backend import Backend
    from lm_experiments_tools.config.training import ExperimentArgs

logger = logging.getLogger(__name__)

_NEXT = 0.8  # of the planned peak that the next setting must stay below, where the plan said that it would fit


@contextmanager
def watched(args: ExperimentArgs, origins: Mapping[str, str], backend: Backend) -> Iterator[None]:
    """Train in it: logs the plan beside what was measured, once, at the end.

    Raises:
        RunError: the device ran out of memory; says what was planned, and what to try next.
    """
    planned = planned_for(args, origins, backend)
    if planned is not None:
        backend.planned_mib = _predicted(planned) / 2**20
    try:
        yield
    except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError is a RuntimeError
        if not is_out_of_memory(error):
            raise
        raise RunError(_sentence(args, origins, backend, planned, error)) from error
    if planned is not None and backend.is_main and not args.validate_only:
        _log(planned, backend)


def config_of(backend: Backend) -> dict:
    """Configuration of the model that was built."""
    config = backend.unwrap().config
    return {**config.to_dict(), "attn_implementation": getattr(config, "_attn_implementation", None)}


def planning_of(backend: Backend, memory: float | None = None) -> PlanningArgs:
    """Device and workers of a run, and the bytes that a setting is to fit into."""
    told, fits = of_launcher(), None if memory is None else f"{int(memory)}B"
    return replace(told, device=backend.device.type, fit=fits)


def planned_for(args: ExperimentArgs, origins: Mapping[str, str], backend: Backend) -> Plan | None:
    """The plan of what was built; None for a model or a device that no formula describes."""
    if backend.device.type not in ("cpu", "cuda") or not hasattr(backend.unwrap(), "config"):
        return None
    try:
        return make_plan(args, planning_of(backend), origins, config_of(backend))
    except UserError:
        return None


def _predicted(plan: Plan) -> float:
    return plan.host() if plan.device == "cpu" else plan.peak.total


def _log(plan: Plan, backend: Backend) -> None:
    """On a GPU tensors are compared with tensors; on a CPU the process, of which the plan knows the size roughly."""
    on_cpu = plan.device == "cpu"
    predicted, measured = _predicted(plan), backend.peak_memory_mib() * 2**20
    kind = "of the whole process, resident; predicted roughly" if on_cpu else "of tensors on the GPU"
    logger.info(
        "memory: predicted %s, measured %s (%s), memory/predicted_over_measured %.2f",
        human_bytes(predicted),
        human_bytes(measured),
        kind,
        predicted / measured,
    )


def _sentence(
    args: ExperimentArgs, origins: Mapping[str, str], backend: Backend, plan: Plan | None, error: Exception
) -> str:
    """What ran out, what was planned, what to try."""
    said = str(error).rpartition("DefaultCPUAllocator: ")[2].split(". ")[0] or "Python's own objects"
    if plan is None:
        return f"out of memory ({said}): try a smaller --batch_size with more --gradient_accumulation_steps"
    parts = ", ".join(f"{name} {human_bytes(size)}" for name, size in plan.peak.parts.items() if size)
    lines = f"out of memory ({said}); planned were {human_bytes(plan.peak.total)} for micro-batches of "
    lines += f"{args.batch_size}: {parts}"
    try:
        planning = planning_of(backend, _NEXT * plan.peak.total / USABLE)
        found = fit(args, planning, origins, config_of(backend), plan)
    except UserError as impossible:
        return f"{lines}. {impossible}"
    return f"{lines}; try {found.flags()}, planned at {human_bytes(found.plan.peak.total)}, as many rows an update"

"""The inverse of a plan: settings for the same global batch that fit into so much memory; loads no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from lm_experiments_tools.config.planning import bytes_of
from lm_experiments_tools.data.tokens.cold import available_memory
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.files import human_bytes
from lm_experiments_tools.planning.plan import Plan, make_plan

if TYPE_CHECKING:
    from lm_experiments_tools.config.planning import PlanningArgs
    from lm_experiments_tools.config.training import ExperimentArgs

USABLE = 0.92  # of the memory: the rest is the allocator's, and on a GPU CUDA's own


class Fit(NamedTuple):
    """Settings that fit, and what they changed as flags."""

    plan: Plan
    changed: dict[str, Any]

    def flags(self) -> str:
        """What to add to the command line; empty where nothing has to be changed."""
        return " ".join(f"--{name}" if value is True else f"--{name} {value}" for name, value in self.changed.items())


def memory_of(device: str) -> int:
    """Bytes that are free on this process's GPU, or in main memory within the limit of its container.

    Raises:
        UserError: PyTorch can use no GPU.
    """
    if device == "cpu":
        return available_memory()
    import torch  # seconds, which a plan with a size given does without

    if not torch.cuda.is_available():
        raise UserError("--fit auto: PyTorch finds no GPU (see CUDA_VISIBLE_DEVICES). Pass a size, such as 24GiB.")
    return torch.cuda.mem_get_info()[0]


def fit(
    args: ExperimentArgs,
    planning: PlanningArgs,
    origins: Mapping[str, str],
    config: Mapping[str, Any],
    plan: Plan,
    below: float | None = None,
) -> Fit:
    """The settings nearest to the given ones that fit into `--fit`: as large a micro-batch as can be without
    recomputation, then with it, then Adafactor. The rows of an update stay what they are.

    Args:
        below: bytes that the predicted peak has to stay below, instead of what `--fit` leaves usable.

    Raises:
        UserError: not even one row fits.
    """
    memory = bytes_to_fit(plan, planning) if below is None else below / USABLE
    rows = args.rows_per_worker()
    optimizers = list(dict.fromkeys([args.optimizer, "Adafactor"]))
    checkpointing = list(dict.fromkeys([args.gradient_checkpointing, True]))
    least = plan
    for optimizer in optimizers:
        for recompute in checkpointing:
            for size in (size for size in range(rows, 0, -1) if rows % size == 0):
                changed = {
                    "batch_size": size,
                    "gradient_accumulation_steps": rows // size,
                    "gradient_checkpointing": recompute,
                    "optimizer": optimizer,
                }
                options = {} if optimizer == args.optimizer else {"optimizer_options": ()}
                tried = make_plan(replace(args, **changed, **options), planning, origins, config)
                if tried.peak.total <= USABLE * memory:
                    return Fit(tried, {n: v for n, v in changed.items() if v != getattr(args, n)})
                least = min(least, tried, key=lambda plan: plan.peak.total)
    raise UserError(
        f"{human_bytes(memory)} are too little: with micro-batches of {least.args.batch_size}, "
        f"{'gradient checkpointing' if least.step.checkpointing else 'no gradient checkpointing'} and "
        f"{least.args.optimizer} the closed form still says {human_bytes(least.peak.total)}; shorten the rows, "
        "divide the model among more workers (--workers N --sharding fsdp), or take adapters or a smaller model."
    )


def bytes_to_fit(plan: Plan, planning: PlanningArgs) -> int:
    """The memory of `--fit`, in bytes."""
    return memory_of(plan.device) if planning.fit == "auto" else bytes_of(planning.fit)


def lines_of_fit(found: Fit, args: ExperimentArgs, memory: str) -> list[str]:
    """What is proposed, and what it means."""
    changed = found.flags()
    rows = args.rows_per_worker()
    if not changed:
        return [f"--fit {memory}: fits as it is, {human_bytes(found.plan.peak.total)}"]
    lines = [
        f"--fit {memory}: {changed}",
        f"  predicted peak {human_bytes(found.plan.peak.total)}; still {rows} rows an update",
    ]
    if "optimizer" in found.changed:
        lines.append(f"  another optimizer than {args.optimizer} wants another learning rate")
    return lines

"""What a script prints with `--dry_run`: settings, data with a first example, memory and time. Nothing is trained."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from lm_experiments_tools.config.bert import BertPretrainingArgs
from lm_experiments_tools.config.cli import to_yaml
from lm_experiments_tools.config.finetuning import FinetuningArgs
from lm_experiments_tools.config.phases import phases_of
from lm_experiments_tools.config.planning import PlanningArgs
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.planning.build import prepare
from lm_experiments_tools.planning.estimate import MemoryEstimate, estimate_memory
from lm_experiments_tools.planning.fit import memory_for_tensors
from lm_experiments_tools.planning.trace import run_passes, update
from lm_experiments_tools.tools import inspect
from lm_experiments_tools.tracking.tracker import duration

_DOCUMENTS = 1000  # of text, which the run would tokenize whole
_TIMED_STEPS = 2  # after one that allocates


def show(args: Any, origins: Mapping[str, str]) -> None:
    """Print settings, data, memory and time of a run. Data and model are opened as the run would open them.

    Raises:
        UserError: the data or the model cannot be used.
    """
    print("settings that are given")
    print("\n".join(f"  {line}" for line in to_yaml(args, origins).splitlines() if "  # " in line))
    kinds = ((BertPretrainingArgs, "pretrain-bert"), (FinetuningArgs, "finetune"))
    script = next((name for kind, name in kinds if isinstance(args, kind)), "pretrain-t5")
    inspected = inspect.SCRIPTS[script]
    settings = {field.name: getattr(args, field.name) for field in fields(args)}
    more = {"documents": _DOCUMENTS} if script == "pretrain-t5" and not args.through_seqio() else {}
    inspect.show(script, inspected(**settings, samples=1, **more))
    print("\nmemory and time")
    try:
        planned = [estimate_memory(phase, PlanningArgs(), origins) for phase in phases_of(args)]
    except UserError as error:
        print(f"  not estimated: {error}")
        return
    largest = max(planned, key=lambda estimate: estimate.total)
    print("\n".join(f"  {line}".rstrip() for line in largest.lines()))
    print(f"  {_time(largest)}")


def _time(estimate: MemoryEstimate) -> str:
    """Time of the updates of a run, from steps of a new model on random tokens."""
    args = estimate.args
    if estimate.total > memory_for_tensors("auto", estimate.device):
        return "It does not fit into the free memory, so no step is timed: lmtools plan --fit auto finds what fits."
    prepared = prepare(args, estimate.device)
    prepared.model.train()
    started = time.perf_counter()
    for number in range(_TIMED_STEPS + 1):
        if number == 1:
            started = time.perf_counter()
        run_passes(prepared)
        update(prepared)
        prepared.optimizer.zero_grad(set_to_none=True)
        next(prepared.model.parameters()).detach().flatten()[0].item()  # waits for a GPU
    seconds = (time.perf_counter() - started) / _TIMED_STEPS * args.gradient_accumulation_steps
    text = f"an update takes about {seconds:.2g} s on this {estimate.device}, without data and validation"
    known = getattr(args, "epochs", None) is None and not getattr(args, "phases", ())
    return f"{text}; {args.iters:,} take {duration(args.iters * seconds)}" if known else text

"""What a script prints with `--dry_run`: settings, data with a first example, memory and time. Nothing is trained."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from lm_experiments_tools.backends.backend import LocalBackend
from lm_experiments_tools.config.bert import BertPretrainingArgs
from lm_experiments_tools.config.cli import to_yaml
from lm_experiments_tools.config.finetuning import FinetuningArgs
from lm_experiments_tools.config.launchers import launcher_size
from lm_experiments_tools.config.lengths import in_updates
from lm_experiments_tools.config.phases import phases_of
from lm_experiments_tools.config.planning import PlanningArgs
from lm_experiments_tools.config.pretraining import T5PretrainingArgs
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.planning.build import prepare
from lm_experiments_tools.planning.estimate import MemoryEstimate, estimate_memory
from lm_experiments_tools.planning.fit import memory_for_tensors
from lm_experiments_tools.planning.trace import run_passes, update
from lm_experiments_tools.recipes.bert import BertPretraining
from lm_experiments_tools.recipes.common import check_phases
from lm_experiments_tools.recipes.recipe import with_models
from lm_experiments_tools.recipes.t5 import T5Pretraining
from lm_experiments_tools.recipes.t5_sources import sources_of_phases
from lm_experiments_tools.tools import inspect
from lm_experiments_tools.tracking.tracker import duration
from lm_experiments_tools.training.distillation import DISTILLATION
from lm_experiments_tools.training.phases import Phase

_DOCUMENTS = 1000  # of text, which the run would tokenize whole
_LOSSES = ("loss", "loss_mlm", "loss_nsp", "loss_lm", DISTILLATION, "bits_per_byte")  # those of all models
_TIMED_STEPS = 2  # after one that allocates


def show(args: Any, origins: Mapping[str, str]) -> None:
    """Print settings, data, memory and time of a run. Data and model are opened as the run would open them.

    Raises UserError: the data or the model cannot be used.
    """
    print("settings that are given")
    print("\n".join(f"  {line}" for line in to_yaml(args, origins).splitlines() if "  # " in line))
    kinds = ((BertPretrainingArgs, "pretrain-bert"), (FinetuningArgs, "finetune"))
    script = next((name for kind, name in kinds if isinstance(args, kind)), "pretrain-t5")
    os.chdir(args.working_folder())
    args, workers = replace(args, working_dir="."), launcher_size()
    check_phases(args, workers)
    if script != "finetune":
        _check_models(args, origins)
    phases = phases_of(args)
    if len(phases) > 1:
        print(f"\nphase 1 of {len(phases)}")
    settings = {field.name: getattr(phases[0], field.name) for field in fields(args)}
    documents = (
        {} if script == "finetune" or getattr(args, "is_registered_task", bool)() else {"documents": _DOCUMENTS}
    )
    inspect.show(script, inspect.SCRIPTS[script](**settings, samples=1, world_size=workers, **documents))
    print("\nmemory and time")
    try:
        planned = [estimate_memory(phase, PlanningArgs(workers=workers), origins) for phase in phases]
    except UserError as error:
        print(f"  not estimated: {error}")
        return
    largest = max(planned, key=lambda estimate: estimate.total)
    print("\n".join(f"  {line}".rstrip() for line in largest.lines()))
    # With an adapter it has no weights of the base model.
    saved = [p for p in largest.prepared.model.parameters() if p.requires_grad or getattr(args, "peft", None) is None]
    size = sum(p.nbytes for p in saved) + largest.parts["optimizer state"]
    print(f"  A checkpoint takes {size / 2**20:,.1f} MiB on disk; --keep_checkpoints {args.keep_checkpoints}.")
    if largest.total > memory_for_tensors("auto", largest.device):
        print("  It does not fit into the free memory, so no step is timed: lmtools plan --fit auto finds what fits.")
        return
    total = 0.0
    for number, (phase, estimate) in enumerate(zip(phases, planned, strict=True), 1):
        seconds, updates = _seconds_of_update(estimate), in_updates(phase, workers).iters
        total += updates * seconds
        text = f"an update takes about {seconds:.2g} s on this {estimate.device}, without data and validation"
        length = f"; {updates:,} take {duration(updates * seconds)}" if getattr(args, "epochs", None) is None else ""
        print(f"  {f'phase {number}: ' if len(phases) > 1 else ''}{text}{length}")
    if len(phases) > 1:
        print(f"  all phases take {duration(total)}")


def _check_models(args: Any, origins: Mapping[str, str]) -> None:
    """Refuse what pre-training refuses before it reads data, such as a model that does not fit the task."""
    is_t5 = isinstance(args, T5PretrainingArgs)
    recipe = T5Pretraining(args, origins, lambda: sources_of_phases(args)) if is_t5 else BertPretraining(args, origins)
    recipe.backend = LocalBackend.from_args(replace(args, fp16_allreduce=False))
    phases = [Phase(part, args, number) for number, part in enumerate(phases_of(args))]
    for phase, source in with_models(phases, recipe.backend, recipe.special_tokens):
        recipe.check(phase.args, source)
        metric, names = phase.args.optimize_metric, [*_LOSSES, *recipe.metric_names(phase.args)]
        if metric not in names and not phase.args.lacks_validation():
            raise UserError(f"--optimize_metric {metric}: validation gives {', '.join(names)}.")


def _seconds_of_update(estimate: MemoryEstimate) -> float:
    """Time of an update, from steps of a new model on random tokens."""
    prepared = prepare(estimate.args, estimate.device)
    prepared.model.train()
    started = time.perf_counter()
    for number in range(_TIMED_STEPS + 1):
        if number == 1:
            started = time.perf_counter()
        run_passes(prepared)
        update(prepared)
        prepared.optimizer.zero_grad(set_to_none=True)
        next(prepared.model.parameters()).detach().flatten()[0].item()  # waits for a GPU
    return (time.perf_counter() - started) / _TIMED_STEPS * estimate.args.gradient_accumulation_steps

"""Facts about a run that every checkpoint records and a restart compares, whoever built the run."""

from __future__ import annotations

import ast
import hashlib
import inspect
import re
import sys
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from lm_experiments_tools.backends.collective import on_all
from lm_experiments_tools.config.flags import harmless_flags
from lm_experiments_tools.files import to_jsonable
from lm_experiments_tools.names import is_of_user
from lm_experiments_tools.tracking.run_directory import differences, refuse_or_report
from lm_experiments_tools.training.micro_batches import num_rows_of

if TYPE_CHECKING:
    from lm_experiments_tools.config.training import TrainerArgs
    from lm_experiments_tools.training.step import Loop

_NAME = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
# Keys of a Hugging Face configuration that describe files and versions, not computation. The forward pass of a
# classifier sets problem_type.
_UNCOMPARED = {"_name_or_path", "_commit_hash", "architectures", "transformers_version", "dtype", "torch_dtype"}
_UNCOMPARED |= {"problem_type"}
_KERNELS = {"foreach", "fused", "capturable", "differentiable", "initial_lr"}


def run_facts(args: TrainerArgs, world_size: int, model: nn.Module, optimizer: Optimizer | None) -> dict[str, Any]:
    """Settings, model configuration, optimizer settings and source of user classes, {name: JSON value}.

    Args:
        world_size: number of workers, virtual ones with `--reproducible elastic`.
        model: as built, before a backend wraps it.
    """
    harmless = harmless_flags(type(args))
    facts = {name: value for name, value in asdict(args).items() if name not in harmless}
    facts |= {"WORLD_SIZE": world_size, **_model_facts(model)}
    if optimizer is not None and not hasattr(args, "optimizer"):  # else the flags say it all
        groups = optimizer.param_groups
        names = sorted(name for name in groups[0] if name != "params" and name not in _KERNELS)
        facts |= {f"optimizer.{name}": [_plain(group.get(name)) for group in groups] for name in names}
    facts |= _sources([*map(type, model.modules()), type(optimizer), *_named(facts.values())])
    return to_jsonable(facts)


def check_facts(loop: Loop, path: Path, now: Mapping[str, Any]) -> None:
    """Compare the checkpoint that `loop` has loaded with this start; the schedule keeps its length.

    Raises:
        UserError: facts differ, and the checkpoint was not named by `--resume PATH`, which only logs what differs.
    """
    state, resume = loop.state, loop.args.resume_path() is not None
    differing = differences(state.facts, now)
    if state.facts.get("WORLD_SIZE") != now["WORLD_SIZE"]:  # the loop warns of another number of workers
        differing.pop("global_batch_size", None)
    on_all(loop.backend, lambda: refuse_or_report(path.parent.parent, differing, resume=resume), only_main=True)
    valid = _data_identity(loop.valid_dataloader)
    if None not in (valid, state.valid_fingerprint) and valid != state.valid_fingerprint:
        loop.say("the validation data is not that of the checkpoint: best metric and patience start afresh")
        state.best_metric, state.best_step, state.patience = None, None, 0
    if change := loop.learning_rate.keep_length(state):
        loop.say(change)


def record_facts(loop: Loop, facts: dict[str, Any]) -> None:
    """Put into the state what the next restart compares."""
    state = loop.state
    state.facts, state.schedule_steps = facts, loop.learning_rate.length
    state.valid_fingerprint = _data_identity(loop.valid_dataloader) or state.valid_fingerprint
    state.data_order = loop.stream and loop.stream.order


def _data_identity(loader: Any) -> str | None:
    """The loader's fingerprint; of other loaders the number of rows, if they know it."""
    if loader is None or (fingerprint := getattr(loader, "fingerprint", None)) is not None:
        return None if loader is None else fingerprint
    num_rows = num_rows_of(getattr(loader, "dataset", None))
    return None if num_rows is None else f"{num_rows} rows"


def _model_facts(model: nn.Module) -> dict[str, Any]:
    """The configuration; of a model without one, the hyperparameters that its modules print."""
    base = getattr(model, "base_fingerprint", None)
    facts = {} if base is None else {"weights of the base model": base}
    if not hasattr(getattr(model, "config", None), "to_dict"):
        return {**facts, "modules of the model": _digest(repr(model))}
    config = model.config.to_dict()
    return {**facts, **{f"model_config.{key}": value for key, value in config.items() if key not in _UNCOMPARED}}


def _plain(value: Any) -> Any:
    """A setting of an optimizer as JSON; numbers may be tensors, and what has no JSON form is left out."""
    value = value.tolist() if hasattr(value, "tolist") else value
    return value if isinstance(value, (bool, int, float, str, tuple, list)) else None


def _named(values: Iterable[Any]) -> list[Any]:
    """Imported objects that settings name as module:Name."""
    names = [value.split(":") for value in values if isinstance(value, str) and _NAME.fullmatch(value)]
    return [getattr(sys.modules[module], name, None) for module, name in names if module in sys.modules]


def _sources(objects: Iterable[Any]) -> Mapping[str, str]:
    """Hashes of the source of the user's classes and functions, base classes included.

    Comments and layout do not count. Installed packages are told apart by their versions (env.json).
    """
    found = {}
    for cls in dict.fromkeys(base for item in objects for base in getattr(item, "__mro__", (item,))):
        if not is_of_user(cls):
            continue
        try:
            text = ast.unparse(ast.parse(textwrap.dedent(inspect.getsource(cls))))
        except (OSError, TypeError, SyntaxError):  # no source: defined interactively, or in C
            continue
        found[f"source of {cls.__module__}:{cls.__qualname__}"] = _digest(text)
    return found


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]

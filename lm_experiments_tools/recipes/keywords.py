"""Flags of the scripts as keywords of `FineTuner` and `PreTrainer`, and what both do alike."""

from __future__ import annotations

import functools
import logging
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from lm_experiments_tools.backends.collective import on_main
from lm_experiments_tools.checkpoint import weights as checkpoint
from lm_experiments_tools.config.suggestions import suggestion
from lm_experiments_tools.errors import RunError, UserError
from lm_experiments_tools.models.speed import fast_process

if TYPE_CHECKING:
    from torch import nn

    from lm_experiments_tools.backends.backend import Backend
    from lm_experiments_tools.training.trainer import TrainingLoop

logger = logging.getLogger(__name__)
T = TypeVar("T")
Args = TypeVar("Args")


def fast(method: Callable[..., T]) -> Callable[..., T]:
    """Decorator: run a method with the process-wide settings of `speed` in its object's `args`."""

    @functools.wraps(method)
    def run(self: Any, *args: Any, **options: Any) -> T:
        with fast_process(self.args):
            return method(self, *args, **options)

    return run


@contextmanager
def stop_button(trained: Callable[[], TrainingLoop]) -> Iterator[None]:
    """Context in which Ctrl-C ends training, not the program: in a notebook and at Python's prompt.

    Raises RunError: no update has been made.
    """
    try:
        yield
    except SystemExit as stop:
        # A script that is stopped must exit with the code that batch systems expect.
        if stop.code != 128 + signal.SIGINT or not hasattr(sys, "ps1"):
            raise
        loop = trained()
        if not loop.state.step:
            raise RunError("training was stopped before its first update") from None
        # Else the next validation of this loop would stop too.
        loop.signals.agreed = 0
        logger.warning("training was stopped after update %d: the object has its weights", loop.state.step)


def as_flag(name: str, value: Any, default: Any) -> Any:
    """Convert a setting to the type of its flag: paths to text, lists and single names to tuples, model_path none."""
    if isinstance(default, tuple):
        values = (value,) if isinstance(value, str) or not isinstance(value, Iterable) else tuple(value)
        return tuple(str(item) if isinstance(item, Path) else item for item in values)
    if name == "model_path" and value == "none":
        return None
    return str(value) if isinstance(value, Path) else value


def changed_args(
    args_class: type[Args],
    args: Args | None,
    settings: Mapping[str, Any],
    *,
    owner: str,
    refused: Mapping[str, str],
    as_flag: Callable[[str, Any, Any], Any] = as_flag,
) -> Args:
    """Build arguments from settings, or replace some of them.

    Args:
        args: arguments to change; None for new ones.
        refused: settings that only a script takes: name -> script.

    Raises:
        UserError: an unknown, refused or impossible setting.
    """
    known = {field.name: field for field in fields(args_class)}
    # A length replaces one of an earlier call in the other unit.
    if "iters" in settings:
        settings = {"epochs": None, **settings}
    elif settings.get("epochs") is not None:
        settings = {"iters": known["iters"].default, **settings}
    for name in settings:
        if name not in known:
            hint = suggestion(name, known, listed_by="the script's --help")
            raise UserError(f"{owner} has no setting {name!r}{hint}")
        if name in refused and settings[name] != known[name].default:
            raise UserError(f"{owner} does not take {name}, a setting of {refused[name]} alone.")
    values = {name: as_flag(name, value, known[name].default) for name, value in settings.items()}
    return args_class(**values) if args is None else replace(args, **values)


def save_folder(folder: Path, backend: Backend, model: nn.Module, write: Callable[[Path], object]) -> None:
    """Save a model as a folder for `from_pretrained`; collective."""
    state = backend.state.model_state() if backend.unwrap() is model else None

    def save() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        checkpoint.save_model(folder, model, state_dict=state)
        write(folder)

    on_main(backend, save)

"""Layout classes of a user's own: settings that their `__init__` takes, blocks that are tensors, arrays or lists."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from lm_experiments_tools.attention.kernels.plan import describe
from lm_experiments_tools.errors import UserError

if TYPE_CHECKING:
    from lm_experiments_tools.attention.layouts import SparsityConfig


def arguments_of(config_cls: type[SparsityConfig]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments of a class by name, and settings that it hands on by **kwargs; each with its default or MISSING."""
    parameters = list(inspect.signature(config_cls.__init__).parameters.values())[1:]
    named = {p.name: p.default for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    named = {name: MISSING if default is inspect.Parameter.empty else default for name, default in named.items()}
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        return named, {}
    return named, {f.name: f.default for f in fields(config_cls) if f.init and f.name not in named}


def plain(value: object) -> object:
    """A setting as JSON holds it."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    return [plain(item) for item in value] if isinstance(value, tuple) else value


def giving_tensors(make_layout: Callable[..., object]) -> Callable[..., Tensor]:
    """A method `make_layout` that may give arrays or lists, giving tensors."""

    @functools.wraps(make_layout)
    def make_tensor(self: SparsityConfig, *args: Any, **kwargs: Any) -> Tensor:
        return as_layout(make_layout(self, *args, **kwargs), self, "make_layout")

    return make_tensor


def as_layout(made: object, config: SparsityConfig, method: str) -> Tensor:
    """What a method of a user's class made, as a tensor.

    Raises:
        UserError: no tensor [heads or 1, blocks, blocks] of 0 and 1.
    """
    layout = made
    if isinstance(made, np.ndarray | list | tuple):
        try:
            layout = torch.as_tensor(made, device="cpu")
        except (TypeError, ValueError, RuntimeError):  # ragged, or no numbers
            layout = None
    if not isinstance(layout, Tensor) or layout.dim() != 3 or 0 in layout.shape:
        raise UserError(
            f"{type(config).__name__}: {method} gave {describe(made)}; it must give a tensor [heads or 1, blocks, "
            "blocks]."
        )
    if layout.dtype != torch.bool and not ((layout == 0) | (layout == 1)).all():
        raise UserError(
            f"{type(config).__name__}: {method} gave values besides 0 and 1: give 1 where attended and 0 elsewhere."
        )
    return layout

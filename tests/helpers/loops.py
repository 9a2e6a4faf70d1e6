"""A training loop in one process, for the tests of what happens in it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any

import torch
from torch import nn

from lm_experiments_tools.backends.backend import Backend, LocalBackend
from lm_experiments_tools.config.training import TrainerArgs
from lm_experiments_tools.training.metrics import StepInfo
from lm_experiments_tools.training.trainer import TrainingLoop
from tests.helpers.toys import RaggedPairs, SeekableBatches, TinyLabeller


class At:
    """A callback that calls `action(loop)` after one step."""

    every = 1

    def __init__(self, step: int, action: Callable[[TrainingLoop], object]) -> None:
        self.step, self.action = step, action

    def on_step_end(self, loop: TrainingLoop, info: StepInfo) -> None:
        if info.step == self.step:
            self.action(loop)


_ARGS = {field.name for field in fields(TrainerArgs)}


def make_loop(
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Callable[..., torch.optim.Optimizer] | None = torch.optim.AdamW,
    loader: Iterable | None = ...,
    valid: Iterable | None = None,
    *,
    backend: Backend | None = None,
    lr: float = 1e-2,
    **options: Any,
) -> TrainingLoop:
    """A loop of 3 steps of 4 rows of `RaggedPairs`; `options` are fields of `TrainerArgs` and arguments of the loop.

    Args:
        optimizer: one that is made, or a class.
        loader: None for a loop that only validates.
    """
    settings = {"batch_size": 4, "iters": 3, "log_interval": 1} | {n: v for n, v in options.items() if n in _ARGS}
    if settings.get("model_path") is not None:
        settings["model_path"] = str(settings["model_path"])
    args, backend = TrainerArgs(**settings), backend or LocalBackend()
    model = TinyLabeller() if model is None else model
    if isinstance(optimizer, type):
        optimizer = optimizer([p for p in model.parameters() if p.requires_grad], lr=lr)
    if loader is ...:
        loader = SeekableBatches(RaggedPairs(24), args.rows_per_worker(), backend.rank, backend.world_size)
    others = {name: value for name, value in options.items() if name not in _ARGS}
    return TrainingLoop(args, backend, model, optimizer, loader, valid, **others)

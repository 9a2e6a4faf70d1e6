"""Short runs of the training loop that save checkpoints, and what of these is equal for equal runs."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from lm_experiments_tools.checkpoint.manifest import read_manifest
from lm_experiments_tools.checkpoint.tree import load_tree
from lm_experiments_tools.training.trainer import TrainingLoop
from tests.helpers.loops import make_loop
from tests.helpers.toys import RaggedPairs, tiny_t5


def make_run(
    path: Path | None, callbacks: Sequence[Any] = (), model: nn.Module | None = None, **args: Any
) -> TrainingLoop:
    """A loop of 6 steps over `RaggedPairs`, with dropout, that saves every second one; continues what is in `path`."""
    settings = {"iters": 6, "save_interval": 2, "keep_checkpoints": None, **args}
    torch.manual_seed(7)
    model = model or tiny_t5(dropout=0.3)
    valid = DataLoader(RaggedPairs(4), batch_size=4) if "save_best" in args else None
    return make_loop(model, valid=valid, callbacks=callbacks, model_path=path, **settings)


def train(path: Path, callbacks: Sequence[Any] = (), model: nn.Module | None = None, **args: Any) -> TrainingLoop:
    loop = make_run(path, callbacks, model, **args)
    loop.train()
    return loop


def steps(path: Path) -> list[int]:
    return [int(entry.name.removeprefix("step_")) for entry in sorted((path / "checkpoints").glob("step_*"))]


def contents(path: Path) -> dict[str, dict[str, str]]:
    """The contents of each checkpoint of a run, by its name."""
    return {entry.name: _sums(entry) for entry in (path / "checkpoints").glob("step_*")}


def _sums(checkpoint: Path) -> dict[str, str]:
    """sha256 of the files of a checkpoint, but for the state with its times."""
    return {n: f["sha256"] for n, f in read_manifest(checkpoint)["files"].items() if "_state" not in n}


def end_of_run(path: Path) -> dict[str, str]:
    """sha256 of what the last checkpoint holds: weights, optimizer, counts, random states and place in the data."""
    checkpoint = (path / "last").resolve()
    tree = load_tree(checkpoint / "trainer_state")
    state = {name: value for name, value in tree["state"].items() if name != "metrics"}  # with times
    own = [{name: worker[name] for name in ("random_state", "stream")} for worker in tree["workers"]]
    plain = _without_tensors([state, own])
    return {**_sums(checkpoint), "state": hashlib.sha256(pickle.dumps(plain)).hexdigest()}


def _without_tensors(node: Any) -> Any:
    if isinstance(node, dict):
        return {name: _without_tensors(value) for name, value in node.items()}
    if isinstance(node, (list, tuple)):
        return [_without_tensors(item) for item in node]
    return node.numpy().tobytes() if isinstance(node, torch.Tensor) else repr(node)

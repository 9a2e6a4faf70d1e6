"""Checkpoints of t5-experiments (`model_N.pth`) and nanoT5 (`pytorch_model.bin`).

Both are pickles. torch's restricted unpickler reads them, which builds tensors and plain containers and runs no code.
"""

from __future__ import annotations

import pickle
import re
import struct
import warnings
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lm_experiments_tools.errors import UserError, first_line
from lm_experiments_tools.files import replacing

_SCALAR_DTYPES = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
_SCALAR_DTYPES += ("float16", "float32", "float64")
_READ_ERRORS = (OSError, EOFError, RuntimeError, struct.error, ValueError, LookupError)
# torch raises these for bytes that are no pickle.
_READ_ERRORS += (TypeError, AttributeError, ImportError)
_WRAPPERS = ("module.", "_orig_mod.")  # DistributedDataParallel, torch.compile


def read_pickle(path: Path, *, allow_pickle: bool = False) -> Any:
    """Load a weights file on the CPU with torch.load. Raises UserError.

    By default no code of the file is run, and other objects than tensors and numbers are refused.
    """
    try:
        if allow_pickle:
            return torch.load(path, map_location="cpu", weights_only=False)
        with torch.serialization.safe_globals(_numpy_scalar_globals()), warnings.catch_warnings():
            # torch warns about the pickle protocol of old files, which is no mistake of the user.
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", weights_only=True)
    except (*_READ_ERRORS, pickle.UnpicklingError) as error:
        refused = re.search(r"GLOBAL (\S+)|`add_safe_globals`,? but got (.+)", str(error))
        if refused and isinstance(error, pickle.UnpicklingError):
            raise UserError(
                f"{path} is a pickle that asks for {refused[1] or refused[2]}, which could run code, and was "
                "not read: convert it to safetensors, or pass --allow_pickle if you trust whoever made it."
            ) from error
        reason = first_line(error)
        # A KeyError is a missing entry of the pickle's memo: any text can be read as a pickle up to there.
        if reason.startswith("Weights only load failed") or isinstance(error, KeyError):
            reason = "not a file of torch.save"
        raise UserError(f"{path} cannot be read ({reason}): it is truncated, corrupt or no checkpoint.") from error


def _numpy_scalar_globals() -> list[Any]:
    """The globals that a pickled np.float64(...) asks for, under their numpy 1 and numpy 2 module names."""
    scalar = np.float64(0).__reduce__()[0]
    globals_ = [(scalar, "numpy.core.multiarray.scalar"), (scalar, "numpy._core.multiarray.scalar"), np.dtype]
    return globals_ + [type(np.dtype(name)) for name in _SCALAR_DTYPES]


def state_dict_of(content: Any, path: Path) -> dict[str, Tensor]:
    """Find the weights in an unpickled t5-experiments or nanoT5 file. Raises UserError if there are none."""
    weights = content.get("model_state_dict", content) if isinstance(content, dict) else None
    is_state = isinstance(weights, dict) and weights and all(isinstance(key, str) for key in weights)
    if not is_state or not all(isinstance(value, Tensor) for value in weights.values()):
        found = sorted(map(str, content))[:5] if isinstance(content, dict) else type(content).__name__
        raise UserError(f"{path} holds no model weights: expected a dictionary of tensors, found {found}.")
    return strip_wrappers(dict(weights))


def strip_wrappers(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Remove the prefix `module.` or `_orig_mod.` from the names, if all have it."""
    for prefix in _WRAPPERS * 2:
        if weights and all(key.startswith(prefix) for key in weights):
            weights = {key.removeprefix(prefix): value for key, value in weights.items()}
    return weights


def read_old_training_state(path: Path, *, allow_pickle: bool = False) -> tuple[int, dict[str, Any] | None]:
    """Read the step and the optimizer's state_dict from a checkpoint of t5-experiments. Raises UserError.

    It is a `.pth` file, or a folder of its accelerate trainer. Sources that hold only weights give (0, None).
    """
    # The accelerate trainer of t5-experiments saved a folder, with its step in trainer.pckl.
    if path.is_dir() and (path / "trainer.pckl").is_file():
        content = read_pickle(path / "trainer.pckl", allow_pickle=allow_pickle)
        if (optimizer := path / "accelerate_state" / "optimizer.bin").is_file():
            content["optimizer_state_dict"] = read_pickle(optimizer, allow_pickle=allow_pickle)
    elif path.is_dir() or path.suffix == ".safetensors":
        return 0, None
    else:
        content = read_pickle(path, allow_pickle=allow_pickle)
        if not isinstance(content, dict) or "model_state_dict" not in content:
            return 0, None
    # t5-experiments numbers updates from 0 and stores the last one
    return int(content.get("iteration", -1)) + 1, content.get("optimizer_state_dict")


def write_old_checkpoint(
    path: Path, weights: dict[str, Tensor], optimizer_state: dict[str, Any], step: int, epoch: int, metrics: dict
) -> None:
    """Write a `model_N.pth` of t5-experiments atomically, of `step` applied updates."""
    content = {
        "model_state_dict": {name: tensor.detach().cpu() for name, tensor in weights.items()},
        "optimizer_state_dict": optimizer_state,
        "iteration": step - 1,
        "epoch": epoch,
        "metrics": metrics,
    }
    with replacing(path) as file:
        torch.save(content, file)


def regrouped(optimizer_state: dict[str, Any], model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Convert a t5-experiments optimizer state to the parameter groups of `optimizer`. Raises UserError.

    t5-experiments numbers parameters by their position in its groups; a single group has the order of
    `model.parameters()`. Settings such as the learning rate are those of `optimizer`.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups, own = optimizer_state["param_groups"], [group["params"] for group in optimizer.param_groups]
    sizes = [len(group["params"]) for group in groups]
    # The groups match if the program has made its own, or one with frozen parameters.
    same_groups = sizes == list(map(len, own))
    if not same_groups and sizes != [len(parameters)]:
        raise UserError(
            f"the checkpoint's optimizer state has {sum(sizes)} parameters in {len(groups)} group(s), the model has "
            f"{len(parameters)} to train; start with --reset_optimizer to take the weights only"
        )
    if unknown := sorted(set(groups[0]) - {"params", "initial_lr"} - set(optimizer.param_groups[0])):
        raise UserError(
            f"the checkpoint's optimizer has settings ({', '.join(unknown)}) that this run's does not know: "
            "choose the same --optimizer, or start with --reset_optimizer"
        )
    numbers, states = count(), optimizer_state["state"]
    settings = [{**group, "params": [next(numbers) for _ in group["params"]]} for group in optimizer.param_groups]
    if same_groups:
        return {"state": states, "param_groups": settings}
    position = {parameter: number for number, parameter in enumerate(parameters)}
    saved = [position[parameter] for group in own for parameter in group]
    return {"state": {i: states[n] for i, n in enumerate(saved) if n in states}, "param_groups": settings}

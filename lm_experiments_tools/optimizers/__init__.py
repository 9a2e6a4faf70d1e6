"""Optimizers by name: ours, torch's, transformers', apex's, or `module:Class`; imports modules."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lm_experiments_tools.config.options import checked_options, parameters_of
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.names import resolve_name
from lm_experiments_tools.optimizers.adafactor import Adafactor
from lm_experiments_tools.optimizers.adamw_scale import AdamWScale
from lm_experiments_tools.optimizers.muon import Muon, hidden_matrices_first

__all__ = ["Adafactor", "AdamWScale", "Muon", "build_optimizer", "get_optimizer", "parameter_groups"]

OWN = {"Adafactor": Adafactor, "AdamWScale": AdamWScale, "Muon": Muon}
APEX = ("FusedAdagrad", "FusedAdam", "FusedLAMB", "FusedMixedPrecisionLamb", "FusedNovoGrad", "FusedSGD")
# Arguments of constructors that are given by flags or the model.
FLAGS = {name: name for name in ("lr", "weight_decay", "scale_parameter", "relative_step", "warmup_init")}
FLAGS |= {"params": "model_cls"}
CHOSEN = "chosen_options"  # key of a parameter group: names of the options that the user gave
UNUSABLE = {
    "Optimizer": "it is the abstract base class",
    "SparseAdam": "it takes sparse gradients only",
    "LBFGS": "it re-evaluates the loss several times a step",
    "LayerWiseDummyOptimizer": "it updates nothing",
}


def get_optimizer(name: str) -> type[Optimizer]:
    """The optimizer class of this name; ours come before torch's, torch's before transformers', apex's last.

    Args:
        name: `Adafactor`, `AdamWScale`, a class of torch.optim or transformers.optimization, one of apex.optimizers
            (`FusedAdam`, ...) where NVIDIA apex is installed, or `module:Class` (`torch.optim:Adafactor`).

    Raises:
        UserError: unknown (the nearest names are given), not installed, or not usable in a training loop.
    """
    if ":" in name:
        return resolve_name(name, Optimizer)
    if name in UNUSABLE:
        raise UserError(f"--optimizer {name} cannot be used: {UNUSABLE[name]}.")
    if name in OWN:
        return OWN[name]
    from_torch = _optimizers_of(torch.optim)
    if name in from_torch:
        return from_torch[name]
    if name in APEX:
        return _apex_optimizer(name)
    import transformers.optimization  # seconds, so only for names that are neither ours nor torch's

    from_transformers = _optimizers_of(transformers.optimization)
    if name in from_transformers:
        return from_transformers[name]
    known = sorted({*OWN, *from_torch, *from_transformers, *APEX})
    lowered = {key.lower(): key for key in known}
    near = [lowered[key] for key in difflib.get_close_matches(name.lower(), lowered, n=3, cutoff=0.5)]
    hint = f"did you mean {' or '.join(near)}" if near else f"known are {', '.join(known)}"
    raise UserError(f"--optimizer {name} is unknown: {hint}? Another class is named by module:Class.")


def _optimizers_of(module: object) -> dict[str, type[Optimizer]]:
    return {
        key: value
        for key, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, Optimizer) and key not in UNUSABLE
    }


def _apex_optimizer(name: str) -> type[Optimizer]:
    try:
        return getattr(importlib.import_module("apex.optimizers"), name)
    except (ImportError, AttributeError) as error:
        raise UserError(
            f"--optimizer {name} needs NVIDIA apex built from source ({error}); AdamW is fused too."
        ) from error


def parameter_groups(named_parameters: Iterable[tuple[str, Tensor]], weight_decay: float) -> list[dict]:
    """The trainable parameters in two groups: [0] matrices, with weight decay; [1] the rest, without.

    Layer-norm weights, biases and T5's relative attention biases are not decayed (nanoT5's rule; t5-experiments
    decayed everything). An empty group is left out.

    Raises:
        UserError: nothing is trainable.
    """
    decay: list[Tensor] = []
    no_decay: list[Tensor] = []
    for name, parameter in named_parameters:
        if parameter.requires_grad:
            bias = any(part.endswith("bias") for part in name.split("."))
            (no_decay if bias or parameter.ndim < 2 else decay).append(parameter)
    if not decay and not no_decay:
        raise UserError("The model has no trainable parameter (requires_grad is False everywhere).")
    groups = [{"params": decay, "weight_decay": weight_decay}, {"params": no_decay, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def build_optimizer(
    model_or_named_parameters: nn.Module | Iterable[tuple[str, Tensor]],
    *,
    name: str,
    lr: float | None,
    weight_decay: float,
    scale_parameter: bool = False,
    relative_step: bool = False,
    warmup_init: bool = False,
    extra: dict | None = None,
) -> Optimizer:
    """The optimizer of this name over the trainable parameters, grouped by `parameter_groups`.

    torch's optimizers that have a fused kernel (AdamW, Adam, SGD, Adagrad) use it on CPU and CUDA unless `extra` says
    otherwise. weight_decay is always passed: 0.0 means none.

    Args:
        model_or_named_parameters: a module, or its (name, parameter) pairs.
        name: see `get_optimizer`.
        lr: learning rate; None only with relative_step.
        weight_decay: for matrices (group 0).
        scale_parameter, relative_step, warmup_init: options of Adafactor; other classes must not be given them.
        extra: further keyword arguments of the class (`--optimizer_options`).

    Raises:
        UserError: unknown name, an option the class does not take, options in conflict, or values it refuses.
    """
    cls = get_optimizer(name)
    taken = _keyword_arguments(cls)
    extra = checked_options(f"--optimizer {name}", extra or {}, taken, FLAGS)
    adafactor = {"scale_parameter": scale_parameter, "relative_step": relative_step, "warmup_init": warmup_init}
    if lr is None and not relative_step:
        raise UserError(f"--optimizer {name} needs --lr (only Adafactor with --relative_step does without).")
    for option, value in {**adafactor, "weight_decay": weight_decay}.items():
        if value and taken is not None and option not in taken:
            raise UserError(
                f"--{option} has no effect with --optimizer {name}, which does not take it: drop one of them."
            )

    named = model_or_named_parameters
    named = list(named.named_parameters() if isinstance(named, nn.Module) else named)
    groups = parameter_groups(named, weight_decay)
    if issubclass(cls, Muon):
        groups = hidden_matrices_first(groups, named)
    if taken is not None and "weight_decay" not in taken:
        groups = [{"params": group["params"]} for group in groups]
    options: dict = {"lr": lr}
    options.update({key: value for key, value in adafactor.items() if taken is not None and key in taken})
    if cls.__module__.startswith("torch.optim") and "fused" in (taken or ()) and not extra.get("foreach"):
        kinds = {p.device.type for group in groups for p in group["params"]}
        options["fused"] = kinds <= {"cpu", "cuda"}
    options.update(extra)
    try:
        optimizer = cls(groups, **options)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"--optimizer {name} refuses its settings: {error}") from error
    if extra:  # in the groups, which survive wrappers of the optimizer; a restored checkpoint reads it
        for group in optimizer.param_groups:
            group[CHOSEN] = sorted(extra)
    return optimizer


def _keyword_arguments(cls: type[Optimizer]) -> dict[str, inspect.Parameter] | None:
    """The parameters of the constructor; None if it takes any (**kwargs)."""
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in inspect.signature(cls).parameters.values()):
        return None
    return parameters_of(cls)

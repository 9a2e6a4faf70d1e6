"""Optimizers by name: this package's, torch's, transformers', apex's, or `module:Class`; imports modules."""

from __future__ import annotations

import difflib
import fnmatch
import importlib
import inspect
import math
from collections.abc import Iterable, Mapping, Sequence
from inspect import Parameter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lm_experiments_tools.config.options import checked_options, parameters_of
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.names import nearest_names, resolve_name
from lm_experiments_tools.optimizers.adafactor import Adafactor
from lm_experiments_tools.optimizers.adamw_scale import AdamWScale
from lm_experiments_tools.optimizers.muon import Muon, hidden_matrices_first
from lm_experiments_tools.optimizers.stable_adamw import StableAdamW

__all__ = ["Adafactor", "AdamWScale", "Muon", "StableAdamW", "build_optimizer", "get_optimizer", "parameter_groups"]

OWN = {"Adafactor": Adafactor, "AdamWScale": AdamWScale, "Muon": Muon, "StableAdamW": StableAdamW}
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
    """Find an optimizer class by name.

    Args:
        name: one of `OWN`, a class of torch.optim or transformers.optimization (in this order), a class of
            apex.optimizers (such as `FusedAdam`) if NVIDIA apex is installed, or `module:Class`.

    Raises:
        UserError: the name is unknown, not installed, or not usable in a training loop.
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


def parameter_groups(
    named_parameters: Iterable[tuple[str, Tensor]],
    weight_decay: float,
    rules: Sequence[tuple[str, Mapping[str, Any]]] = (),
) -> list[dict]:
    """Group the trainable parameters for an optimizer: matrices with weight decay, and all others without.

    Vectors and T5's relative attention biases are not decayed (nanoT5's rule; t5-experiments decays everything). Empty
    groups are left out.

    Args:
        named_parameters: (name, parameter) pairs.
        weight_decay: weight decay of matrices.
        rules: (pattern, group options) pairs. Parameters whose name matches a shell pattern such as `*norm*` form
            groups of their own with these options; the first matching pattern decides. A `weight_decay` option applies
            to vectors too.

    Raises:
        UserError: no parameter is trainable, or a pattern is the first match of none.
    """
    groups: dict[tuple[int, bool], list[Tensor]] = {(-1, True): [], (-1, False): []}
    named = [(name, parameter) for name, parameter in named_parameters if parameter.requires_grad]
    if not named:
        raise UserError("The model has no trainable parameter (requires_grad is False everywhere).")
    for name, parameter in named:
        bias = any(part.endswith("bias") for part in name.split("."))
        rule = next((i for i, (pattern, _) in enumerate(rules) if fnmatch.fnmatchcase(name, pattern)), -1)
        groups.setdefault((rule, parameter.ndim >= 2 and not bias), []).append(parameter)
    for i, (pattern, _) in enumerate(rules):
        if all(rule != i for rule, _ in groups):
            names = [name for name, _ in named]
            raise UserError(
                f"--optimizer_groups {pattern} is the first match of no trainable parameter"
                f"{nearest_names(pattern, names) or f'; the first one is {names[0]}'}."
            )
    chosen = [
        {"params": parameters, "weight_decay": weight_decay * decays, **(rules[rule][1] if rule >= 0 else {})}
        for (rule, decays), parameters in sorted(groups.items(), key=lambda item: (item[0][0], not item[0][1]))
    ]
    return [group for group in chosen if group["params"]]


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
    rules: Sequence[tuple[str, Mapping[str, Any]]] = (),
) -> Optimizer:
    """Create an optimizer by name over the trainable parameters, grouped by `parameter_groups`.

    torch's fused kernels (AdamW, Adam, SGD, Adagrad) are used on CPU and CUDA unless `extra` says otherwise.

    Args:
        model_or_named_parameters: a module, or its (name, parameter) pairs.
        name: see `get_optimizer`.
        lr: learning rate; None only with relative_step.
        weight_decay: weight decay of matrices.
        scale_parameter, relative_step, warmup_init: options of Adafactor only.
        extra: further arguments of the class (`--optimizer_options`).
        rules: see `parameter_groups`. The option `lr_scale` multiplies `lr`.

    Raises:
        UserError: unknown name, or options that the class does not take, conflict, or have invalid values.
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
    groups = parameter_groups(named, weight_decay, [_checked_rule(name, rule, lr, taken) for rule in rules])
    if issubclass(cls, Muon):
        groups = hidden_matrices_first(groups, named)
    if taken is not None and "weight_decay" not in taken:
        groups = [{key: value for key, value in group.items() if key != "weight_decay"} for group in groups]
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
    _record_choices(optimizer, name, rules, extra)
    return optimizer


def _record_choices(
    optimizer: Optimizer, name: str, rules: Sequence[tuple[str, Mapping[str, Any]]], extra: Mapping[str, Any]
) -> None:
    """Note the chosen options in the groups; UserError for an option of a rule that is not one of a group."""
    for pattern, options in rules:
        if unused := [key for key in options if key not in (*optimizer.defaults, "lr_scale")]:
            raise UserError(
                f"--optimizer_groups {pattern}: --optimizer {name} has one {unused[0]} for all parameters."
            )
    if extra:  # in the groups, which survive wrappers of the optimizer; a restored checkpoint reads it
        for group in optimizer.param_groups:
            group[CHOSEN] = sorted({*extra, *group.get(CHOSEN, ())})


def _checked_rule(
    name: str, rule: tuple[str, Mapping[str, Any]], lr: float | None, taken: Mapping[str, Parameter] | None
) -> tuple[str, dict[str, Any]]:
    """A rule with the options of its parameter group as the optimizer takes them; UserError for others."""
    pattern, options = rule
    said = f"--optimizer_groups {pattern}"
    own = {key: options[key] for key in ("lr_scale", "weight_decay") if key in options}
    for key, value in own.items():
        least, takes = 1e-12, "above 0 (freeze by --trained or --freeze)"
        if key == "weight_decay":
            least, takes = 0.0, "of at least 0"
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not (is_number and least <= value < math.inf):
            raise UserError(f"{said}: {key} is {value!r}, but it takes a number {takes}.")
    if "weight_decay" in own and taken is not None and "weight_decay" not in taken:
        raise UserError(f"{said}: --optimizer {name} takes no weight_decay: drop it.")
    others = {key: value for key, value in options.items() if key not in own}
    checked: dict[str, Any] = {**checked_options(f"{said}: --optimizer {name}", others, taken, FLAGS)}
    if "weight_decay" in own:
        checked["weight_decay"] = float(own["weight_decay"])
    if "lr_scale" in own:
        if lr is None:
            raise UserError(f"{said}: lr_scale multiplies --lr, which is not given.")
        checked["lr"] = lr * own["lr_scale"]
    return pattern, {**checked, CHOSEN: sorted(checked)}


def _keyword_arguments(cls: type[Optimizer]) -> dict[str, inspect.Parameter] | None:
    """The parameters of the constructor; None if it takes any (**kwargs)."""
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in inspect.signature(cls).parameters.values()):
        return None
    return parameters_of(cls)

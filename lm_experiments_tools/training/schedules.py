"""Learning-rate schedules as pure functions: a multiplier of `lr`, given the number of updates already applied.

There is no scheduler object and nothing to save: the step is the state. Names and values of transformers' schedules
are kept; `t5_inverse_sqrt` is the T5 paper's, `legacy` and `cosine_with_floor` are nanoT5's.
"""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable

from lm_experiments_tools.errors import UserError

Schedule = Callable[[int], float]


def get_schedule(
    name: str,
    *,
    num_warmup_steps: int | None = None,
    num_training_steps: int | None = None,
    min_lr_ratio: float = 0.0,
    base_lr: float | None = None,
    **options: object,
) -> Schedule:
    """A function step -> multiplier of `base_lr`, where step is the number of optimizer updates already applied.

    Args:
        name: one of `SCHEDULES`.
        num_warmup_steps: length of the warm-up in updates; all but `constant`, `legacy` and `t5_inverse_sqrt` need it.
        num_training_steps: length of the run in updates; the schedules that end somewhere need it.
        min_lr_ratio: floor as a fraction of `base_lr`, for the schedules that have one.
        base_lr: the learning rate being multiplied; `polynomial` and `legacy` need it, being stated in absolute rates.
        options: what only this schedule takes (see its function below), e.g. `num_cycles`, `power`, `decay_type`.

    Returns:
        A pure function of an int >= 0.

    Raises:
        UserError: unknown name or option, a missing or senseless number, or a setting the schedule would ignore.
    """
    factory = _find(name)
    accepted = inspect.signature(factory).parameters
    general = {
        "num_warmup_steps": num_warmup_steps,
        "num_training_steps": num_training_steps,
        "min_lr_ratio": min_lr_ratio,
        "base_lr": base_lr,
    }
    _check_numbers(name, accepted, general)
    for option in options:
        if option not in accepted or option in general:
            known = [key for key in accepted if key not in general]
            raise UserError(
                f"--lr_scheduler {name} has no option '{option}'; it takes {', '.join(known) if known else 'none'}."
            )
    arguments = {key: value for key, value in general.items() if key in accepted and value is not None}
    return factory(**arguments, **options)


def _find(name: str) -> Callable[..., Schedule]:
    if name in SCHEDULES:
        return SCHEDULES[name]
    if name == "reduce_lr_on_plateau":
        raise UserError(
            "--lr_scheduler reduce_lr_on_plateau depends on validation results, not on the step: use --use_lr_drop."
        )
    near = difflib.get_close_matches(name, SCHEDULES, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]}? " if near else ""
    raise UserError(f"--lr_scheduler {name} is unknown: {hint}Known: {', '.join(SCHEDULES)}.")


def _check_numbers(name: str, accepted: dict, general: dict) -> None:
    warmup, total = general["num_warmup_steps"], general["num_training_steps"]
    for key, value in general.items():
        needed = key in accepted and accepted[key].default is inspect.Parameter.empty
        if needed and value is None:
            raise UserError(f"--lr_scheduler {name} needs {_FLAGS[key]}, which is not set.")
    if warmup is not None and warmup < 0:
        raise UserError(f"--num_warmup_steps is {warmup}: a number of updates cannot be negative.")
    if total is not None and total < 1:
        raise UserError(f"--num_training_steps is {total}: a schedule needs at least one update.")
    if {"num_warmup_steps", "num_training_steps"} <= set(accepted) and None not in (warmup, total) and warmup > total:
        raise UserError(
            f"--num_warmup_steps {warmup} is more than the {total} updates of the schedule (--num_training_steps, or "
            f"--iters where that is not set): shorten the warm-up."
        )
    if warmup and "num_warmup_steps" not in accepted:
        raise UserError(f"--num_warmup_steps {warmup} has no effect with --lr_scheduler {name}: drop one of them.")
    if not 0.0 <= general["min_lr_ratio"] <= 1.0:
        raise UserError(f"--lr_min_ratio is {general['min_lr_ratio']}: it is a fraction of --lr, from 0 to 1.")
    if general["min_lr_ratio"] and "min_lr_ratio" not in accepted:
        floored = [
            key for key, factory in SCHEDULES.items() if "min_lr_ratio" in inspect.signature(factory).parameters
        ]
        raise UserError(
            f"--lr_scheduler {name} has no floor (--lr_min_ratio): those that have are {', '.join(floored)}."
        )
    if general["base_lr"] is not None and general["base_lr"] <= 0 and "base_lr" in accepted:
        raise UserError(f"--lr_scheduler {name} needs a positive --lr, not {general['base_lr']}.")


_FLAGS = {"num_warmup_steps": "--num_warmup_steps", "num_training_steps": "--num_training_steps", "base_lr": "--lr"}


def _warmup(step: int, num_warmup_steps: int) -> float:
    """0 at the first update, reaching 1 after num_warmup_steps."""
    return float(step) / float(max(1, num_warmup_steps))


def _progress(step: int, num_warmup_steps: int, num_training_steps: int) -> float:
    """Fraction of the updates after the warm-up that are done; above 1 past the end."""
    return float(step - num_warmup_steps) / float(max(1, num_training_steps - num_warmup_steps))


def _half_cosine(progress: float, num_cycles: float) -> float:
    """1 at progress 0; with num_cycles 0.5, 0 at progress 1."""
    return 0.5 * (1.0 + math.cos(math.pi * float(num_cycles) * 2.0 * progress))


def constant() -> Schedule:
    """lr, always."""
    return lambda step: 1.0


def constant_with_warmup(num_warmup_steps: int) -> Schedule:
    """Linear warm-up from 0, then lr."""
    return lambda step: _warmup(step, num_warmup_steps) if step < num_warmup_steps else 1.0


def linear(num_warmup_steps: int, num_training_steps: int) -> Schedule:
    """Linear warm-up from 0, then linear to 0 at num_training_steps."""

    def multiplier(step: int) -> float:
        if step < num_warmup_steps:
            return _warmup(step, num_warmup_steps)
        return max(0.0, float(num_training_steps - step) / float(max(1, num_training_steps - num_warmup_steps)))

    return multiplier


def cosine(num_warmup_steps: int, num_training_steps: int, num_cycles: float = 0.5) -> Schedule:
    """Linear warm-up from 0, then a cosine of num_cycles periods; to 0 at the end with the default half period."""

    def multiplier(step: int) -> float:
        if step < num_warmup_steps:
            return _warmup(step, num_warmup_steps)
        return max(0.0, _half_cosine(_progress(step, num_warmup_steps, num_training_steps), num_cycles))

    return multiplier


def cosine_with_restarts(num_warmup_steps: int, num_training_steps: int, num_cycles: int = 1) -> Schedule:
    """Linear warm-up from 0, then num_cycles half cosines from 1 to 0, jumping back to 1 between them."""

    def multiplier(step: int) -> float:
        if step < num_warmup_steps:
            return _warmup(step, num_warmup_steps)
        progress = _progress(step, num_warmup_steps, num_training_steps)
        if progress >= 1.0:
            return 0.0
        return max(0.0, 0.5 * (1.0 + math.cos(math.pi * ((float(num_cycles) * progress) % 1.0))))

    return multiplier


def polynomial(
    num_warmup_steps: int, num_training_steps: int, base_lr: float, lr_end: float = 1e-7, power: float = 1.0
) -> Schedule:
    """Linear warm-up from 0, then lr_end + (lr - lr_end) * remaining ** power; lr_end is an absolute rate."""
    if not base_lr > lr_end:
        raise UserError(f"--lr_scheduler polynomial ends at lr_end={lr_end}, so --lr {base_lr} must be larger.")

    def multiplier(step: int) -> float:
        if step < num_warmup_steps:
            return _warmup(step, num_warmup_steps)
        if step >= num_training_steps:
            return lr_end / base_lr
        remaining = 1 - (step - num_warmup_steps) / (num_training_steps - num_warmup_steps)
        return ((base_lr - lr_end) * remaining**power + lr_end) / base_lr

    return multiplier


def inverse_sqrt(num_warmup_steps: int, timescale: int | None = None) -> Schedule:
    """Linear warm-up from 0, then sqrt(timescale / (step - warmup + timescale)); timescale defaults to the warm-up,
    or 10,000 without one."""
    scale = timescale if timescale is not None else (num_warmup_steps or 10_000)
    if scale <= 0:
        raise UserError(f"--lr_scheduler inverse_sqrt needs a positive timescale, not {scale}.")
    shift = scale - num_warmup_steps

    def multiplier(step: int) -> float:
        if step < num_warmup_steps:
            return _warmup(step, num_warmup_steps)
        return 1.0 / math.sqrt((step + shift) / scale)

    return multiplier


def cosine_with_min_lr(
    num_warmup_steps: int, num_training_steps: int, min_lr_ratio: float = 0.0, num_cycles: float = 0.5
) -> Schedule:
    """`cosine` squeezed between min_lr_ratio and 1 after the warm-up from 0."""

    def multiplier(step: int) -> float:
        if step < num_warmup_steps:
            return _warmup(step, num_warmup_steps)
        wave = _half_cosine(_progress(step, num_warmup_steps, num_training_steps), num_cycles)
        return max(0.0, wave * (1 - min_lr_ratio) + min_lr_ratio)

    return multiplier


def cosine_warmup_with_min_lr(
    num_warmup_steps: int,
    num_training_steps: int,
    min_lr_ratio: float = 0.0,
    num_cycles: float = 0.5,
    warmup_lr_rate: float | None = None,
) -> Schedule:
    """As `cosine_with_min_lr`, but the first update already moves: the warm-up starts at 1 / num_warmup_steps, or at
    warmup_lr_rate, and the cosine is one update ahead."""

    def multiplier(step: int) -> float:
        if step < num_warmup_steps:
            if warmup_lr_rate is None:
                return (step + 1.0) / max(1.0, float(num_warmup_steps))
            return warmup_lr_rate + (1.0 - warmup_lr_rate) * float(step) / max(1, float(num_warmup_steps) - 1)
        progress = (float(step) - num_warmup_steps + 1.0) / max(1.0, float(num_training_steps) - num_warmup_steps)
        wave = 0.5 * (1.0 + math.cos(math.pi * num_cycles * 2.0 * progress))
        return max(0.0, wave * (1 - min_lr_ratio) + min_lr_ratio)

    return multiplier


_RAMPS: dict[str, Callable[[float], float]] = {
    "linear": lambda x: x,
    "cosine": lambda x: 0.5 * (1.0 - math.cos(math.pi * x)),
    "1-sqrt": lambda x: 1.0 - math.sqrt(1.0 - x),
}


def warmup_stable_decay(
    num_warmup_steps: int,
    num_training_steps: int,
    min_lr_ratio: float = 0.0,
    num_decay_steps: int | None = None,
    num_stable_steps: int | None = None,
    warmup_type: str = "linear",
    decay_type: str = "cosine",
    num_cycles: float = 0.5,
) -> Schedule:
    """Warm-up from min_lr_ratio, a plateau at 1, then a decay to min_lr_ratio.

    num_decay_steps defaults to a tenth of the run (rounded up), as MiniCPM (arXiv 2404.06395) recommends, and
    num_stable_steps to what is left. Types: linear, cosine, 1-sqrt.
    """
    if num_decay_steps is None:
        num_decay_steps = math.ceil(0.1 * num_training_steps)
    if num_stable_steps is None:
        num_stable_steps = num_training_steps - num_warmup_steps - num_decay_steps
    if num_stable_steps < 0 or num_decay_steps < 0:
        raise UserError(
            f"--lr_scheduler warmup_stable_decay: {num_warmup_steps} warm-up and {num_decay_steps} decay updates do "
            f"not fit into {num_training_steps}."
        )
    for option, value in (("warmup_type", warmup_type), ("decay_type", decay_type)):
        if value not in _RAMPS:
            raise UserError(
                f"--lr_scheduler warmup_stable_decay: {option} is '{value}', not one of {', '.join(_RAMPS)}."
            )
    decays = {
        "linear": lambda x: 1.0 - x,
        "cosine": lambda x: _half_cosine(x, num_cycles),
        "1-sqrt": lambda x: 1.0 - math.sqrt(x),
    }
    end_of_stable = num_warmup_steps + num_stable_steps

    def multiplier(step: int) -> float:
        if num_warmup_steps <= step < end_of_stable:
            return 1.0
        if step < num_warmup_steps:
            factor = _RAMPS[warmup_type](_warmup(step, num_warmup_steps))
        elif step < end_of_stable + num_decay_steps:
            # in this order, as the reference: float(a - b - c) / float(d)
            factor = decays[decay_type](float(step - num_warmup_steps - num_stable_steps) / float(num_decay_steps))
        else:
            return min_lr_ratio
        return max(0.0, factor * (1.0 - min_lr_ratio) + min_lr_ratio)

    return multiplier


def t5_inverse_sqrt(num_warmup_steps: int = 10_000) -> Schedule:
    """1 / sqrt(max(step, num_warmup_steps)), the pre-training schedule of T5 (arXiv 1910.10683, section 3.1.2).

    The multiplier is the paper's absolute rate, so `--lr 1.0` gives the paper's 0.01 for the first 10,000 updates;
    another lr scales it. The rate is flat, not rising, during the warm-up.
    """
    if num_warmup_steps < 1:
        raise UserError(
            f"--lr_scheduler t5_inverse_sqrt starts at 1 / sqrt(--num_warmup_steps), which is {num_warmup_steps}."
        )
    return lambda step: 1.0 / math.sqrt(max(step, num_warmup_steps))


def legacy(num_training_steps: int, base_lr: float) -> Schedule:
    """nanoT5's `legacy`: min(0.01, 1 / sqrt(step)) for 90 % of the run, then linear to 0.

    The rates are absolute: the multiplier is divided by base_lr, so the result does not depend on --lr (as in nanoT5).
    """
    turn = math.ceil(num_training_steps * 0.9)

    def rate(step: int) -> float:
        return min(1e-2, 1.0 / math.sqrt(step)) if step else 1e-2

    def multiplier(step: int) -> float:
        if step < turn:
            return rate(step) / base_lr
        remaining = num_training_steps - step
        return max(0.0, remaining / max(1, num_training_steps - turn)) * rate(turn) / base_lr

    return multiplier


def cosine_with_floor(
    num_warmup_steps: int, num_training_steps: int, min_lr_ratio: float = 0.0, warmup_start: float = 0.5
) -> Schedule:
    """nanoT5's `cosine`: linear from warmup_start to 1, then half a cosine to min_lr_ratio, where it stays.

    nanoT5's `final_cosine` is an absolute rate: min_lr_ratio = final_cosine / base_lr (1e-5 / 2e-2 by its defaults).
    """

    def multiplier(step: int) -> float:
        if step < num_warmup_steps:
            return warmup_start + (1.0 - warmup_start) * _warmup(step, num_warmup_steps)
        progress = min(1.0, _progress(step, num_warmup_steps, num_training_steps))
        return min_lr_ratio + (1.0 - min_lr_ratio) * _half_cosine(progress, 0.5)

    return multiplier


SCHEDULES: dict[str, Callable[..., Schedule]] = {
    factory.__name__: factory
    for factory in (
        constant,
        constant_with_warmup,
        linear,
        cosine,
        cosine_with_restarts,
        polynomial,
        inverse_sqrt,
        cosine_with_min_lr,
        cosine_warmup_with_min_lr,
        warmup_stable_decay,
        t5_inverse_sqrt,
        legacy,
        cosine_with_floor,
    )
}


class PlateauDrop:
    """torch's ReduceLROnPlateau as a multiplier of `base_lr`, with a state that is JSON.

    The rule is torch's own: its scheduler drives an optimizer that holds nothing but a learning rate.

    Args:
        base_lr: the learning rate being multiplied; `min_lr` and `eps` are absolute rates and are compared with it.
        mode, factor, patience, threshold, threshold_mode, cooldown, min_lr, eps: as in
            `torch.optim.lr_scheduler.ReduceLROnPlateau`; patience and cooldown count calls of `update`.

    Raises:
        UserError: base_lr is not positive, or torch refuses a setting.
    """

    def __init__(
        self,
        base_lr: float,
        *,
        mode: str = "min",
        factor: float = 0.1,
        patience: int = 10,
        threshold: float = 1e-4,
        threshold_mode: str = "rel",
        cooldown: int = 0,
        min_lr: float = 0.0,
        eps: float = 1e-8,
    ) -> None:
        import torch

        if not base_lr or base_lr <= 0:
            raise UserError(f"--use_lr_drop lowers --lr step by step and needs it positive, not {base_lr}.")
        self._base_lr = base_lr
        self._optimizer = torch.optim.SGD([torch.zeros(())], lr=base_lr)
        try:
            self._scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
                self._optimizer,
                mode=mode,
                factor=factor,
                patience=patience,
                threshold=threshold,
                threshold_mode=threshold_mode,
                cooldown=cooldown,
                min_lr=min_lr,
                eps=eps,
            )
        except ValueError as error:
            raise UserError(f"--use_lr_drop with these --lr_drop_* settings is refused by torch: {error}") from error

    @property
    def multiplier(self) -> float:
        """What `base_lr` is multiplied by now: 1.0 before the first drop."""
        return self._optimizer.param_groups[0]["lr"] / self._base_lr

    def update(self, metric: float) -> bool:
        """Report a validation result; True when the learning rate has just been dropped."""
        before = self.multiplier
        self._scheduler.step(float(metric))
        return self.multiplier < before

    def state_dict(self) -> dict:
        """Plain JSON scalars; `best` is None before the first result."""
        scheduler = self._scheduler
        return {
            "lr": self._optimizer.param_groups[0]["lr"],
            "best": None if math.isinf(scheduler.best) else scheduler.best,
            "num_bad_epochs": scheduler.num_bad_epochs,
            "cooldown_counter": scheduler.cooldown_counter,
            "last_epoch": scheduler.last_epoch,
        }

    def load_state_dict(self, state: dict) -> None:
        """Continue from `state_dict()`; the settings stay those of the constructor."""
        scheduler = self._scheduler
        self._optimizer.param_groups[0]["lr"] = state["lr"]
        scheduler.best = scheduler.mode_worse if state["best"] is None else state["best"]
        scheduler.num_bad_epochs = state["num_bad_epochs"]
        scheduler.cooldown_counter = state["cooldown_counter"]
        scheduler.last_epoch = state["last_epoch"]

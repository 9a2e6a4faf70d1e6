"""Learning-rate schedules: functions of the optimizer step that return a multiplier of `lr`.

The number of applied updates alone determines the rate, so a schedule has no state to save. After its last update a
schedule is constant.

Transformers' schedules are found by name. `t5_inverse_sqrt` is the T5 paper's, `legacy` and `cosine_with_floor` are
nanoT5's. `module:function` names a user's function f(step, num_warmup_steps, num_training_steps, **options) -> float.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from lm_experiments_tools.config.options import checked_options, read_options
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.names import nearest_names, resolve_name

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from lm_experiments_tools.checkpoint.train_state import TrainState
    from lm_experiments_tools.config.training import TrainerArgs

Schedule = Callable[[int], float]
# Arguments of schedules that flags give.
FLAGS = {"num_warmup_steps": "num_warmup_steps", "num_training_steps": "num_training_steps", "base_lr": "lr"}
FLAGS |= {"min_lr_ratio": "lr_min_ratio", "min_lr_rate": "lr_min_ratio"}
_BY_RESULTS = ("greedy", "reduce_lr_on_plateau")  # schedules of transformers that are not functions of the step
_ENDLESS = ("constant", "constant_with_warmup", "inverse_sqrt", "t5_inverse_sqrt")
_WITHOUT_WARMUP = ("constant", "legacy")
_ABSOLUTE = ("polynomial", "legacy")  # with absolute rates
# Schedules with a floor, and their name of it.
_FLOORS = {"cosine_with_min_lr": "min_lr_rate", "cosine_warmup_with_min_lr": "min_lr_rate"}
_FLOORS |= {"warmup_stable_decay": "min_lr_ratio", "cosine_with_floor": "min_lr_ratio"}


def get_schedule(
    name: str,
    /,
    *,
    num_warmup_steps: int | None = None,
    num_training_steps: int | None = None,
    min_lr_ratio: float = 0.0,
    base_lr: float | None = None,
    **options: object,
) -> Schedule:
    """Create a schedule by name.

    Args:
        name: t5_inverse_sqrt, legacy, cosine_with_floor, one of transformers, or `module:function`.
        num_warmup_steps: warm-up in updates. Default: 0, for t5_inverse_sqrt 10,000; required by schedules whose name
            contains "warmup".
        num_training_steps: length of the run in updates; required by schedules with an end.
        min_lr_ratio: floor as a fraction of `base_lr`, for schedules that have one.
        base_lr: learning rate that is multiplied; required by `polynomial` and `legacy`, which use absolute rates.
        options: arguments of this schedule only (`--lr_scheduler_options`), e.g. `num_cycles`, `power`.

    Returns:
        f(number of updates applied) -> multiplier of `base_lr`.

    Raises:
        UserError: unknown name or option, a missing or invalid number, or a setting that the schedule would ignore.
    """
    build = _find(name)
    _check_numbers(name, num_warmup_steps, num_training_steps, min_lr_ratio, base_lr)
    warmup = num_warmup_steps
    if warmup is None:
        warmup = 10_000 if name == "t5_inverse_sqrt" else 0
    if name in _FLOORS:
        options[_FLOORS[name]] = min_lr_ratio
    # transformers would drop options of a constant rate without a word.
    if options and name in ("constant", "constant_with_warmup"):
        raise UserError(f"--lr_scheduler {name} takes no --lr_scheduler_options: drop {', '.join(options)}.")
    end = None if name in _ENDLESS else num_training_steps
    try:
        schedule = build(warmup, num_training_steps, base_lr, options)
        for step in (0, warmup, num_training_steps or warmup):
            schedule(step)
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise UserError(f"--lr_scheduler {name} refuses its settings: {error}.") from error
    # Some of transformers' schedules rise again after their end, as the cosine does.
    return schedule if end is None else lambda step: schedule(min(step, end))


def _find(name: str) -> Callable[[int, int | None, float | None, dict[str, Any]], Schedule]:
    """The function (warm-up, length, base_lr, options) that builds the schedule of this name."""
    if name in _BUILDERS:
        return _BUILDERS[name]
    if name in _BY_RESULTS:
        raise UserError(f"--lr_scheduler {name} depends on results, not on the step: use --use_lr_drop.")
    if ":" in name:
        function = resolve_name(name, said=f"--lr_scheduler {name}")
        return lambda warmup, length, base_lr, options: partial(
            function, num_warmup_steps=warmup, num_training_steps=length, **options
        )
    if name not in (known := [*_BUILDERS, *_of_transformers()]):
        raise UserError(
            f"--lr_scheduler {name} is unknown{nearest_names(name, known)}. Known: {', '.join(known)}; or "
            "module:function."
        )
    return partial(_build, name)


def _of_transformers() -> list[str]:
    """Names of transformers' schedules that depend on the step alone; importing them takes seconds."""
    from transformers import SchedulerType

    return [kind.value for kind in SchedulerType if kind.value not in _BY_RESULTS]


def _build(name: str, warmup: int, length: int | None, base_lr: float | None, options: dict[str, Any]) -> Schedule:
    """The function of the step in transformers' LambdaLR of an optimizer with only a learning rate."""
    import torch
    from transformers import get_scheduler

    # The decay is a tenth of the run (MiniCPM, arXiv 2404.06395).
    if name == "warmup_stable_decay":
        decay = options.setdefault("num_decay_steps", math.ceil(0.1 * length))
        if warmup + decay + options.get("num_stable_steps", 0) > length:
            raise ValueError(f"{warmup} warm-up and {decay} decay updates do not fit into {length}")
        length = None if "num_stable_steps" in options else length
    # transformers would divide by the length of the decay, which is 0.
    elif name == "polynomial" and warmup == length:
        length -= 1
    optimizer = torch.optim.SGD([torch.zeros(())], lr=base_lr or 1.0)
    return get_scheduler(name, optimizer, warmup, length, options).lr_lambdas[0]


def _check_numbers(name: str, warmup: int | None, total: int | None, floor: float, base_lr: float | None) -> None:
    if warmup is None and "warmup" in name and ":" not in name:
        raise UserError(f"--lr_scheduler {name} needs --num_warmup_steps, which is not set.")
    if total is None and name not in _ENDLESS:
        raise UserError(f"--lr_scheduler {name} needs --num_training_steps, which is not set.")
    if warmup is not None and name not in _ENDLESS and warmup > total:
        raise UserError(
            f"--num_warmup_steps {warmup} is more than the {total} updates of the schedule (--num_training_steps, or "
            f"--iters where that is not set): shorten the warm-up."
        )
    if warmup and name in _WITHOUT_WARMUP:
        raise UserError(f"--num_warmup_steps {warmup} has no effect with --lr_scheduler {name}: drop one of them.")
    if floor and name not in _FLOORS:
        raise UserError(f"--lr_scheduler {name} has no floor (--lr_min_ratio); {', '.join(_FLOORS)} have one.")
    if name in _ABSOLUTE and not (base_lr or 0) > 0:
        raise UserError(f"--lr_scheduler {name} needs a positive --lr, not {base_lr}.")


def t5_inverse_sqrt(num_warmup_steps: int = 10_000) -> Schedule:
    """T5's schedule for pre-training, 1 / sqrt(max(step, num_warmup_steps)) (arXiv 1910.10683, section 3.1.2).

    The multiplier is the paper's absolute rate, so `--lr 1.0` gives the paper's 0.01 for the first 10,000 updates;
    another lr scales it. The rate is flat, not rising, during the warm-up.
    """
    return lambda step: 1.0 / math.sqrt(max(step, num_warmup_steps))


def legacy(num_training_steps: int, base_lr: float) -> Schedule:
    """Schedule `legacy` of nanoT5: min(0.01, 1 / sqrt(step)) for 90 % of the run, then a linear fall to 0.

    These are absolute rates, which do not depend on --lr, as in nanoT5.

    Args:
        base_lr: the learning rate by which the result is divided to get a multiplier.
    """
    turn = math.ceil(num_training_steps * 0.9)

    def multiplier(step: int) -> float:
        rate = min(1e-2, 1.0 / math.sqrt(max(min(step, turn), 1)))
        if step >= turn:
            rate = max(0.0, (num_training_steps - step) / max(1, num_training_steps - turn)) * rate
        return rate / base_lr

    return multiplier


def cosine_with_floor(
    num_warmup_steps: int, num_training_steps: int, min_lr_ratio: float = 0.0, warmup_start: float = 0.5
) -> Schedule:
    """Schedule `cosine` of nanoT5: linear from warmup_start to 1, then half a cosine to min_lr_ratio, where it stays.

    nanoT5's setting `final_cosine` is an absolute rate: min_lr_ratio = final_cosine / base_lr (nanoT5's defaults: 1e-5
    / 2e-2).
    """

    def multiplier(step: int) -> float:
        if step < num_warmup_steps:
            return warmup_start + (1.0 - warmup_start) * (float(step) / float(max(1, num_warmup_steps)))
        done = float(step - num_warmup_steps) / float(max(1, num_training_steps - num_warmup_steps))
        return min_lr_ratio + (1.0 - min_lr_ratio) * (0.5 * (1.0 + math.cos(math.pi * min(1.0, done))))

    return multiplier


_BUILDERS: Mapping[str, Callable[..., Schedule]] = {
    "t5_inverse_sqrt": lambda warmup, length, base_lr, options: t5_inverse_sqrt(warmup, **options),
    "legacy": lambda warmup, length, base_lr, options: legacy(length, base_lr, **options),
    "cosine_with_floor": lambda warmup, length, base_lr, options: cosine_with_floor(warmup, length, **options),
}


class PlateauDrop:
    """Lowers the learning rate when validation stops improving: torch's ReduceLROnPlateau as a multiplier.

    Args:
        base_lr: learning rate that is multiplied.
        settings: arguments of `torch.optim.lr_scheduler.ReduceLROnPlateau`; patience and cooldown count calls of
            `update`, `min_lr` and `eps` are absolute rates.

    Raises:
        UserError: base_lr is not positive, or torch refuses a setting.
    """

    _COUNTERS = ("num_bad_epochs", "cooldown_counter", "last_epoch")

    def __init__(self, base_lr: float, **settings: Any) -> None:
        import torch

        if not base_lr or base_lr <= 0:
            raise UserError(f"--use_lr_drop lowers --lr step by step and needs it positive, not {base_lr}.")
        self._base_lr = base_lr
        self._optimizer = torch.optim.SGD([torch.zeros(())], lr=base_lr)
        try:
            self._scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(self._optimizer, **settings)
        except ValueError as error:
            raise UserError(f"--use_lr_drop with these --lr_drop_* settings is refused by torch: {error}") from error

    @property
    def multiplier(self) -> float:
        """Current factor of `base_lr`; 1.0 before the first drop."""
        return self._optimizer.param_groups[0]["lr"] / self._base_lr

    def update(self, metric: float) -> None:
        """Lower the learning rate if `metric`, the new validation result, shows no more improvement."""
        self._scheduler.step(float(metric))

    def state_dict(self) -> dict:
        """State as JSON scalars; `best` is None before the first result."""
        best = self._scheduler.best
        counters = {name: getattr(self._scheduler, name) for name in self._COUNTERS}
        rates = {"lr": self._optimizer.param_groups[0]["lr"], "base_lr": self._base_lr}
        return {**rates, "best": None if math.isinf(best) else best, **counters}

    def load_state_dict(self, state: dict) -> None:
        """Restore a result of `state_dict`; settings stay those of the constructor."""
        self._optimizer.param_groups[0]["lr"] = state["lr"] * (self._base_lr / state["base_lr"])
        self._scheduler.best = self._scheduler.mode_worse if state["best"] is None else state["best"]
        for name in self._COUNTERS:
            setattr(self._scheduler, name, state[name])


class LearningRate:
    """Sets the learning rates of an optimizer: initial rate * schedule * drops at plateaus.

    Attributes:
        base: initial rate of each parameter group; None if the optimizer computes its own (relative_step).
        length: number of updates at which the schedule ends, from the first step of a phase that ends at `--iters`.
    """

    def __init__(self, args: TrainerArgs, optimizer: Optimizer | None, start: int = 0) -> None:
        self.base = [group.get("lr") for group in optimizer.param_groups] if optimizer is not None else []
        self.plateau, self.length, self._args = None, args.schedule_steps(), args
        if args.num_training_steps is None:
            self.length -= start
        self.schedule = self._schedule(self.length)
        if args.use_lr_drop and optimizer is not None:
            options = ("factor", "patience", "threshold", "threshold_mode", "cooldown", "min_lr", "eps")
            chosen = {name: getattr(args, f"lr_drop_{name}") for name in options}
            self.plateau = PlateauDrop(self.base[0], mode=args.optimize_mode, **chosen)

    def _schedule(self, length: int) -> Schedule | None:
        """The schedule of `--lr_scheduler`, which ends after `length` updates; None for a constant rate."""
        args = self._args
        if not args.lr_scheduler or not self.base:
            return None
        options = read_options("lr_scheduler_options", args.lr_scheduler_options)
        # Rounded up, as transformers' Trainer does.
        warmup = args.num_warmup_steps if args.warmup_ratio is None else math.ceil(args.warmup_ratio * length)
        return get_schedule(
            args.lr_scheduler,
            num_warmup_steps=warmup,
            num_training_steps=length,
            min_lr_ratio=args.lr_min_ratio,
            base_lr=self.base[0],
            **checked_options(f"--lr_scheduler {args.lr_scheduler}", options, None, FLAGS),
        )

    def keep_length(self, state: TrainState) -> str | None:
        """Keep the checkpoint's schedule length if `--iters` has changed; `--num_training_steps` overrides it.

        Returns a log message about the two lengths; None if they are equal, or there is no end or no step left.
        """
        args, then, now = self._args, state.schedule_steps, self.length
        is_endless = args.lr_scheduler in _ENDLESS and args.warmup_ratio is None
        if self.schedule is None or is_endless or then in (None, now) or state.step >= args.iters:
            return None
        if args.num_training_steps is None:
            self.length, self.schedule = then, self._schedule(then)
            return f"the learning-rate schedule stays {then} updates long: stretch it by --num_training_steps {now}"
        return f"the learning-rate schedule is {now} updates long, and no longer {then}"

    def check_end(self, state: TrainState) -> str | None:
        """Return a warning for a schedule that ends at 0 before `--iters`.

        UserError if it has ended before the first update of this start, so that all updates would change nothing.
        """
        args, done = self._args, state.step - state.schedule_start
        length = args.iters - state.schedule_start
        if self.schedule is None or state.step >= args.iters or length <= self.length or self.schedule(length - 1):
            return None
        stretch = f"stretch it by --num_training_steps {length}"
        if done < self.length:
            updates = f"the last {length - self.length} updates up to --iters {args.iters} change nothing"
            return f"the learning-rate schedule ends at 0 after {self.length} updates, so {updates}: {stretch}"
        afresh = ", or start it afresh by --reset_lr" if args.init_checkpoint and not args.reset_lr else ""
        raise UserError(
            f"the learning-rate schedule has ended after {self.length} updates at 0, and updates up to --iters "
            f"{args.iters} would change nothing: {stretch}{afresh}."
        )

    def resume(self, plateau: dict) -> None:
        """Restore the drops, a `PlateauDrop.state_dict`, if both this run and the saved one use `--use_lr_drop`."""
        if self.plateau is not None and plateau:
            self.plateau.load_state_dict(plateau)

    def set(self, optimizer: Optimizer, step: int) -> None:
        """Set the learning rate of each group for an update, numbered from the start of the schedule."""
        factor = 1.0 if self.schedule is None else self.schedule(step)
        if self.plateau is not None:
            factor *= self.plateau.multiplier
        for group, base in zip(optimizer.param_groups, self.base, strict=True):
            if base is not None:
                group["lr"] = base * factor

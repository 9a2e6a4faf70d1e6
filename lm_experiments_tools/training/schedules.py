"""Learning-rate schedules: functions of the optimizer step that return a multiplier of `lr`.

The number of applied updates alone determines the rate, so a schedule has no state to save. After its last update a
schedule is constant.

Transformers' schedules are found by name. `t5_inverse_sqrt` is the T5 paper's, `legacy` and `cosine_with_floor` are
nanoT5's. `module:function` names a user's function of one of these forms::

    f(step, num_warmup_steps, num_training_steps) -> float          any of these arguments, min_lr_ratio or base_lr
    get_x_schedule(optimizer, num_warmup_steps, num_training_steps) -> LambdaLR
"""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from inspect import Parameter
from typing import TYPE_CHECKING, Any

from lm_experiments_tools.config.options import checked_options, parameters_of, read_options
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.names import resolve_name

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from lm_experiments_tools.checkpoint.train_state import TrainState
    from lm_experiments_tools.config.training import TrainerArgs

Schedule = Callable[[int], float]
# Arguments of schedules that flags give.
FLAGS = {"num_warmup_steps": "num_warmup_steps", "num_training_steps": "num_training_steps", "base_lr": "lr"}
FLAGS |= {"min_lr_ratio": "lr_min_ratio", "min_lr_rate": "lr_min_ratio"}
_BY_RESULTS = ("greedy", "reduce_lr_on_plateau")  # schedules of transformers that are not functions of the step


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
        name: one of `SCHEDULES`, one of transformers, or `module:function`.
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
    factory, accepted = _find(name)
    if num_warmup_steps is None and "warmup" not in name and _is_required(accepted.get("num_warmup_steps")):
        num_warmup_steps = 0
    general = {
        "num_warmup_steps": num_warmup_steps,
        "num_training_steps": num_training_steps,
        "min_lr_ratio": min_lr_ratio,
        "base_lr": base_lr,
    }
    own = {key: parameter for key, parameter in accepted.items() if key not in general}
    options = checked_options(f"--lr_scheduler {name}", options, own, FLAGS)
    for key, parameter in accepted.items():
        if _is_required(parameter) and {**general, **options}.get(key) is None:
            flag, problem = "--lr" if key == "base_lr" else f"--{key}", "which is not set"
            if key not in general:
                flag, problem = f"--lr_scheduler_options {key}=VALUE", "which is not given"
            raise UserError(f"--lr_scheduler {name} needs {flag}, {problem}.")
    _check_numbers(name, accepted, general)
    arguments = {key: value for key, value in general.items() if key in accepted and value is not None}
    schedule, end = factory(**arguments, **options), arguments.get("num_training_steps")
    # Some of transformers' schedules rise again after their end, as the cosine does.
    return schedule if end is None else lambda step: schedule(min(step, end))


def _is_required(parameter: Parameter | None) -> bool:
    return parameter is not None and parameter.default is Parameter.empty


def _find(name: str) -> tuple[Callable[..., Schedule], Mapping[str, Parameter]]:
    """The function that builds the schedule of this name, and the arguments that it takes."""
    if name in SCHEDULES:
        return SCHEDULES[name], parameters_of(SCHEDULES[name])
    if name in _BY_RESULTS:
        raise UserError(f"--lr_scheduler {name} depends on results, not on the step: use --use_lr_drop.")
    if ":" in name:
        function = resolve_name(name, said=f"--lr_scheduler {name}")
    elif (function := _transformers_schedules().get(name)) is None:
        known = list(dict.fromkeys([*SCHEDULES, *_transformers_schedules()]))
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]}? " if near else ""
        raise UserError(f"--lr_scheduler {name} is unknown: {hint}Known: {', '.join(known)}; or module:function.")
    if not (parameters := parameters_of(function)):
        raise UserError(f"--lr_scheduler {name} names no argument: its first must be the step, or optimizer.")
    first, *others = parameters.values()
    if first.name != "optimizer":
        return partial(partial, function), {p.name: p for p in others}
    return partial(_multiplier, name, function), _arguments_of(others)


def _arguments_of(others: Sequence[Parameter]) -> dict[str, Parameter]:
    """Arguments after the optimizer of a schedule written like transformers', by our names."""
    accepted = {p.name.replace("min_lr_rate", "min_lr_ratio"): p for p in others if p.name != "last_epoch"}
    if "min_lr_ratio" in accepted:
        accepted.pop("min_lr", None)  # the same as an absolute rate
    accepted["base_lr"] = Parameter("base_lr", Parameter.KEYWORD_ONLY, default=None)
    return accepted


def _transformers_schedules() -> dict[str, Callable]:
    """transformers' schedules that depend on the step alone, by name; importing them takes seconds."""
    from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION

    named = {kind.value: function for kind, function in TYPE_TO_SCHEDULER_FUNCTION.items()}
    return {name: function for name, function in named.items() if name not in _BY_RESULTS}


def _multiplier(name: str, function: Callable, base_lr: float | None = None, **arguments: Any) -> Schedule:
    """The function of the step in the LambdaLR that `function` makes of an optimizer with only a learning rate."""
    import torch

    if "min_lr_rate" in inspect.signature(function).parameters:  # transformers' name of min_lr_ratio
        arguments["min_lr_rate"] = arguments.pop("min_lr_ratio", 0.0)
    try:
        scheduler = function(torch.optim.SGD([torch.zeros(())], lr=base_lr or 1.0), **arguments)
    except ValueError as error:
        raise UserError(f"--lr_scheduler {name} refuses its settings: {error}.") from error
    if not isinstance(scheduler, torch.optim.lr_scheduler.LambdaLR):
        raise UserError(
            f"--lr_scheduler {name} makes a {type(scheduler).__name__}, not a LambdaLR: only a schedule that depends "
            "on the step alone can be used."
        )
    return scheduler.lr_lambdas[0]


def _check_numbers(name: str, accepted: Mapping[str, Parameter], general: Mapping[str, Any]) -> None:
    warmup, total = general["num_warmup_steps"], general["num_training_steps"]
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
        known = dict.fromkeys([*SCHEDULES, *_transformers_schedules()])
        floored = ", ".join(key for key in known if "min_lr_ratio" in _find(key)[1])
        raise UserError(f"--lr_scheduler {name} has no floor (--lr_min_ratio): those that have are {floored}.")
    if general["base_lr"] is not None and general["base_lr"] <= 0 and _is_required(accepted.get("base_lr")):
        raise UserError(f"--lr_scheduler {name} needs a positive --lr, not {general['base_lr']}.")


def constant() -> Schedule:
    """Schedule with a constant learning rate: the multiplier is 1 at every step."""
    return lambda step: 1.0


def polynomial(
    num_warmup_steps: int, num_training_steps: int, base_lr: float, lr_end: float = 1e-7, power: float = 1.0
) -> Schedule:
    """Linear warm-up from 0, then a polynomial decay to `lr_end`.

    The rate after the warm-up is lr_end + (base_lr - lr_end) * remaining ** power, where `remaining` falls from 1 to
    0.

    Args:
        base_lr: learning rate at the end of the warm-up.
        lr_end: absolute rate at the end, not a multiplier.
    """
    if not base_lr > lr_end:
        raise UserError(f"--lr_scheduler polynomial ends at lr_end={lr_end}, so --lr {base_lr} must be larger.")
    no_decay = num_warmup_steps == num_training_steps  # whose length transformers would divide by
    length = num_training_steps - int(no_decay)
    return _of_transformers(
        "polynomial", base_lr, num_warmup_steps, num_training_steps=length, lr_end=lr_end, power=power
    )


def inverse_sqrt(num_warmup_steps: int, timescale: int | None = None) -> Schedule:
    """Linear warm-up from 0, then sqrt(timescale / (step - num_warmup_steps + timescale)).

    Args:
        timescale: updates that set how slowly the rate falls. None: num_warmup_steps, or 10,000 without a warm-up.
    """
    if timescale is not None and timescale <= 0:
        raise UserError(f"--lr_scheduler inverse_sqrt needs a positive timescale, not {timescale}.")
    return _of_transformers("inverse_sqrt", None, num_warmup_steps, timescale=timescale)


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
    """Warm-up from min_lr_ratio to 1, a plateau, then a decay to min_lr_ratio.

    Args:
        num_decay_steps: updates of the decay; None: a tenth of the run (MiniCPM, arXiv 2404.06395).
        num_stable_steps: updates of the plateau; None: the remaining ones.
        warmup_type, decay_type: "linear", "cosine" or "1-sqrt".
        num_cycles: number of cosine waves in a cosine warm-up or decay.
    """
    decay = math.ceil(0.1 * num_training_steps) if num_decay_steps is None else num_decay_steps
    stable = num_training_steps - num_warmup_steps - decay if num_stable_steps is None else num_stable_steps
    if stable < 0 or decay < 0:
        raise UserError(
            f"--lr_scheduler warmup_stable_decay: {num_warmup_steps} warm-up and {decay} decay updates do "
            f"not fit into {num_training_steps}."
        )
    shape = {"warmup_type": warmup_type, "decay_type": decay_type, "num_cycles": num_cycles}
    lengths = {"num_decay_steps": decay, "num_stable_steps": stable}
    return _of_transformers(
        "warmup_stable_decay", None, num_warmup_steps, **lengths, min_lr_ratio=min_lr_ratio, **shape
    )


def _of_transformers(name: str, base_lr: float | None, num_warmup_steps: int, **arguments: Any) -> Schedule:
    schedule = _transformers_schedules()[name]
    return _multiplier(name, schedule, base_lr, num_warmup_steps=num_warmup_steps, **arguments)


def t5_inverse_sqrt(num_warmup_steps: int = 10_000) -> Schedule:
    """T5's schedule for pre-training, 1 / sqrt(max(step, num_warmup_steps)) (arXiv 1910.10683, section 3.1.2).

    The multiplier is the paper's absolute rate, so `--lr 1.0` gives the paper's 0.01 for the first 10,000 updates;
    another lr scales it. The rate is flat, not rising, during the warm-up.
    """
    if num_warmup_steps < 1:
        raise UserError(
            f"--lr_scheduler t5_inverse_sqrt starts at 1 / sqrt(--num_warmup_steps), which is {num_warmup_steps}."
        )
    return lambda step: 1.0 / math.sqrt(max(step, num_warmup_steps))


def legacy(num_training_steps: int, base_lr: float) -> Schedule:
    """Schedule `legacy` of nanoT5: min(0.01, 1 / sqrt(step)) for 90 % of the run, then a linear fall to 0.

    These are absolute rates, which do not depend on --lr, as in nanoT5.

    Args:
        base_lr: the learning rate by which the result is divided to get a multiplier.
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


_OURS = constant, polynomial, inverse_sqrt, warmup_stable_decay, t5_inverse_sqrt, legacy, cosine_with_floor
SCHEDULES: dict[str, Callable[..., Schedule]] = {factory.__name__: factory for factory in _OURS}


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
        """Lower the learning rate if a validation metric has stopped improving.

        Args:
            metric: the new validation result.
        """
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
        plateau: state of `--use_lr_drop`; None without this flag.
        length: number of updates at which the schedule ends.

    Args:
        start: first step of the phase that ends at `--iters`.
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
        return get_schedule(
            args.lr_scheduler,
            num_warmup_steps=args.num_warmup_steps,
            num_training_steps=length,
            min_lr_ratio=args.lr_min_ratio,
            base_lr=self.base[0],
            **checked_options(f"--lr_scheduler {args.lr_scheduler}", options, None, FLAGS),
        )

    def keep_length(self, state: TrainState) -> str | None:
        """Keep the checkpoint's schedule length if `--iters` has changed; `--num_training_steps` overrides it.

        Args:
            state: trainer state of the checkpoint.

        Returns:
            Log message about the two lengths; None if both give the same rates, or no step is left.
        """
        args, then, now = self._args, state.schedule_steps, self.length
        if self.schedule is None or then in (None, now) or state.step >= args.iters:
            return None
        steps = state.step - state.schedule_start, args.iters - 1 - state.schedule_start
        curves = {then: self._schedule(then), now: self.schedule}
        if all(curves[then](step) == curves[now](step) for step in steps):
            return None  # a schedule that has no end
        self.length = then if args.num_training_steps is None else now
        self.schedule, end = curves[self.length], self.length
        rates = {length: [self.base[0] * curves[length](step) for step in steps] for length in curves}
        shown = {length: f"{first:.3g} now and {last:.3g} at the end" for length, (first, last) in rates.items()}
        other = then if end == now else now
        return (
            f"the learning-rate schedule is {end} updates long ({shown[end]}); of {other} updates "
            f"(--num_training_steps {other}) it would be {shown[other]}"
        )

    def check_end(self, state: TrainState) -> str | None:
        """Check that the schedule does not end at 0 before the run ends.

        Args:
            state: trainer state before the first update of this start.

        Returns:
            Warning for a schedule that will end at 0 before `--iters`.

        Raises:
            UserError: it has ended already, so all updates would change nothing.
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
        """Restore the drops of the learning rate from a checkpoint, if both runs use `--use_lr_drop`.

        Args:
            plateau: a result of `PlateauDrop.state_dict`; empty without drops.
        """
        if self.plateau is not None and plateau:
            self.plateau.load_state_dict(plateau)

    def set(self, optimizer: Optimizer, step: int) -> None:
        """Set the learning rate of each parameter group for one update.

        Args:
            step: number of the update, counted from the start of the schedule.
        """
        factor = 1.0 if self.schedule is None else self.schedule(step)
        if self.plateau is not None:
            factor *= self.plateau.multiplier
        for group, base in zip(optimizer.param_groups, self.base, strict=True):
            if base is not None:
                group["lr"] = base * factor

"""Arguments of t5-experiments' trainers with their old names and defaults, and conversion to current arguments.

`HfArgumentParser(TrainerArgs)` sees only the old fields, so a program can add its own `--seed`. The parser passes all
of them and gets the old class; any other call `TrainerArgs(...)` returns current arguments.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Annotated, Any

from lm_experiments_tools.ancestor.notice import notice
from lm_experiments_tools.config import training as today
from lm_experiments_tools.config.flags import HARMLESS
from lm_experiments_tools.config.launchers import launcher_rank
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.training.checks import OF_VALIDATION

if TYPE_CHECKING:
    from torch.optim import Optimizer

logger = logging.getLogger(__name__)

_TODAY = (
    "TrainerArgs(batch_size=..., iters=...) with the flags of --help, or a dataclass of lm_experiments_tools.config"
)
_OF_MIXED_PRECISION = ("fp16", "fp16_allreduce", "apex_opt_lvl", "min_loss_scale", "max_loss_scale")
# Setting -> settings that are ignored without it. t5-experiments ignored them silently.
_NEEDS = {
    "init_checkpoint": ("reset_lr", "reset_iteration", "reset_optimizer", "skip_used_data"),
    "model_path": ("save_interval", "save_best"),
    "lr_scheduler": ("num_warmup_steps", "num_training_steps"),
    "fp16": ("apex_opt_lvl", "min_loss_scale", "max_loss_scale"),
    "valid_dataloader": OF_VALIDATION,
}


def _flag(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": f"{text} (default: {default})"})


@dataclass
class TrainerAccelerateArgs:
    """Arguments of t5-experiments' `TrainerAccelerate`. The Accelerator sets the mixed precision."""

    model_path: str | None = _flag(None, "run directory; None saves nothing")
    log_interval: int | None = _flag(None, "updates between two reports on training data; None: one at the end")
    valid_interval: int | None = _flag(None, "updates between two validations; None: as log_interval")
    save_interval: int | None = _flag(None, "updates between two checkpoints; None: 10 minutes or 1,000 updates")
    save_best: bool = _flag(False, "also keep the checkpoint with the best optimize_metric")
    use_generate_on_valid: bool = _flag(False, "also generate on validation data")
    init_checkpoint: str | None = _flag(None, "checkpoint to start from")
    skip_used_data: bool = _flag(False, "go on reading data where init_checkpoint stopped")
    reset_lr: bool = _flag(False, "start the learning-rate schedule afresh")
    reset_iteration: bool = _flag(False, "count updates from 0")
    reset_optimizer: bool = _flag(False, "take the weights of init_checkpoint, start the optimizer afresh")
    lr: float | None = _flag(None, "learning rate, for the program's optimizer")
    batch_size: int = _flag(1, "examples in one forward pass of one worker")
    iters: int = _flag(1, "optimizer updates to make")
    gradient_accumulation_steps: int = _flag(1, "forward passes of one worker in one update")
    clip_grad_norm: float | None = _flag(None, "largest norm of the gradients; None or 0: no clipping")
    clip_grad_value: float | None = _flag(None, "largest element of the gradients; None or 0: no clipping")
    early_stopping_patience: int | None = _flag(None, "validations without improvement to bear; None: any number")
    lr_scheduler: str | None = _flag(None, "schedule by its name in transformers; None: constant")
    num_warmup_steps: int | None = _flag(None, "updates over which the learning rate rises")
    num_training_steps: int | None = _flag(None, "updates after which the schedule has ended; None: iters")
    use_lr_drop: bool = _flag(False, "reduce the learning rate when validation stops improving")
    lr_drop_factor: float = _flag(0.1, "factor of a reduction")
    lr_drop_patience: int = _flag(10, "validations to wait before a reduction")
    lr_drop_threshold: float = _flag(1e-4, "least change that is an improvement")
    lr_drop_threshold_mode: str = _flag("rel", "rel: of the best value, abs")
    lr_drop_cooldown: int = _flag(0, "validations to ignore after a reduction")
    lr_drop_min_lr: float = _flag(0.0, "lower bound of the learning rate")
    lr_drop_eps: float = _flag(1e-8, "smallest reduction worth making")
    optimize_metric: str = _flag("loss", "validation metric that decides the best checkpoint")
    optimize_mode: str = _flag("min", "a lower (min) or a higher (max) metric is better")


class _ReturnsCurrentArgs(type):
    """Metaclass: calling the class with current settings returns those."""

    def __call__(cls, *values: Any, **settings: Any) -> Any:
        if cls is TrainerArgs and not values and not settings.keys() >= {f.name for f in fields(cls)}:
            return (_WithRate if settings.get("lr") is not None else today.TrainerArgs)(**settings)
        return super().__call__(*values, **settings)

    def __instancecheck__(cls, thing: object) -> bool:
        return super().__instancecheck__(thing) or (cls is TrainerArgs and isinstance(thing, today.TrainerArgs))


@dataclass
class TrainerArgs(TrainerAccelerateArgs, metaclass=_ReturnsCurrentArgs):
    """Arguments of t5-experiments' `Trainer`, for `HfArgumentParser`.

    A call that does not give all of them returns the current class of arguments instead.
    """

    fp16: bool = _flag(False, "mixed precision in float16")
    fp16_allreduce: bool = _flag(False, "send gradients as float16")
    apex_opt_lvl: str | None = _flag(None, "O0 to O3: use NVIDIA apex")
    min_loss_scale: float | None = _flag(None, "the loss scale never falls below this")
    max_loss_scale: float | None = _flag(2.0**24, "the loss scale never rises above this")


# `help` shows no metadata. The defaults that these name are not those of the current class.
_HELP = [f"    {f.name}: {f.metadata['help'].rpartition(' (default')[0]}\n" for f in fields(TrainerArgs)]
TrainerArgs.__doc__ = f"{TrainerArgs.__doc__}Fields:\n{''.join(_HELP)}"


@dataclass(frozen=True, kw_only=True)
class _WithRate(today.TrainerArgs):
    """Current arguments with the learning rate of the program's optimizer."""

    lr: Annotated[float, HARMLESS]
    """Learning rate that the program gives its optimizer."""


def check_rate(args: today.TrainerArgs, optimizer: Optimizer | None) -> None:
    """Refuse arguments whose `lr` is not the optimizer's. Raises UserError."""
    rates = [float(group["lr"]) for group in optimizer.param_groups if group.get("lr")] if optimizer else []
    if isinstance(args, _WithRate) and rates and args.lr not in rates:
        raise UserError(
            f"TrainerArgs has lr {args.lr}, but the optimizer was made with {rates[0]}: give the optimizer lr=args.lr"
        )


def settings_of(args: Any, mixed_precision: str | None = None, *, validates: bool = True) -> today.TrainerArgs:
    """Convert arguments of t5-experiments, an object with attributes, to current arguments. Raises UserError.

    Arguments without effect are dropped and logged. The result allows checkpoints to be loaded partially.
    `early_stopping_patience` is increased by one, because t5-experiments stopped one validation later.

    Args:
        mixed_precision: the Accelerator's setting, used instead of `fp16`; None without an Accelerator.
    """
    notice("TrainerArgs for HfArgumentParser", _TODAY)
    given = {f.name: getattr(args, f.name, None) for f in fields(TrainerArgs)}
    given = {f.name: f.default if given[f.name] is None else given[f.name] for f in fields(TrainerArgs)}
    if mixed_precision is not None:
        given |= {name: None for name in _OF_MIXED_PRECISION}
        given |= {"fp16": mixed_precision == "fp16", "bf16": mixed_precision == "bf16"}
    unread = _unread({**given, "valid_dataloader": validates})
    if unread and launcher_rank() == 0:
        logger.info("without effect, and left out: %s", "; ".join(f"{n} (no {why})" for n, why in unread.items()))
    patience = given["early_stopping_patience"]
    given["early_stopping_patience"] = -1 if patience is None or patience < 0 else patience + 1
    given["log_interval"] = given["log_interval"] or given["iters"]
    known = {f.name for f in fields(today.TrainerArgs)} - unread.keys()
    chosen = {name: value for name, value in given.items() if name in known and value is not None}
    return today.TrainerArgs(**chosen, keep_checkpoints=1, allow_partial_checkpoint=True)


def _unread(given: Mapping[str, Any]) -> dict[str, str]:
    """Settings without effect that differ from their defaults -> the setting they need."""
    defaults = {f.name: f.default for f in fields(TrainerArgs)}
    drop = tuple(name for name in defaults if name.startswith("lr_drop_"))
    pairs = [(name, needed) for needed, names in {**_NEEDS, "use_lr_drop": drop}.items() for name in names]
    return {name: needed for name, needed in pairs if not given[needed] and given[name] not in (None, defaults[name])}

"""Arguments of the training scripts, as dataclasses.

Each `...Args` class below that declares fields is one group of `--help`; the line under a field is its help text. The
arguments of a script are one flat, frozen dataclass that inherits the groups it needs, so `args.lr` is `--lr` is `lr:`
in YAML. What can be checked without opening a file is checked in `check`, which names every flag involved; numbers
that follow from others are methods, so nothing is ever written into `args` after parsing. Standard library only,
because `--help` must be instant.
"""

import math
import os
from dataclasses import dataclass
from typing import Literal

from lm_experiments_tools.errors import UserError


@dataclass(frozen=True, kw_only=True)
class ModelArgs:
    """The model: its class, its configuration, how it is run."""

    model_cls: str = "transformers:T5ForConditionalGeneration"
    """Model class, as module:Class."""
    model_cfg: str | None = None
    """Configuration of a new model: a JSON file, or the name of one below models_configs, for example t5-small."""
    base_model: str | None = None
    """Hugging Face name or folder whose configuration is used; the weights are random (see --init_checkpoint)."""
    dropout_rate: float | None = None
    """Dropout probability, instead of the configuration's."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more compute."""
    compile: bool = False
    """Run the model through torch.compile."""

    def check(self) -> None:
        check_conflict(self, "model_cfg", "base_model", "both give the model's configuration")
        if self.model_cls is not None and ":" not in self.model_cls:
            raise UserError(
                f"--model_cls {self.model_cls} must be module:Class, for example {ModelArgs.model_cls} or "
                "modeling_t5.modeling_t5:T5ForConditionalGeneration."
            )
        if self.dropout_rate is not None and not 0.0 <= self.dropout_rate < 1.0:
            raise UserError(f"--dropout_rate is {self.dropout_rate}: it must be at least 0 and below 1.")


@dataclass(frozen=True, kw_only=True)
class OptimizerArgs:
    """The optimizer."""

    optimizer: str = "AdamW"
    """Adafactor, AdamWScale, the name of one in torch.optim, transformers or apex, or module:Class."""
    lr: float | None = None
    """Learning rate; the peak where there is a schedule. None only for --relative_step."""
    weight_decay: float = 0.0
    """Decoupled weight decay, per update."""
    scale_parameter: bool = False
    """Adafactor: scale the learning rate of each tensor by its RMS."""
    relative_step: bool = False
    """Adafactor: learning rate from the update count, min(0.01, 1/sqrt(step)), instead of --lr."""
    warmup_init: bool = False
    """Adafactor: with --relative_step, start from 1e-6 * step instead of 0.01."""

    def check(self) -> None:
        if self.lr is not None and not (self.lr > 0.0 and math.isfinite(self.lr)):
            raise UserError(f"--lr is {self.lr}: it must be above 0 and finite, for example 1e-3.")
        check_minimum(self, 0.0, "weight_decay")
        adafactor = self.optimizer.replace(".", ":").rsplit(":", 1)[-1] == "Adafactor"
        for flag in ("scale_parameter", "relative_step", "warmup_init"):
            if getattr(self, flag) and not adafactor:
                raise UserError(f"--{flag} belongs to --optimizer Adafactor, but --optimizer is {self.optimizer}.")
        if self.warmup_init and not self.relative_step:
            raise UserError("--warmup_init needs --relative_step: it is the warm-up of Adafactor's own learning rate.")
        check_conflict(self, "relative_step", "lr", "Adafactor then computes its own learning rate")


@dataclass(frozen=True, kw_only=True)
class RunArgs:
    """The run: where it lives, how long it is, what runs it."""

    model_path: str | None = None
    """Run directory: checkpoints, logs, configuration. None: nothing is saved."""
    working_dir: str = "."
    """Folder that relative paths start from."""
    iters: int = 100
    """Optimizer updates to make, in all; a resumed run makes the rest."""
    seed: int = 42
    """Seed of weights, dropout and data order."""
    backend: Literal["auto", "horovod", "accelerate", "local"] = "auto"
    """What joins the processes; auto reads the launcher's environment."""
    resume: str = "auto"
    """auto: from the newest valid checkpoint in --model_path, if any; never: afresh; PATH: from that checkpoint."""
    validate_only: bool = False
    """Validate once and stop, without training."""

    def check(self) -> None:
        check_minimum(self, 1, "iters")
        if not 0 <= self.seed < 2**32:
            raise UserError(f"--seed is {self.seed}: it must lie between 0 and {2**32 - 1}.")

    def working_folder(self) -> str:
        """`--working_dir`, which has to be there. Raises UserError."""
        if not os.path.isdir(self.working_dir):
            raise UserError(f"--working_dir {self.working_dir} is not a folder")
        return self.working_dir

    def resume_path(self) -> str | None:
        """The checkpoint named by `--resume PATH`, or None for auto and never."""
        return None if self.resume in ("auto", "never") else self.resume


@dataclass(frozen=True, kw_only=True)
class ScheduleArgs:
    """The learning-rate schedule."""

    lr_scheduler: str | None = None
    """Schedule by name: those of transformers, t5_inverse_sqrt, legacy, ... None: constant."""
    num_warmup_steps: int | None = None
    """Updates over which the learning rate rises to --lr. None: no warm-up."""
    num_training_steps: int | None = None
    """Updates after which the schedule has ended. None: --iters."""
    lr_min_ratio: float = 0.0
    """Floor of a decaying schedule, as a fraction of --lr."""
    use_lr_drop: bool = False
    """Reduce the learning rate when --optimize_metric stops improving on validation data."""
    lr_drop_factor: float = 0.1
    """--use_lr_drop: factor of a reduction."""
    lr_drop_patience: int = 10
    """--use_lr_drop: validations without improvement to wait before a reduction."""
    lr_drop_threshold: float = 1e-4
    """--use_lr_drop: least change that counts as an improvement."""
    lr_drop_threshold_mode: Literal["rel", "abs"] = "rel"
    """--use_lr_drop: whether the threshold is relative to the best value or absolute."""
    lr_drop_cooldown: int = 0
    """--use_lr_drop: validations to ignore after a reduction."""
    lr_drop_min_lr: float = 0.0
    """--use_lr_drop: lower bound of the learning rate."""
    lr_drop_eps: float = 1e-8
    """--use_lr_drop: smallest reduction worth making."""

    def check(self) -> None:
        check_conflict(self, "use_lr_drop", "lr_scheduler", "only one of them can set the learning rate")
        check_minimum(self, 0, "num_warmup_steps", "lr_drop_patience", "lr_drop_cooldown")
        check_minimum(self, 0.0, "lr_drop_threshold", "lr_drop_min_lr", "lr_drop_eps")
        check_minimum(self, 1, "num_training_steps")
        if not 0.0 <= self.lr_min_ratio <= 1.0:
            raise UserError(f"--lr_min_ratio is {self.lr_min_ratio}: it is a fraction of --lr, from 0 to 1.")
        if not 0.0 < self.lr_drop_factor < 1.0:
            raise UserError(
                f"--lr_drop_factor is {self.lr_drop_factor}: it must lie between 0 and 1, for example 0.1."
            )
        if self.lr_scheduler is None:
            for flag in ("num_warmup_steps", "num_training_steps", "lr_min_ratio"):
                if getattr(self, flag):
                    raise UserError(f"--{flag} needs an --lr_scheduler, for example --lr_scheduler linear.")
        if not self.use_lr_drop:
            for flag in _fields_with_prefix(ScheduleArgs, "lr_drop_"):
                if getattr(self, flag) != getattr(ScheduleArgs, flag):
                    raise UserError(f"--{flag} does nothing without --use_lr_drop: add that flag or drop this one.")


@dataclass(frozen=True, kw_only=True)
class BatchArgs:
    """Batches and gradients."""

    batch_size: int = 10
    """Micro-batch: examples in one forward and backward pass of one worker."""
    gradient_accumulation_steps: int = 1
    """Micro-batches of one worker in one optimizer update."""
    clip_grad_norm: float | None = None
    """Largest global L2 norm of the gradients. None or 0: no clipping."""
    clip_grad_value: float | None = None
    """Largest absolute value of a gradient element. None or 0: no clipping."""
    max_skipped_updates: int = 20
    """Updates in a row that may be skipped for a non-finite gradient before the run stops."""
    pad_to_multiple_of: int | None = None
    """Cut columns that are padding in every row of a micro-batch, down to a multiple of this. None: never."""

    def check(self) -> None:
        flags = ("batch_size", "gradient_accumulation_steps", "max_skipped_updates", "pad_to_multiple_of")
        check_minimum(self, 1, *flags)
        check_minimum(self, 0.0, "clip_grad_norm", "clip_grad_value")
        check_conflict(self, "clip_grad_norm", "clip_grad_value", "choose one way of clipping")

    def trim_to(self) -> int | None:
        """The multiple that widths of micro-batches are cut down to; None where they are kept."""
        return self.pad_to_multiple_of

    def rows_per_worker(self) -> int:
        """Examples that one worker reads for one optimizer update."""
        return self.batch_size * self.gradient_accumulation_steps

    def global_batch_size(self, world_size: int) -> int:
        """Examples in one optimizer update of `world_size` workers."""
        return self.rows_per_worker() * world_size


@dataclass(frozen=True, kw_only=True)
class PrecisionArgs:
    """Number formats."""

    fp16: bool = False
    """Mixed precision in float16 with dynamic loss scaling."""
    bf16: bool = False
    """Mixed precision in bfloat16; needs no loss scaling."""
    apex_opt_lvl: Literal["O0", "O1", "O2", "O3"] | None = None
    """Use NVIDIA apex at this level instead of torch.amp; needs --fp16 and an installed apex."""
    min_loss_scale: float | None = None
    """--fp16: the loss scale never falls below this. None: no floor."""
    max_loss_scale: float = 2.0**24
    """--fp16: the loss scale never rises above this."""
    fp16_allreduce: bool = False
    """Horovod and DDP: send gradients as float16, half the traffic for some precision."""

    def check(self) -> None:
        check_conflict(self, "fp16", "bf16", "choose one number format")
        for flag in ("min_loss_scale", "max_loss_scale"):
            value = getattr(self, flag)
            if value is not None and not (value > 0.0 and math.isfinite(value)):
                raise UserError(f"--{flag} is {value}: it must be above 0 and finite.")
        if self.min_loss_scale is not None and self.min_loss_scale > self.max_loss_scale:
            raise UserError(
                f"--min_loss_scale {self.min_loss_scale:g} is above --max_loss_scale {self.max_loss_scale:g}."
            )
        for flag in ("apex_opt_lvl", "min_loss_scale", "max_loss_scale"):
            if getattr(self, flag) != getattr(PrecisionArgs, flag) and not self.fp16:
                raise UserError(f"--{flag} needs --fp16: only float16 training has a loss scale.")

    def precision_options(self) -> dict[str, bool | float | str | None]:
        """Arguments of `backends.precision.get_precision`."""
        names = ("fp16", "bf16", "apex_opt_lvl", "min_loss_scale", "max_loss_scale")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, kw_only=True)
class ValidationArgs:
    """Validation, and what is decided by it."""

    valid_interval: int | None = None
    """Updates between two validations. None: --log_interval."""
    valid_at_start: bool = False
    """Also validate before the first update."""
    eval_batch_size: int | None = None
    """Examples in one forward pass of one worker on validation data. None: --batch_size."""
    use_generate_on_valid: bool = False
    """Also generate text on validation data, for metrics that need it."""
    optimize_metric: str = "loss"
    """Validation metric that decides the best checkpoint, early stopping and --use_lr_drop."""
    optimize_mode: Literal["min", "max"] = "min"
    """Whether a lower (min) or a higher (max) --optimize_metric is better."""
    save_best: bool = False
    """Also keep the checkpoint with the best --optimize_metric."""
    early_stopping_patience: int = -1
    """Validations without improvement after which the run stops. -1: never."""

    def check(self) -> None:
        check_minimum(self, 1, "valid_interval", "eval_batch_size")
        if self.early_stopping_patience != -1 and self.early_stopping_patience < 1:
            raise UserError(
                f"--early_stopping_patience is {self.early_stopping_patience}: it must be at least 1, or -1 for never."
            )
        if self.optimize_metric == "loss" and self.optimize_mode == "max":
            raise UserError(
                "--optimize_mode max would keep the worst model: --optimize_metric loss is better when low."
            )

    def needs_validation(self) -> tuple[str, ...]:
        """Names of the flags in use that mean nothing without validation data."""
        flags = (
            "valid_interval",
            "valid_at_start",
            "use_generate_on_valid",
            "save_best",
            "use_lr_drop",
            "validate_only",
        )
        used = [flag for flag in flags if getattr(self, flag)]
        return (*used, *(["early_stopping_patience"] if self.early_stopping_patience != -1 else []))


@dataclass(frozen=True, kw_only=True)
class CheckpointArgs:
    """Checkpoints: when they are written, what a run starts from."""

    save_interval: int | None = None
    """Updates between two checkpoints. None: only the one at the end."""
    keep_checkpoints: int | None = 3
    """Newest checkpoints to keep; the best one is kept as well. None: all."""
    init_checkpoint: str | None = None
    """Checkpoint to start from when this run has none of its own to resume."""
    reset_optimizer: bool = False
    """--init_checkpoint: take the weights, start the optimizer afresh."""
    reset_lr: bool = False
    """--init_checkpoint: start the learning-rate schedule (and --use_lr_drop) afresh, not where the checkpoint was."""
    reset_iteration: bool = False
    """--init_checkpoint: count updates from 0."""
    skip_used_data: bool = False
    """--init_checkpoint: go on reading data where the checkpoint stopped, not from the first example."""
    allow_partial_checkpoint: bool = False
    """Accept weights that do not match the model name by name and shape by shape; the differences are printed."""
    allow_pickle: bool = False
    """Read checkpoint files in pickle format, which can run any code: only for files you trust."""

    def check(self) -> None:
        check_minimum(self, 1, "save_interval", "keep_checkpoints")

    def resets(self) -> tuple[str, ...]:
        """Names of the flags in use that change what is taken from a checkpoint."""
        flags = ("reset_optimizer", "reset_lr", "reset_iteration", "skip_used_data")
        return tuple(flag for flag in flags if getattr(self, flag))


@dataclass(frozen=True, kw_only=True)
class LoggingArgs:
    """What is reported while training."""

    log_interval: int = 10
    """Updates between two lines of log."""
    profile_after: int | None = None
    """Write a torch profiler trace of the three updates after this one. None: no trace."""
    report: bool = False
    """End with a report: loss before and after, example predictions, the loss curve as a PNG."""

    def check(self) -> None:
        check_minimum(self, 1, "log_interval", "profile_after")


@dataclass(frozen=True, kw_only=True)
class TrainerArgs(LoggingArgs, CheckpointArgs, ValidationArgs, PrecisionArgs, BatchArgs, ScheduleArgs, RunArgs):
    """Everything the Trainer reads."""

    def __post_init__(self) -> None:
        for cls in reversed(type(self).__mro__):
            if "check" in vars(cls):
                cls.check(self)

    def check(self) -> None:
        self._check_steps()
        self.check_profile()
        if self.validate_only and self.report:
            raise UserError("--report is about a training run, and --validate_only makes none: choose one of them.")
        self._check_starting_point()
        if self.fp16_allreduce and self.backend == "local":
            raise UserError("--fp16_allreduce is about gradients between workers, and --backend local has one.")
        if self.model_path is None:
            for flag in ("save_interval", "save_best", "report", "profile_after"):
                if getattr(self, flag):
                    raise UserError(f"--{flag} needs --model_path: there is no run directory to write to.")

    def check_profile(self) -> None:
        """The updates to be traced must be made."""
        if self.profile_after is not None and self.profile_after + 3 > self.iters:
            raise UserError(
                f"--profile_after {self.profile_after} traces the three updates after it, but --iters is {self.iters}."
            )

    def _check_steps(self) -> None:
        """Only what was asked for in so many words: a short run may well end inside the warm-up of a long schedule."""
        warmup, total = self.num_warmup_steps, self.num_training_steps
        if warmup is not None and total is not None and warmup > total:
            raise UserError(
                f"--num_warmup_steps {warmup} is more than --num_training_steps {total}: the schedule would end "
                "before its warm-up."
            )

    def _check_starting_point(self) -> None:
        if self.init_checkpoint is not None and self.resume_path() is not None:
            raise UserError(
                f"--resume {self.resume} and --init_checkpoint {self.init_checkpoint} both name a checkpoint to start "
                "from: keep --resume to continue that run, --init_checkpoint to begin a new one from its weights."
            )
        if self.resets() and self.init_checkpoint is None:
            raise UserError(
                f"--{self.resets()[0]} says what to take from --init_checkpoint, which is not given; --resume always "
                "takes everything."
            )

    def names_weights(self) -> bool:
        """Whether the flags name weights to start from."""
        return self.init_checkpoint is not None

    def schedule_steps(self) -> int:
        """Updates after which the learning-rate schedule has ended."""
        return self.iters if self.num_training_steps is None else self.num_training_steps

    def valid_batch_size(self) -> int:
        """Examples in one forward pass of one worker on validation data."""
        return self.batch_size if self.eval_batch_size is None else self.eval_batch_size

    def effective_valid_interval(self) -> int:
        """Updates between two validations."""
        return self.log_interval if self.valid_interval is None else self.valid_interval


@dataclass(frozen=True, kw_only=True)
class ExperimentArgs(TrainerArgs, OptimizerArgs, ModelArgs):
    """What every training script needs besides its data."""

    def check(self) -> None:
        self.check_model()
        if self.learning_rate() is None and not self.relative_step and not self.validate_only:
            raise UserError(
                f"--lr is missing: --optimizer {self.optimizer} needs a learning rate, for example --lr 1e-3."
            )
        check_conflict(self, "relative_step", "lr_scheduler", "Adafactor then computes its own learning rate")
        check_conflict(self, "relative_step", "use_lr_drop", "Adafactor then computes its own learning rate")

    def check_model(self) -> None:
        """A model must be named."""
        if self.model_cfg is None and self.base_model is None and self.init_checkpoint is None:
            raise UserError(
                "no model is named: give --model_cfg for a new one, a file or a preset such as t5-small or "
                "bert_base_uncased, or --base_model NAME for a pre-trained one."
            )

    def learning_rate(self) -> float | None:
        """`--lr`, or what takes its place."""
        return self.lr


def help_groups(args_class: type) -> list[type]:
    """The dataclasses that declare the fields of `args_class`, in the order of its fields.

    A class lower down may repeat a field to change its default; a new field belongs in a group of its own.
    """
    bases = [cls for cls in reversed(args_class.__mro__) if vars(cls).get("__annotations__")]
    return [cls for cls in bases if not any(issubclass(cls, other) for other in bases if other is not cls)]


def _fields_with_prefix(group: type, prefix: str) -> list[str]:
    return [name for name in group.__annotations__ if name.startswith(prefix)]


def check_minimum(args: object, minimum: float, *flags: str) -> None:
    """Refuse a flag below `minimum`, NaN or infinite; None passes."""
    for flag in flags:
        value = getattr(args, flag)
        if value is not None and not (value >= minimum and math.isfinite(value)):
            raise UserError(f"--{flag} is {value}: it must be at least {minimum:g}.")


def check_conflict(args: object, first: str, second: str, reason: str) -> None:
    if getattr(args, first) and getattr(args, second):
        raise UserError(f"--{first} and --{second} exclude each other: {reason}.")

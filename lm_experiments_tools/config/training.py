"""Arguments of the training scripts, as dataclasses.

Each `...Args` class that declares fields is one group of `--help`; the line under a field is its help text. The
arguments of a script are one flat, frozen dataclass that inherits the groups it needs, so `args.lr` is `--lr` is `lr:`
in YAML. Annotations hold the rules of a flag (see flags.py), `check` the other conflicts that need no file. Standard
library only, because `--help` must be instant.
"""

import os
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

from lm_experiments_tools.config.flags import (
    AUTO,
    COUNT,
    DROPOUT,
    FRACTION,
    HARMLESS,
    LENGTH,
    NOT_NEGATIVE,
    PART,
    POSITIVE,
    Ignored,
    Range,
    check_conflict,
    check_groups,
    given_flags,
    needs,
    refuse_ignored,
)
from lm_experiments_tools.config.lengths import lengths_in_tokens
from lm_experiments_tools.config.options import read_options
from lm_experiments_tools.config.suggestions import suggestion
from lm_experiments_tools.errors import UserError

VALIDATION = Ignored(lambda args: args.lacks_validation(), "needs validation data: give --valid_data_path")
EVALUATION = Ignored(lambda args: args.measures_nothing(), VALIDATION.reason)
MOST_PROFILED = 50
IN_RUN_DIRECTORY = needs("model_path")
_PATIENCE = Range(lambda value: value == -1 or value >= 1, "it must be at least 1, or -1 for never")
_WAIT = Range(lambda value: 2 <= value <= 10**6, "it must lie between 2 and 1000000")  # a C int of ms
_OF_ADAFACTOR = Ignored(
    lambda args: args.optimizer.replace(".", ":").rsplit(":", 1)[-1] != "Adafactor",
    "needs --optimizer Adafactor, and --optimizer is {optimizer}",
)
_OF_SCHEDULE = needs("lr_scheduler", reason="needs an --lr_scheduler, for example --lr_scheduler linear")
_WARMUP = Ignored(lambda args: not args.lr_scheduler and bool(args.num_warmup_steps), _OF_SCHEDULE.reason)
_WARMUP_RATIO = Ignored(lambda args: not args.lr_scheduler and bool(args.warmup_ratio), _OF_SCHEDULE.reason)
_OF_LR_DROP = needs("use_lr_drop")
_OF_FP16 = needs("fp16")
_BETWEEN_WORKERS = Ignored(lambda args: args.backend == "local", "has no effect with --backend local, one worker")
_OF_TRAINING = Ignored(lambda args: args.validate_only, "is about training, which --validate_only leaves out")
_OF_INIT_CHECKPOINT = needs(
    "init_checkpoint", reason="needs --init_checkpoint, which is not given; --resume always restores everything"
)


@dataclass(frozen=True, kw_only=True)
class ModelArgs:
    """The model: its class, its configuration, how it is run."""

    model_cls: str = "transformers:T5ForConditionalGeneration"
    """Model class, as module:Class."""
    model_cfg: Annotated[str | None, HARMLESS] = None  # the model's configuration is compared
    """Configuration of a new model: a JSON file, or the name of one below models_configs, for example t5-small."""
    base_model: str | None = None
    """Hugging Face name or folder whose configuration is used; the weights are random (see --init_checkpoint)."""
    dropout_rate: Annotated[float | None, DROPOUT] = None
    """Dropout probability, instead of the configuration's."""
    z_loss: Annotated[float | None, NOT_NEGATIVE] = None
    """Weight of log(Z)^2 in the loss, Z the softmax's denominator (1e-4 in T5X and PaLM), for
    modeling_t5:T5ForConditionalGeneration. None: the configuration's."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more compute."""
    speed: Annotated[Literal["auto", "off"], HARMLESS] = "auto"
    """auto: choose --model_cls, --bf16 and --compile, where they are not given, for speed on this hardware, and use
    the fused path of our own models; off: choose nothing."""
    compile: Annotated[bool, HARMLESS] = False
    """Run each transformer block through torch.compile."""

    def check(self) -> None:
        check_conflict(self, "model_cfg", "base_model", "both give the model's configuration")
        if self.model_cls is not None and ":" not in self.model_cls:
            raise UserError(f"--model_cls {self.model_cls} must be module:Class, such as {ModelArgs.model_cls}.")


@dataclass(frozen=True, kw_only=True)
class OptimizerArgs:
    """The optimizer."""

    optimizer: str = "AdamW"
    """Adafactor, AdamWScale, Muon, StableAdamW, a name of torch.optim, transformers or apex, or module:Class."""
    lr: Annotated[float | None, Range(POSITIVE.holds, f"{POSITIVE.reason}, for example 1e-3")] = None
    """Learning rate; the peak where there is a schedule. None only for --relative_step."""
    weight_decay: Annotated[float, NOT_NEGATIVE] = 0.0
    """Weight decay of matrices, decoupled from the gradient and multiplied by the learning rate. A fully decoupled
    decay d at --lr is d / lr here: 1e-5 at 8e-4 is 0.0125."""
    scale_parameter: Annotated[bool, _OF_ADAFACTOR] = False
    """Adafactor: scale the learning rate of each tensor by its RMS."""
    relative_step: Annotated[bool, _OF_ADAFACTOR] = False
    """Adafactor: learning rate from the update count, min(0.01, 1/sqrt(step)), instead of --lr."""
    warmup_init: Annotated[bool, _OF_ADAFACTOR, needs("relative_step")] = False
    """Adafactor: with --relative_step, start from 1e-6 * step instead of 0.01."""
    optimizer_options: tuple[str, ...] = ()
    """Other arguments of the optimizer's class as NAME=VALUE, for example betas=0.9,0.98 eps=1e-6."""

    optimizer_groups: tuple[str, ...] = ()
    """Options of the parameters whose names match a pattern, as "PATTERN: NAME=VALUE ...", for example
    "*embed*: lr_scale=0.5 weight_decay=0". lr_scale multiplies --lr; other names are those of --optimizer_options. The
    first pattern that matches counts."""

    def check(self) -> None:
        check_conflict(self, "relative_step", "lr", "Adafactor then computes its own learning rate")
        read_options("optimizer_options", self.optimizer_options)
        self.group_rules()

    def group_rules(self) -> list[tuple[str, dict[str, Any]]]:
        """Return `--optimizer_groups` as (parameter name pattern, options) pairs. Raises UserError."""
        rules = []
        for text in self.optimizer_groups:
            pattern, _, options = text.partition(":")
            if not pattern.strip() or not options.strip():
                raise UserError(
                    f"--optimizer_groups {text!r} is not 'PATTERN: NAME=VALUE ...': write for example "
                    "'*embed*: lr_scale=0.5 weight_decay=0', in quotes."
                )
            rules.append((pattern.strip(), read_options("optimizer_groups", options.split())))
        return rules


@dataclass(frozen=True, kw_only=True)
class RunArgs:
    """The run: directory, length, backend."""

    model_path: Annotated[str | None, HARMLESS] = None
    """Run directory: checkpoints, logs, configuration. auto, which the scripts take by default: a new folder
    runs/SCRIPT-DATE; none: nothing is saved."""
    working_dir: Annotated[str, HARMLESS] = "."
    """Folder that relative paths start from."""
    iters: Annotated[int, HARMLESS, LENGTH, COUNT] = 100
    """Optimizer updates to make, in all; a resumed run makes the rest. Pre-training takes tokens too, padding
    included, here and for the schedule and intervals: 10Btok, 100Mtok, 5000tok."""
    seed: Annotated[int, Range(lambda seed: 0 <= seed < 2**32, f"it must lie between 0 and {2**32 - 1}")] = 42
    """Seed of weights, dropout and data order."""
    backend: Annotated[Literal["auto", "horovod", "accelerate", "local"], HARMLESS] = "auto"
    """What joins the processes; auto reads the launcher's environment."""
    reproducible: Literal["off", "fixed", "elastic"] = "off"
    """fixed: the same bits after any restart and from every backend, with this number of workers; elastic: with any
    number that divides --virtual_ranks, too. Costs 8 bytes a parameter and some time (docs/reproducibility.md)."""
    virtual_ranks: Annotated[int, COUNT, needs("reproducible", "elastic")] = 12
    """--reproducible elastic: the workers that the batch is for; each real one computes the shares of several."""
    stall_timeout: Annotated[int | None, HARMLESS, _WAIT] = None
    """Seconds that workers wait for a lost one after the first step, before the job ends. None: 1800 (Horovod: 30)."""
    resume: Annotated[str, HARMLESS] = "auto"
    """auto: from the newest valid checkpoint in --model_path, if any; never: afresh; PATH: from that checkpoint."""
    validate_only: Annotated[bool, HARMLESS, EVALUATION] = False
    """Validate once and stop, without training."""

    def working_folder(self) -> str:
        """The folder in which the run works (`--working_dir`). Raises UserError if it does not exist."""
        if not os.path.isdir(self.working_dir):
            raise UserError(f"--working_dir {self.working_dir} is not a folder")
        return self.working_dir

    def virtual_size(self, world_size: int) -> int:
        """Return the number of virtual data-parallel ranks, into which each batch is divided.

        It is `--virtual_ranks` with `--reproducible elastic`, otherwise `world_size`, the number of workers.
        """
        return self.virtual_ranks if self.reproducible == "elastic" else world_size

    def shares(self, world_size: int) -> int:
        """Number of virtual ranks of each of `world_size` workers; 1 unless `--reproducible elastic` is set.

        UserError if the workers do not divide the virtual ranks.
        """
        if (virtual := self.virtual_size(world_size)) % world_size:
            raise UserError(f"--virtual_ranks {virtual} is not a multiple of the {world_size} workers that run.")
        return virtual // world_size

    def resume_path(self) -> str | None:
        """The checkpoint that `--resume` names; None for "auto" and "never"."""
        return None if self.resume in ("auto", "never") else self.resume


@dataclass(frozen=True, kw_only=True)
class ScheduleArgs:
    """The learning-rate schedule."""

    lr_scheduler: str | None = None
    """Schedule by name: those of transformers, t5_inverse_sqrt, legacy, ... None: constant."""
    num_warmup_steps: Annotated[int | None, LENGTH, NOT_NEGATIVE, _WARMUP] = None
    """Updates over which the learning rate rises to --lr. None: no warm-up (t5_inverse_sqrt: 10000)."""
    warmup_ratio: Annotated[float | None, FRACTION, _WARMUP_RATIO] = None
    """The same as a fraction of the schedule's length, instead of --num_warmup_steps."""
    num_training_steps: Annotated[int | None, HARMLESS, LENGTH, COUNT, _OF_SCHEDULE] = None
    """Updates after which the schedule has ended. None: --iters of the first start."""
    lr_min_ratio: Annotated[float, FRACTION, _OF_SCHEDULE] = 0.0
    """Floor of a decaying schedule, as a fraction of --lr."""
    lr_scheduler_options: Annotated[tuple[str, ...], _OF_SCHEDULE] = ()
    """Other arguments of the schedule as NAME=VALUE, for example num_decay_steps=1000 decay_type=linear."""
    use_lr_drop: Annotated[bool, VALIDATION] = False
    """Reduce the learning rate when --optimize_metric stops improving on validation data."""
    lr_drop_factor: Annotated[float, PART, _OF_LR_DROP] = 0.1
    """--use_lr_drop: factor of a reduction."""
    lr_drop_patience: Annotated[int, NOT_NEGATIVE, _OF_LR_DROP] = 10
    """--use_lr_drop: validations without improvement to wait before a reduction."""
    lr_drop_threshold: Annotated[float, NOT_NEGATIVE, _OF_LR_DROP] = 1e-4
    """--use_lr_drop: least change that counts as an improvement."""
    lr_drop_threshold_mode: Annotated[Literal["rel", "abs"], _OF_LR_DROP] = "rel"
    """--use_lr_drop: the threshold is relative to the best value (rel) or absolute (abs)."""
    lr_drop_cooldown: Annotated[int, NOT_NEGATIVE, _OF_LR_DROP] = 0
    """--use_lr_drop: validations to ignore after a reduction."""
    lr_drop_min_lr: Annotated[float, NOT_NEGATIVE, _OF_LR_DROP] = 0.0
    """--use_lr_drop: lower bound of the learning rate."""
    lr_drop_eps: Annotated[float, NOT_NEGATIVE, _OF_LR_DROP] = 1e-8
    """--use_lr_drop: smallest reduction worth making."""

    def check(self) -> None:
        check_conflict(self, "use_lr_drop", "lr_scheduler", "only one of them can set the learning rate")
        check_conflict(self, "num_warmup_steps", "warmup_ratio", "both say how long the warm-up is")
        read_options("lr_scheduler_options", self.lr_scheduler_options)


@dataclass(frozen=True, kw_only=True)
class BatchArgs:
    """Batches and gradients."""

    batch_size: Annotated[int, COUNT] = 10
    """Micro-batch: examples in one forward and backward pass of one worker."""
    gradient_accumulation_steps: Annotated[int, COUNT] = 1
    """Micro-batches of one worker in one optimizer update."""
    split_in_batch_loss: bool = False
    """Accept accumulation and several workers for a loss that compares the rows of a batch (in-batch negatives): each
    micro-batch then compares its own."""
    clip_grad_norm: Annotated[float | None, NOT_NEGATIVE] = None
    """Largest global L2 norm of the gradients. None or 0: no clipping."""
    clip_grad_value: Annotated[float | None, NOT_NEGATIVE] = None
    """Largest absolute value of a gradient element. None or 0: no clipping."""
    max_skipped_updates: Annotated[int, HARMLESS, COUNT] = 20
    """Updates in a row that may be skipped for a non-finite gradient before the run stops."""
    pad_to_multiple_of: Annotated[int | None, COUNT] = None
    """Cut columns that are padding in every row of a micro-batch, down to a multiple of this. None: never."""

    def check(self) -> None:
        check_conflict(self, "clip_grad_norm", "clip_grad_value", "choose one way of clipping")

    def trim_to(self) -> int | None:
        """Multiple (in tokens) to which the width of a micro-batch is rounded up when columns of padding are cut off.

        None to cut nothing off.
        """
        return self.pad_to_multiple_of

    def rows_per_worker(self) -> int:
        """Examples that one worker reads for one optimizer update."""
        return self.batch_size * self.gradient_accumulation_steps

    def rows_on_worker(self, world_size: int) -> int:
        """Examples that each of `world_size` workers reads for one update, for all of its virtual ranks."""
        return self.rows_per_worker() * self.shares(world_size)

    def global_batch_size(self, world_size: int) -> int:
        """Examples in one optimizer update of `world_size` workers."""
        return self.rows_per_worker() * self.virtual_size(world_size)


@dataclass(frozen=True, kw_only=True)
class PrecisionArgs:
    """Number formats."""

    fp16: bool = False
    """Mixed precision in float16 with dynamic loss scaling."""
    bf16: bool = False
    """Mixed precision in bfloat16; needs no loss scaling."""
    apex_opt_lvl: Annotated[Literal["O0", "O1", "O2", "O3"] | None, _OF_FP16] = None
    """Use NVIDIA apex at this level instead of torch.amp; needs --fp16 and an installed apex."""
    min_loss_scale: Annotated[float | None, POSITIVE, _OF_FP16] = None
    """--fp16: the loss scale never falls below this. None: no floor."""
    max_loss_scale: Annotated[float, POSITIVE, _OF_FP16] = 2.0**24
    """--fp16: the loss scale never rises above this."""
    fp16_allreduce: Annotated[bool, _BETWEEN_WORKERS] = False
    """Horovod and DDP: send gradients as float16, half the traffic for some precision."""

    def check(self) -> None:
        check_conflict(self, "fp16", "bf16", "choose one number format")
        if self.min_loss_scale is not None and self.min_loss_scale > self.max_loss_scale:
            limits = f"--min_loss_scale {self.min_loss_scale:g} is above --max_loss_scale {self.max_loss_scale:g}"
            raise UserError(f"{limits}.")

    def precision_options(self) -> dict[str, bool | float | str | None]:
        """Arguments of `backends.precision.get_precision`."""
        names = ("fp16", "bf16", "apex_opt_lvl", "min_loss_scale", "max_loss_scale")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, kw_only=True)
class ValidationArgs:
    """Validation, early stopping and the best checkpoint."""

    valid_interval: Annotated[int | None, HARMLESS, LENGTH, COUNT, VALIDATION] = None
    """Updates between two validations. None: pre-training validates 1 example for 20 that it trains on, fine-tuning
    once an epoch."""
    valid_at_start: Annotated[bool, HARMLESS, VALIDATION] = False
    """Also validate before the first update."""
    eval_batch_size: Annotated[int | None, HARMLESS, COUNT] = None
    """Examples in one forward pass of one worker on validation data. None: --batch_size."""
    use_generate_on_valid: Annotated[bool, HARMLESS] = False
    """Also generate text on validation data, for metrics that need it."""
    optimize_metric: str = "loss"
    """Validation metric that decides the best checkpoint, early stopping and --use_lr_drop."""
    optimize_mode: Literal["min", "max"] = "min"
    """A lower (min) or a higher (max) --optimize_metric is better."""
    save_best: Annotated[bool, HARMLESS, IN_RUN_DIRECTORY, VALIDATION] = False
    """Also keep the checkpoint with the best --optimize_metric."""
    early_stopping_patience: Annotated[int, HARMLESS, _PATIENCE, VALIDATION] = -1
    """Validations without improvement after which the run stops. -1: never."""

    def check(self) -> None:
        if self.optimize_metric == "loss" and self.optimize_mode == "max":
            raise UserError("--optimize_mode max would select the worst --optimize_metric loss.")


@dataclass(frozen=True, kw_only=True)
class CheckpointArgs:
    """Checkpoints: when they are written, and where a run starts."""

    save_interval: Annotated[int | None, HARMLESS, LENGTH, COUNT, IN_RUN_DIRECTORY] = None
    """Updates between two checkpoints; the end always has one. None: 10 minutes of training or 1,000 updates,
    whichever comes first."""
    keep_checkpoints: Annotated[int | None, HARMLESS, COUNT] = 3
    """Newest checkpoints to keep; the best one is kept as well. None: all."""
    save_in_background: Annotated[bool, HARMLESS, IN_RUN_DIRECTORY] = True
    """Copy the state and write checkpoints while training goes on."""
    init_checkpoint: Annotated[str | None, HARMLESS] = None
    """Checkpoint to start from when this run has none of its own to resume."""
    reset_optimizer: Annotated[bool, HARMLESS, _OF_INIT_CHECKPOINT] = False
    """--init_checkpoint: take the weights, start the optimizer afresh."""
    reset_lr: Annotated[bool, HARMLESS, _OF_INIT_CHECKPOINT] = False
    """--init_checkpoint: start the learning-rate schedule (and --use_lr_drop) afresh, not where the checkpoint was."""
    reset_iteration: Annotated[bool, HARMLESS, _OF_INIT_CHECKPOINT] = False
    """--init_checkpoint: count updates from 0."""
    skip_used_data: Annotated[bool, HARMLESS, _OF_INIT_CHECKPOINT] = False
    """--init_checkpoint: go on reading data where the checkpoint stopped, not from the first example."""
    allow_partial_checkpoint: Annotated[bool, HARMLESS] = False
    """Accept weights that do not match the model name by name and shape by shape; the differences are printed."""
    allow_pickle: Annotated[bool, HARMLESS] = False
    """Read checkpoint files in pickle format, which can run any code: only for files you trust."""


@dataclass(frozen=True, kw_only=True)
class LoggingArgs:
    """Logs and reports during training."""

    log_interval: Annotated[int, HARMLESS, LENGTH, COUNT] = 10
    """Updates between two lines of log."""
    log_to: Annotated[tuple[Literal["tensorboard", "trackio", "wandb"], ...], HARMLESS, IN_RUN_DIRECTORY] = (
        "tensorboard",
    )
    """Where curves are shown, besides metrics.jsonl, which is always written: several may be named. wandb is offline
    unless WANDB_MODE=online."""
    peak_tflops: Annotated[float | None, HARMLESS, POSITIVE] = None
    """Peak of one device in 10^12 FLOP/s, which mfu is the share of. None: NVIDIA's data sheet; others have no mfu."""
    profile: Annotated[int | None, HARMLESS, COUNT, IN_RUN_DIRECTORY, _OF_TRAINING] = None
    """Trace this many updates by torch's profiler: a table of operators, and a file. None: none, or 3 with
    --profile_after."""
    profile_after: Annotated[int | None, HARMLESS, COUNT, IN_RUN_DIRECTORY, _OF_TRAINING] = None
    """The update after which --profile begins. None: 5 after the run has started or gone on."""
    debug_non_finite: Annotated[bool, HARMLESS, _OF_TRAINING] = False
    """Check the output of each module, and name the first non-finite one of a skipped update; slow."""
    report: Annotated[bool, HARMLESS, IN_RUN_DIRECTORY, _OF_TRAINING] = False
    """End with a report: loss before and after, example predictions, the loss curve as a PNG."""


@dataclass(frozen=True, kw_only=True)
class TrainerArgs(LoggingArgs, CheckpointArgs, ValidationArgs, PrecisionArgs, BatchArgs, ScheduleArgs, RunArgs):
    """All arguments that the training loop reads."""

    # Before `__init__`, whose error for an unknown name says no more than the name.
    def __new__(cls, **settings: Any) -> "TrainerArgs":
        known = {field.name: field for field in fields(cls)}
        for name in settings.keys() - known.keys():
            raise UserError(f"{cls.__name__} has no argument {name!r}{suggestion(name, known)}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        check_groups(self, type(self).__mro__[::-1])

    def check(self) -> None:
        self.check_profile()
        if self.tokens_per_row() is None and (lengths := lengths_in_tokens(self)):
            flag, length = next(iter(lengths.items()))
            raise UserError(f"--{flag} {length}: rows have no fixed number of tokens here, so give updates.")
        warmup, total = self.num_warmup_steps, self.num_training_steps
        if warmup is not None and total is not None and type(warmup) is type(total) and warmup > total:
            raise UserError(f"--num_warmup_steps {warmup} is more than --num_training_steps {total}.")
        if self.init_checkpoint is not None and self.resume_path() is not None:
            raise UserError(
                f"--resume {self.resume} and --init_checkpoint {self.init_checkpoint} exclude each other: --resume "
                "continues a run, --init_checkpoint starts a new one."
            )

    def check_profile(self) -> None:
        """Raise UserError if `--profile` names updates that the run does not make, or too many to fit in memory."""
        number, start = self.profiled_steps(), self.profile_after or 1  # the first is never typical
        if number is not None and number > MOST_PROFILED:
            raise UserError(f"--profile {number} would not fit in memory: trace at most {MOST_PROFILED} updates.")
        if number is not None and start + number > self.iters:
            raise UserError(f"--profile {number}, begun after update {start}, is not over by --iters {self.iters}.")

    def profiled_steps(self) -> int | None:
        """Number of updates that `--profile` traces; None without it."""
        return 3 if self.profile is None and self.profile_after is not None else self.profile

    def check_used(self) -> None:
        """Raise UserError for a flag without effect in a run of the script. `FineTuner` accepts such flags."""
        refuse_ignored(self, in_run=True)

    def lacks_validation(self) -> bool:
        """True if a run with these arguments has no validation data."""
        return False

    def measures_nothing(self) -> bool:
        """True if a run with these arguments has neither validation nor test data."""
        return self.lacks_validation()

    def needs_validation(self) -> list[str]:
        """Return the given flags that need validation data."""
        return given_flags(self, VALIDATION, EVALUATION)

    def names_weights(self) -> bool:
        """True if a flag names weights to start from."""
        return self.init_checkpoint is not None

    def may_resume(self) -> bool:
        """True if the run may resume from one of its checkpoints."""
        return self.resume_path() is not None or (self.resume == "auto" and self.model_path not in (None, AUTO))

    def tokens_per_row(self) -> int | None:
        """Return the tokens of a row, padding included; None if the length of rows varies."""
        return None

    def schedule_steps(self) -> int:
        """Length of the learning-rate schedule in updates."""
        return self.iters if self.num_training_steps is None else self.num_training_steps

    def valid_batch_size(self) -> int:
        """Examples in one forward pass of one worker on validation data."""
        return self.batch_size if self.eval_batch_size is None else self.eval_batch_size

    def effective_valid_interval(self) -> int:
        """Updates between two validations."""
        return self.log_interval if self.valid_interval is None else self.valid_interval


@dataclass(frozen=True, kw_only=True)
class ExperimentArgs(TrainerArgs, OptimizerArgs, ModelArgs):
    """Arguments of every training script, besides its data."""

    def check(self) -> None:
        self.check_model()
        if self.learning_rate() is None and not (self.relative_step or self.validate_only):
            raise UserError(self.lacking_rate())
        check_conflict(self, "relative_step", "lr_scheduler", "Adafactor then computes its own learning rate")
        check_conflict(self, "relative_step", "use_lr_drop", "Adafactor then computes its own learning rate")

    def check_model(self) -> None:
        """Check that a model is named. Raises UserError."""
        names = ("model_cfg", "base_model", "init_checkpoint", "from_pretrained")
        if all(getattr(self, name, None) is None for name in names):
            raise UserError("no model is named: give --model_cfg, such as t5-small, or --base_model NAME.")

    def learning_rate(self) -> float | None:
        """The learning rate of the run: `--lr`, or the script's default for the optimizer, if it has one."""
        return self.lr

    def lacking_rate(self) -> str:
        """Return the error message for a missing learning rate."""
        return f"--lr is missing: --optimizer {self.optimizer} needs a learning rate, for example --lr 1e-3."

"""Steps shared by the training scripts: run directory, model, optimizer, seeds, training, end."""

from __future__ import annotations

import logging
import os
import random
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lm_experiments_tools.backends.collective import on_all
from lm_experiments_tools.checkpoint.manifest import verify_model
from lm_experiments_tools.checkpoint.tree import disk_errors_named
from lm_experiments_tools.config.bert import SENTENCES
from lm_experiments_tools.config.lengths import in_updates
from lm_experiments_tools.config.options import read_options
from lm_experiments_tools.config.phases import phases_of
from lm_experiments_tools.errors import UserError, first_line
from lm_experiments_tools.models.build import (
    build_model,
    check_vocabulary,
    enable_checkpointing,
    load_model_config,
    num_parameters,
    pretrained_config,
    set_dropout,
    set_z_loss,
)
from lm_experiments_tools.models.freezing import train_only
from lm_experiments_tools.models.speed import check_agreement, describe_speed, speed_up
from lm_experiments_tools.modules.inspection import forward_names_of
from lm_experiments_tools.modules.labelled_head import pick_labelled, spread_labels
from lm_experiments_tools.modules.user_classes import get_cls_by_name
from lm_experiments_tools.names import nearest_names
from lm_experiments_tools.optimizers import build_optimizer
from lm_experiments_tools.tracking.run_directory import RunDirectory, setup_logging
from lm_experiments_tools.training.distillation import Predict, distilled, predictor
from lm_experiments_tools.training.run_folder import claim_for_all
from lm_experiments_tools.training.schedules import LearningRate

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from lm_experiments_tools.backends.backend import Backend
    from lm_experiments_tools.config.bert import BertPretrainingArgs
    from lm_experiments_tools.config.objectives import ModelKind
    from lm_experiments_tools.config.pretraining import T5PretrainingArgs
    from lm_experiments_tools.config.training import ExperimentArgs, TrainerArgs
    from lm_experiments_tools.data.loader import TrainSource
    from lm_experiments_tools.training.losses import Loss
    from lm_experiments_tools.training.phases import Phase
    from lm_experiments_tools.training.trainer import TrainingLoop

logger = logging.getLogger(__name__)


def start_run(args: TrainerArgs, backend: Backend) -> RunDirectory | None:
    """Enter the working directory, set up logging, open the run directory (None on other ranks or without one).

    Raises:
        UserError: the directory holds a run with other settings, or one that has not ended, or cannot serve all
            machines.
    """
    os.chdir(args.working_folder())
    on_all(backend, lambda: setup_logging(args.model_path, backend.rank))
    on_all(backend, lambda: _check_phases(args, backend.world_size))
    check_agreement(args, backend)
    if args.model_path is None:
        return None
    return claim_for_all(args, backend)


def _check_phases(args: ExperimentArgs, world_size: int) -> None:
    """`_check_optimization` of each phase; of a run without phases, of its own arguments."""
    for number, phase in enumerate(phases_of(args), 1):
        try:
            _check_optimization(in_updates(phase, world_size))
        except UserError as error:
            raise UserError(f"--phases: phase {number}: {error}" if args is not phase else str(error)) from None


def _check_optimization(args: ExperimentArgs) -> None:
    """Build optimizer and schedule for a toy parameter, to refuse bad settings before hours of tokenizing."""
    if args.validate_only:
        return
    if getattr(args, "epochs", None) is not None:  # the number of updates is not known yet
        args = replace(args, iters=10**9)
    rules = [(f"rule {i}", options) for i, (_, options) in enumerate(args.group_rules())]  # each matches a toy
    names = ["layer.0.weight", *(pattern for pattern, _ in rules)]
    LearningRate(args, _optimizer(args, [(name, nn.Parameter(torch.zeros(2, 2))) for name in names], rules))


class RunData(Protocol):
    """Data of a run, as `t5_data`, `bert_data` and `finetuning_data` return it."""

    train: TrainSource | None
    objective: str


def show_run(
    args: ExperimentArgs,
    origins: Mapping[str, str],
    run: RunDirectory | None,
    backend: Backend,
    model: nn.Module,
    data: RunData,
    phase: Phase | None = None,
) -> None:
    """Log a summary of the run and record it in the run directory, after everything is set up."""
    if not backend.is_main:
        return
    count = num_parameters(model)
    rows = args.global_batch_size(backend.world_size)
    epoch = None if data.train is None else data.train.samples_per_epoch
    workers = f"{args.virtual_size(backend.world_size)} {'virtual ranks' if backend.shares > 1 else 'worker(s)'}"
    updates = args.iters - (0 if phase is None else phase.start)
    panel: dict[str, Any] = {
        "model": f"{args.model_cls or type(model).__name__}, {count.total:,} parameters ({count.embedding:,} in "
        f"embeddings){'' if count.trainable == count.total else f', {count.trainable:,} of them trained'}",
        "objective": data.objective,
        "batch": f"micro-batch {args.batch_size} x accumulation {args.gradient_accumulation_steps} x {workers}"
        f" = {rows} rows a step",
        "steps": f"{updates} updates, {updates * rows:,} examples"
        + (f" = {updates * rows / epoch:.2f} epochs of {epoch:,}" if epoch else ""),
        "optimizer": ", ".join([args.optimizer, *args.optimizer_options, f"lr {args.lr}"])
        + ", ".join([f", schedule {args.lr_scheduler or 'constant'}", *args.lr_scheduler_options]),
        "precision": _precision(args),
        "speed": describe_speed(args, origins, model),
    }
    if run is not None:
        panel["run"] = f"{run.path} (tensorboard --logdir {run.path})"
        model_config = model.config.to_dict() if hasattr(model, "config") else None
        recorded = asdict(args) if phase is None else {**asdict(phase.run), "iters": phase.last_step}
        run.write_start(recorded, origins, sys.argv, model_config, world_size=args.virtual_size(backend.world_size))
    if args.validate_only:
        panel["batch"] = f"{args.valid_batch_size()} rows x {backend.world_size} worker(s), validated once"
        del panel["steps"], panel["optimizer"]
    width = max(map(len, panel))
    for name, value in panel.items():
        logger.info("%-*s  %s", width, name, value)


def _precision(args: ExperimentArgs) -> str:
    """Precision of computation, and of the weights where it is lower."""
    options = args.precision_options()
    held = [kind for kind in (getattr(args, "quantize", None), getattr(args, "inference_dtype", None)) if kind]
    computed = "fp16" if options["fp16"] or "fp16" in held else "bf16" if options["bf16"] else "fp32"
    return f"{computed}, weights held in {' and '.join(held)}" if held else computed


def seed_worker(seed: int, rank: int) -> None:
    """Seed Python, numpy and torch, so that each worker draws its own dropout noise."""
    random.seed(f"{seed}-{rank}")
    np.random.seed((seed * 1000003 + rank) % 2**32)
    torch.manual_seed(seed * 1000003 + rank)


@dataclass(frozen=True)
class ModelSource:
    """Model class and configuration of a run, from `model_source`."""

    name: str
    cls: type
    config: PreTrainedConfig

    @property
    def may_be_decoder(self) -> bool:
        """True for a class that predicts the next token if its configuration sets `is_decoder`."""
        return getattr(self.cls, "has_causal_loss", False)

    @property
    def kind(self) -> ModelKind:
        """Kind of the model. Encoder-decoders apart, models that generate and BERT with `is_decoder` are decoders."""
        if getattr(self.config, "is_encoder_decoder", False):
            return "encoder-decoder"
        if self.may_be_decoder and self.config.is_decoder:
            return "decoder"
        return "decoder" if hasattr(self.cls, "can_generate") and self.cls.can_generate() else "encoder"


def model_source(args: ExperimentArgs, backend: Backend) -> ModelSource:
    """Import the model class and read its configuration; every worker calls it once.

    Without a configuration (for `lmtools inspect`) it is the class's default one.

    Raises:
        UserError: class or configuration is not available.
    """
    return on_all(backend, lambda: _model_source(args))


def _model_source(args: ExperimentArgs) -> ModelSource:
    model_cls = get_cls_by_name(args.model_cls)
    config_cls = getattr(model_cls, "config_class", None)
    is_named = args.model_cfg or args.base_model or args.init_checkpoint
    config = config_cls() if config_cls is not None and not is_named else _config(args, config_cls)
    for name, value in read_options("model_options", getattr(args, "model_options", ())).items():
        if not hasattr(config, name):
            near = nearest_names(name, config.to_dict()) or "."
            raise UserError(f"--model_options {name}: {type(config).__name__} has no such value{near}")
        setattr(config, name, value)
    return ModelSource(args.model_cls, model_cls, config)


def _config(args: ExperimentArgs, config_cls: type | None) -> PreTrainedConfig:
    from huggingface_hub.errors import StrictDataclassError

    if args.model_cfg is not None:
        return load_model_config(args.model_cfg, config_cls)
    if args.base_model is not None:
        if (Path(args.base_model) / "config.json").is_file():
            verify_model(Path(args.base_model), ["config.json"])
        try:
            return pretrained_config(args.base_model, config_cls)
        except (OSError, ValueError, StrictDataclassError) as error:
            reason = " ".join(str(error).split()) if isinstance(error, StrictDataclassError) else first_line(error)
            raise UserError(f"--base_model {args.base_model}: its configuration cannot be read ({reason}).") from error
    path = Path(args.init_checkpoint) / "config.json"
    if not path.is_file():
        raise UserError(f"--init_checkpoint {path.parent} has no config.json: give --model_cfg.")
    verify_model(path.parent, [path.name])
    return load_model_config(path, config_cls, trusted=False)


def model_from_args(args: ExperimentArgs, source: ModelSource, vocabulary_size: int) -> nn.Module:
    """Build the model with random weights, equal on all workers.

    Raises:
        UserError: a model without a loss, or whose embedding is smaller than the vocabulary.
    """
    if args.dropout_rate is not None:
        set_dropout(source.config, args.dropout_rate)
    if args.z_loss is not None:
        set_z_loss(source.config, args.z_loss)
    check_vocabulary(source.config, vocabulary_size)
    if "labels" not in forward_names_of(source.cls):
        raise UserError(f"--model_cls {source.name} takes no labels: choose a class such as {type(args).model_cls}.")
    model = build_model(source.cls, source.config, seed=args.seed)
    train_only(model, getattr(args, "trained", ()))
    if args.gradient_checkpointing:
        enable_checkpointing(model)
    speed_up(model, args)
    return model


def labels_alone(
    args: BertPretrainingArgs | T5PretrainingArgs,
    backend: Backend,
    model: nn.Module,
    most_labels: Callable[[int], int],
) -> Callable[[int], int] | None:
    """`--mlm_positions`: `most_labels` if only masked positions are scored, else None.

    Raises:
        UserError: this was requested, and the model's head needs all positions.
    """
    chosen = args.mlm_positions
    if chosen == "all" or args.distill_from is not None:
        return None
    reason = on_all(backend, lambda: pick_labelled(model, args.input_seq_len))
    if reason is not None and chosen == "labels":
        raise UserError(f"--mlm_positions labels: {args.model_cls} scores all positions: {reason}.")
    if reason is not None and backend.is_main:
        logger.info("all positions are scored, not only those with a label: %s", reason)
    return most_labels if reason is None else None


def distilled_loss(
    args: BertPretrainingArgs | T5PretrainingArgs, backend: Backend, student: nn.Module, kind: ModelKind, loss: Loss
) -> Loss:
    """`loss`, with the divergence from the predictions of `--distill_from` where there is one.

    Raises:
        UserError: the teacher cannot be read, or has another vocabulary or kind.
    """
    if args.distill_from is None:
        return loss
    from lm_experiments_tools.models.saved import open_saved

    def opened() -> Predict:
        teacher = open_saved(args.distill_from, flag="--distill_from")
        rows = [model.get_output_embeddings().weight.shape[0] for model in (teacher.model, student)]
        if rows[0] != rows[1]:
            raise UserError(
                f"--distill_from {args.distill_from} predicts {rows[0]} tokens, the model {rows[1]}: they need one "
                "vocabulary."
            )
        return predictor(teacher.model.requires_grad_(False).to(backend.device), teacher.kind, kind)

    return distilled(loss, on_all(backend, opened), args.distill_weight, backend.autocast)


def most_labels(args: BertPretrainingArgs) -> Callable[[int], int]:
    """Upper bound of the number of masked tokens in so many rows; whole-word masking varies more."""
    if args.packing == SENTENCES:
        return lambda rows: rows * args.most_predictions()
    rate = min(1.0, args.highest_rate() * (1.5 if args.whole_word else 1.0))
    return lambda rows: spread_labels(rows * args.input_seq_len, rate)


def optimizer_from_args(args: ExperimentArgs, model: nn.Module) -> Optimizer | None:
    """The optimizer that the flags describe, over the trainable parameters; None with `--validate_only`."""
    return None if args.validate_only else _optimizer(args, model, args.group_rules())


def _optimizer(
    args: ExperimentArgs,
    model: nn.Module | Iterable[tuple[str, Tensor]],
    rules: Sequence[tuple[str, Mapping[str, Any]]],
) -> Optimizer:
    return build_optimizer(
        model,
        name=args.optimizer,
        lr=args.lr,
        weight_decay=args.weight_decay,
        scale_parameter=args.scale_parameter,
        relative_step=args.relative_step,
        warmup_init=args.warmup_init,
        extra=read_options("optimizer_options", args.optimizer_options),
        rules=rules,
    )


def save_tokenizer(args: ExperimentArgs, backend: Backend, save: Callable[[Path], object]) -> Path | None:
    """Write the tokenizer's files below the run directory; returns their folder, None for a run that saves nothing."""
    if args.model_path is None or args.validate_only:
        return None
    folder = Path(args.model_path) / "tokenizer"

    def write() -> None:
        with disk_errors_named(folder):
            save(folder)

    on_all(backend, write, only_main=True)
    return folder


def train_or_validate(trainer: TrainingLoop) -> None:
    """Train, or with `--validate_only` validate once, where there is validation data."""
    if not trainer.args.validate_only:
        trainer.train()
    elif trainer.valid_dataloader is not None:
        trainer.validate(trainer.valid_dataloader)


def close_run(backend: Backend, data: RunData) -> None:
    """End the processes that make batches, and the backend."""
    if data.train is not None:
        data.train.close()
    backend.close()

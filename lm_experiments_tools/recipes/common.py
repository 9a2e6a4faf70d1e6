"""From arguments to the things a training script puts together: run directory, model, optimizer, random states."""

from __future__ import annotations

import logging
import os
import random
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from lm_experiments_tools.backends.collective import on_all
from lm_experiments_tools.config.flags import harmless_flags
from lm_experiments_tools.errors import UserError, first_line
from lm_experiments_tools.models.build import (
    build_model,
    check_vocabulary,
    enable_checkpointing,
    load_model_config,
    num_parameters,
    set_dropout,
)
from lm_experiments_tools.modules.inspection import forward_names_of
from lm_experiments_tools.modules.user_classes import get_cls_by_name
from lm_experiments_tools.optimizers import build_optimizer
from lm_experiments_tools.tracking.run_directory import RunDirectory, setup_logging

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from lm_experiments_tools.backends.backend import Backend
    from lm_experiments_tools.config.objectives import ModelKind
    from lm_experiments_tools.config.training import ExperimentArgs, TrainerArgs

logger = logging.getLogger(__name__)


def start_run(args: TrainerArgs, backend: Backend) -> RunDirectory | None:
    """Enter the working directory, set up logging, open the run directory (None on other ranks or without one).

    Raises:
        UserError: the directory holds a run with other settings, or one that has not ended.
    """
    if not os.path.isdir(args.working_dir):
        raise UserError(f"--working_dir {args.working_dir} is not a folder")
    os.chdir(args.working_dir)
    on_all(backend, lambda: setup_logging(args.model_path, backend.rank))
    if args.model_path is None:
        return None

    def open_directory() -> RunDirectory:
        run = RunDirectory(args.model_path, backend.rank)
        run.claim()
        resume, harmless = args.resume_path() is not None, harmless_flags(type(args))
        run.check_compatible(asdict(args), resume, world_size=backend.world_size, harmless=harmless)
        return run

    return on_all(backend, open_directory, only_main=True)


def show_run(
    args: ExperimentArgs,
    origins: Mapping[str, str],
    run: RunDirectory | None,
    backend: Backend,
    model: nn.Module,
    samples_per_epoch: int | None,
    objective: str,
) -> None:
    """The run at a glance, and its record in the run directory; for when all is set up and nothing can be refused."""
    if not backend.is_main:
        return
    count = num_parameters(model)
    rows = args.global_batch_size(backend.world_size)
    panel: dict[str, Any] = {
        "model": f"{args.model_cls or type(model).__name__}, {count.total:,} parameters ({count.embedding:,} in "
        f"embeddings){'' if count.trainable == count.total else f', {count.trainable:,} of them trained'}",
        "objective": objective,
        "batch": f"{args.batch_size} rows x {args.gradient_accumulation_steps} accumulated x {backend.world_size} "
        f"worker(s) = {rows} rows a step",
        "steps": f"{args.iters} updates, {args.iters * rows:,} examples"
        + (
            f" = {args.iters * rows / samples_per_epoch:.2f} epochs of {samples_per_epoch:,}"
            if samples_per_epoch
            else ""
        ),
        "optimizer": f"{args.optimizer}, lr {args.lr}, schedule {args.lr_scheduler or 'constant'}",
        "precision": "fp16" if args.fp16 else "bf16" if args.bf16 else "fp32",
    }
    if run is not None:
        panel["run"] = f"{run.path} (tensorboard --logdir {run.path})"
        model_config = model.config.to_dict() if hasattr(model, "config") else None
        run.write_start(asdict(args), origins, sys.argv, model_config, world_size=backend.world_size)
    width = max(map(len, panel))
    for name, value in panel.items():
        logger.info("%-*s  %s", width, name, value)


def _amount(samples: int, samples_per_epoch: int | None) -> str:
    """That many samples in words: epochs where an epoch has a known size."""
    if samples_per_epoch is None:
        return f"{samples:,} examples"
    return f"{samples / samples_per_epoch:.2f} epochs of {samples_per_epoch:,}"


def seed_worker(seed: int, rank: int) -> None:
    """Seed Python, numpy and torch: each worker draws its own dropout noise (a resumed run goes on with its own)."""
    random.seed(f"{seed}-{rank}")
    np.random.seed((seed * 1000003 + rank) % 2**32)
    torch.manual_seed(seed * 1000003 + rank)


def model_from_args(args: ExperimentArgs, vocabulary_size: int) -> nn.Module:
    """The model that the flags describe, with random weights equal on all workers.

    Its class may live in a file of the current folder (`--model_cls my_model:MyT5`).

    Raises:
        UserError: class or configuration cannot be had, or the embedding is smaller than the vocabulary.
    """
    model_cls, config = class_and_config(args)
    if args.dropout_rate is not None:
        set_dropout(config, args.dropout_rate)
    check_vocabulary(config, vocabulary_size)
    if "labels" not in forward_names_of(model_cls):
        raise UserError(
            f"--model_cls {args.model_cls}: its forward takes no labels and so gives no loss; choose a class "
            f"such as {type(args).model_cls}"
        )
    model = build_model(model_cls, config, seed=args.seed)
    if args.gradient_checkpointing:
        enable_checkpointing(model)
    if args.compile:
        model.compile()
    return model


def optimizer_from_args(args: ExperimentArgs, model: nn.Module) -> Optimizer:
    """The optimizer that the flags describe, over the model's trainable parameters."""
    return build_optimizer(
        model,
        name=args.optimizer,
        lr=args.lr,
        weight_decay=args.weight_decay,
        scale_parameter=args.scale_parameter,
        relative_step=args.relative_step,
        warmup_init=args.warmup_init,
    )


def model_kind(args: ExperimentArgs) -> ModelKind:
    """What `--model_cls` is: by its configuration's `is_encoder_decoder`, and a decoder if it can generate.

    Without a configuration (`lmtools inspect` needs none) the class' default one is asked.

    Raises:
        UserError: class or configuration cannot be had.
    """
    model_cls, config = class_and_config(args)
    if getattr(config, "is_encoder_decoder", False):
        return "encoder-decoder"
    return "decoder" if hasattr(model_cls, "can_generate") and model_cls.can_generate() else "encoder"


def class_and_config(args: ExperimentArgs) -> tuple[type, PreTrainedConfig]:
    """`--model_cls`, which may live in a file of the current folder, and the configuration that the flags name."""
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)
    model_cls = get_cls_by_name(args.model_cls)
    config_cls = getattr(model_cls, "config_class", None)
    if config_cls is not None and not (args.model_cfg or args.base_model or args.init_checkpoint):
        return model_cls, config_cls()
    return model_cls, _config(args, config_cls)


def _config(args: ExperimentArgs, config_cls: type | None) -> PreTrainedConfig:
    if args.model_cfg is not None:
        return load_model_config(args.model_cfg, config_cls)
    if args.base_model is not None:
        return _pretrained_config(args.base_model, config_cls, "--base_model")
    source = Path(args.init_checkpoint)
    if not (source / "config.json").is_file():
        raise UserError(
            f"--init_checkpoint {source} holds no config.json that would describe the model; give --model_cfg"
        )
    return load_model_config(source / "config.json", config_cls)


def _pretrained_config(name: str, config_cls: type | None, flag: str) -> PreTrainedConfig:
    from transformers import AutoConfig

    try:
        return (config_cls or AutoConfig).from_pretrained(name)
    except (OSError, ValueError) as error:
        raise UserError(
            f"{flag} {name}: its configuration cannot be read ({first_line(error)}); give a folder with a "
            "config.json, or --model_cfg"
        ) from error

"""Checks that a user's model, optimizer and loaders fit together, and that workers read data of one fingerprint."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from lm_experiments_tools.config.flags import is_given
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.training.batches import BatchStream, is_split, num_rows_in, sampler_of

if TYPE_CHECKING:
    from lm_experiments_tools.backends.backend import Backend
    from lm_experiments_tools.config.training import TrainerArgs
    from lm_experiments_tools.training.losses import Targets

logger = logging.getLogger(__name__)

OF_VALIDATION = ("save_best", "early_stopping_patience", "use_lr_drop")


def check_parts(args: TrainerArgs, model: nn.Module, optimizer: Optimizer | None, train: Any, valid: Any) -> None:
    """Check that model, optimizer and data loaders can be trained with `args`. Raises UserError."""
    if hasattr(model, "_orig_mod"):
        raise UserError(
            "the model was compiled by torch.compile, which renames its weights: give the trainer the model itself, "
            "and TrainerArgs compile=True"
        )
    if optimizer is not None:
        _check_optimizer(model, optimizer)
    unread = [name for name in OF_VALIDATION if is_given(args, name)]
    if unread and train is not None and valid is None and not args.validate_only:
        raise UserError(f"no validation data for {', '.join(unread)}: give valid_dataloader, or leave them out")
    if args.reproducible == "elastic" and train is not None and not hasattr(train, "seek"):
        raise UserError(
            "--reproducible elastic needs a training data loader with seek(), as data.loader.TrainLoader has, whose "
            f"rows are the same for any number of workers; {type(train).__name__} has none."
        )


def check_loss(args: TrainerArgs, backend: Backend, model: nn.Module, targets: Targets) -> None:
    """Log what a loss is assumed to be a mean over.

    UserError for a loss over whole batches, and steps of several micro-batches or workers.
    """
    parts, name = args.gradient_accumulation_steps * args.virtual_size(backend.world_size), type(model).__name__
    if targets.mean_over == "batch" and parts > 1 and not args.split_in_batch_loss:
        raise UserError(
            f"the loss of {name} compares the rows of a batch, and each step has {parts} parts that would see only "
            "their own rows: use --gradient_accumulation_steps 1 and one worker, or accept it by --split_in_batch_loss"
        )
    if not targets.is_declared and backend.is_main:
        shift = ", the first of a row left out" if targets.shifts_labels else ""
        logger.log(
            logging.WARNING if parts > 1 else logging.INFO,
            "%s declares no divisor of its loss, so that is taken as a mean over labels other than -100%s (without "
            "labels: over rows). With another (class weights, in-batch negatives) the gradient depends on the split "
            "into micro-batches and workers. Declare loss_mean_over = 'labels', 'rows' or 'batch' and shifts_labels "
            "in the class, or take num_items_in_batch (docs/new_variant.md)",
            name, shift,
        )  # fmt: skip


def _check_optimizer(model: nn.Module, optimizer: Optimizer) -> None:
    trained = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    optimized = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if trained.isdisjoint(optimized):
        raise UserError(
            f"the optimizer has none of the {len(trained)} trained parameters of the model, so nothing would be "
            "trained: make it with this model's parameters(), after any change of the model"
        )
    if foreign := len(optimized.difference(map(id, model.parameters()))):
        logger.warning(
            "%d of the %d parameters of the optimizer are not the model's, and %d of the model's %d trained ones are "
            "not the optimizer's: make it after any change of the model",
            foreign, len(optimized), len(trained - optimized), len(trained),
        )  # fmt: skip


def check_training_data(stream: BatchStream | None, optimizer: Optimizer | None, backend: Backend) -> str | None:
    """Check that a trainer can train, and that all workers read the same training data; collective.

    Warns if each of several workers reads a `DataLoader` as a single process would. A sampler that does not split the
    rows is right only if the workers' datasets are different parts of the data.

    Returns:
        Fingerprint of the training data; None if unknown.

    Raises:
        UserError: the trainer was built without optimizer or training data, or fingerprints of two workers differ.
    """
    missing = [name for name, part in {"train_dataloader": stream, "optimizer": optimizer}.items() if part is None]
    if missing:
        raise UserError(f"the trainer was made without {' and '.join(missing)}, so it can only validate")
    loader = stream.loader
    if backend.is_main and backend.world_size > 1 and sampler_of(loader) is not None and not is_split(loader):
        logger.warning(
            "each of the %d workers reads its whole training DataLoader. Unless each has another part of the data, "
            "they train on the same rows: give it a torch.utils.data.DistributedSampler(dataset, "
            "num_replicas=world_size, rank=rank, shuffle=True, seed=seed)",
            backend.world_size,
        )
    fingerprints = backend.gather(stream.fingerprint)
    if len(set(fingerprints)) > 1:
        other = next(rank for rank, f in enumerate(fingerprints) if f != fingerprints[0])
        raise UserError(
            f"worker {other} reads other training data than worker 0: copy the same files to every machine, or "
            "train from a shared folder"
        )
    return stream.fingerprint


def warn_of_batch_size(batch: Any, args: TrainerArgs) -> None:
    """Warn if the first batch of a loader has another number of rows than a step takes."""
    rows, wanted = num_rows_in(batch), args.rows_per_worker()
    if rows != wanted:
        logger.warning(
            "the training data gives %d rows a batch, but a step takes one batch of batch_size %d x "
            "gradient_accumulation_steps %d = %d rows: make the loader with batch_size=args.rows_per_worker()",
            rows, args.batch_size, args.gradient_accumulation_steps, wanted,
        )  # fmt: skip

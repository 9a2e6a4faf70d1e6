"""Checks of what a program hands to the trainer: model, optimizer and loaders that belong together."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from lm_experiments_tools.config.flags import is_given
from lm_experiments_tools.errors import UserError

if TYPE_CHECKING:
    from lm_experiments_tools.config.training import TrainerArgs

logger = logging.getLogger(__name__)

OF_VALIDATION = ("save_best", "early_stopping_patience", "use_lr_drop")


def check_parts(args: TrainerArgs, model: nn.Module, optimizer: Optimizer | None, train: Any, valid: Any) -> None:
    """Raise UserError where model, optimizer and data loaders cannot train as `args` say."""
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
    sparse = (nn.Embedding, nn.EmbeddingBag)
    for name, module in model.named_modules():
        if isinstance(module, sparse) and module.sparse and module.weight.requires_grad:
            raise UserError(
                f"{name} has sparse gradients, whose norm cannot be computed: make the {type(module).__name__} with "
                "sparse=False"
            )


def check_trainable(stream: Any, optimizer: Optimizer | None) -> None:
    """Raise UserError where a trainer was made for evaluation alone."""
    missing = [name for name, part in {"train_dataloader": stream, "optimizer": optimizer}.items() if part is None]
    if missing:
        raise UserError(f"the trainer was made without {' and '.join(missing)}, so it can only validate")

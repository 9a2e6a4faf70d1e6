"""Build the model and the optimizer of a pre-training run from its flags."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lm_experiments_tools.backends.collective import on_all
from lm_experiments_tools.checkpoint.manifest import verify_model
from lm_experiments_tools.config.bert import SENTENCES
from lm_experiments_tools.config.options import read_options
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.files import read_json
from lm_experiments_tools.models.build import (
    build_model,
    check_vocabulary,
    enable_checkpointing,
    load_model_config,
    pretrained_config,
    refusals_named,
    set_dropout,
    set_special_tokens,
    set_z_loss,
)
from lm_experiments_tools.models.freezing import train_only
from lm_experiments_tools.models.speed import speed_up
from lm_experiments_tools.modules.inspection import forward_names_of, takes_any_name
from lm_experiments_tools.modules.user_classes import get_cls_by_name
from lm_experiments_tools.names import nearest_names
from lm_experiments_tools.optimizers import build_optimizer

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from lm_experiments_tools.backends.backend import Backend
    from lm_experiments_tools.config.bert import BertPretrainingArgs
    from lm_experiments_tools.config.objectives import ModelKind
    from lm_experiments_tools.config.pretraining import T5PretrainingArgs
    from lm_experiments_tools.config.training import ExperimentArgs

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelSource:
    """The model that flags ask for: its name (`--model_cls`), class and configuration; made by `model_source`."""

    name: str
    cls: type
    config: PreTrainedConfig

    @property
    def may_be_decoder(self) -> bool:
        """True if the class becomes a causal language model when its configuration has `is_decoder`."""
        return getattr(self.cls, "has_causal_loss", False)

    @property
    def kind(self) -> ModelKind:
        """Kind of the model; a decoder can generate, or is our BERT with `is_decoder`."""
        if getattr(self.config, "is_encoder_decoder", False):
            return "encoder-decoder"
        if self.may_be_decoder and self.config.is_decoder:
            return "decoder"
        return "decoder" if hasattr(self.cls, "can_generate") and self.cls.can_generate() else "encoder"


def model_source(
    args: ExperimentArgs, backend: Backend, tokens: Mapping[str, int | None] | None = None
) -> ModelSource:
    """Import the model class that flags name, and read its configuration. Every worker must call it. Raises UserError.

    Without a flag for the configuration (`lmtools inspect`), the class's default is used.

    Args:
        tokens: id of each special token of the vocabulary, which a model without weights takes (see
            `build.set_special_tokens`); None leaves those of the configuration.
    """
    return on_all(backend, lambda: _model_source(args, tokens))


def _model_source(args: ExperimentArgs, tokens: Mapping[str, int | None] | None) -> ModelSource:
    model_cls = get_cls_by_name(args.model_cls)
    config_cls = getattr(model_cls, "config_class", None)
    is_named = args.model_cfg or args.base_model or args.init_checkpoint
    config = config_cls() if config_cls is not None and not is_named else _config(args, config_cls)
    if args.model_cfg is not None:
        _report_unknown(args, config, model_cls)
    if args.init_checkpoint is not None and args.model_cfg is not None:
        _keep_special_tokens(config, Path(args.init_checkpoint))
    elif tokens is not None and args.init_checkpoint is None:
        set_special_tokens(config, tokens, model_cls)
    for name, value in read_options("model_options", getattr(args, "model_options", ())).items():
        if not hasattr(config, name):
            near = nearest_names(name, config.to_dict()) or "."
            raise UserError(f"--model_options {name}: {type(config).__name__} has no such value{near}")
        with refusals_named(f"--model_options {name}={value}"):
            setattr(config, name, value)
    return ModelSource(args.model_cls, model_cls, config)


def _report_unknown(args: ExperimentArgs, config: PreTrainedConfig, model_cls: type) -> None:
    """Warn of a class in `architectures` of `--model_cfg` that is neither trained nor one of transformers."""
    import transformers

    known = {model_cls.__name__, "T5WithLMHeadModel"}  # the old name of T5ForConditionalGeneration
    for name in getattr(config, "architectures", None) or ():
        if name not in known and not hasattr(transformers, name):
            logger.warning(
                "--model_cfg %s names the class %s, which transformers does not have: %s is trained; name a class of "
                "your own by --model_cls module:%s",
                args.model_cfg, name, args.model_cls, name,
            )  # fmt: skip


def _keep_special_tokens(config: PreTrainedConfig, weights: Path) -> None:
    """Give a configuration the special tokens with which its weights were trained, if a config.json tells them."""
    path = weights / "config.json"
    if not path.is_file():
        return
    verify_model(weights, [path.name])
    for key, value in read_json(path).items():
        if key.endswith("_token_id") and value is not None and getattr(config, key, value) != value:
            logger.info("%s of the model is %s, that of %s (was %s)", key, value, path, getattr(config, key))
            setattr(config, key, value)


def _config(args: ExperimentArgs, config_cls: type | None) -> PreTrainedConfig:
    if args.model_cfg is not None:
        return load_model_config(args.model_cfg, config_cls)
    if args.base_model is not None:
        if (Path(args.base_model) / "config.json").is_file():
            verify_model(Path(args.base_model), ["config.json"])
        return pretrained_config(args.base_model, config_cls)
    path = Path(args.init_checkpoint) / "config.json"
    if not path.is_file():
        raise UserError(f"--init_checkpoint {path.parent} has no config.json: give --model_cfg.")
    verify_model(path.parent, [path.name])
    return load_model_config(path, config_cls, trusted=False)


def model_from_args(args: ExperimentArgs, source: ModelSource, vocabulary_size: int) -> nn.Module:
    """Build the model of a pre-training run with random weights, equal on all workers. Raises UserError."""
    if args.dropout_rate is not None:
        set_dropout(source.config, args.dropout_rate)
    if args.z_loss is not None:
        set_z_loss(source.config, args.z_loss)
    check_vocabulary(source.config, vocabulary_size)
    if "labels" not in forward_names_of(source.cls) and not takes_any_name(source.cls):
        raise UserError(f"--model_cls {source.name} takes no labels: choose a class such as {type(args).model_cls}.")
    model = build_model(source.cls, source.config, seed=args.seed)
    train_only(model, getattr(args, "trained", ()))
    if args.gradient_checkpointing:
        enable_checkpointing(model)
    speed_up(model, args)
    return model


def most_labels(args: BertPretrainingArgs | T5PretrainingArgs) -> Callable[[int], int]:
    """Return a function of a batch's rows that bounds its masked tokens, which fixes the size of label tensors."""
    if getattr(args, "packing", None) == SENTENCES:
        return lambda rows: rows * args.most_predictions()
    return lambda rows: spread_labels(rows * args.input_seq_len, args.highest_rate())


def spread_labels(tokens: int, probability: float) -> int:
    """Bound the number of masked tokens among `tokens`: six standard deviations above the mean."""
    mean = tokens * probability
    return math.ceil(mean + 6 * math.sqrt(mean * (1 - probability)))


def optimizer_from_args(args: ExperimentArgs, model: nn.Module) -> Optimizer | None:
    """Build the optimizer that flags describe, over the trainable parameters; None with `--validate_only`."""
    return None if args.validate_only else make_optimizer(args, model, args.group_rules())


def make_optimizer(
    args: ExperimentArgs,
    model: nn.Module | Iterable[tuple[str, Tensor]],
    rules: Sequence[tuple[str, Mapping[str, Any]]],
) -> Optimizer:
    """Build the optimizer that flags describe for a model or for (name, parameter) pairs."""
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

"""What run_finetuning.py puts together out of arguments, data and model: the loop, and the evaluation it ends with."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn
from torch.optim import Optimizer

from lm_experiments_tools.adapters import new_token_prefix
from lm_experiments_tools.batches import forward_names
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.evaluation.predictions import Predictions, TextDecoder
from lm_experiments_tools.evaluation.text import check_metrics
from lm_experiments_tools.freezing import summary
from lm_experiments_tools.losses import LANGUAGE_MODEL_LOSS, MODEL_LOSS
from lm_experiments_tools.manifest import MANIFEST, read_manifest
from lm_experiments_tools.state import on_main
from lm_experiments_tools.trainer import TrainingLoop

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from lm_experiments_tools.backends.backend import Backend
    from lm_experiments_tools.data.finetuning import FinetuningData
    from lm_experiments_tools.finetuning_args import FinetuningArgs

logger = logging.getLogger(__name__)


def with_new_tokens(args: FinetuningArgs, tokenizer: PreTrainedTokenizerBase) -> FinetuningArgs:
    """The same arguments with a prefix that begins with the tokens of `--peft new_tokens`, where there are any."""
    new = new_token_prefix(tokenizer)
    return replace(args, prefix=new + args.prefix) if new and args.task != "instructions" else args


def save_tokenizer(args: FinetuningArgs, backend: Backend, tokenizer: PreTrainedTokenizerBase) -> Path | None:
    """The folder below the run directory that holds the tokenizer's files; None for a run that saves nothing."""
    if args.model_path is None:
        return None
    folder = Path(args.model_path) / "tokenizer"
    on_main(backend, lambda: tokenizer.save_pretrained(folder) and None)
    return folder


def show_summary(backend: Backend, model: nn.Module) -> None:
    """Log the parameters by part, as they are before any backend cuts them into slices."""
    if backend.is_main:
        for line in str(summary(model)).splitlines():
            logger.info("%s", line)


def finetuning_loop(
    args: FinetuningArgs,
    backend: Backend,
    model: nn.Module,
    optimizer: Optimizer | None,
    data: FinetuningData,
    tokenizer: PreTrainedTokenizerBase,
    tokenizer_dir: Path | None = None,
) -> TrainingLoop:
    """The loop that trains `model` on `data.train` and evaluates it as `args.metrics` says.

    Args:
        args: with what follows from others put in (`FinetuningArgs.resolved`).
        tokenizer_dir: folder whose tokenizer files are put into every checkpoint.

    Raises:
        UserError: `--packing` for a model that cannot tell the examples of a row apart, or metrics that cannot be had.
    """
    if args.packing and args.model_type == "encoder-decoder" and "segment_ids" not in forward_names(model):
        raise UserError(
            f"--packing: {type(model).__name__} does not take segment_ids, so the examples of a row would see each "
            "other; choose --model_cls modeling_t5:T5ForConditionalGeneration, which loads the same weights."
        )
    if args.packing and args.model_type == "decoder" and "position_ids" not in forward_names(model):
        raise UserError(
            f"--packing: {type(model).__name__} does not take position_ids, by which transformers tells the examples "
            "of a row apart: leave it out, or choose another model."
        )
    check_metrics(args.metric_names())
    folder = None if args.model_path is None else Path(args.model_path) / "predictions"

    def collect(split: str) -> Predictions:
        return Predictions(args, split, data.splits[split].examples, TextDecoder(tokenizer), data.label_names, folder)

    valid = data.splits.get("valid")
    return TrainingLoop(
        args,
        backend,
        model,
        optimizer,
        None if args.validate_only else data.train,
        None if valid is None else valid.loader,
        generate_kwargs=args.generation_options(),
        tokenizer_dir=tokenizer_dir,
        loss=LANGUAGE_MODEL_LOSS if args.task == "causal_lm" else MODEL_LOSS,
        collect=collect if args.task != "causal_lm" and args.metric_names() else None,
    )


def evaluate_last(trainer: TrainingLoop, data: FinetuningData) -> None:
    """Evaluate the test data after training; with `--save_best` by the best checkpoint, validation data again as well.

    Raises:
        SystemExit: with 128 + signal number, where a signal cut it short.
    """
    args, state = trainer.args, trainer.state
    with trainer.signals, trainer.tracking():
        if args.save_best and not args.validate_only and state.best_step != state.step:
            best = Path(args.model_path) / "best"
            if state.best_step is None:
                trainer.say(f"no validation gave a {args.optimize_metric} (all were nan): the last one is evaluated")
            elif on_main(trainer.backend, lambda: _step_of(best) == state.best_step):
                trainer.load(best)
                trainer.validate(data.splits["valid"].loader, write_tb=False)
            else:
                trainer.say(f"step {state.best_step} was the best and was not kept: the last one is evaluated")
        if "test" in data.splits and not trainer.signals.agreed:
            trainer.validate(data.splits["test"].loader, "test")
    if trainer.signals.agreed:
        raise SystemExit(128 + trainer.signals.agreed)


def _step_of(checkpoint: Path) -> int | None:
    return read_manifest(checkpoint)["step"] if (checkpoint / MANIFEST).is_file() else None

"""Build model, optimizer and one batch from a run's settings, with random weights and random tokens."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch import Tensor, nn

from lm_experiments_tools.backends.backend import LocalBackend
from lm_experiments_tools.backends.precision import Precision
from lm_experiments_tools.config.finetuning import FinetuningArgs
from lm_experiments_tools.data.objectives.span_corruption import plan_spans
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.labels import LABEL_POSITIONS
from lm_experiments_tools.models.adapters import add_adapter, check_peft
from lm_experiments_tools.models.build import enable_checkpointing
from lm_experiments_tools.models.freezing import freeze
from lm_experiments_tools.models.from_args import model_from_args, model_source, most_labels, optimizer_from_args
from lm_experiments_tools.models.pretrained import untrained_model
from lm_experiments_tools.models.speed import choose_speed, speed_up
from lm_experiments_tools.modules.inspection import base_of, forward_names
from lm_experiments_tools.planning.trace import Prepared

if TYPE_CHECKING:
    from lm_experiments_tools.config.training import ExperimentArgs

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def resolve(args: ExperimentArgs, origins: Mapping[str, str], device: str) -> ExperimentArgs:
    """Replace automatic settings (`--speed auto`) by those that a run on `device`, "cpu" or "cuda", would choose.

    This machine need not have the device. UserError for `--quantize` and adapters other than LoRA.
    """
    if getattr(args, "quantize", None):
        raise UserError(f"--quantize {args.quantize}: no estimate, its kernels read the weights. Leave it out.")
    if getattr(args, "peft", None) not in (None, "lora"):
        raise UserError(
            f"--peft {args.peft}: no estimate, it needs the tokenizer. Choose --peft lora, or leave it out."
        )
    args, origins = choose_speed(args, origins, keeps_process=True)
    free = args.speed == "auto" and origins.get("bf16", "default").startswith(("default", "--speed"))
    if device == "cuda" and not torch.cuda.is_available() and free and not args.fp16:
        args = replace(args, bf16=True)
    return replace(args, compile=False, lr=args.lr or (None if args.relative_step else 1e-3))


def prepare(args: ExperimentArgs, device: str) -> Prepared:
    """Build the model, its optimizer and one micro-batch of random tokens, to measure a training step on them.

    `args` are the result of `resolve`. Raises UserError.
    """
    with torch.device(device) if device != "cpu" else nullcontext():
        model = _model(args)
        source, target = _lengths(args, model)
        scored = _num_scored(args, model)
        if LABEL_POSITIONS not in forward_names(model):
            scored = None
        batch = _batch(model, args, source, target, scored)
    optimizer = optimizer_from_args(args, model)
    dtype = next((dtype for name, dtype in _DTYPES.items() if getattr(args, name)), None)
    return Prepared(model, optimizer, batch, dtype)


def _model(args: ExperimentArgs) -> nn.Module:
    if not isinstance(args, FinetuningArgs):
        source = model_source(args, LocalBackend(Precision(), torch.device("cpu")))
        return model_from_args(args, source, 0)
    model = untrained_model(args)
    if args.gradient_checkpointing:
        enable_checkpointing(model)
    if args.peft is None:
        freeze(model, args.freeze)
    else:
        check_peft("--peft")
        with mock.patch.object(nn.Module, "to", lambda module, *_, **__: module):  # nothing to move without data
            model = add_adapter(model, args, None, None, ())
    speed_up(model, args, plain=args.peft is None)
    return model


def _lengths(args: ExperimentArgs, model: nn.Module) -> tuple[int, int]:
    """Tokens of a source and of a target, at most; 0 for a model without decoder or without encoder."""
    if not getattr(model.config, "is_encoder_decoder", False):
        return args.input_seq_len, 0
    if getattr(args, "task", "") == "span_corruption":
        counts = plan_spans(args.input_seq_len, args.noise_density, args.mean_noise_span_length)
        return args.input_seq_len, counts.targets_length
    return args.input_seq_len, getattr(args, "target_seq_len", args.input_seq_len)


def _num_scored(args: ExperimentArgs, model: nn.Module) -> int | None:
    """Tokens of a micro-batch that a masked language model scores; None for all."""
    masked = hasattr(args, "most_predictions") or getattr(args, "task", "") == "mlm"
    if isinstance(args, FinetuningArgs) or not masked or args.mlm_positions == "all" or args.distill_from:
        return None
    return most_labels(args)(args.batch_size)


def _batch(model: nn.Module, args: ExperimentArgs, source: int, target: int, scored: int | None) -> dict[str, Any]:
    """Random tokens in the form that the script passes to the model."""
    base = base_of(model)
    names, rows = forward_names(base), args.batch_size
    vocabulary = base.get_input_embeddings().weight.shape[0]

    def ids(*shape: int) -> Tensor:
        return torch.randint(0, vocabulary, shape)

    batch: dict[str, Any] = {"input_ids": ids(rows, source), "labels": ids(rows, target or source)}
    if isinstance(args, FinetuningArgs) and args.model_type == "encoder":
        batch["labels"] = torch.zeros(rows, dtype=torch.float32 if args.task == "regression" else torch.long)
    elif scored is not None:
        batch |= {"labels": ids(1, scored), LABEL_POSITIONS: torch.zeros(scored, dtype=torch.long)}
    if not (target and getattr(base, "is_fast", False)):  # which is not given a mask of ones
        batch["attention_mask"] = torch.ones(rows, source, dtype=torch.long)
    if not target:
        batch["token_type_ids"] = torch.zeros(rows, source, dtype=torch.long)
        if getattr(args, "use_nsp", False):
            batch["next_sentence_label"] = torch.zeros(rows, dtype=torch.long)
    batch |= {name: False for name in ("use_cache", "return_logits")}
    return {name: value for name, value in batch.items() if name in names}

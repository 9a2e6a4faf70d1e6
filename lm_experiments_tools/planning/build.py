"""The model, optimizer and batch of planned settings, for a trace: built where tensors have no data."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch import Tensor, nn

from lm_experiments_tools.backends.backend import LocalBackend
from lm_experiments_tools.backends.precision import Precision
from lm_experiments_tools.config.finetuning import FinetuningArgs
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.models.adapters import add_adapter, check_peft
from lm_experiments_tools.models.freezing import freeze
from lm_experiments_tools.modules.inspection import forward_names
from lm_experiments_tools.modules.labelled_head import LABEL_POSITIONS, pick_labelled
from lm_experiments_tools.planning.plan import Plan
from lm_experiments_tools.planning.trace import Prepared, Traced, trace_steps
from lm_experiments_tools.recipes import common

if TYPE_CHECKING:
    from lm_experiments_tools.config.training import ExperimentArgs

# Whatever the code of a model says when it meets tensors without data.
_FAILURES = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, NotImplementedError, AssertionError)
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def trace_plan(args: ExperimentArgs, source: int, target: int, scored: int | None, *, fake: bool = True) -> Traced:
    """Two traced steps of the model that the settings name, on a CPU.

    Args:
        args: with what `--speed auto` chooses put in.
        source, target: tokens of a row; 0 for no decoder.
        scored: tokens with a label of their own, where a head scores these alone.
        fake: False computes with real tensors.

    Raises:
        UserError: the model cannot be built, or not be traced.
    """
    if getattr(args, "quantize", None):
        raise UserError(f"--quantize {args.quantize} cannot be traced: its kernels look at the weights")
    if getattr(args, "peft", None):
        check_peft("--peft")
    try:
        return trace_steps(lambda: prepare(args, source, target, scored), fake=fake)
    except _FAILURES as error:
        if isinstance(error, UserError):
            raise
        reason = " ".join(str(error).split())[:160]
        raise UserError(f"{args.model_cls} cannot be traced: {type(error).__name__}: {reason}") from error


def prepare(
    args: ExperimentArgs, source: int, target: int, scored: int | None, device: torch.device | None = None
) -> Prepared:
    """Model, optimizer and a batch of random tokens, as `trace_plan` takes them; on a CPU, or on `device`."""
    device = device or torch.device("cpu")
    backend = LocalBackend(Precision(), device)
    args = replace(args, compile=False, lr=args.lr or (None if args.relative_step else 1e-3))
    if getattr(args, "from_pretrained", None) and not args.model_cfg:  # its configuration is enough
        args = replace(args, base_model=args.from_pretrained)
    model_source = common.model_source(args, backend)
    model = common.model_from_args(args, model_source, 0)
    model = _adapted(model, args)
    if device.type != "cpu":
        model.to(device)
    picks = scored is not None and pick_labelled(model, source, tried=False) is None
    batch = _batch(model, args, source, target, scored if picks else None)
    batch = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in batch.items()}
    optimizer = common.optimizer_from_args(args, model)
    dtype = next((dtype for name, dtype in _DTYPES.items() if getattr(args, name)), None)
    return Prepared(model, optimizer, batch, dtype, args.gradient_accumulation_steps)


def _adapted(model: nn.Module, args: ExperimentArgs) -> nn.Module:
    if not isinstance(args, FinetuningArgs):
        return model
    if args.peft is None:
        freeze(model, args.freeze)
        return model
    if args.peft != "lora":
        raise UserError(f"--peft {args.peft} cannot be traced without its tokenizer: see the closed form")
    with mock.patch.object(nn.Module, "to", lambda module, *_, **__: module):  # torch cannot move what has no data
        return add_adapter(model, args, None, None, ())


def _batch(model: nn.Module, args: ExperimentArgs, source: int, target: int, scored: int | None) -> dict[str, Any]:
    """Random tokens in the form that the script gives them to the model."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    names, words, rows = forward_names(base), base.config.vocab_size, args.batch_size

    def ids(*shape: int) -> Tensor:
        return torch.randint(0, words, shape)

    batch: dict[str, Any] = {"input_ids": ids(rows, source)}
    is_t5 = bool(target)
    if is_t5:
        batch["labels"] = ids(rows, target)
    elif isinstance(args, FinetuningArgs):
        batch["labels"] = torch.zeros(rows, dtype=torch.long)
    elif scored is not None:
        batch |= {"labels": ids(1, scored), LABEL_POSITIONS: torch.zeros(scored, dtype=torch.long)}
    else:
        batch["labels"] = ids(rows, source)
    if is_t5 and not getattr(base, "is_fast", False):  # which is not given a mask of ones
        batch["attention_mask"] = torch.ones(rows, source, dtype=torch.long)
    if not is_t5:
        batch["attention_mask"] = torch.ones(rows, source, dtype=torch.long)
        batch["token_type_ids"] = torch.zeros(rows, source, dtype=torch.long)
        if getattr(args, "use_nsp", False):
            batch["next_sentence_label"] = torch.zeros(rows, dtype=torch.long)
    if "use_cache" in names:
        batch["use_cache"] = False
    if "return_logits" in names:
        batch["return_logits"] = False
    return {name: value for name, value in batch.items() if name in names or name == LABEL_POSITIONS}


def traced(plan: Plan) -> Traced:
    """The trace of a plan. Raises UserError."""
    if plan.device != "cpu":
        raise UserError("only a CPU's tensors are traced, whose attention and masks are other than a GPU's")
    return trace_plan(plan.args, plan.step.source, plan.step.target, plan.step.scored)

"""Build the training loop of a fine-tuning run, and evaluate the model at its end."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lm_experiments_tools.backends.collective import on_all, on_main
from lm_experiments_tools.checkpoint.manifest import MANIFEST, named_checkpoint, read_manifest
from lm_experiments_tools.checkpoint.source import CONFIG, TASK_FILE, ModelFiles
from lm_experiments_tools.config.flags import is_given
from lm_experiments_tools.data.text.hf_tokenizer import pretrained_token_bytes
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.evaluation.measuring import chosen_metrics
from lm_experiments_tools.evaluation.predictions import Predictions, TextDecoder, decoded_targets, positive_label_of
from lm_experiments_tools.files import dump_json, write_atomic
from lm_experiments_tools.models.adapters import new_token_prefix
from lm_experiments_tools.models.freezing import summary
from lm_experiments_tools.models.from_args import optimizer_from_args
from lm_experiments_tools.models.pretrained import pretrained_model
from lm_experiments_tools.models.tokenizers import load_tokenizer
from lm_experiments_tools.modules.inspection import base_of, evaluated, forward_names
from lm_experiments_tools.recipes.common import save_tokenizer, seed_worker, show_run, start_run, warn_of_few_rows
from lm_experiments_tools.recipes.finetuning_data import FinetuningData, finetuning_data
from lm_experiments_tools.recipes.recipe import Recipe
from lm_experiments_tools.training.generators import preserved_random_state
from lm_experiments_tools.training.losses import LANGUAGE_MODEL_LOSS, MODEL_LOSS, with_bytes
from lm_experiments_tools.training.trainer import TrainingLoop

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from lm_experiments_tools.backends.backend import Backend
    from lm_experiments_tools.config.finetuning import FinetuningArgs
    from lm_experiments_tools.data.examples.examples import Example

logger = logging.getLogger(__name__)

_PROBE = 6  # tokens of an example by which --packing is checked
_PACKING_CLASSES = {
    "encoder": "modeling_bert:BertForSequenceClassification",
    "encoder-decoder": "modeling_t5:T5ForConditionalGeneration",
}
_SAME = 1e-4  # relative difference of logits; kept apart they differ by 1e-6 at most, in OpenAI-GPT by 5e-3


class Finetuning(Recipe):
    """A run of the script run_finetuning.py."""

    script = "finetuning"

    data: FinetuningData

    def train(self) -> None:
        args, backend = self.args, self.backend
        run = start_run(args, backend)
        show_inherited(args, self.origins)
        files = ModelFiles(args)
        tokenizer = on_all(backend, lambda: load_tokenizer(args, files))
        self.data = finetuning_data(with_new_tokens(args, tokenizer), backend, tokenizer, files)
        if self.data.train is not None:
            args = args.with_epochs(self.data.train.samples_per_epoch, backend.world_size)
        model = on_all(backend, lambda: pretrained_model(args, tokenizer, self.data.label_names, files))
        for line in str(summary(model)).splitlines() if backend.is_main else ():  # before a backend shards it
            logger.info("%s", line)
        self.trainer = training_loop(args, backend, model, self.data, tokenizer)
        show_run(args, self.origins, run, backend, backend.unwrap(), self.data)
        self.train_or_validate()

    def commands(self, folder: str) -> list[str]:
        if self.args.task == "instructions" or len(self.data.sentence_names) > 1:  # inputs of several parts
            return []
        return [f"lmtools generate {folder} 'A text'"]

    def finish(self) -> None:
        evaluate_last(self.trainer, self.data)
        self.trainer.save_metrics(self.args.model_path)


def with_new_tokens(args: FinetuningArgs, tokenizer: PreTrainedTokenizerBase) -> FinetuningArgs:
    """Put the trainable tokens of `--peft new_tokens` before the prefix of every input."""
    new = new_token_prefix(tokenizer)
    return replace(args, prefix=new + args.prefix) if new and args.task != "instructions" else args


def saved_task(args: FinetuningArgs, data: FinetuningData) -> dict[str, Any]:
    """Return the settings that are saved with the weights, such as the prefix, for later predictions."""
    of_data = {"sentence_names": data.sentence_names}
    if args.model_type != "encoder":
        of_data |= {"label_names": data.label_names, "label_words": data.label_words}
    return {**args.task_settings(), **{name: values for name, values in of_data.items() if values}}


def write_task(folder: Path, task: Mapping[str, Any]) -> None:
    """Write the result of `saved_task` into an existing folder with weights, for later predictions."""
    write_atomic(folder / TASK_FILE, dump_json(dict(task)) + "\n")


def show_inherited(args: FinetuningArgs, origins: Mapping[str, str]) -> None:
    """Log the settings that this run takes over from the weights it starts from (see `models.inherited`)."""
    for name, origin in origins.items():
        if origin.endswith((TASK_FILE, CONFIG)) and is_given(args, name):
            logger.info("--%s %s, as %s has it", name, getattr(args, name), origin)


def finetuning_loop(
    args: FinetuningArgs,
    backend: Backend,
    model: nn.Module,
    optimizer: Optimizer | None,
    data: FinetuningData,
    tokenizer: PreTrainedTokenizerBase,
    tokenizer_dir: Path | None = None,
) -> TrainingLoop:
    """Build the loop that trains `model` on `data.train` and evaluates it with `args.metrics`. Raises UserError.

    `args` are those of `FinetuningArgs.resolved`. `optimizer` is None if the loop only evaluates.
    """
    if args.packing and data.train is not None:
        on_all(backend, lambda: check_packing(model, args))
    # Refuses what evaluation could not compute before the first step.
    names, positive = [*chosen_metrics(args)], positive_label_of(args, data.label_names)
    if args.task == "classification" and len(data.label_names) == 2 and {"f1", "precision", "recall"} & {*names}:
        named = data.label_names[positive]
        logger.info("f1, precision and recall are of the label %s (--positive_label), f1_macro is of both", named)
    folder = None if args.model_path is None else Path(args.model_path) / "predictions"

    decode = TextDecoder(tokenizer)

    @functools.cache
    def examples_of(split: str) -> list[Example]:
        examples = data.splits[split].examples
        return decoded_targets(examples, decode) if args.needs_generation() else examples

    def collect(split: str) -> Predictions:
        words = decode.references(data.label_words)
        return Predictions(args, split, examples_of(split), decode, data.label_names, folder, words)

    valid = data.splits.get("valid")
    is_fast = getattr(model, "is_fast", False) and "return_logits" in forward_names(model)
    is_causal = args.task == "causal_lm"
    loop = TrainingLoop(
        args,
        backend,
        model,
        optimizer,
        None if args.validate_only else data.train,
        None if valid is None else valid.loader,
        forward_kwargs={"return_logits": False} if is_fast else None,  # what is written is measured, not logits
        generate_kwargs=args.generation_options(),
        tokenizer_dir=tokenizer_dir,
        loss=with_bytes(LANGUAGE_MODEL_LOSS, pretrained_token_bytes(tokenizer), model) if is_causal else MODEL_LOSS,
        collect=collect if args.task != "causal_lm" and args.metric_names() else None,
    )
    return loop


def training_loop(
    args: FinetuningArgs, backend: Backend, model: nn.Module, data: FinetuningData, tokenizer: PreTrainedTokenizerBase
) -> TrainingLoop:
    """Build the training loop of a fine-tuning run with a new optimizer, and save the tokenizer."""

    def write(folder: Path) -> None:
        tokenizer.save_pretrained(folder)
        write_task(folder, saved_task(args, data))

    if backend.is_main and not args.validate_only:
        warn_of_few_rows(args, data)
    optimizer = optimizer_from_args(args, model)
    seed_worker(args.seed, backend.rank)
    tokenizer_dir = save_tokenizer(args, backend, write)
    return finetuning_loop(args, backend, model, optimizer, data, tokenizer, tokenizer_dir)


def check_packing(model: nn.Module, args: FinetuningArgs) -> None:
    """Check that examples which are packed into one row do not influence each other in `model`. Raises UserError.

    One example is placed in three small rows, next to different examples; its logits must be equal. Call it before a
    backend shards the model. Weights on the meta device are not checked.
    """
    base = base_of(model)
    known, name = forward_names(model), type(base).__name__
    if args.model_type in _PACKING_CLASSES and "segment_ids" not in known:
        raise UserError(
            f"--packing: {name} takes no segment_ids: choose --model_cls {_PACKING_CLASSES[args.model_type]}."
        )
    if args.model_type == "decoder" and "position_ids" not in known:
        raise UserError(f"--packing: {name} takes no position_ids, which separate the examples of a row.")
    device = next((p.device for p in model.parameters() if p.device.type != "meta"), None)
    if device is None:
        return
    length = max(1, min(max(_PROBE, args.pad_to_multiple_of or 1), args.input_seq_len // 2, args.target_seq_len // 2))
    batch = _probe(length, base.get_input_embeddings().weight.shape[0], args.model_type)
    inputs = {name: value.to(device) for name, value in batch.items()} | (
        {"use_cache": False} if "use_cache" in known else {}
    )
    with evaluated(model), preserved_random_state(), torch.no_grad():
        try:
            logits = dict(model.forward(**inputs)).get("logits")  # `forward`: --compile need not compile for it
        except ValueError as error:  # a variant of ours that looks at the whole row
            raise UserError(f"--packing: {name} takes no packed rows: {error}") from error
    if logits is None:
        return
    if logits.dim() < 3 or logits.shape[1] % 2:
        raise UserError(f"--packing: {name} has logits {list(logits.shape)}, which are not one for each example.")
    half = logits.shape[1] // 2
    common = torch.stack([logits[0, half:], logits[1, half:], logits[2, :half]]).float()
    if (common - common[0]).abs().max() > _SAME * common[0].abs().max():
        raise UserError(f"--packing: in {name} the examples of a row see each other: choose another --model_cls.")


def _probe(length: int, vocab_size: int, model_type: str) -> dict[str, Tensor]:
    """Rows a b, c b and b a of examples with `length` tokens each."""
    a, b, c = (torch.arange(3 * length) % vocab_size).view(3, length)
    ids = torch.stack([torch.cat(pair) for pair in ((a, b), (c, b), (b, a))])
    if model_type == "decoder":
        return {"input_ids": ids, "position_ids": torch.arange(length).repeat(3, 2)}
    segments = torch.tensor([1, 2]).repeat_interleave(length).repeat(3, 1)
    inputs = {"input_ids": ids, "segment_ids": segments, "attention_mask": torch.ones_like(ids)}
    return inputs if model_type == "encoder" else {**inputs, "labels": ids, "decoder_segment_ids": segments}


def evaluate_last(trainer: TrainingLoop, data: FinetuningData) -> None:
    """Evaluate the test data after training. With `--save_best`, the best checkpoint is loaded and validated first.

    Raises SystemExit: with 128 + signal number, after a signal.
    """
    args, state = trainer.args, trainer.state
    with trainer.signals, trainer.tracking():
        if args.save_best and not args.validate_only and state.best_step != state.step:
            best = named_checkpoint(Path(args.model_path) / "best")
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

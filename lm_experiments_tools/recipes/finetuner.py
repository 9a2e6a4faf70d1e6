"""Fine-tuning from Python, with the flags of run_finetuning.py as settings.

tuner = FineTuner("t5-small", prefix="summarize: ", data_path="train.jsonl", valid_data_path="valid.jsonl")
tuner.train(epochs=3)
print(tuner.evaluate()["rougeL"], tuner.generate_single("A long text ..."))
tuner.save("summaries")
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from lm_experiments_tools.backends import get_backend
from lm_experiments_tools.checkpoint.source import ModelFiles
from lm_experiments_tools.config.finetuning import (
    LABEL_TASKS,
    SENTENCE_TASKS,
    FinetuningArgs,
    InstructionArgs,
    LengthArgs,
    MemoryArgs,
    PretrainedArgs,
    TaskArgs,
)
from lm_experiments_tools.config.flags import AUTO
from lm_experiments_tools.config.training import ModelArgs, PrecisionArgs
from lm_experiments_tools.data.examples.dataset import encode_examples
from lm_experiments_tools.data.examples.examples import Example, t5_text
from lm_experiments_tools.data.text.sources import as_source, as_sources
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.evaluation.predictions import TextDecoder, labels_above, thresholds_of
from lm_experiments_tools.metrics.metric import GivenFunction
from lm_experiments_tools.models.freezing import ModelSummary, freeze, summary
from lm_experiments_tools.models.inherited import inherited_settings
from lm_experiments_tools.models.pretrained import pretrained_model
from lm_experiments_tools.models.speed import choose_speed, fast_process
from lm_experiments_tools.models.tokenizers import load_tokenizer
from lm_experiments_tools.modules.inspection import evaluated, forward_names, is_adapted
from lm_experiments_tools.recipes.common import described, show_run, start_run
from lm_experiments_tools.recipes.finetuning import (
    evaluate_last,
    finetuning_loop,
    saved_task,
    show_inherited,
    training_loop,
    with_new_tokens,
    write_task,
)
from lm_experiments_tools.recipes.finetuning_data import example_encoder, example_rows, finetuning_data
from lm_experiments_tools.recipes.keywords import as_flag, changed_args, fast, save_folder, stop_button
from lm_experiments_tools.tracking.notebook import Results
from lm_experiments_tools.training.micro_batches import MicroBatch
from lm_experiments_tools.training.run_folder import with_run_directory
from lm_experiments_tools.training.validation import generate

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from lm_experiments_tools.backends.backend import Backend
    from lm_experiments_tools.recipes.finetuning_data import FinetuningData
    from lm_experiments_tools.recipes.settings import FineTuningSettings
    from lm_experiments_tools.training.trainer import TrainingLoop

logger = logging.getLogger(__name__)

Text = str | tuple[str, str]
_DRAWS = 4  # times as many texts are drawn as are wanted, before fewer different ones are returned


def _names(*groups: type) -> frozenset[str]:
    return frozenset(name for group in groups for name in group.__annotations__)


# Settings of the model and backend, which cannot change after they are built, and settings of the data.
_OF_MODEL = _names(PretrainedArgs, MemoryArgs, ModelArgs, PrecisionArgs) | {"model_type", "task", "backend"}
_OF_DATA = _names(TaskArgs, LengthArgs, InstructionArgs) | {
    "batch_size", "gradient_accumulation_steps", "eval_batch_size", "pad_to_multiple_of", "seed",
}  # fmt: skip
_REFUSED = dict.fromkeys(("init_checkpoint", "validate_only", "working_dir"), "run_finetuning.py")
# Settings of a loop that only evaluates: it reads no checkpoint and writes nothing.
_ONLY_EVALUATION = {
    "model_path": None, "resume": "never", "save_best": False, "save_interval": None, "profile": None,
    "profile_after": None, "save_in_background": True, "optimize_metric": "loss", "optimize_mode": "min",
}  # fmt: skip


class FineTuner:
    """A pre-trained model with its tokenizer and a task, to be fine-tuned, evaluated and used.

    Args:
        from_pretrained: Hugging Face name or folder, run directory or checkpoint; None with `model_cfg`.
        keywords: flags of run_finetuning.py. Give `epochs` or `iters`.

    Attributes:
        model, tokenizer: objects of transformers (or peft). They may be changed before `train`.
        args: the settings.
        label_names: names of the classes by index.

    Raises:
        UserError: an unknown or impossible setting, or a model that cannot be loaded.
    """

    def __init__(self, from_pretrained: str | Path | None = None, **keywords: Unpack[FineTuningSettings]) -> None:
        settings: dict[str, Any] = dict(keywords)
        if from_pretrained is not None:
            settings["from_pretrained"] = str(from_pretrained)
        inherited = inherited_settings(settings)
        self.args = _changed(None, {**{name: value for name, (value, _) in inherited.items()}, **settings})
        given = dict.fromkeys(settings, "given")
        self.args, _ = choose_speed(self.args, given, keeps_process=True)
        show_inherited(self.args, {name: origin for name, (_, origin) in inherited.items()})
        self.files = ModelFiles(self.args)
        self.tokenizer = load_tokenizer(self.args, self.files)
        self.label_names: tuple[str, ...] = ()
        if self.args.task in LABEL_TASKS:
            self.label_names = self.args.label_names or self._known_labels()
        with fast_process(self.args):  # threads of torch take over its settings when they start
            self.model: nn.Module = pretrained_model(self.args, self.tokenizer, self.label_names, self.files)
        self._run_folders: set[Path] = set()  # that this object has trained in
        self._epochs = 0  # of training data begun so far
        self._added_rows = False  # new rows of the embedding, which are in no file yet

    @cached_property
    def backend(self) -> Backend:
        """The distributed backend of the launcher, or of a single process; created on first use."""
        return get_backend(self.args)

    @cached_property
    def data(self) -> FinetuningData:
        """Training, validation and test data of the task, tokenized."""
        args = self.args
        evaluates = not args.data_path and (args.valid_data_path or args.test_data_path)
        args = replace(args, validate_only=True) if evaluates else args.resolved()
        return finetuning_data(with_new_tokens(args, self.tokenizer), self.backend, self.tokenizer, self.files)

    def _known_labels(self) -> tuple[str, ...]:
        """Labels of the data, if any is named; else those of a saved classifier."""
        args = self.args
        if args.data_path or args.valid_data_path or args.test_data_path:
            return self.data.label_names
        names = self.files.label_names
        if not names and args.model_type == "encoder":
            raise UserError("the labels are unknown: give data_path or label_names to FineTuner.")
        return names

    def summary(self) -> ModelSummary:
        """Return the number of parameters (all, trainable) and their bytes for each part of the model."""
        return summary(self.model)

    def freeze(self, *parts: str) -> int:
        """Freeze parts of the model; returns the number of frozen parameters.

        Args:
            parts: "encoder", "decoder", "embeddings", "head", or patterns of parameter names.

        Raises:
            UserError: a pattern matches no parameter.
        """
        before = self.summary().all.trainable
        freeze(self.model, parts)
        return before - self.summary().all.trainable

    def add_tokens(self, tokens: str | Sequence[str]) -> int:
        """Add tokens to the vocabulary and trainable rows to the embeddings; returns the number of new tokens.

        Raises:
            UserError: the model has an adapter, which would neither train nor save the new rows.
        """
        if is_adapted(self.model):
            raise UserError("add_tokens: an adapter neither trains nor saves new rows: use it without peft.")
        added = self.tokenizer.add_tokens([tokens] if isinstance(tokens, str) else list(tokens))
        if len(self.tokenizer) > self.model.get_input_embeddings().weight.shape[0]:
            self.model.resize_token_embeddings(len(self.tokenizer), pad_to_multiple_of=64)
            self._added_rows = True
        self._forget_data()  # tokenized by the old vocabulary
        return added

    @fast
    def train(self, **settings: Unpack[FineTuningSettings]) -> dict[str, dict[str, float]]:
        """Train on `data_path`; returns the metrics of each split, as in metrics.json.

        With `save_best`, the model has the weights of the best checkpoint afterwards. Test data is evaluated at the
        end. If `model_path` has checkpoints, the run is resumed. Another call of `train` keeps the weights, creates a
        new optimizer and needs another `model_path`, if any.

        Args:
            settings: flags of run_finetuning.py to change before training, for example epochs=1.

        Raises:
            UserError: a setting that only the constructor accepts, or a `model_path` of an earlier `train`.
        """
        before = self.args
        try:
            self._change(dict(settings))
            self._refuse_few_bits("train")
            self._check_rows()
            is_new = self.args.model_path == AUTO
            args = with_run_directory(self.args.resolved(), self.backend, "finetuning")
            self._check_folder(args.model_path)
            ends = described(args, self.backend, is_new=is_new, trained=lambda: loop, commands=None)
            with stop_button(lambda: loop), ends:
                loop = self._start(args)
                loop.train()
                evaluate_last(loop, self.data)
                loop.save_metrics(args.model_path)
        except UserError:
            # Refused settings must not stay: `predict` reads the labels of the data that they name.
            self.args = before
            self._forget_data()
            raise
        self._epochs += ceil(loop.state.consumed_samples / self.data.train.samples_per_epoch)
        self.backend.release()
        return Results(loop.state.metrics)

    def _start(self, args: FinetuningArgs) -> TrainingLoop:
        """Open the run directory and the data of a training, and make its loop."""
        run, data = start_run(args, self.backend), self.data
        per_epoch = data.train.samples_per_epoch
        args = args.with_epochs(per_epoch, self.backend.world_size)
        data.train.seek(0 if args.model_path else self._epochs * per_epoch)
        loop = training_loop(args, self.backend, self.model, data, self.tokenizer)
        if args.model_path is not None:
            self._run_folders.add(Path(args.model_path).resolve())
        if self.args.resume_path() is not None:
            self.args = replace(self.args, resume="auto")  # it has been read, and must not undo what follows
        show_run(args, {}, run, self.backend, self.model, data)
        return loop

    @fast
    def evaluate(self, split: str = "valid") -> dict[str, float]:
        """Evaluate the model on `valid_data_path`, or on `test_data_path` with split="test".

        For test data without labels or targets, only metrics that need no references are computed.

        Raises:
            UserError: the split has no data.
        """
        if split not in ("valid", "test"):
            raise UserError(f"there is no split {split!r}: evaluate 'valid' or 'test'.")
        if getattr(self.args, f"{split}_data_path") is None:
            raise UserError(f"there is no {split} data: give {split}_data_path to FineTuner.")
        generates = self.args.needs_generation()
        args = replace(self.args, **_ONLY_EVALUATION, use_generate_on_valid=generates)
        data = replace(self.data, train=None)
        with evaluated(self.model):
            loop = finetuning_loop(args, self.backend, self.model, None, data, self.tokenizer)
            try:
                return Results(loop.validate(data.splits[split].loader, split) or {})
            finally:
                self.backend.release()

    def generate_single(self, text: Text, **options: Any) -> str:
        """Generate the output for one text.

        Args:
            options: arguments of transformers' `generate` (num_beams, max_new_tokens, ...).
        """
        return self.predict([text], **options)[0]

    def generate_diverse(self, text: Text, num_texts: int = 3, top_p: float = 0.95, **options: Any) -> list[str]:
        """Generate up to `num_texts` different outputs by nucleus sampling, from at most 4 x `num_texts` samples."""
        found: dict[str, None] = {}
        for _ in range(_DRAWS):
            drawn = {"do_sample": True, "top_p": top_p, "num_beams": 1, "num_return_sequences": num_texts, **options}
            found.update(dict.fromkeys(self.predict([text], **drawn)))
            if len(found) >= num_texts:
                break
        return list(found)[:num_texts]

    @fast
    def predict(
        self, texts: str | Sequence[Text], batch_size: int = 8, *, return_probabilities: bool = False, **options: Any
    ) -> list[str] | list[list[str]] | list[dict[str, float]]:
        """Generate the output for each text. An encoder returns a label, a list of labels or a number instead.

        The inputs are built as in training, with the prefix.

        Args:
            texts: texts, or pairs of sentences; a string is one text.
            return_probabilities: for an encoder that classifies: return {label: probability} for each text.
            options: arguments of transformers' `generate`, for models that generate.

        Raises:
            UserError: an empty text, a number of sentences that does not fit the task, or an argument that does not
                fit the model.
        """
        args, encoder = self.args, example_encoder(self.args, self.tokenizer)
        if options and args.model_type == "encoder":
            raise UserError(f"predict: an encoder generates no text: leave {', '.join(options)} out.")
        if return_probabilities and (args.model_type != "encoder" or args.task not in LABEL_TASKS):
            raise UserError(
                f"predict: return_probabilities is for encoders that classify, and this is --task {args.task} of an "
                f"{args.model_type}: leave it out."
            )
        if hasattr(texts, "columns"):
            raise UserError("predict takes a list of texts or pairs, not a table: give one of its columns.")
        answer = self._probabilities if return_probabilities else self._labels
        examples = self._examples([texts] if isinstance(texts, str) else texts)
        encoded = encode_examples(examples, encoder, args.model_type)
        rows = example_rows(replace(args, pad_to_multiple_of=None), encoded, self.tokenizer, training=False)
        found: list[Any] = []
        with evaluated(self.model), torch.no_grad(), self.backend.autocast():
            for start in range(0, len(rows), batch_size):
                some = np.arange(start, min(start + batch_size, len(rows)))
                found += self._answers(rows.batch(np.zeros_like(some), some), options, answer)
        encoder.sources.warn_of_unknown("the texts")
        if encoder.sources.num_truncated:
            flag = "--input_seq_len" + (" - --target_seq_len =" if self.args.model_type == "decoder" else "")
            logger.warning("predict: %s", encoder.sources.describe("texts", flag))
        return found

    def save(self, path: str | Path) -> None:
        """Save model and tokenizer as a folder for `from_pretrained`. Every worker must call it.

        For a model with an adapter only the adapter is saved.
        """
        self._check_rows()
        self._refuse_few_bits("save")
        task = self._saved_task()

        def write(folder: Path) -> None:
            self.tokenizer.save_pretrained(folder)
            write_task(folder, task)

        save_folder(Path(path), self.backend, self.model, write)

    def _saved_task(self) -> dict[str, Any]:
        """For `write_task`: from the data; without any, from the loaded weights."""
        of_sentences = self.args.task in SENTENCE_TASKS
        if "data" in self.__dict__ or (self.args.data_path and of_sentences):
            return saved_task(self.args, self.data)
        return {**self.files.task, **self.args.task_settings()}

    def _examples(self, texts: Sequence[Text]) -> list[Example]:
        """Examples that data with these texts would give."""
        args = with_new_tokens(self.args, self.tokenizer)
        rows = [(text,) if isinstance(text, str) else tuple(text) for text in texts]
        for number, row in enumerate(rows):
            if not all(text.strip() for text in row):
                raise UserError(f"text {number} of those to predict for is empty.")
        classifies = args.task in SENTENCE_TASKS
        names: Sequence[str] = ("text",)
        if classifies and (args.model_type == "encoder-decoder" or self._knows_sentences()):
            names = self._sentence_names
        elif classifies and rows:
            names = ("sentence1", "sentence2")[: len(rows[0])]
        for number, row in enumerate(rows):
            if len(row) != len(names):
                raise UserError(f"text {number} of those to predict for has {len(row)} parts, not {len(names)}.")
        if classifies and args.model_type == "encoder-decoder":
            return [Example(args.prefix + t5_text(names, row)) for row in rows]
        return [Example(args.prefix + row[0], pair=row[1] if len(row) == 2 else None) for row in rows]

    def _knows_sentences(self) -> bool:
        return bool(self.args.text_fields or self.args.data_path or self.files.task.get("sentence_names"))

    @cached_property
    def _sentence_names(self) -> tuple[str, ...]:
        """Names of the sentences' fields in the data, which an encoder-decoder reads before them."""
        args = self.args
        if args.text_fields:
            return args.text_fields
        if not args.data_path and "sentence_names" in self.files.task:
            return tuple(self.files.task["sentence_names"])
        if args.data_path:
            return self.data.sentence_names
        raise UserError("the names of the sentences' fields are unknown: give text_fields or data_path to FineTuner.")

    def _answers(
        self, rows: dict[str, np.ndarray], options: dict[str, Any], answer: Callable[[Tensor], list[Any]]
    ) -> list[Any]:
        """Generated texts, or what `answer` makes of an encoder's logits."""
        batch = {name: torch.from_numpy(values) for name, values in rows.items()}
        known = forward_names(self.model) - {"labels"}
        device = next(self.model.parameters()).device
        inputs = {name: values.to(device) for name, values in batch.items() if name in known}
        if self.args.model_type == "encoder":
            return answer(self.model(**inputs).logits)
        synced = self.backend.state.shards_weights and self.backend.unwrap() is self.model
        part, options = MicroBatch(inputs, batch, {}), {**self.args.generation_options(), **options}
        return TextDecoder(self.tokenizer)(generate(self.model, part, options, synced=synced))

    def _labels(self, logits: Tensor) -> list[str] | list[list[str]]:
        if self.args.task == "multi_label":
            chosen = labels_above(logits, thresholds_of(self.args, self.label_names))
            return [[self.label_names[number] for number in numbers] for numbers in chosen]
        if self.args.task == "regression":
            return [f"{value:g}" for value in logits.flatten().tolist()]
        return [self.label_names[number] for number in logits.argmax(-1).tolist()]

    def _probabilities(self, logits: Tensor) -> list[dict[str, float]]:
        logits = logits.float()
        values = logits.sigmoid() if self.args.task == "multi_label" else logits.softmax(-1)
        return [dict(zip(self.label_names, row, strict=True)) for row in values.tolist()]

    def _change(self, settings: dict[str, Any]) -> None:
        """Apply settings of `train`, which undoes refused ones, and drop data that they change."""
        args = _changed(self.args, settings)
        changed = [name for name in settings if getattr(args, name) != getattr(self.args, name)]
        for name in changed:
            if name in _OF_MODEL:
                raise UserError(f"train({name}=...) comes too late for the model: give {name} to FineTuner(...).")
        self.args = args
        if _OF_DATA.isdisjoint(changed):
            return
        self._forget_data()
        if args.task not in LABEL_TASKS:
            return
        self.label_names = self.label_names or self.data.label_names
        if self.data.label_names != self.label_names:
            there = ", ".join(self.data.label_names)
            raise UserError(f"the model has the labels {', '.join(self.label_names)}, this data {there}.")

    def _check_folder(self, model_path: str | None) -> None:
        if model_path is not None and Path(model_path).resolve() in self._run_folders:
            raise UserError(
                f"this FineTuner has trained in {model_path}: choose another model_path, or make a new FineTuner."
            )

    def _check_rows(self) -> None:
        """Refuse an adapter put on by hand after `add_tokens`: its files would lack the new rows."""
        if self._added_rows and is_adapted(self.model):
            raise UserError(
                "the rows of add_tokens() are in the base model, and an adapter is saved without it: save() the base "
                "before an adapter is on it, and make the adapter by FineTuner(folder, peft=...)."
            )

    def _refuse_few_bits(self, what: str) -> None:
        """Refuse to train or save weights of few bits."""
        if self.args.quantize is not None and not is_adapted(self.model):
            raise UserError(
                f"{what}: quantize={self.args.quantize!r} holds weights of few bits, for evaluate and predict alone."
            )

    def _forget_data(self) -> None:
        data = self.__dict__.pop("data", None)
        self.__dict__.pop("_sentence_names", None)
        if data is not None and data.train is not None:
            data.train.close()


def _changed(args: FinetuningArgs | None, settings: dict[str, Any]) -> FinetuningArgs:
    if settings.get("iters") is not None and settings.get("epochs") is not None:
        raise UserError("iters and epochs exclude each other: both say how long to train.")
    return changed_args(FinetuningArgs, args, settings, owner="FineTuner", refused=_REFUSED, as_flag=_as_flag)


def _as_flag(name: str, value: Any, default: Any) -> Any:
    """A setting as its flag has it; data as paths or `PythonRows`."""
    if name == "data_path":
        return as_sources(value, name)
    if name in ("valid_data_path", "test_data_path"):
        return None if value is None else as_source(value, name)
    if name == "metrics" and (isinstance(value, list | tuple) or callable(value)):
        values = value if isinstance(value, list | tuple) else (value,)
        return tuple(GivenFunction(item) if callable(item) else item for item in values)
    if name == "positive_label" and value is not None:
        return str(value)
    value = as_flag(name, value, default)
    return tuple(map(str, value)) if name == "label_names" else value

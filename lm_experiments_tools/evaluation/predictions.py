"""Predictions of one evaluation: streamed to disk, each example counted once, metrics over all workers' lines.

A worker keeps of a batch what fits in a line of JSON (a text, a number, a label's or those of labels), in a file
without a name that vanishes with the process. At the end rank 0 is told all lines in pieces (workers need no folder in
common), keeps them in another such file, reads them in the order of the examples and writes, beside the references, to
`folder`/{split}.jsonl::

    {"id": "SJ1Xmf-Rb", "source": "Incremental class ...", "prediction": "We present ...", "references": ["..."]}

with "pair" (the second sentence), "group" (the task of an instruction) and "text" (what an encoder-decoder wrote for a
label or a number) where there are such. The file is of the last evaluation of that split: with --save_best, after
training, that of the best checkpoint. Of examples without labels or targets it is written all the same, with
references [], and only what needs none is measured.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from lm_experiments_tools.backends.collective import on_main
from lm_experiments_tools.config.finetuning import SENTENCE_TASKS
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.evaluation.answers import INVALID_NUMBER, LabelWords, number_in
from lm_experiments_tools.evaluation.measuring import chosen_metrics, measured
from lm_experiments_tools.files import dump_json, naming, replacing
from lm_experiments_tools.metrics.labels import UNKNOWN
from lm_experiments_tools.tracking.examples import show_examples

if TYPE_CHECKING:
    from lm_experiments_tools.backends.backend import Backend
    from lm_experiments_tools.config.finetuning import FinetuningArgs
    from lm_experiments_tools.data.examples.examples import Example

PIECE_BYTES = 1 << 20  # of lines that a worker sends at once
Value = str | int | float | list[int]  # a text, a label's number, a number, the numbers of all labels that apply
_log_examples = partial(show_examples, tracker=None, step=0)


class TextDecoder:
    """Texts of generated tokens, without special tokens and without spaces around.

    Args:
        tokenizer: any tokenizer with Hugging Face's interface.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.pad_id: int = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id

    def __call__(self, token_ids: Tensor) -> list[str]:
        """Texts of int64[rows, length]; negative numbers (-100 of padded batches) are padding."""
        token_ids = token_ids.masked_fill(token_ids < 0, self.pad_id)
        return [line.strip() for line in self.tokenizer.batch_decode(token_ids, skip_special_tokens=True)]

    def lengths(self, token_ids: Tensor) -> list[int]:
        """Tokens of each row without padding."""
        return ((token_ids >= 0) & (token_ids != self.pad_id)).sum(-1).tolist()


class StoredAnswers(Sequence):
    """Predictions of all examples in an unnamed temporary file; memory holds only their offsets.

    Args:
        number: number of examples.
        folder: where the file is created; None uses the system's folder for temporary files.

    Attributes:
        num_tokens: int64[number] generated tokens.
    """

    def __init__(self, number: int, folder: Path | None) -> None:
        self.file = tempfile.TemporaryFile(dir=folder)
        self.places = np.full(number, -1, np.int64)
        self.num_tokens = np.zeros(number, np.int64)

    def put(self, example: int, answer: Value, num_tokens: int) -> None:
        """Store an answer; a second answer to the same example is ignored. Call it before the first read."""
        if self.places[example] < 0:
            self.places[example], self.num_tokens[example] = self.file.tell(), num_tokens
            self.file.write(json.dumps(answer).encode() + b"\n")

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, example: int) -> Value:
        self.file.seek(self.places[example])
        return json.loads(self.file.readline())


class Predictions:
    """Collects what a model predicts for `examples` (metrics.Collector): one object for one evaluation.

    Args:
        args: task, metrics and --show_valid_examples.
        split: name of the file of predictions.
        examples: all examples of the split, on every worker; a batch's "example" holds indices into them.
        decode: texts of generated tokens; needed where the model generates.
        label_names: classes in the order of their numbers.
        folder: where predictions are written. None: nowhere.
        show: f(split, examples) that shows the chosen ones; by default in the log.
        label_words: text that a generating model writes for each label; by default from args, else the names.

    Raises:
        UserError: metrics that compute one value differently or need a package that is not installed; labels with the
            same word; examples of which only some have a reference.
    """

    def __init__(
        self,
        args: FinetuningArgs,
        split: str,
        examples: Sequence[Example],
        decode: TextDecoder | None = None,
        label_names: Sequence[str] = (),
        folder: Path | None = None,
        show: Callable[[str, list[dict[str, Any]]], None] = _log_examples,
        label_words: Sequence[str] = (),
    ) -> None:
        self.show = show
        self.args, self.split, self.examples, self.decode = args, split, examples, decode
        self.label_names, self.folder = tuple(label_names), folder
        self.generates, self.task = args.needs_generation(), args.task
        self.metrics = chosen_metrics(args)
        self.measurable = self._measurable()
        self.thresholds = thresholds_of(args, self.label_names)
        words = tuple(label_words) or tuple(args.label_words) or self.label_names
        self.label_of = LabelWords(words) if self.task == "classification" and self.generates else None
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        self.lines = tempfile.TemporaryFile(dir=folder)  # of this worker

    def _measurable(self) -> bool:
        without = [example.name for example in self.examples if not self._references(example)]
        if 0 < len(without) < len(self.examples):
            raise UserError(
                f"{len(without)} of {len(self.examples)} examples of the {self.split} data have no reference, the "
                f"first is {without[0]}: give all of them one, or none."
            )
        return not without

    # ---- during the evaluation
    def add(self, batch: Mapping[str, Any], outputs: Mapping[str, Any]) -> None:
        """Append a line [example, prediction, generated tokens] for each row of a batch.

        Args:
            batch: with "example", int64[rows].
            outputs: with "generation_outputs", int64[rows, length] new tokens (none of a decoder's prompt), or with
                "logits", float[rows, labels] or [rows, 1].
        """
        rows = zip(batch["example"].tolist(), *self._values(outputs), strict=True)
        with naming(self.folder or tempfile.gettempdir()):
            self.lines.write("".join(json.dumps(row) + "\n" for row in rows).encode())

    def _values(self, outputs: Mapping[str, Any]) -> tuple[list[Value], list[int]]:
        if self.generates:
            token_ids = outputs["generation_outputs"].cpu()
            return self.decode(token_ids), self.decode.lengths(token_ids)
        logits = outputs["logits"].detach()
        if self.task == "multi_label":
            return labels_above(logits, self.thresholds), [0] * len(logits)
        values = logits.argmax(-1) if self.task == "classification" else logits.to(torch.float64).squeeze(-1)
        return values.tolist(), [0] * len(values)

    # ---- at its end
    def reduce(self, backend: Backend) -> dict[str, float]:
        """Write the file, log --show_valid_examples of it, and tell every worker the metrics; collective."""
        with naming(self.folder or tempfile.gettempdir()):
            answers = self._gathered(backend)
        with answers.file:
            return on_main(backend, lambda: self._finish(answers))

    def _gathered(self, backend: Backend) -> StoredAnswers:
        """The answer for every example, on rank 0; of repeated ones the first."""
        found = StoredAnswers(len(self.examples) if backend.is_main else 0, self.folder)
        self.lines.seek(0)
        while any(pieces := backend.gather(self.lines.readlines(PIECE_BYTES))):
            for line in (line for piece in pieces for line in piece) if backend.is_main else ():
                found.put(*json.loads(line))
        self.lines.close()
        return found

    def _finish(self, answers: StoredAnswers) -> dict[str, float]:
        absent = np.flatnonzero(answers.places < 0)
        if absent.size:
            raise RuntimeError(
                f"{len(absent)} of {len(answers)} examples of {self.split} were not predicted, the first is "
                f"{self.examples[absent[0]].name}"
            )
        values, predictions = {}, answers
        if self.generates and self.task == "classification":
            predictions = [self.label_of(answer) for answer in answers]
            values["unknown_answers"] = predictions.count(UNKNOWN) / len(predictions)
        elif self.generates and self.task == "regression":
            numbers = [number_in(answer) for answer in answers]
            values["unknown_answers"] = numbers.count(None) / len(numbers)
            predictions = [INVALID_NUMBER if number is None else number for number in numbers]
        elif self.task in SENTENCE_TASKS:
            predictions = list(answers)
        self._write(answers, predictions)
        self._show(answers, predictions)
        return self._measure(predictions, answers.num_tokens) | values

    def _measure(self, predictions: Sequence[Any], num_tokens: np.ndarray) -> dict[str, float]:
        facts = {
            "groups": [example.group for example in self.examples],
            "num_labels": len(self.label_names),
            "num_tokens": num_tokens,
            "bleu_tokenize": self.args.bleu_tokenize,
        }
        writes_text = self.task not in SENTENCE_TASKS
        references = [example.targets if writes_text else example.label for example in self.examples]
        values: dict[str, float] = {}
        for name, metric in self.metrics.items():
            if metric.needs_references and not self.measurable:
                continue
            sides = (predictions, references)
            if metric.is_own:
                wanted = map(self._references, self.examples)
                sides = ([*map(self._readable, predictions)], [r if writes_text else r[0] for r in wanted])
            values |= measured(name, metric, *sides, facts, known=values)
        return values

    def _references(self, example: Example) -> list[Value]:
        if self.task not in SENTENCE_TASKS:
            return list(example.targets)
        if example.label is None:
            return []
        return [self._readable(example.label)]

    def _readable(self, prediction: Value) -> Value | list[str] | None:
        """A label's name (None: unknown), the names of several, a number or a text."""
        if self.task == "multi_label":
            return [self.label_names[number] for number in prediction]
        if self.task != "classification":
            return prediction
        return None if prediction == UNKNOWN else self.label_names[prediction]

    # ---- for people
    def _records(self, answers: Sequence[Value], predictions: Sequence[Value]) -> Iterator[dict[str, Any]]:
        for example, answer, prediction in zip(self.examples, answers, predictions, strict=True):
            record = {"id": example.name, "source": example.source}
            if example.pair is not None:
                record["pair"] = example.pair
            record |= {"prediction": self._readable(prediction), "references": self._references(example)}
            if self.generates and self.task in SENTENCE_TASKS:
                record["text"] = answer
            if example.group:
                record["group"] = example.group
            yield record

    def _write(self, answers: Sequence[Value], predictions: Sequence[Value]) -> None:
        if self.folder is None:
            return
        with replacing(self.folder / f"{self.split}.jsonl") as file:
            for record in self._records(answers, predictions):
                file.write(dump_json(record, indent=None).encode() + b"\n")
        if any(metric.writes_by_id for metric in self.metrics.values()):
            with replacing(self.folder / f"{self.split}.json") as file:
                by_id = {example.name: answer for example, answer in zip(self.examples, answers, strict=True)}
                file.write(dump_json(by_id).encode() + b"\n")

    def _show(self, answers: Sequence[Value], predictions: Sequence[Value]) -> None:
        """Show examples at equal distances, the same ones each time."""
        number = min(self.args.show_valid_examples, len(self.examples))
        chosen = {index * len(self.examples) // number for index in range(number)}
        records = enumerate(self._records(answers, predictions) if chosen else ())
        self.show(self.split, [record for index, record in records if index in chosen])


def thresholds_of(args: FinetuningArgs, label_names: Sequence[str]) -> tuple[float, ...]:
    """`--thresholds`, one for each label. Raises UserError where there are others."""
    if args.task == "multi_label" and len(args.thresholds) not in (1, len(label_names)):
        raise UserError(
            f"--thresholds has {len(args.thresholds)} values, and there are {len(label_names)} labels "
            f"({', '.join(label_names)}): give one for all, or one for each, in this order."
        )
    return args.thresholds * (len(label_names) if len(args.thresholds) == 1 else 1)


def labels_above(logits: Tensor, thresholds: Sequence[float]) -> list[list[int]]:
    """Numbers of the labels whose probability reaches the threshold, of logits [rows, labels]."""
    reached = logits.float().sigmoid() >= torch.tensor(thresholds, device=logits.device)
    return [row.nonzero().flatten().tolist() for row in reached]

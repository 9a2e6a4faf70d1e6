"""Collect the predictions of an evaluation, compute metrics and write `folder`/{split}.jsonl.

At the end rank 0 gathers the predictions of all workers, sorts them by example, drops repeated examples and writes one
line for each::

    {"id": "SJ1Xmf-Rb", "source": "Incremental class ...", "prediction": "We present ...", "references": ["..."]}

Lines may also have "pair" (the second sentence), "group" (the task of an instruction) and "text" (the generated text
that was read as a label or a number). Each evaluation of a split overwrites its file. Examples without labels or
targets have references [] and are not scored by metrics that need references.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from lm_experiments_tools.backends.collective import on_main
from lm_experiments_tools.config.finetuning import SENTENCE_TASKS
from lm_experiments_tools.data.examples.example_encoder import framing_ids
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.evaluation.answers import INVALID_NUMBER, LabelWords, number_in
from lm_experiments_tools.evaluation.measuring import chosen_metrics, measured
from lm_experiments_tools.files import dump_json, replacing
from lm_experiments_tools.metrics.labels import UNKNOWN
from lm_experiments_tools.tracking.examples import show_examples

if TYPE_CHECKING:
    from lm_experiments_tools.backends.backend import Backend
    from lm_experiments_tools.config.finetuning import FinetuningArgs
    from lm_experiments_tools.data.examples.examples import Example

Value = str | int | float | list[int]  # a text, a label's number, a number, the numbers of all labels that apply


class TextDecoder:
    """Decode generated tokens to text, without surrounding spaces and the tokens that frame every text.

    Other special tokens are text: users' own ones, which structure a target.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.pad_id: int = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id

    def __call__(self, token_ids: Tensor) -> list[str]:
        """Decode int64[rows, length]; negative ids, such as -100, are padding."""
        return self._texts(token_ids.tolist())

    def references(self, texts: Sequence[str]) -> list[str]:
        """Return the texts that equal predictions must have, to compare both by one rule.

        A text with tokens that were added to the vocabulary is encoded and decoded, because many tokenizers lose the
        spaces around such tokens. Other texts are unchanged: metrics compare with what the data says.
        """
        if not texts:
            return []
        rows = self.tokenizer(text_target=list(texts), add_special_tokens=False, verbose=False)["input_ids"]
        added, unknown = {*self.tokenizer.added_tokens_decoder} - self._framing, self.tokenizer.unk_token_id
        decoded = zip(texts, rows, self._texts(rows), strict=True)
        return [line if added & {*row} and unknown not in row else text for text, row, line in decoded]

    def _texts(self, rows: Sequence[Sequence[int]]) -> list[str]:
        kept = [[number for number in row if number >= 0 and number not in self._framing] for row in rows]
        return [line.strip() for line in self.tokenizer.batch_decode(kept, skip_special_tokens=False)]

    @cached_property
    def _framing(self) -> set[int]:
        return framing_ids(self.tokenizer)

    def lengths(self, token_ids: Tensor) -> list[int]:
        """Return the number of tokens of each row, without padding."""
        return ((token_ids >= 0) & (token_ids != self.pad_id)).sum(-1).tolist()


class Predictions:
    """Collect the predictions of one evaluation and compute its metrics.

    Args:
        split: name of the predictions file, such as "valid".
        examples: all examples of the split, on every worker. "example" in a batch holds indices into them.
        decode: decodes generated tokens; only for models that generate.
        folder: folder of the predictions file; None writes none.
        label_words: text that a generating model writes for each label; by default `--label_words` or the names.

    Raises:
        UserError: two metrics define one value differently, a package is missing, two labels have the same word, or
            only some examples have references.
    """

    def __init__(
        self,
        args: FinetuningArgs,
        split: str,
        examples: Sequence[Example],
        decode: TextDecoder | None = None,
        label_names: Sequence[str] = (),
        folder: Path | None = None,
        label_words: Sequence[str] = (),
    ) -> None:
        self.args, self.split, self.examples, self.decode = args, split, examples, decode
        self.label_names, self.folder = tuple(label_names), folder
        self.generates, self.task = args.needs_generation(), args.task
        self.metrics = chosen_metrics(args)
        self._check_ids()
        self.measurable = self._measurable()
        self.thresholds = thresholds_of(args, self.label_names)
        self.positive_label = positive_label_of(args, self.label_names)
        words = tuple(label_words) or tuple(args.label_words) or self.label_names
        self.label_of = LabelWords(words) if self.task == "classification" and self.generates else None
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        # Of this worker: the index of an example, its prediction and the number of generated tokens.
        self.rows: list[tuple[int, Value, int]] = []

    def _check_ids(self) -> None:
        names = Counter(example.name for example in self.examples)
        if len(names) < len(self.examples) and any(metric.writes_by_id for metric in self.metrics.values()):
            raise UserError(
                f"--metrics {', '.join(self.metrics)} writes {{id: prediction}}, and several examples of the "
                f"{self.split} data have the id {names.most_common(1)[0][0]}: name another field by --id_field."
            )

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
        """Store the predictions of a batch.

        Args:
            batch: "example", int64[rows], the index of each row's example.
            outputs: "generation_outputs", int64[rows, length] without a decoder's prompt, or "logits", float[rows,
                labels] (regression: [rows, 1]).
        """
        self.rows += zip(batch["example"].tolist(), *self._values(outputs), strict=True)

    def _values(self, outputs: Mapping[str, Any]) -> tuple[list[Value], list[int]]:
        if self.generates:
            token_ids = outputs["generation_outputs"].cpu()
            return self.decode(token_ids), self.decode.lengths(token_ids)
        logits = outputs["logits"].detach()
        if self.task == "multi_label":
            return labels_above(logits, self.thresholds), [0] * len(logits)
        values = logits.argmax(-1) if self.task == "classification" else logits.squeeze(-1)
        return values.tolist(), [0] * len(values)

    # ---- at its end
    def reduce(self, backend: Backend) -> dict[str, float]:
        """Gather all predictions, write the file and return the metrics. Every worker must call it."""
        found: dict[int, tuple[Value, int]] = {}
        # Of repeated examples, which fill up the last batches of workers, the first counts.
        for example, answer, num_tokens in chain.from_iterable(backend.gather(self.rows)):
            found.setdefault(example, (answer, num_tokens))
        return on_main(backend, lambda: self._finish(found))

    def _finish(self, found: Mapping[int, tuple[Value, int]]) -> dict[str, float]:
        absent = [example.name for number, example in enumerate(self.examples) if number not in found]
        if absent:
            raise RuntimeError(
                f"{len(absent)} of {len(self.examples)} examples of {self.split} were not predicted, the first is "
                f"{absent[0]}"
            )
        answers, num_tokens = zip(*(found[number] for number in range(len(self.examples))), strict=True)
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
        return self._measure(predictions, np.array(num_tokens)) | values

    def _measure(self, predictions: Sequence[Any], num_tokens: np.ndarray) -> dict[str, float]:
        facts = {
            "groups": [example.group for example in self.examples],
            "num_labels": len(self.label_names),
            "positive_label": self.positive_label,
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
        show_examples(self.split, [record for index, record in records if index in chosen])


def decoded_targets(examples: Sequence[Example], decode: TextDecoder) -> list[Example]:
    """Return the examples with the references that equal predictions must have (`TextDecoder.references`)."""
    texts = iter(decode.references([text for example in examples for text in example.targets]))
    return [replace(example, targets=tuple(islice(texts, len(example.targets)))) for example in examples]


def thresholds_of(args: FinetuningArgs, label_names: Sequence[str]) -> tuple[float, ...]:
    """Return the probability from which each label is predicted (`--thresholds`). Raises UserError."""
    if args.task == "multi_label" and len(args.thresholds) not in (1, len(label_names)):
        raise UserError(
            f"--thresholds has {len(args.thresholds)} values, and there are {len(label_names)} labels "
            f"({', '.join(label_names)}): give one for all, or one for each, in this order."
        )
    return args.thresholds * (len(label_names) if len(args.thresholds) == 1 else 1)


def positive_label_of(args: FinetuningArgs, label_names: Sequence[str]) -> int:
    """Return the index of the label that f1, precision and recall are about (`--positive_label`). Raises UserError."""
    if args.positive_label is None:
        return 1
    if len(label_names) != 2 or args.positive_label not in label_names:
        raise UserError(
            f"--positive_label {args.positive_label} is to be one of two labels, and there are "
            f"{', '.join(label_names)}: name one of two, or leave it out."
        )
    return label_names.index(args.positive_label)


def labels_above(logits: Tensor, thresholds: Sequence[float]) -> list[list[int]]:
    """Return for each row of `logits`, float[rows, labels], the labels whose probability reaches their threshold."""
    reached = logits.float().sigmoid() >= torch.tensor(thresholds, device=logits.device)
    return [row.nonzero().flatten().tolist() for row in reached]

"""Make fine-tuning examples from rows of files: sources with targets, or sentences with labels.

A source is the input text, and a target is the text that the model learns to write. All of these formats are
understood (Hugging Face's translation datasets, plain pairs, several references, SCROLLS):

    {"translation": {"s": "a long text", "t": "short"}}
    {"source": "a long text", "target": "short"}        {"source": "a long text", "targets": ["short", "brief"]}
    {"id": "q1", "pid": "q1_0", "input": "a question", "output": "an answer"}

In evaluation, rows with the same id and source form one example, with all their targets as references. In training,
each row is an example with its first target. A target may be empty text. Test data may have no targets or labels at
all. Numbers are read as text, null as empty text.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lm_experiments_tools.data.text.records import (
    BadRecord,
    Record,
    RejectedRecords,
    converted,
    field_of,
    rows,
    text_of,
)
from lm_experiments_tools.labels import IGNORED_LABEL

logger = logging.getLogger(__name__)

SOURCE_FIELDS = ("s", "source", "input", "text", "article")
TARGET_FIELDS = ("t", "target", "targets", "output", "summary")
MRPC_FIELDS, MNLI_FIELDS = ("#1 String", "#2 String"), ("premise", "hypothesis")
PAIR_FIELDS = (
    MNLI_FIELDS,
    MRPC_FIELDS,
    ("question1", "question2"),  # QQP
    ("sentence1", "sentence2"),  # STS-B, RTE, WNLI, MNLI's tables
    ("question", "sentence"),  # QNLI
)
SENTENCE_FIELDS = ("sentence", "text")  # SST-2, CoLA
LABEL_FIELDS = ("label", "gold_label", "score", "is_duplicate", "Quality")
# Labels that are not given: -1 in sets of Hugging Face, - in SNLI, an empty cell, and the text that pandas writes for
# a missing value. A class has one of these names only if `--label_names` says so.
HIDDEN_LABELS = ("-1", "-1.0", "-", "", "nan", "NaN", "<NA>")
_NULL = ("None", "nan", "NaT", "<NA>")
_WHOLE_NUMBER = re.compile(r"^(-?\d+)\.0+$")
_OTHER_FORMS = 'see "Other forms of rows" in docs/finetuning_data.md'
_LARGEST = float(np.finfo(np.float32).max)  # of the numbers to predict


@dataclass(frozen=True)
class Example:
    """One fine-tuning example: a source text with its targets (texts to generate) or its label.

    Attributes:
        targets: reference texts; training uses the first.
        pair: second sentence, for an encoder; None if the example is a single sentence.
        label: number of the label, numbers of several labels, or the value to predict; None in test data.
        name: id in the predictions, by default the row number.
        group: name of the task, if a dataset has several tasks.
        variants: alternatives to `source`; training draws one of them in each epoch.
    """

    source: str
    targets: tuple[str, ...] = ()
    pair: str | None = None
    label: int | float | tuple[int, ...] | None = None
    name: str = ""
    group: str = ""
    variants: tuple[str, ...] = ()


# ---- sources with targets ----


@dataclass(frozen=True)
class TextFields:
    """Names of the fields that hold the source text, the target text and the id; None for the usual names.

    `columns` names the columns of tables without a header, see `rows`.
    """

    source: str | None = None
    target: str | None = None
    prefix: str = ""
    id: str | None = None
    columns: tuple[str, ...] = ()

    def target_of(self, fields: dict[str, Any]) -> str:
        return self.target or ("targets" if "targets" in fields else _found(fields, TARGET_FIELDS, "--target_id"))

    def has_target(self, row: Record) -> bool:
        """Return True if a row has a target, False if the field is missing, null, an empty list or empty text."""
        try:
            fields = _texts_of(row)
            value = field_of(fields, self.target_of(fields))
        except BadRecord:
            return False
        texts = value if isinstance(value, list | tuple | np.ndarray) else [value]
        return not all(_is_null(text) or (isinstance(text, str) and not text.strip()) for text in texts)


def text_examples(
    path: str, fields: TextFields, rejected: RejectedRecords, *, merge: bool, with_targets: bool = True
) -> Iterator[Example]:
    """Yield sources with their targets from a file or dataset, for models that generate text.

    With `merge`, for evaluation, rows with the same id and source are one example with several targets.

    Raises UserError: there are too many bad rows.
    """

    def convert(row: Record) -> tuple[object, Example]:
        """Key and example of a row: rows with equal keys are references of one example."""
        texts = _texts_of(row)
        key = fields.source or _found(texts, SOURCE_FIELDS, "--source_id")
        source = text_in(texts, key)
        targets = texts_in(texts, fields.target_of(texts)) if with_targets else ()
        name = _name(row.value, fields.id, "id", "pid")
        example = Example(fields.prefix + source, targets, name=name or str(row.number))
        return (name, source) if name else row.number, example

    num_empty = number = 0
    found = converted(rows(path, rejected, fields.columns), convert, rejected)
    for example in _merged(found) if merge else (example for _, example in found):
        number, num_empty = number + 1, num_empty + (example.targets[:1] == ("",))
        yield example
    if num_empty:
        logger.warning("%s: the target of %d of %d examples is empty", path, num_empty, number)


def _merged(examples: Iterable[tuple[object, Example]]) -> Iterator[Example]:
    """Examples of one id and source put together, in the order of their first rows."""
    found: dict[object, Example] = {}
    for key, example in examples:
        first = found.get(key)
        found[key] = replace(first, targets=first.targets + example.targets) if first else example
    yield from found.values()


def _texts_of(row: Record) -> dict[str, Any]:
    texts = row.value.get("translation", row.value)
    if not isinstance(texts, dict):
        raise BadRecord(f"'translation' is of type {type(texts).__name__}, not an object of two texts")
    return texts


def texts_in(fields: dict[str, Any], key: str) -> tuple[str, ...]:
    """Return the target texts in a field: one text, which may be empty, or a list of them. Raises BadRecord."""
    value = field_of(fields, key)
    value = value.tolist() if isinstance(value, np.ndarray) else value
    texts = value if isinstance(value, list | tuple) else [value]
    if key == "targets" and isinstance(value, str) and value.lstrip()[:1] == "[":
        raise BadRecord("'targets' is a list written as text: write lists in JSON lines, or texts as 'target'")
    if not texts:
        raise BadRecord(f"{key!r} is an empty list of references")
    if any(map(_is_null, texts)):
        raise BadRecord(f'{key!r} is null, no target (an empty one is "")')
    return tuple(text_in({key: text}, key, may_be_empty=True) for text in texts)


# ---- fields of any row ----


def text_in(fields: dict[str, Any], key: str, *, may_be_empty: bool = False) -> str:
    """Return the text in a field of a row. A number becomes text, and null is empty text. Raises BadRecord."""
    value = field_of(fields, key)
    text = "" if _is_null(value) else str(value)
    if text and not isinstance(value, str | int | float | np.generic):
        parts = f" with {', '.join(map(repr, list(value)[:4]))}" if isinstance(value, dict) else ""
        raise BadRecord(f"{key!r} is of type {type(value).__name__}{parts}, not text: {_OTHER_FORMS}")
    if not text.strip() and not may_be_empty:
        raise BadRecord(f"{key!r} is empty")
    return text_of({key: text}, key) if text.strip() else ""


def _name(fields: dict[str, Any], field: str | None, *usual: str) -> str:
    """The value of this field; None: of the first usual one with a value, else empty."""
    if field is None:
        return next((str(fields[key]) for key in usual if not _is_null(fields.get(key))), "")
    if _is_null(field_of(fields, field)) or not str(fields[field]).strip():
        raise BadRecord(f"{field!r} is empty, and is to be the id")
    return str(fields[field])


def _found(fields: dict[str, Any], names: Sequence[str], flag: str) -> str:
    for name in names:
        if name in fields:
            return name
    found = ", ".join(map(repr, list(fields)[:8])) or "none"
    advice = f"name it by {flag}, the columns of a table without a header by --table_columns, or {_OTHER_FORMS}"
    raise BadRecord(f"no field {', '.join(names)} (there is {found}): {advice}")


def _is_null(value: Any) -> bool:
    """True for None, NaN and pandas' values of the same meaning."""
    return value is None or (not isinstance(value, str | list | tuple | dict | np.ndarray) and str(value) in _NULL)


# ---- sentences with labels ----


@dataclass
class LabelFields:
    """Names of the fields of sentences, label and id in the rows of a run; empty or None for those of GLUE's data.

    Attributes:
        as_text: the sentences and their names are one text, as an encoder-decoder reads them.
        several: a row may have any number of labels.
        names: names of the sentence fields of the loaded model's data, else of the first row; empty before it is read.
        where: the place of these names, for error messages.
    """

    texts: tuple[str, ...] = ()
    label: str | None = None
    prefix: str = ""
    id: str | None = None
    as_text: bool = False
    several: bool = False
    columns: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    where: str = ""

    def sentences_of(self, row: Record) -> tuple[str, ...]:
        """Return the names of a row's sentence fields, as many as in the first row; `as_text`: the same names.

        Raises BadRecord: the row has other fields.
        """
        names = self.texts or self._usual(row.value)
        if not self.names:
            self.names, self.where = names, row.where
        if len(names) != len(self.names) or (names != self.names and self.as_text):
            here, there = (
                f"{'a pair' if len(n) > 1 else 'one sentence'} ({', '.join(n)})" for n in (names, self.names)
            )
            raise BadRecord(f"{here}, where {self.where} has {there}: select the same by --text_fields")
        return names

    def _usual(self, fields: dict[str, Any]) -> tuple[str, ...]:
        for names in (self.names, *PAIR_FIELDS):
            if names and all(name in fields for name in names):
                return names[::-1] if self.as_text and names is MNLI_FIELDS else names  # T5 sorts them by name
        return (_found(fields, SENTENCE_FIELDS, "--text_fields"),)

    def label_of(self, fields: dict[str, Any]) -> Any:
        usual = ("labels", *LABEL_FIELDS) if self.several else LABEL_FIELDS
        value = field_of(fields, self.label or _found(fields, usual, "--label_field"))
        return value.tolist() if isinstance(value, np.generic | np.ndarray) else value

    def names_in(self, fields: dict[str, Any], known: Sequence[str] = ()) -> tuple[str, ...]:
        """Return the names of all labels of a row."""
        value = self.label_of(fields)
        if not self.several:
            return (_label_name(value, known),)
        if not isinstance(value, list | tuple) or any(isinstance(label, bool) for label in value):
            raise BadRecord(f"the labels {value!r} are no list of names: {_OTHER_FORMS}")
        return tuple(_label_name(label, known) for label in value)

    def has_label(self, row: Record, names: Sequence[str]) -> bool:
        """Return False if a row's label is missing, null, or one of `HIDDEN_LABELS` that is not in `names` itself."""
        try:
            return not _is_hidden(self.label_of(row.value), names)
        except BadRecord:
            return False


def found_labels(path: str, fields: LabelFields, rejected: RejectedRecords) -> set[str]:
    """Return the names of all labels of usable rows. Raises UserError if too many rows cannot be used."""

    def names(row: Record) -> tuple[str, ...]:
        # Rows without a usable text are left out later, so their labels must not become classes.
        for key in fields.sentences_of(row):
            text_in(row.value, key)
        return fields.names_in(row.value)

    return {name for found in converted(rows(path, rejected, fields.columns), names, rejected) for name in found}


def in_order(labels: Iterable[str]) -> tuple[str, ...]:
    """Sort label names: numbers by value, words alphabetically."""
    labels = sorted(labels)
    try:
        return tuple(sorted(labels, key=float))
    except ValueError:
        return tuple(labels)


def plain_number(name: str) -> str:
    """Return the name of a label without the decimals of a whole number: "1" for "1.0", which pandas writes."""
    return _WHOLE_NUMBER.sub(r"\1", name)


def _is_hidden(value: Any, known: Sequence[str]) -> bool:
    return _is_null(value) or (str(value).strip() in HIDDEN_LABELS and {*known}.isdisjoint(HIDDEN_LABELS))


def _label_name(value: Any, known: Sequence[str] = ()) -> str:
    if _is_hidden(value, known):
        advice = "" if _is_null(value) else ", or name all labels by --label_names if this is one of them"
        raise BadRecord(f"no label ({value!r}): leave out the row{advice}")
    if isinstance(value, (str, int)) or (isinstance(value, float) and value.is_integer()):  # True and False are ints
        return plain_number(str(value).strip())
    raise BadRecord(f"the label {value!r} is neither a string nor an integer")


def label_examples(
    path: str,
    fields: LabelFields,
    rejected: RejectedRecords,
    *,
    names: Sequence[str] = (),
    words: Sequence[str] | None = None,
    with_labels: bool = True,
) -> Iterator[Example]:
    """Read sentences, or pairs of sentences, with their labels from a file or dataset.

    For an encoder-decoder everything becomes text, as in T5 (Raffel et al. 2020, appendix D). The source is
    "sentence1: ... sentence2: ..." after the prefix, and the target is the word of the label. A number is rounded to
    the nearest 0.2, as T5 did for STS-B, and written with one decimal.

    Args:
        names: the labels in the order of their numbers; empty if the labels are numbers to predict.
        words: target text of each label for an encoder-decoder (empty for numbers); None for an encoder.

    Raises:
        UserError: there are too many bad rows.
    """
    numbers = {plain_number(name.strip()): number for number, name in enumerate(names)}
    rounded = 0

    def convert(row: Record) -> Example:
        nonlocal rounded
        keys = fields.sentences_of(row)
        texts = [text_in(row.value, key) for key in keys]
        label = _label(row.value, fields, numbers) if with_labels else None
        name = _name(row.value, fields.id, "id") or str(row.number)
        if words is None:
            return Example(fields.prefix + texts[0], pair=texts[1] if len(texts) > 1 else None, label=label, name=name)
        source = fields.prefix + t5_text(keys, texts)
        if label is None:
            return Example(source, name=name)
        target = words[label] if numbers else number_text(label)
        rounded += not numbers and float(target) != label
        return Example(source, (target,), label=label, name=name)

    yield from converted(rows(path, rejected, fields.columns), convert, rejected)
    if rounded:
        logger.warning("%s: %d labels are rounded to the nearest 0.2, as T5 did for STS-B", path, rounded)


def _label(record: dict[str, Any], fields: LabelFields, numbers: dict[str, int]) -> int | float | tuple[int, ...]:
    """The label or labels of a row as numbers; the value to predict if no label has a name."""
    if not numbers:
        return _number(fields.label_of(record))
    names = fields.names_in(record, tuple(numbers))
    if unknown := [name for name in names if name not in numbers]:
        raise BadRecord(f"the label {unknown[0]!r} is none of {', '.join(list(numbers)[:20])}")
    chosen = tuple(sorted({numbers[name] for name in names}))
    return chosen if fields.several else chosen[0]


def _number(value: Any) -> float:
    if _is_null(value) or value == "":
        raise BadRecord(f"no label ({value!r}): leave out the row")
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise BadRecord(f"the label {value!r} is not a number with a decimal point") from None
    if not abs(number) <= _LARGEST or number == IGNORED_LABEL:  # also nan
        raise BadRecord(
            f"the label {value!r} cannot be predicted: give finite float32 values other than {IGNORED_LABEL}"
        )
    return number


def number_text(number: float) -> str:
    """Format a number as in T5's STS-B: the nearest multiple of 0.2, with one decimal."""
    return f"{round(number * 5) / 5 + 0.0:.1f}"  # no "-0.0"


def t5_text(keys: Sequence[str], texts: Sequence[str]) -> str:
    """Join sentences and their field names as t5 does for GLUE, such as "question: Who? sentence: He."."""
    names = ("sentence1", "sentence2") if tuple(keys) == MRPC_FIELDS else keys
    return " ".join(f"{name}: {text}" for name, text in zip(names, texts, strict=True))

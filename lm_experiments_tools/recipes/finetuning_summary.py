"""Summaries of fine-tuning examples for the log: counts of labels, lengths in tokens, and the first example."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from lm_experiments_tools.data.examples.dataset import EncodedExamples, Ragged
from lm_experiments_tools.data.examples.examples import Example

_PERCENTILES = (50, 90, 99, 100)
_LABELS = 12  # most frequent labels, named with their counts
_TOKENS = 48  # shown of an example


def summary(
    encoded: EncodedExamples, label_names: Sequence[str] = (), counts: Mapping[int, int] | None = None
) -> list[str]:
    """Summarize examples for the log, as lines: examples per label, for classification, and percentiles of lengths."""
    sides = {"sources": encoded.sources, "targets": encoded.targets}
    parts = [f"{side} {_lengths(ragged.lengths)}" for side, ragged in sides.items() if ragged is not None]
    lengths = f"tokens at {' / '.join(map(str, _PERCENTILES))} %: {', '.join(parts)}"
    return [_labels(label_names, counts or {}), lengths] if label_names else [lengths]


def first_example(encoded: EncodedExamples, tokenizer: Any, label_names: Sequence[str] = ()) -> str:
    """Return a log line that shows the tokens of the first example, and its target or label."""
    if encoded.labels is None:
        target = _first(encoded.targets, tokenizer)
    else:
        target = label_text(encoded.labels[0], label_names)
    return f"the first example: {_first(encoded.sources, tokenizer)} -> {target}"


def counted(examples: Iterable[Example], counts: dict[int, int]) -> Iterator[Example]:
    """Yield the given examples unchanged, and count in `counts` how often each label occurs."""
    for example in examples:
        for label in example.label if isinstance(example.label, tuple) else (example.label,):
            counts[label] = counts.get(label, 0) + 1
        yield example


def label_text(label: Any, names: Sequence[str]) -> str:
    """Return the names of the labels of one example, an item of `EncodedExamples.labels`, or the plain number."""
    if np.ndim(label):
        return ", ".join(names[number] for number in np.flatnonzero(label > 0)) or "none"
    return names[int(label)] if names else f"{label:g}"


def _labels(names: Sequence[str], counts: Mapping[int, int]) -> str:
    total = max(sum(counts.values()), 1)
    numbers = sorted(range(len(names)), key=lambda number: -counts.get(number, 0))  # the most frequent first
    shown = [f"{names[n]} {counts.get(n, 0):,} ({counts.get(n, 0) / total:.1%})" for n in numbers[:_LABELS]]
    more = f", and {len(names) - _LABELS} rarer ones" if len(names) > _LABELS else ""
    return f"{len(names)} labels: {', '.join(shown)}{more}"


def _lengths(lengths: np.ndarray) -> str:
    return " / ".join(f"{value:,.0f}" for value in np.percentile(lengths, _PERCENTILES, method="higher"))


def _first(rows: Ragged, tokenizer: Any) -> str:
    ids = rows.flat(np.zeros(1, np.int64)).tolist()
    more = f" ... ({len(ids)} in all)" if len(ids) > _TOKENS else ""
    return " ".join(map(str, tokenizer.convert_ids_to_tokens(ids[:_TOKENS]))) + more

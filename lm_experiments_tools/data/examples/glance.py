"""A look at encoded examples, in lines of the log: what there is to learn, how long it is, how the model reads it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from unicodedata import normalize

import numpy as np

from lm_experiments_tools.data.examples.dataset import EncodedExamples
from lm_experiments_tools.data.examples.examples import Example
from lm_experiments_tools.data.examples.ragged import Ragged

_PERCENTILES = (50, 90, 99, 100)
_LABELS = 12  # that are named with their counts
_TOKENS = 48  # of an example


def glance(
    encoded: EncodedExamples, tokenizer: Any, label_names: Sequence[str] = (), counts: Mapping[int, int] | None = None
) -> Iterator[str]:
    """Lines about examples: labels with their counts (of a classification), lengths, the first example as tokens.

    Args:
        counts: examples of each label, by its number in `label_names`.
    """
    if label_names:
        yield _labels(label_names, counts or {})
    sides = {"sources": encoded.sources, "targets": encoded.targets}
    parts = [f"{side} {_lengths(ragged.lengths)}" for side, ragged in sides.items() if ragged is not None]
    yield f"tokens at {' / '.join(map(str, _PERCENTILES))} %: {', '.join(parts)}"
    target = (
        _first(encoded.targets, tokenizer) if encoded.labels is None else label_text(encoded.labels[0], label_names)
    )
    yield f"the first example: {_first(encoded.sources, tokenizer)} -> {target}"


def counted(examples: Iterable[Example], counts: dict[int, int]) -> Iterator[Example]:
    """The examples, whose labels are counted on their way."""
    for example in examples:
        for label in example.label if isinstance(example.label, tuple) else (example.label,):
            counts[label] = counts.get(label, 0) + 1
        yield example


def label_text(label: Any, names: Sequence[str]) -> str:
    """A value of `EncodedExamples.labels` for people: the names of the labels that apply, or a number."""
    if np.ndim(label):
        return ", ".join(names[number] for number in np.flatnonzero(label > 0)) or "none"
    return names[int(label)] if names else f"{label:g}"


def alike(names: Sequence[str]) -> list[tuple[str, ...]]:
    """Groups of labels that differ by nothing but case, white space and the encoding of equal characters (NFKC)."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(" ".join(normalize("NFKC", name).split()).casefold(), []).append(name)
    return [tuple(group) for group in groups.values() if len(group) > 1]


def _labels(names: Sequence[str], counts: Mapping[int, int]) -> str:
    total = max(sum(counts.values()), 1)
    numbers = sorted(range(len(names)), key=lambda number: -counts.get(number, 0))  # the most frequent first
    shown = [f"{names[n]} {counts.get(n, 0):,} ({counts.get(n, 0) / total:.1%})" for n in numbers[:_LABELS]]
    more = f", and {len(names) - _LABELS} rarer ones" if len(names) > _LABELS else ""
    return f"{len(names)} labels: {', '.join(shown)}{more}"


def _lengths(lengths: np.ndarray) -> str:
    return " / ".join(f"{value:,.0f}" for value in np.percentile(lengths, _PERCENTILES, method="higher"))


def _first(rows: Ragged, tokenizer: Any) -> str:
    """The tokens of the first row."""
    ids = rows.flat(np.zeros(1, np.int64)).tolist()
    more = f" ... ({len(ids)} in all)" if len(ids) > _TOKENS else ""
    return " ".join(map(str, tokenizer.convert_ids_to_tokens(ids[:_TOKENS]))) + more

"""Training samples in words: the batch that the model gets, decoded, with nothing left out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np

from lm_experiments_tools.labels import IGNORED_LABEL


@dataclass(frozen=True)
class Wording:
    """How ids and labels are written.

    Attributes:
        decode: ids -> text.
        shown: ids with a name of their own.
        labels_at_inputs: a label belongs to the input at its position (masked words), not to a decoder's targets.
        meanings: entry of a batch with one value a row -> value -> its meaning, shown beside it.
    """

    decode: Callable[[list[int]], str]
    shown: Mapping[int, str]
    labels_at_inputs: bool = False
    meanings: Mapping[str, Mapping[int, str]] = field(default_factory=dict)


def render_ids(ids: np.ndarray, decode: Callable[[list[int]], str], shown: Mapping[int, str]) -> str:
    """Text of ids; ids in `shown` (padding, eos, ignored labels) are written as names, runs of them as `name x n`.

    One worked example: [5, 6, 1, 0, 0] with decode giving "a b" for 5 6 and shown {0: "<pad>", 1: "</s>"} is
    "a b </s> <pad> x 2".
    """
    words = []
    for name, run in groupby(np.asarray(ids).tolist(), key=lambda i: shown.get(i)):
        members = list(run)
        if name is None:
            words.append(decode(members))
        else:
            words.append(name if len(members) == 1 else f"{name} x {len(members)}")
    return " ".join(word for word in words if word)


def render_predictions(
    input_ids: np.ndarray, labels: np.ndarray, decode: Callable[[list[int]], str], shown: Mapping[int, str]
) -> str:
    """An input with labels at its own positions: each predicted one is written `[input -> label]`.

    One worked example: inputs 5 9 7 with labels -100 6 -100, ids decoding to letters e f g and 9 to "<mask>", is
    "e [<mask> -> f] g".
    """
    words: list[str] = []
    plain: list[int] = []
    for token, label in zip(np.asarray(input_ids).tolist(), np.asarray(labels).tolist(), strict=True):
        if label == IGNORED_LABEL:
            plain.append(token)
            continue
        words += [render_ids(np.array(plain), decode, shown)] if plain else []
        plain = []
        words.append(f"[{shown.get(token) or decode([token])} -> {shown.get(label) or decode([label])}]")
    words += [render_ids(np.array(plain), decode, shown)] if plain else []
    return " ".join(words)


def render_sample(row: Mapping[str, np.ndarray], wording: Wording) -> list[str]:
    """Lines that show one row of a batch, every entry of it: `input_ids` [length], `labels` [length], and others."""
    inputs, labels = np.asarray(row["input_ids"]), np.asarray(row["labels"])
    decode, shown = wording.decode, {**wording.shown, IGNORED_LABEL: "(ignored)"}
    attended = int(np.asarray(row["attention_mask"]).sum()) if "attention_mask" in row else len(inputs)
    predicted = int((labels != IGNORED_LABEL).sum())
    lines = [f"input    {len(inputs)} tokens, {attended} attended"]
    if wording.labels_at_inputs:
        lines += [f"  {render_predictions(inputs, labels, decode, shown)}"]
        lines += [f"target   {predicted} tokens, shown as [input -> target]"]
    else:
        lines += [
            f"  {render_ids(inputs, decode, shown)}",
            f"target   {len(labels)} tokens, {predicted} of them predicted",
        ]
        same = inputs.shape == labels.shape and bool((inputs == labels).all())
        lines += ["  the input itself" if same else f"  {render_ids(labels, decode, shown)}"]
    for name in sorted(set(row) - {"input_ids", "labels"}):
        value = np.asarray(row[name])
        if value.ndim:
            lines.append(f"{name}: {_runs(value)}")
            continue
        meaning = wording.meanings.get(name, {}).get(value.item())
        lines.append(f"{name}: {value.item()}" + ("" if meaning is None else f", {meaning}"))
    return lines


def _runs(values: np.ndarray) -> str:
    """`0 x 12, 1 x 4` for a flat array."""
    return ", ".join(f"{value} x {len(list(run))}" for value, run in groupby(values.tolist()))

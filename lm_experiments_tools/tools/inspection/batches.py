"""Micro-batches as the model gets them: steps of an epoch, padding, samples as text."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import ceil
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lm_experiments_tools.labels import IGNORED_LABEL
from lm_experiments_tools.tools.inspection.section import Section
from lm_experiments_tools.tools.inspection.tokens import TokenSource
from lm_experiments_tools.training.micro_batches import split_batch

MEASURED_MICRO_BATCHES = 64


@dataclass(frozen=True)
class Wording:
    """How ids and labels are written.

    Attributes:
        decode: ids -> text.
        shown: ids with a name of their own.
        labels_at_inputs: a label belongs to the input at its position (masked LM), not to a decoder's targets.
        meanings: entry of a batch with one value a row -> value -> its meaning.
    """

    decode: Callable[[list[int]], str]
    shown: Mapping[int, str]
    labels_at_inputs: bool = False
    meanings: Mapping[str, Mapping[int, str]] = field(default_factory=dict)


def training_section(
    batches: Iterable[Mapping[str, Tensor]],
    samples_per_epoch: int | None,
    sources: list[TokenSource],
    args: Any,
    has_decoder: bool,
    wording: Wording,
    facts: list[tuple[str, str]],
) -> Section:
    """`facts`, the steps of an epoch, padding of the first micro-batches, and the first samples of the run.

    Args:
        batches: global batches; rows `rank::world_size` belong to a worker.
        samples_per_epoch: of `sources`; None if only the end of the epoch tells. Padding is measured within an epoch.
        args: of the run, `SampleArgs` and `TokenArgs`.
    """
    section = Section("training", [*facts, _steps(samples_per_epoch, sources, args)])
    wanted = min(MEASURED_MICRO_BATCHES, ceil((samples_per_epoch or 1 << 62) / args.batch_size))
    measured: list[dict[str, Tensor]] = []
    number = 0
    for micro_batches in micro_batches_by_rank(batches, args, has_decoder):
        measured += micro_batches[: wanted - len(measured)]
        for row, rank in itertools.product(range(args.batch_size), range(args.world_size)):
            if number < args.samples:
                worker = f" (worker {rank})" if args.world_size > 1 else ""
                values = {name: entries[row].numpy() for name, entries in micro_batches[rank].items()}
                section.samples.append((f"sample {number}{worker}", render_sample(values, wording)))
                number += 1
        if len(measured) >= wanted and number >= args.samples:
            break
    section.add("padding", _padding(measured, args.batch_size, wording.labels_at_inputs))
    return section


def _steps(samples: int | None, sources: list[TokenSource], args: Any) -> tuple[str, str]:
    """The steps of an epoch, estimated for all the data if documents were left out."""
    rows = args.global_batch_size(args.world_size)
    shape = f"{args.batch_size} x {args.gradient_accumulation_steps} accumulated x {args.world_size} worker(s)"
    if samples is None:
        return "steps", f"{rows} examples each ({shape}); the examples of an epoch are known only at its end"
    weighted = args.data_weights and args.data_blending == "proportional"
    epoch = estimated_epoch(samples, sources, list(args.data_weights) if weighted else [1.0] * len(sources))
    # --data_n_samples and --data_maximum limit all documents, so the first ones tell nothing about an epoch of all.
    limited = args.data_maximum is not None or getattr(args, "data_n_samples", None) is not None
    if epoch is None or (epoch != samples and limited):
        of_these = f"of these documents has {samples:,} examples = {samples / rows:,.1f} steps of {rows} ({shape})"
        return "an epoch", f"{of_these}; of all the data it is not known from them"
    about, why = ("", "") if epoch == samples else ("about ", ", estimated from these documents")
    return "an epoch", (
        f"{about}{round(epoch):,} examples = {about}{epoch / rows:,.1f} steps of {rows} ({shape}){why}; "
        f"--iters {args.iters:,} = {about}{args.iters * rows / epoch:.2f} epochs"
    )


def estimated_epoch(samples: int, sources: list[TokenSource], weights: list[float]) -> float | None:
    """Samples in an epoch of all the data, from those of the inspected documents; None if a size is unknown.

    A source gives samples in proportion to its tokens times its weight. One worked example: 30 samples of two sources
    with 100 and 200 tokens, weight 1 each, the first a tenth of its file and the second all of it, are
    30 * (1000 + 200) / (100 + 200) = 120.
    """
    if not all(source.fraction for source in sources):
        return None
    tokens = [source.tokens.num_tokens * weight for source, weight in zip(sources, weights, strict=True)]
    return samples * (sum(t / s.fraction for t, s in zip(tokens, sources, strict=True)) / sum(tokens))


def micro_batches_by_rank(
    batches: Iterable[Mapping[str, Tensor]], args: Any, has_decoder: bool
) -> Iterator[list[dict[str, Tensor]]]:
    """One micro-batch of each rank at a time, split as the training loop splits a batch."""
    options = torch.device("cpu"), has_decoder, ("labels",), args.trim_to()
    for batch in batches:
        ranks = [
            split_batch({name: rows[rank :: args.world_size] for name, rows in batch.items()},
                        args.batch_size, set(batch), *options).micro_batches
            for rank in range(args.world_size)
        ]  # fmt: skip
        for micro_batches in zip(*ranks, strict=True):
            yield [micro_batch.batch for micro_batch in micro_batches]


def _padding(micro_batches: list[dict[str, Tensor]], rows: int, labels_at_inputs: bool) -> str:
    masks, labels = ([batch[name] for batch in micro_batches] for name in ("attention_mask", "labels"))
    inputs, attended = sum(mask.numel() for mask in masks), sum(int(mask.sum()) for mask in masks)
    targets, predicted = sum(map(Tensor.numel, labels)), sum(int((t != IGNORED_LABEL).sum()) for t in labels)
    text = f"{1 - attended / inputs:.2%} of the inputs"
    if labels_at_inputs:
        text = f"{text}; {predicted / attended:.2%} of the other tokens are to be predicted"
    else:
        text = f"{text}, {1 - predicted / targets:.2%} of the targets"
    widths = [
        " to ".join(map(str, sorted({min(w), max(w)}))) for w in ([t.shape[1] for t in ts] for ts in (masks, labels))
    ]
    measured = f"measured on {len(micro_batches)} micro-batches of {rows} rows"
    return f"{text}: {measured}, {widths[0]} inputs, {widths[1]} targets wide"


def render_ids(ids: np.ndarray, decode: Callable[[list[int]], str], shown: Mapping[int, str]) -> str:
    """Text of ids; runs of an id in `shown` (padding, EOS, ignored labels) are written as `name x n`.

    One worked example: [5, 6, 1, 0, 0] with decode giving "a b" for 5 6 and shown {0: "<pad>", 1: "</s>"} is
    "a b </s> <pad> x 2".
    """
    words = []
    for name, run in itertools.groupby(np.asarray(ids).tolist(), key=shown.get):
        members = list(run)
        times = f" x {len(members)}" if len(members) > 1 else ""
        words.append(decode(members) if name is None else f"{name}{times}")
    return " ".join(word for word in words if word)


def render_predictions(
    input_ids: np.ndarray, labels: np.ndarray, decode: Callable[[list[int]], str], shown: Mapping[int, str]
) -> str:
    """An input with labels at its own positions: each predicted one is written `[input -> label]`.

    One worked example: inputs 5 9 7 with labels -100 6 -100, ids decoding to letters e f g and 9 to "<mask>", is
    "e [<mask> -> f] g".
    """
    words = []
    pairs = zip(np.asarray(input_ids).tolist(), np.asarray(labels).tolist(), strict=True)
    for predicted, run in itertools.groupby(pairs, key=lambda pair: pair[1] != IGNORED_LABEL):
        if predicted:
            names = [[shown.get(i) or decode([i]) for i in pair] for pair in run]
            words += [f"[{token} -> {label}]" for token, label in names]
        else:
            words.append(render_ids(np.array([token for token, _ in run]), decode, shown))
    return " ".join(words)


def render_sample(row: Mapping[str, np.ndarray], wording: Wording) -> list[str]:
    """Lines that show every entry of one row of a batch: `input_ids` [length], `labels` [length], and others."""
    inputs, labels = np.asarray(row["input_ids"]), np.asarray(row["labels"])
    decode, shown = wording.decode, {**wording.shown, IGNORED_LABEL: "(ignored)"}
    attended = int(np.asarray(row["attention_mask"]).sum()) if "attention_mask" in row else len(inputs)
    predicted = int((labels != IGNORED_LABEL).sum())
    lines = [f"input    {len(inputs)} tokens, {attended} attended"]
    if wording.labels_at_inputs:
        lines += [f"  {render_predictions(inputs, labels, decode, shown)}"]
        lines += [f"target   {predicted} tokens, shown as [input -> target]"]
    else:
        same = inputs.shape == labels.shape and bool((inputs == labels).all())
        lines += [f"  {render_ids(inputs, decode, shown)}"]
        lines += [f"target   {len(labels)} tokens, {predicted} of them predicted"]
        lines += ["  the input itself" if same else f"  {render_ids(labels, decode, shown)}"]
    for name in sorted(set(row) - {"input_ids", "labels"}):
        value = np.asarray(row[name])
        if value.ndim:
            lines.append(
                f"{name}: {', '.join(f'{v} x {len(list(run))}' for v, run in itertools.groupby(value.tolist()))}"
            )
        else:
            meaning = wording.meanings.get(name, {}).get(value.item())
            lines.append(f"{name}: {value.item()}" + ("" if meaning is None else f", {meaning}"))
    return lines

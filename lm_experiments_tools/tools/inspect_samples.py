"""Describe the micro-batches of a run before training: steps per epoch, padding, and samples as text."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lm_experiments_tools.config.lengths import in_updates
from lm_experiments_tools.labels import IGNORED_LABEL
from lm_experiments_tools.tools.inspect_tokens import Facts
from lm_experiments_tools.training.micro_batches import split_batch

Samples = list[tuple[str, list[str]]]  # (title, lines)
MEASURED_MICRO_BATCHES = 64


@dataclass(frozen=True)
class Rendering:
    """How `lmtools inspect` prints a sample of a batch.

    Attributes:
        shown: names of special ids, such as {0: "<pad>"}.
        labels_at_inputs: True if labels are predicted at the input positions (masked LM), not by a decoder.
    """

    decode: Callable[[list[int]], str]
    shown: Mapping[int, str]
    labels_at_inputs: bool = False


def training_section(
    batches: Iterable[Mapping[str, Tensor]],
    samples_per_epoch: int | None,
    is_whole: bool,
    args: Any,
    has_decoder: bool,
    rendering: Rendering,
    facts: Facts,
) -> tuple[str, Facts, Samples]:
    """Title, (name, value) lines and printed samples of the training data, with the padding of first micro-batches.

    Args:
        batches: global batches; a worker gets the rows `rank::world_size`.
        is_whole: False if only the first documents are inspected.
        facts: (name, value) lines that come first.
    """
    wanted = min(MEASURED_MICRO_BATCHES, ceil((samples_per_epoch or 1 << 62) / args.batch_size))
    options = torch.device("cpu"), has_decoder, ("labels",), args.trim_to()
    measured: list[dict[str, Tensor]] = []
    samples: Samples = []
    for batch in batches:
        ranks = [
            split_batch({name: rows[rank :: args.world_size] for name, rows in batch.items()},
                        args.batch_size, set(batch), *options)
            for rank in range(args.world_size)
        ]  # fmt: skip
        for micro_batches in zip(*ranks, strict=True):
            rows = [micro_batch.batch for micro_batch in micro_batches]
            measured += rows[: wanted - len(measured)]
            for row, rank in itertools.product(range(args.batch_size), range(args.world_size)):
                if len(samples) < args.samples:
                    worker = f" (worker {rank})" if args.world_size > 1 else ""
                    values = {name: entries[row].numpy() for name, entries in rows[rank].items()}
                    samples.append((f"sample {len(samples)}{worker}", render_sample(values, rendering)))
        if len(measured) >= wanted and len(samples) >= args.samples:
            break
    padding = _padding(measured, args.batch_size, rendering.labels_at_inputs)
    return "training", [*facts, _steps(samples_per_epoch, is_whole, args), ("padding", padding)], samples


def _steps(samples: int | None, is_whole: bool, args: Any) -> tuple[str, str]:
    rows = args.global_batch_size(args.world_size)
    accumulation, workers = args.gradient_accumulation_steps, args.world_size
    shape = f"micro-batch {args.batch_size} x accumulation {accumulation} x {workers} worker(s)"
    if samples is None:
        return "steps", f"{rows} examples each ({shape}); the examples of an epoch are known only at its end"
    steps = f"{samples:,} examples = {samples / rows:,.1f} steps of {rows} ({shape})"
    if not is_whole:
        return "an epoch", f"of these documents has {steps}"
    if args.epochs is not None:
        return "an epoch", f"{steps}; --epochs {args.epochs:g} = {ceil(args.epochs * samples / rows):,} steps"
    if args.phases:
        return "an epoch", steps
    updates = in_updates(args, workers).iters
    return "an epoch", f"{steps}; --iters {updates:,} = {updates * rows / samples:.2f} epochs"


def _padding(micro_batches: list[dict[str, Tensor]], rows: int, labels_at_inputs: bool) -> str:
    masks, labels = ([batch[name] for batch in micro_batches] for name in ("attention_mask", "labels"))
    inputs, attended = sum(mask.numel() for mask in masks), sum(int(mask.sum()) for mask in masks)
    targets, predicted = sum(map(Tensor.numel, labels)), sum(int((t != IGNORED_LABEL).sum()) for t in labels)
    text = f"{1 - attended / inputs:.2%} of the inputs"
    if labels_at_inputs:
        text = f"{text}; {predicted / attended:.2%} of the other tokens are to be predicted"
    else:
        text = f"{text}, {1 - predicted / targets:.2%} of the targets"
    widths = [sorted({t.shape[1] for t in tensors}) for tensors in (masks, labels)]
    inputs_wide, targets_wide = (" to ".join(map(str, dict.fromkeys((w[0], w[-1])))) for w in widths)
    measured = f"measured on {len(micro_batches)} micro-batches of {rows} rows"
    return f"{text}: {measured}, {inputs_wide} inputs, {targets_wide} targets wide"


def render_ids(ids: np.ndarray, decode: Callable[[list[int]], str], shown: Mapping[int, str]) -> str:
    """Decode token ids to text in which special ids are visible and repeated ones are counted.

    With shown={0: "<pad>", 1: "</s>"}, [5, 6, 1, 0, 0] becomes "a b </s> <pad> x 2".
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
    """Decode a masked-LM sample to text that shows inputs and labels together: "e [<mask> -> f] g"."""
    words = []
    pairs = zip(np.asarray(input_ids).tolist(), np.asarray(labels).tolist(), strict=True)
    for is_predicted, run in itertools.groupby(pairs, key=lambda pair: pair[1] != IGNORED_LABEL):
        if is_predicted:
            names = [[shown.get(i) or decode([i]) for i in pair] for pair in run]
            words += [f"[{token} -> {label}]" for token, label in names]
        else:
            words.append(render_ids(np.array([token for token, _ in run]), decode, shown))
    return " ".join(words)


def render_sample(row: Mapping[str, np.ndarray], rendering: Rendering, label: str | None = None) -> list[str]:
    """Format one row of a batch as lines, one for each entry; `label` is the text of labels that are no token ids."""
    inputs, labels = np.asarray(row["input_ids"]), np.asarray(row["labels"])
    decode, shown = rendering.decode, {**rendering.shown, IGNORED_LABEL: "(ignored)"}
    attended = int(np.asarray(row["attention_mask"]).sum()) if "attention_mask" in row else len(inputs)
    predicted = int((labels != IGNORED_LABEL).sum())
    lines = [f"input    {len(inputs)} tokens, {attended} attended"]
    if rendering.labels_at_inputs:
        lines += [f"  {render_predictions(inputs, labels, decode, shown)}"]
        lines += [f"target   {predicted} tokens, shown as [input -> target]"]
    else:
        lines += [f"  {render_ids(inputs, decode, shown)}"]
        lines += [f"target   {len(labels)} tokens, {predicted} of them predicted"] if label is None else []
        lines += [f"  {render_ids(labels, decode, shown)}" if label is None else f"label    {label}"]
    for name in sorted(set(row) - {"input_ids", "labels"}):
        value = np.asarray(row[name])
        if value.ndim:
            runs = (f"{v} x {len(list(run))}" for v, run in itertools.groupby(value.tolist()))
            lines.append(f"{name}: {', '.join(runs)}")
        else:
            lines.append(f"{name}: {value.item()}")
    return lines

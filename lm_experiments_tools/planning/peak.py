"""The highest moment of a training step, by walking through it with the formulas of activations.py; no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from lm_experiments_tools.planning.activations import LOSS_CHUNK, Step, parts_of
from lm_experiments_tools.planning.shapes import Model


class Fixed(NamedTuple):
    """What does not depend on the batch, bytes."""

    weights: float
    gradients: float
    state: float  # of the optimizer
    update: float = 0  # beside, while the optimizer updates
    communication: float = 0


@dataclass(frozen=True)
class Peak:
    """Bytes at the highest moment, by part; `moment` says when it is."""

    moment: str
    parts: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.parts.values())


class Head(NamedTuple):
    """The output layer and its loss, bytes."""

    saved: float  # kept for the backward pass
    forward: float  # most that exists in the forward pass
    backward: float  # and in the loss's backward pass
    gradients: int  # parameters whose gradient its backward pass makes


def head_of(model: Model, step: Step) -> Head:
    """Logits, log-softmax and their gradient: 4 n V each, of which three exist at once; 4 n V is kept.

    Our T5's fast step makes gradients of a chunk's logits at once, and keeps those of the output's matrix: 4 V D.
    """
    c, vocabulary, width = step.computed, model.vocabulary, model.width
    n = step.rows * (step.target or step.source)
    if model.labels:  # pooler and classifier of the first token
        head = model.width**2 + (1 + model.labels) * model.width + model.labels
        return Head(4 * c * step.rows * model.width, 0, 0, 0 if "head" in step.frozen else head)
    if model.kind == "bert":
        n = n if step.scored is None else step.scored
        extra = 4 * c * n * width + (2 * model.table if step.mixed else 0)
    else:
        extra = c * n * width + (2 * model.table if step.mixed else 0)
    own = 0 if model.tied or "head" in step.frozen else model.table
    chunk = model.chunk or (LOSS_CHUNK if step.fast else 0)
    if model.kind == "t5" and chunk and step.code != "transformers":
        rows = min(chunk, n)
        product = (c if n <= chunk else 4) * model.table
        saved = c * n * width * 2 + product
        several = model.table * c if n > chunk else 0
        cast = 2 * model.table if step.mixed else 0
        return Head(saved, saved + c * rows * vocabulary + several + cast, saved + 4 * model.table, own)
    logits = 4 * n * vocabulary
    narrow = 2 * n * vocabulary if step.mixed else 0
    return Head(extra + logits, extra + 2 * logits + narrow, extra + 3 * logits, own)


def walk(model: Model, step: Step, fixed: Fixed, accumulates: bool, trained: int) -> Peak:
    """The highest moment of forward pass, loss, backward pass and update.

    Args:
        accumulates: gradients of earlier micro-batches exist.
        trained: parameters; with adapters, gradients of the tables are not made.
    """
    parts, head = parts_of(model, step), head_of(model, step)
    adapts = step.adapted is not None
    share = fixed.gradients / (model.parameters() if adapts else trained)  # bytes of gradient for each parameter
    kept = [part.count * (part.entry if step.checkpointing and part.entry else part.saved) for part in parts]
    done = fixed.gradients if accumulates else 0.0
    table = 0 if adapts or "embeddings" in step.frozen else share * model.table
    reads = _reads_of_table(model, step)
    reads_last = model.tied and not model.labels
    waiting = table if reads_last else 0  # the output's share of the table's gradient, until the embeddings' are there
    moments = [_Moment(f"forward pass, {part.name}", 0, 0, done, part.passing) for part in parts]
    moments += [
        _Moment("forward pass, loss", sum(kept), head.forward, done),
        _Moment("backward pass, loss", sum(kept), head.backward, done),
        _Moment("backward pass, output layer", sum(kept), head.saved, done + share * head.gradients, waiting),
    ]
    made = share * head.gradients
    for number in reversed(range(len(parts))):
        part, left = parts[number], sum(kept[:number])
        again = part.saved if step.checkpointing and part.entry else 0
        for layer in range(part.count, 0, -1):
            made += share * part.parameters if part.name != "embeddings" else 0
            held = left + layer * kept[number] / part.count + again
            scratch = waiting + part.scratch
            if part.name == "decoder's embeddings" and reads > 1:
                scratch, waiting = (3 if waiting else 1) * table, table  # two that wait or come, and their sum
            moments.append(_Moment(f"backward pass, {part.name}", held, 0, done if accumulates else made, scratch))
    both = (2 if reads + reads_last > 1 else 0) * table
    moments.append(_Moment("backward pass, embeddings", kept[0], 0, fixed.gradients, both))
    moments.append(_Moment("update", 0, 0, fixed.gradients, fixed.update))
    peak = max(moments, key=lambda moment: sum(moment[1:]))
    return Peak(
        peak.name,
        {
            "weights": fixed.weights,
            "gradients": peak.gradients,
            "optimizer state": fixed.state,
            "activations": peak.activations,
            "logits and loss": peak.logits,
            "communication": fixed.communication,
            "temporary": peak.scratch,
        },
    )


class _Moment(NamedTuple):
    name: str
    activations: float
    logits: float
    gradients: float
    scratch: float = 0


def _reads_of_table(model: Model, step: Step) -> int:
    """How often a pass looks tokens up, each with a gradient of the whole table: our fast step does so once."""
    joined = step.fast and not step.checkpointing
    return 2 if model.decoder_layers and not joined else 1

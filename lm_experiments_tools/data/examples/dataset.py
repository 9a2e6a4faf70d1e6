"""Encoded fine-tuning examples as a dataset of numbered rows. Batches are padded to their longest row.

Example: source ids 5 6 1, target ids 7 1 and padding 0, next to a longer example:

    encoder-decoder      input_ids  5 6 1 0      labels     7    1 -100
    decoder              input_ids  5 6 1 7 1    labels  -100 -100 -100 7 1     (the model shifts them itself)
      to evaluate also   prompt_ids 0 5 6 1      prompt_mask 0 1 1 1            (generation continues at the right)
    encoder              input_ids  5 6 1 0      labels     2                   (number of the class, or a value)
      several labels                             labels   0. 1. 1.              (1 for each class that applies)

The same example packed with another, source 7 1 and target 9 1, into one row:

    encoder-decoder   input_ids            5 6 1 7 1 0     labels               7 1 9 1
                      segment_ids          1 1 1 2 2 0     decoder_segment_ids  1 1 2 2
                      attention_mask       1 1 1 1 1 0
    decoder           input_ids            5 6 1 7 1 7 1 9 1 0
                      labels               - - - 7 1 - - 9 1 -       (-: -100)
                      position_ids         0 1 2 3 4 0 1 2 3 0
    encoder           input_ids, segment_ids, attention_mask as above, labels 2 0 (-100 in rows that have fewer)

The model must limit attention to a segment, the tokens of one example (0 is padding). A decoder gets no mask:
transformers detects sequences by `position_ids`, unless `use_cache` is on. Examples are packed once, each into the
first of the last 64 rows with enough space; epochs differ in the order of rows. A row is a sample of --batch_size.

Labels are -100 if the data has no targets or labels. `example` is the number of the example in its split (such as the
training data). Each epoch is shuffled. If an example has several sources (prompts) or targets, each epoch draws one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Literal

import numpy as np

from lm_experiments_tools.data.examples.example_encoder import ExampleEncoder
from lm_experiments_tools.data.examples.examples import Example
from lm_experiments_tools.data.order import draw_integers, permute, stream_key
from lm_experiments_tools.data.packing import Segments, pack
from lm_experiments_tools.labels import IGNORED_LABEL

Kind = Literal["encoder", "encoder-decoder", "decoder"]
_AT_ONCE = 1024  # examples tokenized by one call
_VERSION = 1  # of the mapping (seed, sample) -> row; part of the fingerprint
_PACKING_VERSION = 1  # of the mapping (seed, examples) -> packed rows; part of the fingerprint
_32 = np.uint64(32)


class Ragged:
    """Rows of integers, such as token ids, of different lengths, stored in one flat array.

    Rows may form groups, such as the targets of one example. Without `sizes` each row is a group.

    Args:
        lengths: int64[number of rows], number of integers in each row.
        sizes: int64[number of groups], number of rows in each group.

    Attributes:
        firsts: int64[number of groups + 1]: group n has the rows firsts[n] to firsts[n + 1] - 1.
    """

    def __init__(self, values: np.ndarray, lengths: np.ndarray, sizes: np.ndarray | None = None) -> None:
        self.values, self.lengths = values, lengths
        self.starts = np.cumsum(lengths) - lengths
        self.firsts = np.concatenate([[0], np.cumsum(np.ones_like(lengths) if sizes is None else sizes)])

    def __len__(self) -> int:
        return len(self.lengths)

    def flat(self, rows: np.ndarray) -> np.ndarray:
        """Return the values of the rows with the given numbers int64[n], concatenated."""
        lengths = self.lengths[rows]
        shifts = self.starts[rows] - (np.cumsum(lengths) - lengths)
        return self.values[np.repeat(shifts, lengths) + np.arange(lengths.sum())]

    def padded_left(self, rows: np.ndarray, fill: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the selected rows as a matrix int64[n, width], padded at the left, and bool[n, width]: no padding."""
        lengths = self.lengths[rows]
        real = np.arange(lengths.max()) >= lengths.max() - lengths[:, None]
        padded = np.full(real.shape, fill, np.int64)
        padded[real] = self.flat(rows)
        return padded, real


class RaggedBuilder:
    """Builds a `Ragged` from some rows at a time, with little more memory than the result needs."""

    def __init__(self, dtype: type[np.integer] = np.int32) -> None:
        self.dtype = dtype
        self._values, self._lengths = [np.empty(0, dtype)], [np.empty(0, np.int64)]
        self._sizes: list[int] = []

    def extend(self, rows: Sequence[Sequence[int]], sizes: Iterable[int] | None = None) -> None:
        self._values.append(np.fromiter(chain.from_iterable(rows), self.dtype))
        self._lengths.append(np.array([len(row) for row in rows], np.int64))
        self._sizes += [1] * len(rows) if sizes is None else sizes

    def build(self) -> Ragged:
        return Ragged(np.concatenate(self._values), np.concatenate(self._lengths), np.array(self._sizes, np.int64))


@dataclass
class EncodedExamples:
    """Token ids of all examples of a data split, such as the training or validation data.

    Attributes:
        sources: token ids of all sources (input texts); those of an example are a group.
        targets: likewise of the target texts; None for an encoder.
        types: `token_type_ids` of each source; None if the tokenizer does not return them.
        labels: of an encoder, int64[n] classes, float32[n] values, or float32[n, num_labels] of 0 and 1; else None.
    """

    sources: Ragged
    targets: Ragged | None = None
    types: Ragged | None = None
    labels: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.sources.firsts) - 1


def encode_examples(
    examples: Iterable[Example], encoder: ExampleEncoder, kind: Kind, *, all_targets: bool = False, num_labels: int = 0
) -> EncodedExamples:
    """Tokenize the sources and targets of fine-tuning examples, and collect their labels.

    With `num_labels` an example may have several labels at the same time.
    """
    sources, targets, types = RaggedBuilder(), RaggedBuilder(), RaggedBuilder(np.uint8)
    labels: list[int | float | tuple[int, ...]] = []
    remaining = iter(examples)
    while some := list(islice(remaining, _AT_ONCE)):
        texts = [example.variants or (example.source,) for example in some]
        pairs = [example.pair for example in some] if some[0].pair is not None else None
        entries = encoder.encode_sources([text for forms in texts for text in forms], pairs)
        sources.extend(entries["input_ids"], map(len, texts))
        if kind == "encoder":
            types.extend(entries.get("token_type_ids", []))
            labels += [IGNORED_LABEL if example.label is None else example.label for example in some]
        elif some[0].targets:
            wanted = [example.targets if all_targets else example.targets[:1] for example in some]
            targets.extend(encoder.encode_targets([text for forms in wanted for text in forms]), map(len, wanted))
        else:  # of the whole split: one empty target each
            targets.extend([[]] * len(some))
    if kind != "encoder":
        return EncodedExamples(sources.build(), targets.build())
    type_rows = types.build()
    dtype = np.int64 if all(isinstance(label, int) for label in labels) else np.float32
    found = _label_rows(labels, num_labels) if num_labels else np.array(labels, dtype)
    return EncodedExamples(sources.build(), types=type_rows if len(type_rows) else None, labels=found)


def _label_rows(labels: list[int | tuple[int, ...]], num_labels: int) -> np.ndarray:
    """float32[n, num_labels]: 1 for labels that apply, else 0; IGNORED_LABEL throughout where none is given."""
    rows = np.zeros((len(labels), num_labels), np.float32)
    for row, chosen in zip(rows, labels, strict=True):
        if chosen == IGNORED_LABEL:
            row[:] = IGNORED_LABEL
        else:
            row[list(chosen)] = 1.0
    return rows


class ExampleRows:
    """Fine-tuning examples, a `data.dataset.Rows`: a row is one example, or several if they are packed.

    Args:
        limits: maximum number of tokens of inputs and of targets in a batch.
        with_prompts: for a decoder, add `prompt_ids` and `prompt_mask` to a batch, from which evaluation generates.
        packed: put as many examples into a row as fit, once, in random order.

    Attributes:
        members: the numbers of the examples in each packed row; None if row n is example n.
    """

    def __init__(
        self,
        encoded: EncodedExamples,
        kind: Kind,
        *,
        pad_id: int,
        seed: int,
        limits: tuple[int, int],
        multiple: int | None = None,
        with_prompts: bool = False,
        packed: bool = False,
        title: str = "",
    ) -> None:
        self.encoded, self.kind, self.pad_id, self.seed = encoded, kind, pad_id, seed
        self.limits, self.multiple, self.with_prompts, self.title = limits, multiple or 1, with_prompts, title
        self.fingerprint, self.order, self.packed = self._fingerprint(), None, packed
        self.members: Ragged | None = None
        if packed:
            self._pack()

    def _pack(self) -> None:
        sides = [side for side in (self.encoded.sources, self.encoded.targets) if side is not None]
        # Tokens of the longest source, and of the longest target, that an example may have, int64[sides, n].
        longest = np.stack([np.maximum.reduceat(side.lengths, side.firsts[:-1]) for side in sides])
        if self.kind == "decoder":
            longest = longest.sum(axis=0, keepdims=True)
        limits, numbers = np.array(self.limits[: len(longest)]), np.arange(len(self.encoded))
        order = permute(numbers, len(numbers), self.seed, np.zeros_like(numbers))
        items, sizes = pack(longest[:, order], limits)
        self.members = Ragged(order[items], sizes)
        self._filled = longest.sum() / (limits.sum() * len(sizes))
        self._most = int(sizes.max())
        self._widest = np.add.reduceat(longest[0, self.members.values], self.members.starts).max()
        self.fingerprint = f"{self.fingerprint}/packed={_PACKING_VERSION}"

    def __len__(self) -> int:
        return len(self.encoded) if self.members is None else len(self.members)

    def describe(self) -> str:
        """Describe the examples, their number, average lengths and rows, for the log."""
        parts = [f"{self.encoded.sources.lengths.mean():.0f} tokens in a source"]
        if self.encoded.targets is not None:
            parts.append(f"{self.encoded.targets.lengths.mean():.0f} in a target")
        rows = f"; packed in {len(self):,} rows, {1.0 - self._filled:.1%} padding" if self.packed else ""
        return f"{self.title}, {len(self.encoded):,} examples, {', '.join(parts)}{rows}"

    def _fingerprint(self) -> str:
        digest = hashlib.blake2b(digest_size=16)
        digest.update(json.dumps([_VERSION, self.kind, self.pad_id, self.seed, *self.limits]).encode())
        encoded = self.encoded
        ragged = [r for r in (encoded.sources, encoded.targets, encoded.types) if r is not None]
        arrays = [array for r in ragged for array in (r.values, r.lengths)]
        arrays += [r.firsts for r in (encoded.sources, encoded.targets) if r is not None]
        for array in arrays if encoded.labels is None else (*arrays, encoded.labels):
            digest.update(array.tobytes())
        return digest.hexdigest()

    def draw(self, side: Literal["source", "target"], epochs: np.ndarray, examples: np.ndarray) -> np.ndarray:
        """Draw a source or a target of each example int64[n]: its index among all, int64[n]."""
        all_firsts = (self.encoded.sources if side == "source" else self.encoded.targets).firsts
        firsts = all_firsts[examples]
        counts = all_firsts[examples + 1] - firsts
        if (counts == 1).all():
            return firsts
        drawn = draw_integers(stream_key(self.seed, f"drawn {side}"), epochs, examples, 1)[0]
        return firsts + (drawn * counts.astype(np.uint64) >> _32).astype(np.int64)

    def _examples_of(self, epochs: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Number of examples of each row; epoch and number of each example, row after row."""
        if self.members is None:
            return np.ones_like(rows), epochs, rows
        counts = self.members.lengths[rows]
        return counts, np.repeat(epochs, counts), self.members.flat(rows)

    def lengths(self, epochs: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Return the numbers of input and target tokens, int64[2, n]. A decoder's prompts and targets are inputs."""
        counts, epochs, examples = self._examples_of(epochs, rows)
        inputs = self.encoded.sources.lengths[self.draw("source", epochs, examples)]
        outputs = np.zeros_like(inputs)
        if self.encoded.targets is not None:
            outputs = self.encoded.targets.lengths[self.draw("target", epochs, examples)]
        if self.kind == "decoder":
            inputs, outputs = inputs + outputs, np.zeros_like(inputs)
        return np.add.reduceat(np.stack([inputs, outputs]), np.cumsum(counts) - counts, axis=1)

    def batch(self, epochs: np.ndarray, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Make a batch of the given rows, padded to the longest of them.

        Returns:
            The model's inputs by name, int64[n, width] each. Exceptions are `labels` of an encoder (int64[n],
            float32[n] or float32[n, num_labels]; with one more dimension if packed) and `example`, the numbers of the
            examples int64[n], which packed rows lack.
        """
        encoded = self.encoded
        counts, epochs, examples = self._examples_of(epochs, rows)
        sources = self.draw("source", epochs, examples)
        if self.kind == "decoder":
            batch = self._decoder_rows(counts, sources, self.draw("target", epochs, examples))
        else:
            batch, segments = self._inputs(counts, sources)
            if encoded.targets is None:
                labels = encoded.labels[examples]
                batch["labels"] = segments.by_segment(labels, self._most, IGNORED_LABEL) if self.packed else labels
            else:
                targets = self.draw("target", epochs, examples)
                segments = self._segments(counts, encoded.targets.lengths[targets], 1)
                batch["labels"] = segments.filled(encoded.targets.flat(targets), IGNORED_LABEL)
                if self.packed:
                    batch["decoder_segment_ids"] = segments.ids()
        return batch if self.packed else {**batch, "example": examples}

    def _inputs(self, counts: np.ndarray, sources: np.ndarray) -> tuple[dict[str, np.ndarray], Segments]:
        """The inputs of an encoder, and their segments."""
        texts, types = self.encoded.sources, self.encoded.types
        segments = self._segments(counts, texts.lengths[sources], 0)
        ids = segments.ids()
        batch = {
            "input_ids": segments.filled(texts.flat(sources), self.pad_id),
            "attention_mask": (ids > 0).astype(np.int64),
        }
        if self.packed:
            batch["segment_ids"] = ids
        if types is not None:
            batch["token_type_ids"] = segments.filled(types.flat(sources), 0)
        return batch, segments

    def _decoder_rows(self, counts: np.ndarray, sources: np.ndarray, targets: np.ndarray) -> dict[str, np.ndarray]:
        prompts, answers = self.encoded.sources, self.encoded.targets
        lengths = np.stack([prompts.lengths[sources], answers.lengths[targets]], axis=1)
        segments = self._segments(counts, lengths.sum(axis=1), 0)
        is_answer = np.repeat(np.tile([False, True], len(lengths)), lengths.ravel())
        ids = np.empty(len(is_answer), np.int64)
        ids[~is_answer], ids[is_answer] = prompts.flat(sources), answers.flat(targets)
        batch = {
            "input_ids": segments.filled(ids, self.pad_id),
            "labels": segments.filled(np.where(is_answer, ids, IGNORED_LABEL), IGNORED_LABEL),
        }
        if self.packed:
            return {**batch, "position_ids": segments.positions()}
        batch["attention_mask"] = (segments.ids() > 0).astype(np.int64)
        if self.with_prompts:
            batch["prompt_ids"], mask = prompts.padded_left(sources, self.pad_id)
            batch["prompt_mask"] = mask.astype(np.int64)
        return batch

    def _segments(self, counts: np.ndarray, lengths: np.ndarray, side: int) -> Segments:
        """Segments of rows that are as wide as the widest, rounded up within the limit of the side (1: targets)."""
        if self.packed and self.kind == "decoder":
            longest = self._widest  # of all rows, whatever rows a worker makes at the same time
        else:
            longest = max(int(np.add.reduceat(lengths, np.cumsum(counts) - counts).max()), 1)  # 0: no target at all
        width = min(-(-longest // self.multiple) * self.multiple, max(self.limits[side], longest))
        return Segments(counts, lengths, width)

"""Encoded fine-tuning examples as a dataset of numbered samples. Batches are padded to their longest row.

Example: source ids 5 6 1, target ids 7 1 and padding 0, next to a longer example:

    encoder-decoder      input_ids  5 6 1 0      labels     7    1 -100
    decoder              input_ids  5 6 1 7 1    labels  -100 -100 -100 7 1     (the model shifts them itself)
      to evaluate also   prompt_ids 0 5 6 1      prompt_mask 0 1 1 1            (generation continues at the right)
    encoder              input_ids  5 6 1 0      labels     2                   (number of the class, or a value)
      several labels                             labels   0. 1. 1.              (1 for each class that applies)

Labels are -100 if the data has no targets or labels. `example` is the number of the example in its split (such as the
training data). Each epoch is shuffled. If an example has several sources (prompts) or targets, each epoch draws one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

import numpy as np

from lm_experiments_tools.data.examples.examples import Example
from lm_experiments_tools.data.examples.ragged import Ragged, RaggedBuilder
from lm_experiments_tools.data.examples.text_encoder import ExampleEncoder
from lm_experiments_tools.data.order import draw_integers, stream_key
from lm_experiments_tools.labels import IGNORED_LABEL

Kind = Literal["encoder", "encoder-decoder", "decoder"]
_AT_ONCE = 1024  # examples tokenized by one call
_VERSION = 1  # of the mapping (seed, sample) -> row; part of the fingerprint
_32 = np.uint64(32)


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
    """Fine-tuning examples, a `data.dataset.Rows`.

    Args:
        limits: maximum number of tokens of inputs and of targets in a batch.
        with_prompts: for a decoder, add `prompt_ids` and `prompt_mask` to a batch, from which evaluation generates.
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
        title: str = "",
    ) -> None:
        self.encoded, self.kind, self.pad_id, self.seed = encoded, kind, pad_id, seed
        self.limits, self.multiple, self.with_prompts, self.title = limits, multiple or 1, with_prompts, title
        self.fingerprint, self.order = self._fingerprint(), None

    def __len__(self) -> int:
        return len(self.encoded)

    def describe(self) -> str:
        """Describe the examples, their number and average lengths, for the log."""
        parts = [f"{self.encoded.sources.lengths.mean():.0f} tokens in a source"]
        if self.encoded.targets is not None:
            parts.append(f"{self.encoded.targets.lengths.mean():.0f} in a target")
        return f"{self.title}, {len(self):,} examples, {', '.join(parts)}"

    def _fingerprint(self) -> str:
        digest = hashlib.blake2b(digest_size=16)
        settings = [_VERSION, self.kind, self.pad_id, self.seed, *self.limits]
        digest.update(json.dumps(settings).encode())
        encoded = self.encoded
        ragged = [r for r in (encoded.sources, encoded.targets, encoded.types) if r is not None]
        arrays = [array for r in ragged for array in (r.values, r.lengths)]
        arrays += [r.firsts for r in (encoded.sources, encoded.targets) if r is not None]
        for array in arrays if encoded.labels is None else (*arrays, encoded.labels):
            digest.update(array.tobytes())
        return digest.hexdigest()

    def draw(self, epochs: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """Draw a source and a target of each example: indices int64[n] of both; targets are None for an encoder."""
        sources = self._draw("source", self.encoded.sources.firsts, epochs, rows)
        if self.encoded.targets is None:
            return sources, None
        return sources, self._draw("target", self.encoded.targets.firsts, epochs, rows)

    def _draw(self, purpose: str, firsts: np.ndarray, epochs: np.ndarray, rows: np.ndarray) -> np.ndarray:
        counts = firsts[rows + 1] - firsts[rows]
        if (counts == 1).all():
            return firsts[rows]
        drawn = draw_integers(stream_key(self.seed, f"drawn {purpose}"), epochs, rows, 1)[0]
        return firsts[rows] + (drawn * counts.astype(np.uint64) >> _32).astype(np.int64)

    def lengths(self, epochs: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Return the numbers of input and target tokens, int64[2, n]. A decoder's prompts and targets are inputs."""
        sources, targets = self.draw(epochs, rows)
        inputs = self.encoded.sources.lengths[sources]
        outputs = np.zeros_like(inputs) if targets is None else self.encoded.targets.lengths[targets]
        if self.kind == "decoder":
            inputs, outputs = inputs + outputs, np.zeros_like(inputs)
        return np.stack([inputs, outputs])

    def batch(self, epochs: np.ndarray, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Make a batch of the given examples, padded to the longest of them.

        Returns:
            The model's inputs by name, int64[n, width] each. Exceptions are `labels` of an encoder (int64[n],
            float32[n] or float32[n, num_labels]) and `example`, the numbers of the examples int64[n].
        """
        sources, targets = self.draw(epochs, rows)
        if self.kind == "decoder":
            batch = self._decoder_rows(sources, targets)
        else:
            inputs = self.encoded.sources
            width = self.width(inputs.lengths[sources], 0)
            ids, real = inputs.padded(sources, width, self.pad_id)
            batch = {"input_ids": ids, "attention_mask": real.astype(np.int64)}
            if self.encoded.types is not None:
                batch["token_type_ids"] = self.encoded.types.padded(sources, width, 0)[0]
            if targets is None:
                batch["labels"] = self.encoded.labels[rows]
            else:
                width = self.width(self.encoded.targets.lengths[targets], 1)
                batch["labels"] = self.encoded.targets.padded(targets, width, IGNORED_LABEL)[0]
        return {**batch, "example": rows}

    def width(self, lengths: np.ndarray, side: int) -> int:
        """Return the width of a batch: the longest row, rounded up to `multiple` within the limit of the side.

        Inputs are side 0, targets side 1.
        """
        longest = max(int(lengths.max()), 1)  # 0: no example has a target
        return min(-(-longest // self.multiple) * self.multiple, max(self.limits[side], longest))

    def _decoder_rows(self, sources: np.ndarray, targets: np.ndarray) -> dict[str, np.ndarray]:
        prompts, answers = self.encoded.sources, self.encoded.targets
        before = prompts.lengths[sources][:, None]
        total = before + answers.lengths[targets][:, None]
        columns = np.arange(self.width(total, 0))
        is_prompt, real = columns < before, columns < total
        ids = np.full(real.shape, self.pad_id, np.int64)
        labels = np.full(real.shape, IGNORED_LABEL, np.int64)
        ids[is_prompt] = prompts.flat(sources)
        ids[real & ~is_prompt] = labels[real & ~is_prompt] = answers.flat(targets)
        batch: dict[str, Any] = {"input_ids": ids, "attention_mask": real.astype(np.int64), "labels": labels}
        if self.with_prompts:
            prompt, mask = prompts.padded(sources, int(before.max()), self.pad_id, left=True)
            batch |= {"prompt_ids": prompt, "prompt_mask": mask.astype(np.int64)}
        return batch

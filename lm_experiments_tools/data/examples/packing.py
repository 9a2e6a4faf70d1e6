"""Pack several fine-tuning examples into one row, which avoids padding.

The model must be able to limit attention to a segment, which is the tokens of one example.

Example: sources 5 6 1 and 7 1, targets 8 1 and 9 1, padding 0:

    encoder-decoder   input_ids            5 6 1 7 1 0     labels               8 1 9 1
                      segment_ids          1 1 1 2 2 0     decoder_segment_ids  1 1 2 2
                      attention_mask       1 1 1 1 1 0
    decoder           input_ids            5 6 1 8 1 7 1 9 1 0
                      labels               - - - 8 1 - - 9 1 -       (-: -100)
                      position_ids         0 1 2 3 4 0 1 2 3 0
    encoder           input_ids            5 6 1 7 1 0     labels               2 0      (class, value or classes of
                      segment_ids          1 1 1 2 2 0      each example, -100 in rows that have fewer)
                      attention_mask       1 1 1 1 1 0

Tokens attend only to their own segment (0 is padding). A decoder gets no mask: transformers detects sequences by
`position_ids`, unless `use_cache` is on. Examples are packed once in random order, each into the first of the last 64
rows with enough space. Epochs differ in the order of rows. A row counts as one sample in --batch_size.
"""

from __future__ import annotations

import numpy as np

from lm_experiments_tools.data.examples.dataset import EncodedExamples, ExampleRows
from lm_experiments_tools.data.examples.ragged import Ragged
from lm_experiments_tools.data.order import permute
from lm_experiments_tools.data.packing import Segments, pack
from lm_experiments_tools.labels import IGNORED_LABEL

_VERSION = 1  # of the mapping (seed, examples) -> rows; part of the fingerprint


class PackedRows:
    """Fine-tuning examples packed several to a row, which avoids padding. A `data.dataset.Rows`."""

    def __init__(self, dataset: ExampleRows) -> None:
        self.dataset, self.seed, self.order = dataset, dataset.seed, dataset.order
        longest = _longest(dataset.encoded)
        if dataset.kind == "decoder":
            longest = longest.sum(axis=0, keepdims=True)
        limits = np.array(dataset.limits[: len(longest)])
        numbers = np.arange(len(dataset))
        order = permute(numbers, len(dataset), dataset.seed, np.zeros_like(numbers))
        items, sizes = pack(longest[:, order], limits)
        self.members = Ragged(order[items], sizes)
        self._filled = longest.sum() / (limits.sum() * len(self.members))
        firsts = np.cumsum(self.members.lengths) - self.members.lengths
        # Decoder batches are as wide as the widest of all rows, whatever rows a worker makes at the same time.
        self._widest = np.add.reduceat(longest[:, self.members.values], firsts, axis=1).max(axis=1)
        self._most = int(self.members.lengths.max())

    def __len__(self) -> int:
        return len(self.members)

    @property
    def fingerprint(self) -> str:
        return f"{self.dataset.fingerprint}/packed={_VERSION}"

    def describe(self) -> str:
        """Describe the number of examples and rows, and the fraction of padding, for the log."""
        return f"{self.dataset.describe()}; packed in {len(self):,} rows, {1.0 - self._filled:.1%} padding"

    def batch(self, epochs: np.ndarray, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Return the packed rows int64[n] in epochs int64[n], as int64[n, width] per key."""
        encoded, counts = self.dataset.encoded, self.members.lengths[rows]
        examples = self.members.flat(rows)
        sources, targets = self.dataset.draw(np.repeat(epochs, counts), examples)
        if self.dataset.kind == "decoder":
            return self._decoder_rows(counts, sources, targets)
        segments = self._segments(counts, encoded.sources.lengths[sources], 0)
        ids = segments.ids()
        batch = {
            "input_ids": segments.filled(encoded.sources.flat(sources), self.dataset.pad_id),
            "segment_ids": ids,
            "attention_mask": (ids > 0).astype(np.int64),
        }
        if encoded.types is not None:
            batch["token_type_ids"] = segments.filled(encoded.types.flat(sources), 0)
        if targets is None:
            return {**batch, "labels": segments.by_segment(encoded.labels[examples], self._most, IGNORED_LABEL)}
        segments = self._segments(counts, encoded.targets.lengths[targets], 1)
        labels = segments.filled(encoded.targets.flat(targets), IGNORED_LABEL)
        return {**batch, "labels": labels, "decoder_segment_ids": segments.ids()}

    def _segments(self, counts: np.ndarray, lengths: np.ndarray, side: int) -> Segments:
        """Segments of rows that are as wide as the widest, rounded up; side 1 are targets."""
        used = np.add.reduceat(lengths, np.cumsum(counts) - counts)
        return Segments(counts, lengths, self.dataset.width(used, side))

    def _decoder_rows(self, counts: np.ndarray, sources: np.ndarray, targets: np.ndarray) -> dict[str, np.ndarray]:
        prompts, answers = self.dataset.encoded.sources, self.dataset.encoded.targets
        lengths = np.stack([prompts.lengths[sources], answers.lengths[targets]], axis=1)
        segments = Segments(counts, lengths.sum(axis=1), self.dataset.width(self._widest[:1], 0))
        is_answer = np.repeat(np.tile([False, True], len(lengths)), lengths.ravel())
        ids = np.empty(len(is_answer), np.int64)
        ids[~is_answer], ids[is_answer] = prompts.flat(sources), answers.flat(targets)
        return {
            "input_ids": segments.filled(ids, self.dataset.pad_id),
            "labels": segments.filled(np.where(is_answer, ids, IGNORED_LABEL), IGNORED_LABEL),
            "position_ids": segments.positions(),
        }


def _longest(encoded: EncodedExamples) -> np.ndarray:
    """int64[sides, n]: tokens of the longest source, and of the longest target, that an example may have."""
    sides = [side for side in (encoded.sources, encoded.targets) if side is not None]
    return np.stack([np.maximum.reduceat(side.lengths, side.firsts[:-1]) for side in sides])

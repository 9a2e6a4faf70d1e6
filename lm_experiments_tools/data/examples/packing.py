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

from collections.abc import Callable

import numpy as np

from lm_experiments_tools.data.examples.dataset import EncodedExamples, ExampleRows, Ragged
from lm_experiments_tools.data.order import permute
from lm_experiments_tools.labels import IGNORED_LABEL

_OPEN_ROWS = 64
_VERSION = 1  # of the mapping (seed, examples) -> rows; part of the fingerprint


class PackedRows:
    """Fine-tuning examples packed several to a row, which avoids padding. A `data.dataset.Rows`.

    Each example of a row is marked by its own segment id, or by position ids that start at 0 again for a decoder.
    Attention does not cross from one example to another.

    Args:
        dataset: the examples to pack.
    """

    def __init__(self, dataset: ExampleRows) -> None:
        self.dataset, self.seed = dataset, dataset.seed
        longest = _longest(dataset.encoded)
        if dataset.kind == "decoder":
            longest = longest.sum(axis=0, keepdims=True)
        limits = np.array(dataset.limits[: len(longest)])
        numbers = np.arange(len(dataset))
        order = permute(numbers, len(dataset), dataset.seed, np.zeros_like(numbers))
        self.members = first_fit(longest[:, order], limits)
        self.members.values = order[self.members.values]
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

    order = None

    def describe(self) -> str:
        """Describe the number of examples and rows, and the fraction of padding, for the log."""
        return f"{self.dataset.describe()}; packed in {len(self):,} rows, {1.0 - self._filled:.1%} padding"

    def batch(self, epochs: np.ndarray, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Return the packed rows int64[n] in epochs int64[n], as int64[n, width] per key."""
        counts = self.members.lengths[rows]
        examples = self.members.flat(rows)
        sources, targets = self.dataset.draw(np.repeat(epochs, counts), examples)
        encoded, pad = self.dataset.encoded, self.dataset.pad_id
        if self.dataset.kind == "decoder":
            return self._decoder_rows(counts, sources, targets)
        if self.dataset.kind == "encoder":
            return self._encoder_rows(counts, sources, examples)
        batch = {}
        for side, (name, ragged, chosen, fill) in enumerate(
            (("input_ids", encoded.sources, sources, pad), ("labels", encoded.targets, targets, IGNORED_LABEL))
        ):
            cells = _Cells(counts, ragged.lengths[chosen], lambda used, side=side: self.dataset.width(used, side))
            batch[name] = cells.filled(ragged.flat(chosen), fill)
            batch["decoder_segment_ids" if side else "segment_ids"] = cells.filled(cells.segments, 0)
        return {**batch, "attention_mask": (batch["segment_ids"] > 0).astype(np.int64)}

    def _encoder_rows(self, counts: np.ndarray, sources: np.ndarray, examples: np.ndarray) -> dict[str, np.ndarray]:
        encoded = self.dataset.encoded
        cells = _Cells(counts, encoded.sources.lengths[sources], lambda used: self.dataset.width(used, 0))
        segments = cells.filled(cells.segments, 0)
        batch = {
            "input_ids": cells.filled(encoded.sources.flat(sources), self.dataset.pad_id),
            "segment_ids": segments,
            "attention_mask": (segments > 0).astype(np.int64),
            "labels": cells.by_segment(encoded.labels[examples], self._most, IGNORED_LABEL),
        }
        if encoded.types is not None:
            batch["token_type_ids"] = cells.filled(encoded.types.flat(sources), 0)
        return batch

    def _decoder_rows(self, counts: np.ndarray, sources: np.ndarray, targets: np.ndarray) -> dict[str, np.ndarray]:
        prompts, answers = self.dataset.encoded.sources, self.dataset.encoded.targets
        lengths = np.stack([prompts.lengths[sources], answers.lengths[targets]], axis=1)
        cells = _Cells(counts, lengths.sum(axis=1), lambda used: self.dataset.width(self._widest[:1], 0))
        is_answer = np.repeat(np.tile([False, True], len(lengths)), lengths.ravel())
        ids = np.empty(len(is_answer), np.int64)
        ids[~is_answer], ids[is_answer] = prompts.flat(sources), answers.flat(targets)
        return {
            "input_ids": cells.filled(ids, self.dataset.pad_id),
            "labels": cells.filled(np.where(is_answer, ids, IGNORED_LABEL), IGNORED_LABEL),
            "position_ids": cells.positions(),
        }


class _Cells:
    """Positions of the tokens of a batch's segments."""

    def __init__(self, counts: np.ndarray, lengths: np.ndarray, width_of: Callable[[np.ndarray], int]) -> None:
        first = np.cumsum(counts) - counts
        before = np.cumsum(lengths) - lengths  # tokens of the batch before each segment
        used = np.add.reduceat(lengths, first)
        self.shape = (len(counts), width_of(used))
        row = np.repeat(np.arange(len(counts)), counts)
        self.row, self.number, self.used = row, np.arange(len(lengths)) - first[row], used
        self.within = np.arange(lengths.sum()) - np.repeat(before, lengths)  # place of a token in its segment
        self.cells = np.repeat(row * self.shape[1] + before - before[first][row], lengths) + self.within
        self.segments = np.repeat(self.number + 1, lengths)

    def filled(self, values: np.ndarray, fill: int) -> np.ndarray:
        """int64[rows, width] with a value in the cell of each token."""
        out = np.full(self.shape, fill, np.int64)
        out.ravel()[self.cells] = values
        return out

    def by_segment(self, values: np.ndarray, most: int, fill: float) -> np.ndarray:
        """[rows, `most`, ...] with the values [segments, ...] of each row."""
        out = np.full((self.shape[0], most, *values.shape[1:]), fill, values.dtype)
        out[self.row, self.number] = values
        return out

    def positions(self) -> np.ndarray:
        """int64[rows, width]: places in segments; those of padding begin again too."""
        padding = np.arange(self.shape[1]) - self.used[:, None]
        out = np.maximum(padding, 0)
        out.ravel()[self.cells] = self.within
        return out


def _longest(encoded: EncodedExamples) -> np.ndarray:
    """int64[sides, n]: tokens of the longest source, and of the longest target, that an example may have."""
    sides = [(encoded.sources, encoded.first_source)]
    if encoded.targets is not None:
        sides.append((encoded.targets, encoded.first_target))
    return np.stack([np.maximum.reduceat(ragged.lengths, firsts[:-1]) for ragged, firsts in sides])


def first_fit(lengths: np.ndarray, limits: np.ndarray) -> Ragged:
    """Pack items into rows: each item goes to the first open row with enough space.

    Only the last 64 rows stay open. An item is an example; it may have two lengths, of its input and of its target.
    An item longer than the limits gets a row of its own.

    Args:
        lengths: int64[sides, n], the lengths of n items; `sides` is 1 for inputs only, and 2 with targets.
        limits: int64[sides], maximum sum of lengths per row.

    Returns:
        The indices of the items in each row, in the order in which the rows were opened.
    """
    room = np.zeros((len(limits), _OPEN_ROWS), np.int64)  # of the open rows, oldest first
    open_rows: list[list[int]] = []
    rows: list[list[int]] = []
    for item, length in enumerate(lengths.T):
        fits = (room[:, : len(open_rows)] >= length[:, None]).all(axis=0)
        place = int(fits.argmax()) if fits.any() else -1
        if place < 0:
            if len(open_rows) == _OPEN_ROWS:
                open_rows.pop(0)
                room = np.roll(room, -1, axis=1)
            place = len(open_rows)
            open_rows.append([])
            rows.append(open_rows[-1])
            room[:, place] = limits
        open_rows[place].append(item)
        room[:, place] -= length
    counts = np.array([len(row) for row in rows], np.int64)
    return Ragged(np.concatenate([np.array(row, np.int64) for row in rows]), counts)

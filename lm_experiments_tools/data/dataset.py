"""Span-corrupted examples straight from a flat stream of tokens: random access, nothing to shuffle or to store."""

import hashlib
import json
import logging
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from lm_experiments_tools.data.order import epoch_shift, permute, sample_words, stream_key
from lm_experiments_tools.data.span_corruption import (
    SpanCounts,
    corrupt,
    count_spans,
    plan_spans,
    random_span_lengths,
)
from lm_experiments_tools.errors import UserError

logger = logging.getLogger(__name__)

IGNORED_LABEL = -100
_VERSION = 1  # of the mapping (seed, sample) -> example; part of the fingerprint
_BLOCK = 64  # rows corrupted at once: few enough for the caches, enough to spread the cost of numpy's calls
_CHECKED_AT_START = 1 << 20  # tokens of each source compared with the vocabulary before the first step


class TokenSource(Protocol):
    """What is needed of an `IndexedDataset`."""

    tokens: np.ndarray
    fingerprint: str


class SpanCorruptionDataset:
    """T5 pre-training examples addressed by a global sample number.

    The sources are read as one endless tape, end joined to beginning. Epoch e starts at a token drawn from (seed, e)
    and cuts the tape into `len(self)` consecutive segments of `tokens_length` tokens, so that cut points differ
    between epochs while every token is read exactly once in each. If the number of tokens is not a multiple of
    `tokens_length`, the epoch's last segment is shorter and padded; nothing is dropped. One segment per epoch spans
    the join of the end with the beginning, as others span the border of two documents.

    Global sample g is row permutation(seed, e)(i) of epoch e with e, i = divmod(g, len(self)); its noise is keyed by
    (seed, e, row). An example is therefore a pure function of (seed, g), whatever batch it is asked for in.

    Args:
        tokens: an `IndexedDataset` or several, read one after the other.
        inputs_length: tokens of an input, sentinels and EOS included.
        targets_length: room for the targets; None takes what they need.
        sentinel_ids: ids of sentinel 0, 1, ...
        eos_id, pad_id: special ids; labels are padded with -100.
        vocab_size: ids at or above it are refused.
        noise_density: fraction of tokens to corrupt.
        mean_noise_span_length: average tokens per corrupted span.
        seed: fixes order, cut points and noise.
        trim_targets: where `targets_length` is larger than the targets, yield them at the length they need (and say
            so) rather than train on padding. False pads to `targets_length`.

    Raises:
        UserError: no tokens, a token id outside the vocabulary, targets that do not fit, or settings that
            `plan_spans` refuses.
    """

    def __init__(
        self,
        tokens: TokenSource | Sequence[TokenSource],
        inputs_length: int,
        targets_length: int | None = None,
        *,
        sentinel_ids: np.ndarray,
        eos_id: int,
        pad_id: int,
        vocab_size: int,
        noise_density: float = 0.15,
        mean_noise_span_length: float = 3.0,
        seed: int = 0,
        trim_targets: bool = True,
    ) -> None:
        self.sources = list(tokens) if isinstance(tokens, Sequence) else [tokens]
        # Plain arrays: a memmap's own slicing costs more than the copy of a row.
        self._parts = [part for part in (np.asarray(source.tokens) for source in self.sources) if part.size]
        sizes = np.array([part.size for part in self._parts], np.int64)
        self._ends = np.cumsum(sizes)
        self._begins = self._ends - sizes
        if not self._parts:
            raise UserError(
                f"The token data is empty ({len(self.sources)} file(s), 0 tokens): check the path and that "
                "tokenization found text."
            )
        self.num_tokens = int(self._ends[-1])
        self.sentinel_ids = np.asarray(sentinel_ids, np.int64)
        self.eos_id, self.pad_id, self.vocab_size, self.seed = eos_id, pad_id, vocab_size, seed
        self.noise_density, self.mean_noise_span_length = noise_density, mean_noise_span_length
        self.inputs_length = inputs_length
        self.counts = plan_spans(inputs_length, noise_density, mean_noise_span_length, len(self.sentinel_ids))
        self.tokens_length = self.counts.tokens_length
        self.targets_length = self._fit_targets(targets_length, trim_targets)
        self._num_samples = -(-self.num_tokens // self.tokens_length)
        self._last_counts = self._counts_of_last_segment()
        self._noise_key = stream_key(seed, "noise")
        for part in self._parts:
            self._check_ids(part[:_CHECKED_AT_START])

    def _fit_targets(self, targets_length: int | None, trim: bool) -> int:
        needed = self.counts.targets_length
        if targets_length is None:
            return needed
        if targets_length < needed:
            raise UserError(
                f"targets_length {targets_length} (--target_seq_len) would cut the targets, {needed} long for "
                f"inputs_length {self.inputs_length}, noise_density {self.noise_density} and mean_noise_span_length "
                f"{self.mean_noise_span_length}: set it to {needed}, or leave it out."
            )
        if targets_length > needed and trim:
            logger.info(
                "targets are %d tokens long, not %d: the rest would be padding (inputs_length %d, noise_density %s)",
                *(needed, targets_length, self.inputs_length, self.noise_density),
            )
            return needed
        return targets_length

    def _counts_of_last_segment(self) -> SpanCounts:
        length = self.num_tokens - (self._num_samples - 1) * self.tokens_length
        if length == self.tokens_length:
            return self.counts
        if self._num_samples == 1:
            logger.warning(
                "the data has %d tokens, fewer than one segment of %d: each epoch is one padded example",
                *(self.num_tokens, self.tokens_length),
            )
        return count_spans(length, self.noise_density, self.mean_noise_span_length)

    def __len__(self) -> int:
        """Samples in an epoch, the same in each."""
        return self._num_samples

    def describe(self) -> str:
        """The objective and the size of the data, for the log."""
        return (
            f"span corruption, {self.tokens_length} tokens -> {self.inputs_length} inputs + {self.targets_length} "
            f"targets; {self.num_tokens:,} training tokens"
        )

    @property
    def fingerprint(self) -> str:
        """sha256 over data, objective and seed: equal fingerprints give equal samples for equal numbers."""
        parts = {
            "version": _VERSION,
            "sources": [source.fingerprint for source in self.sources],
            "lengths": [self.inputs_length, self.targets_length],
            "noise": [self.noise_density, self.mean_noise_span_length],
            "ids": [self.sentinel_ids.tolist(), self.eos_id, self.pad_id],
            "seed": self.seed,
        }
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def batch(self, samples: np.ndarray) -> dict[str, np.ndarray]:
        """Examples of global sample numbers.

        Args:
            samples: int64[n], any order, any epochs.

        Returns:
            `input_ids` and `attention_mask` int64[n, inputs_length], `labels` int64[n, targets_length].

        Raises:
            UserError: a token id outside the vocabulary.
        """
        samples = np.asarray(samples, np.int64)
        epochs, indices = np.divmod(samples, self._num_samples)
        rows = permute(indices, self._num_samples, self.seed, epochs)
        shifts = np.array([epoch_shift(self.seed, epoch, self.num_tokens) for epoch in epochs.tolist()], np.int64)
        starts = (shifts + rows * self.tokens_length) % self.num_tokens
        words = sample_words(self._noise_key, epochs, rows, self.counts.words_per_sample)

        batch = {
            "input_ids": np.empty((len(samples), self.inputs_length), np.int64),
            "attention_mask": np.empty((len(samples), self.inputs_length), np.int64),
            "labels": np.empty((len(samples), self.targets_length), np.int64),
        }
        self._fill(batch, slice(0, len(samples)), self.counts, starts, words)
        if self._last_counts is not self.counts:
            for row in np.flatnonzero(rows == self._num_samples - 1).tolist():
                here = slice(row, row + 1)
                self._fill(batch, here, self._last_counts, starts[here], words[:, here])
        return batch

    def _fill(
        self, batch: dict[str, np.ndarray], rows: slice, counts: SpanCounts, starts: np.ndarray, words: np.ndarray
    ) -> None:
        """Write the examples cut at `starts` into rows of the batch."""
        span_lengths = random_span_lengths(counts, words[: counts.words_per_sample])
        inputs_end, targets_end = counts.inputs_length, counts.targets_length
        for begin in range(0, len(starts), _BLOCK):
            block = slice(begin, min(begin + _BLOCK, len(starts)))
            here = slice(rows.start + block.start, rows.start + block.stop)
            tokens = self._read(starts[block], counts.tokens_length)
            batch["input_ids"][here, :inputs_end], batch["labels"][here, :targets_end] = corrupt(
                tokens, span_lengths[block], self.sentinel_ids, self.eos_id
            )
        batch["input_ids"][rows, inputs_end:] = self.pad_id
        batch["labels"][rows, targets_end:] = IGNORED_LABEL
        batch["attention_mask"][rows, :inputs_end] = 1
        batch["attention_mask"][rows, inputs_end:] = 0

    def _read(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Tokens [n, length] of the tape from each of `starts`, going round from the end to the beginning."""
        tokens = np.empty((len(starts), length), np.int64)
        part_of = np.searchsorted(self._ends, starts, side="right")
        offsets = starts - self._begins[part_of]
        for row, part, offset in zip(tokens, part_of.tolist(), offsets.tolist(), strict=True):
            piece = self._parts[part][offset : offset + length]
            filled = piece.size
            row[:filled] = piece
            while filled < length:
                part = (part + 1) % len(self._parts)
                piece = self._parts[part][: length - filled]
                row[filled : filled + piece.size] = piece
                filled += piece.size
        self._check_ids(tokens)
        return tokens

    def _check_ids(self, tokens: np.ndarray) -> None:
        worst = int(tokens.max())
        if worst < self.vocab_size and tokens.dtype.kind == "i":
            worst = min(worst, int(tokens.min()))
        if not 0 <= worst < self.vocab_size:
            raise UserError(
                f"The token data holds id {worst}, but the vocabulary has ids 0 to {self.vocab_size - 1}: it was "
                "tokenized with another vocabulary; give that one, or tokenize again."
            )

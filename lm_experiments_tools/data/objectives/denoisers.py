"""Denoisers: inputs and targets from a row of text by span corruption or prefix LM, with one interface.

`draw` chooses a split of each row from `words_per_sample` random words, `lengths` are those that follow, `write` makes
the examples. Given the same split, examples equal those of the `t5` package. One worked example of prefix LM with a
prefix of 3, EOS 1, padding 0 and -100, without and with a mode token 98:

    tokens     10 11 12 13 14
    inputs     10 11 12  1  0          98 10 11 12  1  0
    targets    13 14  1 -100 -100      13 14  1 -100 -100
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from lm_experiments_tools.data.objectives.span_corruption import SpanCounts, corrupt, count_spans, random_span_lengths
from lm_experiments_tools.labels import IGNORED_LABEL

_32 = np.uint64(32)


@dataclass(frozen=True)
class SpanDenoiser:
    """Span corruption (see span_corruption.py).

    Attributes:
        counts: tokens, noise tokens and spans of a row.
        noise_density, mean_noise_span_length: the settings of `counts`.
        sentinel_ids: int64, at least one for each span.
        mode_id: prepended to the inputs, if not None.
        varies: True if lengths differ between rows.
    """

    counts: SpanCounts
    noise_density: float
    mean_noise_span_length: float
    sentinel_ids: np.ndarray
    eos_id: int
    pad_id: int
    mode_id: int | None = None
    varies = False

    @property
    def tokens_length(self) -> int:
        return self.counts.tokens_length

    @property
    def inputs_length(self) -> int:
        return self.counts.inputs_length + (self.mode_id is not None)

    @property
    def targets_length(self) -> int:
        return self.counts.targets_length

    @property
    def words_per_sample(self) -> int:
        return self.counts.words_per_sample

    def for_length(self, tokens_length: int) -> SpanDenoiser:
        """This denoiser for rows of another length."""
        return replace(self, counts=count_spans(tokens_length, self.noise_density, self.mean_noise_span_length))

    def draw(self, words: np.ndarray) -> np.ndarray:
        """Span lengths int64[n, spans, 2] from words uint64[words_per_sample, n]."""
        return random_span_lengths(self.counts, words)

    def lengths(self, drawn: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Lengths of inputs and targets, int64[n] each."""
        return np.full(len(drawn), self.inputs_length), np.full(len(drawn), self.targets_length)

    def write(
        self, tokens: np.ndarray, drawn: np.ndarray, input_ids: np.ndarray, mask: np.ndarray, labels: np.ndarray
    ) -> None:
        """Fill rows of a batch with the examples of tokens int64[n, tokens_length]."""
        mode, end = int(self.mode_id is not None), self.inputs_length
        inputs, targets = corrupt(tokens, drawn, self.sentinel_ids, self.eos_id)
        input_ids[:, mode:end], labels[:, : self.targets_length] = inputs, targets
        if mode:
            input_ids[:, 0] = self.mode_id
        input_ids[:, end:] = self.pad_id
        labels[:, self.targets_length :] = IGNORED_LABEL
        mask[:, :end] = 1
        mask[:, end:] = 0


@dataclass(frozen=True)
class PrefixDenoiser:
    """The beginning of a row is the input, the rest the target: prefix LM, and UL2's S-denoiser.

    The prefix is uniform on [shortest, tokens_length - 1]. `shortest` follows t5's `random_prefix_noise_mask`: the
    target has `noise_density` of the tokens on average, at most `max_targets` with EOS.

    Attributes:
        noise_density: in (0, 0.5]; 0.5 is prefix LM.
        mode_id: prepended to the inputs, if not None.
    """

    tokens_length: int
    noise_density: float
    max_targets: int
    eos_id: int
    pad_id: int
    mode_id: int | None = None
    varies = True
    words_per_sample = 1

    @property
    def shortest(self) -> int:
        """The shortest prefix."""
        longest = self.tokens_length - 1
        by_density = int(np.rint(np.float32(1 - 2 * self.noise_density) * np.float32(longest)))  # t5 rounds in float32
        return min(longest, max(1, by_density, self.tokens_length + 1 - self.max_targets))

    @property
    def inputs_length(self) -> int:
        return self.tokens_length + (self.mode_id is not None)  # the longest prefix, and EOS

    @property
    def targets_length(self) -> int:
        return self.tokens_length - self.shortest + 1

    def for_length(self, tokens_length: int) -> PrefixDenoiser:
        """This denoiser for rows of another length."""
        return replace(self, tokens_length=tokens_length)

    def draw(self, words: np.ndarray) -> np.ndarray:
        """Lengths of prefixes int64[n] from words uint64[1, n]."""
        choices = np.uint64(self.tokens_length - self.shortest)
        return self.shortest + (words[0] * choices >> _32).astype(np.int64)

    def lengths(self, drawn: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Lengths of inputs and targets, int64[n] each."""
        return drawn + 1 + (self.mode_id is not None), self.tokens_length - drawn + 1

    def write(
        self, tokens: np.ndarray, drawn: np.ndarray, input_ids: np.ndarray, mask: np.ndarray, labels: np.ndarray
    ) -> None:
        """Fill rows of a batch with the examples of tokens int64[n, tokens_length]."""
        rows, (_, length), mode = np.arange(len(tokens)), tokens.shape, int(self.mode_id is not None)
        if mode:
            input_ids[:, 0] = self.mode_id
        body = input_ids[:, mode:]
        body[:, :length] = tokens
        body[rows, drawn] = self.eos_id
        mask[:] = np.arange(mask.shape[1]) <= drawn[:, None] + mode
        np.copyto(input_ids, self.pad_id, where=mask == 0)
        positions = np.arange(labels.shape[1])
        # Values past a row's end are overwritten.
        labels[:] = tokens.reshape(-1).take((rows * length + drawn)[:, None] + positions, mode="clip")
        labels[rows, length - drawn] = self.eos_id
        np.copyto(labels, IGNORED_LABEL, where=positions > (length - drawn)[:, None])


Denoiser = SpanDenoiser | PrefixDenoiser

"""T5's span corruption (Raffel et al., 2020, section 3.1.4).

Example. Non-noise and noise spans alternate, beginning with non-noise. Sentinels are 99, 98, ... and EOS is 1:

    tokens      10 11 12 13 14 15 16 17 18 19
    noise mask   .  .  .  N  N  .  .  .  .  N
    inputs      10 11 12 99 15 16 17 18 98  1
    targets     99 13 14 98 19  1

A row of `tokens` tokens gives `tokens - noise + spans + 1` inputs and `noise + spans + 1` targets (1 for EOS). Given
the same noise mask, examples equal those of the `t5` package. This module raises an error in two cases where t5 makes
wrong examples: more spans than sentinels, and targets longer than the maximum.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import inf

import numpy as np
from numpy.random import Generator

from lm_experiments_tools.data.objectives.objective import Objective
from lm_experiments_tools.errors import UserError


@dataclass(frozen=True)
class SpanCounts:
    """Numbers of tokens, noise tokens and noise spans in a row. Rows of equal length have equal numbers."""

    tokens_length: int
    num_noise_tokens: int
    num_spans: int

    @property
    def num_nonnoise_tokens(self) -> int:
        return self.tokens_length - self.num_noise_tokens

    @property
    def inputs_length(self) -> int:
        return self.num_nonnoise_tokens + self.num_spans + 1

    @property
    def targets_length(self) -> int:
        return self.num_noise_tokens + self.num_spans + 1

    @property
    def num_gaps(self) -> int:
        """Number of gaps between two noise or two non-noise tokens: the random numbers that a mask is drawn from."""
        return max(self.num_nonnoise_tokens - 1, 0) + max(self.num_noise_tokens - 1, 0)


@lru_cache(maxsize=4096)
def count_spans(tokens_length: int, noise_density: float, mean_noise_span_length: float) -> SpanCounts:
    """Compute the numbers of noise tokens and noise spans in a row of `tokens_length` tokens.

    Numbers are rounded in float32, halves to even, as in t5. There are never more spans than non-noise tokens.
    """
    length = max(tokens_length, 2)
    num_noise = int(np.rint(np.float32(length) * np.float32(noise_density)))
    num_noise = min(max(num_noise, 1), length - 1)
    num_spans = max(int(np.rint(np.float32(num_noise) / np.float32(mean_noise_span_length))), 1)
    num_spans = min(num_spans, length - num_noise)
    return SpanCounts(tokens_length, num_noise if tokens_length > 1 else 0, num_spans)


def random_spans_lengths(inputs_length: int, noise_density: float, mean_noise_span_length: float) -> tuple[int, int]:
    """Find the longest row whose inputs fit into `inputs_length`; the result is that of t5's `random_spans_helper`.

    Returns:
        Tokens per row, and tokens per target with sentinels and EOS; (568, 114) for (512, 0.15, 3.0).

    Raises:
        UserError: `inputs_length` is below 3, the noise settings are invalid, or spans outnumber the other tokens.
    """
    if inputs_length < 3:
        raise UserError(f"inputs_length (--input_seq_len) is {inputs_length}, but a token, a sentinel and EOS need 3.")
    if not (0 < noise_density < 1 <= mean_noise_span_length):
        raise UserError(
            f"noise_density is {noise_density} and mean_noise_span_length {mean_noise_span_length}: the first is "
            "above 0 and below 1, the second at least 1."
        )

    def inputs_and_targets(tokens: int) -> tuple[int, int]:
        # Python's float64 rounding, unlike the mask's float32: t5 mixes the two, and equality with it needs both.
        noise = round(tokens * noise_density)
        spans = round(noise / mean_noise_span_length)
        return tokens - noise + spans + 1, noise + spans + 1

    tokens_length = inputs_length - 1
    while inputs_and_targets(tokens_length + 1)[0] <= inputs_length:
        tokens_length += 1
    inputs, targets = inputs_and_targets(tokens_length)
    if noise_density == 0.5 and targets > inputs:
        tokens_length, targets = tokens_length - 1, targets - 1
    num_noise = round(tokens_length * noise_density)
    if round(num_noise / mean_noise_span_length) > tokens_length - num_noise:
        raise UserError(
            f"{round(num_noise / mean_noise_span_length)} noise spans cannot be separated by "
            f"{tokens_length - num_noise} other tokens: lower noise_density or raise mean_noise_span_length."
        )
    return tokens_length, targets


def plan_spans(
    inputs_length: int, noise_density: float, mean_span: float, max_targets: float = inf, max_spans: float = inf
) -> SpanCounts:
    """Compute the numbers of tokens and spans of the longest row whose inputs, targets and spans fit.

    Without other limits than `inputs_length` it is t5's row, or one token shorter in the few settings where t5 would
    truncate the inputs.

    Raises UserError: no row fits, or `random_spans_lengths` refuses the settings.
    """
    for tokens_length in range(random_spans_lengths(inputs_length, noise_density, mean_span)[0], 1, -1):
        counts = count_spans(tokens_length, noise_density, mean_span)
        lengths_fit = counts.inputs_length <= inputs_length and counts.targets_length <= max_targets
        if lengths_fit and counts.num_spans <= max_spans:
            return counts
    raise UserError(
        f"Spans of {mean_span:g} tokens in {noise_density:g} of the text need a larger --input_seq_len or "
        "--target_seq_len."
    )


def noise_mask(counts: SpanCounts, gaps: np.ndarray) -> np.ndarray:
    """Choose the noise tokens of rows. All combinations of span lengths are equally likely, as in t5.

    Args:
        gaps: float[..., counts.num_gaps], a random number for each gap between two non-noise tokens, then for each
            between two noise tokens. Spans are separated at the gaps with the smallest numbers.

    Returns:
        bool[..., tokens_length], True for noise.
    """
    split = max(counts.num_nonnoise_tokens - 1, 0)
    nonnoise = _span_lengths(gaps[..., :split], counts.num_nonnoise_tokens, counts.num_spans)
    noise = _span_lengths(gaps[..., split:], counts.num_noise_tokens, counts.num_spans)
    lengths = np.stack([nonnoise, noise], axis=-1)
    is_noise = np.arange(lengths.size) % 2 == 1
    return np.repeat(is_noise, lengths.reshape(-1)).reshape(*gaps.shape[:-1], counts.tokens_length)


def _span_lengths(gaps: np.ndarray, num_tokens: int, num_spans: int) -> np.ndarray:
    """Lengths int64[..., num_spans] of `num_tokens` tokens, cut at the gaps with the smallest numbers."""
    ends = np.full((*gaps.shape[:-1], num_spans + 1), num_tokens)
    ends[..., 0] = 0
    if num_spans > 1:
        ends[..., 1:-1] = np.sort(np.argpartition(gaps, num_spans - 2)[..., : num_spans - 1]) + 1
    return np.diff(ends)


def replace_spans(tokens: np.ndarray, mask: np.ndarray, sentinel_ids: np.ndarray) -> np.ndarray:
    """Replace each span of a mask by one sentinel token, the first span by the first sentinel.

    Args:
        tokens: int64[..., length].
        mask: bool[..., length], True in spans. All rows have the same number of spans and of tokens in them.
        sentinel_ids: int64, at least one per span.

    Returns:
        int64[..., length - tokens in spans + spans].
    """
    starts = mask.copy()
    starts[..., 1:] &= ~mask[..., :-1]
    num_rows, num_starts = mask.size // mask.shape[-1], np.count_nonzero(starts)
    replaced = tokens.copy()
    replaced[starts] = np.tile(sentinel_ids[: num_starts // num_rows], num_rows)
    return replaced[starts | ~mask].reshape(*tokens.shape[:-1], -1)


class SpanCorruption(Objective):
    """Span corruption, T5's pre-training objective. UL2's R- and X-denoisers are of this kind.

    Raises UserError: the targets are longer than `target_length`, a row has more spans than the vocabulary has
    sentinels, or `plan_spans` refuses the settings.
    """

    def __init__(self, noise_density: float = 0.15, mean_noise_span_length: float = 3.0) -> None:
        self.noise = noise_density, mean_noise_span_length

    def prepare(self) -> None:
        self.sentinel_ids = np.asarray(self.vocabulary.sentinel_ids, np.int64)
        counts = plan_spans(self.input_length, *self.noise)
        if counts.num_spans > len(self.sentinel_ids):
            raise UserError(
                f"{self.input_length} inputs hold {counts.num_spans} noise spans but the vocabulary has "
                f"{len(self.sentinel_ids)} sentinels: shorten the inputs, lengthen the spans, train one with more "
                "(`lmtools vocab --extra_ids`), or add them to a Hugging Face tokenizer: tokenizer.add_tokens("
                "[f'<extra_id_{k}>' for k in range(100)], special_tokens=True) and save_pretrained()."
            )
        if self.target_length < counts.targets_length:
            raise UserError(
                f"--target_seq_len {self.target_length} would cut the targets, which are {counts.targets_length} long "
                f"for --input_seq_len {self.input_length}: set it to {counts.targets_length}."
            )
        self.row_length, self.target_length = counts.tokens_length, counts.targets_length

    def examples(self, rows: np.ndarray, rngs: Iterator[Generator]) -> dict[str, np.ndarray]:
        # One call of numpy for many rows: five times as fast.
        counts = count_spans(rows.shape[1], *self.noise)
        gaps = np.empty((len(rows), counts.num_gaps))
        for row, rng in zip(gaps, rngs, strict=True):
            rng.random(out=row)
        mask = noise_mask(counts, gaps)
        inputs, targets = (replace_spans(rows, spans, self.sentinel_ids) for spans in (mask, ~mask))
        return {"input_ids": inputs, "labels": targets}

    def lengths(self, rows: np.ndarray, rngs: Iterator[Generator]) -> tuple[int, int]:
        counts = count_spans(rows.shape[1], *self.noise)
        sentinels = counts.num_spans if counts.num_noise_tokens else 0  # a row of one token has no noise
        return counts.num_nonnoise_tokens + sentinels, counts.targets_length - 1

    def describe(self) -> str:
        lengths = f"{self.input_length} inputs + {self.target_length} targets"
        return f"span corruption, {self.row_length} tokens -> {lengths}"

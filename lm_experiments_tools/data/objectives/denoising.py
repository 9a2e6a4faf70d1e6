"""T5's span corruption (Raffel et al., 2020, section 3.1.4), computed for a batch of rows at a time.

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

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from lm_experiments_tools.data.objectives.token_stream import BLOCK, TokenSource, TokenStreamDataset
from lm_experiments_tools.data.order import draw_integers, stream_key
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.labels import IGNORED_LABEL

if TYPE_CHECKING:
    from lm_experiments_tools.data.objectives.registry import ObjectiveContext

logger = logging.getLogger(__name__)

_POSITIONS = np.arange(1 << 16, dtype=np.int32)  # 0, 1, 2, ...: as many as a block of rows has


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
    def integers_per_sample(self) -> int:
        """Number of random integers that `random_span_lengths` needs per row."""
        return 2 * (self.num_spans - 1)


def count_spans(tokens_length: int, noise_density: float, mean_noise_span_length: float) -> SpanCounts:
    """Compute the numbers of noise tokens and noise spans in a row of `tokens_length` tokens.

    Numbers are rounded in float32, halves to even, as in t5. There are never more spans than non-noise tokens.

    Raises:
        UserError: `noise_density` is outside (0, 1), or `mean_noise_span_length` is below 1.
    """
    if not 0 < noise_density < 1:
        raise UserError(f"noise_density is {noise_density}, but it is a fraction of the tokens: choose 0 < d < 1.")
    if mean_noise_span_length < 1:
        raise UserError(f"mean_noise_span_length is {mean_noise_span_length}, but a span has at least 1 token.")
    length = max(tokens_length, 2)
    num_noise = int(np.rint(np.float32(length) * np.float32(noise_density)))
    num_noise = min(max(num_noise, 1), length - 1)
    num_spans = max(int(np.rint(np.float32(num_noise) / np.float32(mean_noise_span_length))), 1)
    num_spans = min(num_spans, length - num_noise)
    return SpanCounts(tokens_length, num_noise if tokens_length > 1 else 0, num_spans)


def random_spans_lengths(
    inputs_length: int, noise_density: float, mean_noise_span_length: float
) -> tuple[int, int, int]:
    """Find the longest row whose inputs fit into `inputs_length`; the result is that of t5's `random_spans_helper`.

    Returns:
        (tokens_length, targets_length, num_spans): tokens per row, tokens per target with sentinels and EOS, and noise
        spans per row; (568, 114, 28) for (512, 0.15, 3.0).

    Raises:
        UserError: `inputs_length` is below 3, the noise settings are invalid, or spans outnumber the other tokens.
    """
    if inputs_length < 3:
        raise UserError(f"inputs_length (--input_seq_len) is {inputs_length}, but a token, a sentinel and EOS need 3.")

    def inputs_and_targets(tokens: int) -> tuple[int, int]:
        # Python's float64 rounding, unlike the mask's float32: t5 mixes the two, and equality with it needs both.
        noise = round(tokens * noise_density)
        spans = round(noise / mean_noise_span_length)
        return tokens - noise + spans + 1, noise + spans + 1

    count_spans(inputs_length, noise_density, mean_noise_span_length)  # refuse bad settings before searching
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
    return tokens_length, targets, count_spans(tokens_length, noise_density, mean_noise_span_length).num_spans


def plan_spans(
    inputs_length: int, noise_density: float, mean_noise_span_length: float, num_sentinels: int
) -> SpanCounts:
    """Compute the numbers of tokens and spans of the longest row whose inputs fit into `inputs_length`.

    The row is one token shorter than t5's in the few settings where t5 would truncate the inputs.

    Raises:
        UserError: `random_spans_lengths` refuses the settings, or a row has more than `num_sentinels` spans.
    """
    tokens_length, _, _ = random_spans_lengths(inputs_length, noise_density, mean_noise_span_length)
    counts = count_spans(tokens_length, noise_density, mean_noise_span_length)
    while counts.inputs_length > inputs_length:
        counts = count_spans(counts.tokens_length - 1, noise_density, mean_noise_span_length)
    if counts.num_spans > num_sentinels:
        raise UserError(
            f"{inputs_length} inputs hold {counts.num_spans} noise spans but the vocabulary has {num_sentinels} "
            "sentinels: shorten the inputs, lengthen the spans, train one with more (`lmtools vocab --extra_ids`), or "
            "add them to a Hugging Face tokenizer: tokenizer.add_tokens([f'<extra_id_{k}>' for k in range(100)], "
            "special_tokens=True) and save_pretrained()."
        )
    return counts


def random_span_lengths(counts: SpanCounts, random_integers: np.ndarray) -> np.ndarray:
    """Draw the lengths of alternating non-noise and noise spans. All combinations are equally likely, as in t5.

    The cut points between spans are sampled without replacement by Floyd's algorithm (Bentley and Floyd, "A Sample of
    Brilliance", CACM 1987).

    Args:
        counts: numbers of tokens and spans of a row.
        random_integers: uint64[counts.integers_per_sample, n], uniform on [0, 2**32), for n rows.

    Returns:
        int64[n, num_spans, 2]: `[i, k]` has the lengths of non-noise span k of row i and of the noise span after it.
    """
    num_rows, num_cuts = random_integers.shape[1], counts.num_spans - 1
    # Non-noise in the first half of the columns and noise in the second: one pass of Floyd's algorithm serves both.
    parts = np.repeat(np.array([counts.num_nonnoise_tokens, counts.num_noise_tokens]), num_rows)
    narrow = np.int16 if counts.tokens_length < 1 << 15 else np.int32
    chosen = np.empty((num_cuts, 2 * num_rows), narrow)
    last = (parts - 1 - num_cuts + np.arange(num_cuts)[:, None]).astype(narrow)  # the newest gap at each step
    picks = random_integers.reshape(num_cuts, 2 * num_rows) * (last.astype(np.uint64) + np.uint64(1)) >> np.uint64(32)
    for step, pick in enumerate(picks.astype(narrow)):
        taken = np.logical_or.reduce(chosen[:step] == pick, axis=0)
        chosen[step] = np.where(taken, last[step], pick)
    cuts = np.empty((2 * num_rows, counts.num_spans + 1), np.int64)
    cuts[:, 0], cuts[:, -1] = 0, parts
    cuts[:, 1:-1] = np.sort(chosen.T, axis=1) + 1
    return np.diff(cuts, axis=1).reshape(2, num_rows, counts.num_spans).transpose(1, 2, 0)


def corrupt(
    tokens: np.ndarray, span_lengths: np.ndarray, sentinel_ids: np.ndarray, eos_id: int
) -> tuple[np.ndarray, np.ndarray]:
    """Replace each noise span by one sentinel token in the inputs, and each non-noise span by one in the targets.

    Args:
        tokens: int64[n, length], n rows of equal length.
        span_lengths: int64[n, num_spans, 2] from `random_span_lengths`. All rows have the same number of noise tokens.
        sentinel_ids: at least `num_spans` ids.
        eos_id: appended to inputs and targets.

    Returns:
        (inputs, targets): int64[n, inputs_length] and int64[n, targets_length].

    Raises:
        ValueError: there are too few sentinels, or the span lengths of a row do not sum to `length`.
    """
    num_spans = span_lengths.shape[1]
    sums = span_lengths.sum(axis=1)
    if num_spans > len(sentinel_ids) or (sums != sums[0]).any() or sums[0].sum() != tokens.shape[1]:
        raise ValueError(f"{num_spans} spans of {sums.tolist()} tokens do not fit rows of {tokens.shape[1]} tokens")
    nonnoise, noise = np.ascontiguousarray(span_lengths[..., 0]), np.ascontiguousarray(span_lengths[..., 1])
    ends = np.cumsum(nonnoise + noise, axis=1)
    sentinels = sentinel_ids[:num_spans]
    # In the inputs the sentinel follows a run of tokens, in the targets it precedes one.
    inputs = _copy_runs(tokens, ends - noise - nonnoise, nonnoise, sentinels, True, eos_id)
    targets = _copy_runs(tokens, ends - noise - 1, noise, sentinels, False, eos_id)
    return inputs, targets


def _copy_runs(
    tokens: np.ndarray,
    begins: np.ndarray,
    run_lengths: np.ndarray,
    sentinels: np.ndarray,
    sentinel_last: bool,
    eos_id: int,
) -> np.ndarray:
    """For each k, `run_lengths[i, k] + 1` tokens from `begins[i, k]`, one a sentinel; then EOS: int64[n, m]."""
    runs = run_lengths + 1
    output_begins = np.cumsum(runs, axis=1) - runs
    length = int(output_begins[0, -1] + runs[0, -1]) + 1  # EOS
    rows = np.arange(len(tokens))[:, None]
    output_begins += rows * length
    offsets = begins + rows * tokens.shape[1] - output_begins
    runs[:, -1] += 1  # the place of EOS
    number = len(tokens) * length
    positions = _POSITIONS[:number] if number <= len(_POSITIONS) else np.arange(number)
    sources = np.repeat(offsets.astype(positions.dtype).reshape(-1), runs.reshape(-1))
    sources += positions
    # Only the place of EOS can lie outside, and is overwritten.
    output = tokens.reshape(-1).take(sources, mode="clip")
    output[output_begins + run_lengths if sentinel_last else output_begins] = sentinels
    output = output.reshape(len(tokens), length)
    output[:, -1] = eos_id
    return output


class Denoiser(Protocol):
    """Interface of denoising objectives: makes an input and a target from a row of `tokens_length` tokens.

    Attributes:
        inputs_length, targets_length: maximum lengths, with EOS and mode token (which names the denoiser in UL2).
        integers_per_sample: number of random integers that `draw` needs per row.
        varies: True if inputs or targets differ in length between rows.
    """

    @property
    def tokens_length(self) -> int: ...

    @property
    def inputs_length(self) -> int: ...

    @property
    def targets_length(self) -> int: ...

    @property
    def integers_per_sample(self) -> int: ...

    @property
    def varies(self) -> bool: ...

    def for_length(self, tokens_length: int) -> Denoiser:
        """Return a denoiser with the same settings for rows of `tokens_length` tokens."""

    def draw(self, random_integers: np.ndarray) -> np.ndarray:
        """Choose the noise of n rows from random integers uint64[integers_per_sample, n], uniform on [0, 2**32)."""

    def lengths(self, drawn: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the lengths of inputs and of targets, int64[n] each, for the noise that `draw` chose for n rows."""

    def write(
        self, tokens: np.ndarray, drawn: np.ndarray, input_ids: np.ndarray, mask: np.ndarray, labels: np.ndarray
    ) -> None:
        """Write the examples of rows int64[n, tokens_length] into `input_ids`, `mask` and `labels`, with padding."""


@dataclass(frozen=True)
class SpanDenoiser:
    """Span corruption as a `Denoiser`: each noise span of the input is replaced by a sentinel token.

    Attributes:
        counts: tokens, noise tokens and spans of a row.
        noise_density: fraction of tokens to corrupt.
        mean_noise_span_length: average tokens per noise span.
        sentinel_ids: int64, at least one per span.
        mode_id: UL2's mode token, prepended to the inputs; None for none.
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
    def integers_per_sample(self) -> int:
        return self.counts.integers_per_sample

    def for_length(self, tokens_length: int) -> SpanDenoiser:
        return replace(self, counts=count_spans(tokens_length, self.noise_density, self.mean_noise_span_length))

    def draw(self, random_integers: np.ndarray) -> np.ndarray:
        return random_span_lengths(self.counts, random_integers)

    def lengths(self, drawn: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return np.full(len(drawn), self.inputs_length), np.full(len(drawn), self.targets_length)

    def write(
        self, tokens: np.ndarray, drawn: np.ndarray, input_ids: np.ndarray, mask: np.ndarray, labels: np.ndarray
    ) -> None:
        mode, end = int(self.mode_id is not None), self.inputs_length
        inputs, targets = corrupt(tokens, drawn, self.sentinel_ids, self.eos_id)
        input_ids[:, mode:end], labels[:, : self.targets_length] = inputs, targets
        if mode:
            input_ids[:, 0] = self.mode_id
        input_ids[:, end:] = self.pad_id
        labels[:, self.targets_length :] = IGNORED_LABEL
        mask[:, :end] = 1
        mask[:, end:] = 0


def build(context: ObjectiveContext, tokens: TokenSource | Sequence[TokenSource]) -> SpanCorruptionDataset:
    """Build the training or validation dataset of `--task span_corruption` from tokenized text."""
    args, vocabulary = context.args, context.vocabulary
    return SpanCorruptionDataset(
        tokens,
        args.input_seq_len,
        args.target_seq_len,
        sentinel_ids=vocabulary.sentinel_ids,
        eos_id=vocabulary.eos_id,
        noise_density=args.noise_density,
        mean_noise_span_length=args.mean_noise_span_length,
        quiet=context.quiet,
        **context.stream_options(),
    )


class DenoisingDataset(TokenStreamDataset):
    """Denoising examples: one or several denoisers make inputs and targets from rows of tokenized text.

    The noise depends only on (seed, epoch, row).

    Args:
        tokens, vocab_size, seed: see `TokenStreamDataset`.
        denoisers: each may read rows of another length.
        schedule: index into `denoisers` for each row, repeated after the last one.
        pad_id: padding of the inputs; labels are padded with -100.
    """

    def __init__(
        self,
        tokens: TokenSource | Sequence[TokenSource],
        denoisers: Sequence[Denoiser],
        schedule: Sequence[int] | np.ndarray = (0,),
        *,
        pad_id: int,
        vocab_size: int,
        seed: int,
    ) -> None:
        self.denoisers, self._schedule = list(denoisers), np.asarray(schedule, np.int64)
        super().__init__(tokens, vocab_size, [self.denoisers[k].tokens_length for k in self._schedule.tolist()], seed)
        self.pad_id = pad_id
        self.inputs_length = max(denoiser.inputs_length for denoiser in self.denoisers)
        self.targets_length = max(denoiser.targets_length for denoiser in self.denoisers)
        self._noise_key = stream_key(seed, "noise")
        self._last = self.denoisers[self._kinds(np.array([len(self) - 1]))[0]].for_length(self.last_row_length)
        if len(self) == 1 and self.last_row_is_short:
            logger.warning("the data has only %d tokens: each epoch is one padded example", self.num_tokens)

    def _kinds(self, rows: np.ndarray) -> np.ndarray:
        return self._schedule[rows % len(self._schedule)]

    def _parts(self, rows: np.ndarray) -> list[tuple[Denoiser, slice | np.ndarray]]:
        """The denoiser of each of `rows`; for all of one kind a slice, which numpy indexes faster."""
        kinds = self._kinds(rows)
        parts: list[tuple[Denoiser, slice | np.ndarray]] = [(self.denoisers[0], slice(0, len(rows)))]
        if len(self.denoisers) > 1:
            parts = [(self.denoisers[k], np.flatnonzero(kinds == k)) for k in np.unique(kinds).tolist()]
        short = np.flatnonzero(self.is_short(rows))
        if short.size:  # overwrites what the denoiser of full rows wrote
            parts.append((self._last, short))
        return parts

    def lengths(self, samples: np.ndarray) -> np.ndarray:
        """Return the numbers of input and target tokens, int64[2, n], of the n samples with the given numbers."""
        epochs, rows = self.rows_of(samples)
        lengths = np.empty((2, len(rows)), np.int64)
        for denoiser, part in self._parts(rows):
            if not denoiser.varies:
                lengths[:, part] = [[denoiser.inputs_length], [denoiser.targets_length]]
                continue
            random_integers = draw_integers(self._noise_key, epochs[part], rows[part], denoiser.integers_per_sample)
            lengths[0, part], lengths[1, part] = denoiser.lengths(denoiser.draw(random_integers))
        return lengths

    def batch(self, samples: np.ndarray) -> dict[str, np.ndarray]:
        """Make a batch of examples from their sample numbers int64[n], which count over all epochs.

        Returns:
            `input_ids` and `attention_mask` int64[n, inputs_length], `labels` int64[n, targets_length].
        """
        epochs, rows = self.rows_of(samples)
        starts = self.starts_of(epochs, rows)
        widths = {"input_ids": self.inputs_length, "attention_mask": self.inputs_length, "labels": self.targets_length}
        batch = {name: np.empty((len(rows), width), np.int64) for name, width in widths.items()}
        for denoiser, part in self._parts(rows):
            random_integers = draw_integers(self._noise_key, epochs[part], rows[part], denoiser.integers_per_sample)
            self._fill(batch, part, denoiser, starts[part], denoiser.draw(random_integers))
        return batch

    def _fill(
        self,
        batch: dict[str, np.ndarray],
        part: slice | np.ndarray,
        denoiser: Denoiser,
        starts: np.ndarray,
        drawn: np.ndarray,
    ) -> None:
        """Write the examples cut at `starts` into some rows of the batch."""
        in_place = isinstance(part, slice)
        made = batch if in_place else {name: np.empty((len(starts), v.shape[1]), v.dtype) for name, v in batch.items()}
        for begin in range(0, len(starts), BLOCK):
            here = slice(begin, begin + BLOCK)
            tokens = self.read(starts[here], denoiser.tokens_length)
            denoiser.write(
                tokens, drawn[here], made["input_ids"][here], made["attention_mask"][here], made["labels"][here]
            )
        for name, values in () if in_place else made.items():
            batch[name][part] = values


class SpanCorruptionDataset(DenoisingDataset):
    """Span corruption examples, T5's pre-training objective.

    Args:
        tokens, vocab_size, seed: see `TokenStreamDataset`.
        inputs_length: tokens per input, with sentinels and EOS.
        targets_length: maximum tokens per target, with sentinels and EOS; None for no limit.
        sentinel_ids: ids of <extra_id_0>, <extra_id_1>, ...
        eos_id: appended to inputs and targets.
        pad_id: padding of the inputs; labels are padded with -100.
        noise_density: fraction of tokens to corrupt.
        mean_noise_span_length: average tokens per corrupted span.
        quiet: do not log the lengths that follow from the settings.

    Raises:
        UserError: the targets are longer than `targets_length`, or `plan_spans` refuses the settings.
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
        quiet: bool = False,
    ) -> None:
        self.sentinel_ids, self.eos_id = np.asarray(sentinel_ids, np.int64), eos_id
        self.noise_density, self.mean_noise_span_length = noise_density, mean_noise_span_length
        counts = plan_spans(inputs_length, noise_density, mean_noise_span_length, len(self.sentinel_ids))
        self.tokens_length, needed = counts.tokens_length, counts.targets_length
        if targets_length is not None and targets_length < needed:
            raise UserError(
                f"targets_length {targets_length} (--target_seq_len) would cut the targets, which are {needed} long "
                f"for inputs_length {inputs_length}: set it to {needed}, or leave it out."
            )
        if (targets_length or 0) > needed and not quiet:
            logger.info("targets are %d tokens long, not %d: the rest would be padding", needed, targets_length)
        denoiser = SpanDenoiser(counts, noise_density, mean_noise_span_length, self.sentinel_ids, eos_id, pad_id)
        super().__init__(tokens, [denoiser], pad_id=pad_id, vocab_size=vocab_size, seed=seed)
        self.inputs_length = inputs_length

    def describe(self) -> str:
        """Describe the objective and the size of the data, for the log."""
        return (
            f"span corruption, {self.tokens_length} tokens -> {self.inputs_length} inputs + {self.targets_length} "
            f"targets; {self.num_tokens:,} training tokens"
        )

    def settings(self) -> dict[str, Any]:
        return {
            "lengths": [self.inputs_length, self.targets_length],
            "noise": [self.noise_density, self.mean_noise_span_length],
            "ids": [self.sentinel_ids.tolist(), self.eos_id, self.pad_id],
        }

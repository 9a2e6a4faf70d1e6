"""Denoising examples from a token stream: random access, no shuffling, no storage.

A denoiser makes inputs and targets of rows: `draw` chooses a split of each row from `words_per_sample` random words,
`lengths` are those that follow, `write` makes the examples. Here it is T5's span corruption (Raffel et al., 2020,
section 3.1.4), computed for a whole batch at once.

One worked example. Spans alternate non-noise, noise, ..., starting with non-noise and ending with noise; sentinels are
99, 98, ... and EOS 1:

    tokens      10 11 12 13 14 15 16 17 18 19
    noise mask   .  .  .  N  N  .  .  .  .  N
    inputs      10 11 12 99 15 16 17 18 98  1
    targets     99 13 14 98 19  1

Lengths: `tokens - noise + spans + 1` inputs and `noise + spans + 1` targets (the 1 is EOS), the same for every row of
one length. Examples equal those of the `t5` package token for token; this module raises where t5 is silently wrong
(more spans than sentinels, targets that do not fit).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from lm_experiments_tools.data.objectives.token_stream import BLOCK, TokenSource, TokenStreamDataset
from lm_experiments_tools.data.order import sample_words, stream_key
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.labels import IGNORED_LABEL

if TYPE_CHECKING:
    from lm_experiments_tools.data.objectives.prefix_lm import PrefixDenoiser
    from lm_experiments_tools.data.objectives.registry import ObjectiveContext

logger = logging.getLogger(__name__)

_POSITIONS = np.arange(1 << 16, dtype=np.int32)  # 0, 1, 2, ...: as many as a block of rows has


@dataclass(frozen=True)
class SpanCounts:
    """Numbers of tokens and spans in a segment of `tokens_length` tokens, all fixed by that length alone."""

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
    def words_per_sample(self) -> int:
        """Random words that `random_span_lengths` takes per row: one for each cut between two spans."""
        return 2 * (self.num_spans - 1)


def count_spans(tokens_length: int, noise_density: float, mean_noise_span_length: float) -> SpanCounts:
    """Noise tokens and spans in a segment of `tokens_length` tokens.

    Rounds half to even in float32 as t5's `random_spans_noise_mask` does. Each span needs a non-noise token before it,
    so a short segment may get fewer spans than rounding gives (t5 fails there).

    Raises:
        UserError: a density outside (0, 1), or a mean span length below 1.
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
    """The segment length that fills `inputs_length` exactly, as t5's `random_spans_helper` (one extra token a span).

    Returns:
        (tokens_length, targets_length, num_spans), lengths with sentinels and EOS; (568, 114, 28) for (512, 0.15,
        3.0).

    Raises:
        UserError: as `count_spans`, `inputs_length` below 3, or too many spans to be separated.
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
    """Counts of the longest segments whose inputs fit into `inputs_length`, checked against the vocabulary.

    In the few settings where t5's two roundings disagree by one token, t5 truncates an example; here the segment is
    one token shorter.

    Raises:
        UserError: as `random_spans_lengths`, or more spans than sentinels, where t5 uses real vocabulary ids.
    """
    tokens_length, _, _ = random_spans_lengths(inputs_length, noise_density, mean_noise_span_length)
    counts = count_spans(tokens_length, noise_density, mean_noise_span_length)
    while counts.inputs_length > inputs_length:
        counts = count_spans(counts.tokens_length - 1, noise_density, mean_noise_span_length)
    if counts.num_spans > num_sentinels:
        raise UserError(
            f"{inputs_length} inputs hold {counts.num_spans} noise spans but the vocabulary has {num_sentinels} "
            f"sentinels: give one with at least {counts.num_spans} (`lmtools vocab --extra_ids`), shorten the inputs "
            "or lengthen the spans."
        )
    return counts


def random_span_lengths(counts: SpanCounts, words: np.ndarray) -> np.ndarray:
    """Lengths of alternating non-noise and noise spans, every arrangement equally likely.

    Noise and other tokens are each cut into `num_spans` positive parts at `num_spans - 1` distinct points, uniformly
    (Floyd's sampling: Bentley and Floyd, "A Sample of Brilliance", CACM 1987). The distribution is t5's.

    Args:
        words: uint64[counts.words_per_sample, n], uniform on [0, 2**32).

    Returns:
        int64[n, num_spans, 2]: span k of a row is `[k, 0]` non-noise tokens followed by `[k, 1]` noise tokens.
    """
    num_rows, num_cuts = words.shape[1], counts.num_spans - 1
    # Non-noise in the first half of the columns and noise in the second: one pass of Floyd's algorithm serves both.
    parts = np.repeat(np.array([counts.num_nonnoise_tokens, counts.num_noise_tokens]), num_rows)
    narrow = np.int16 if counts.tokens_length < 1 << 15 else np.int32
    chosen = np.empty((num_cuts, 2 * num_rows), narrow)
    last = (parts - 1 - num_cuts + np.arange(num_cuts)[:, None]).astype(narrow)  # the newest gap at each step
    picks = words.reshape(num_cuts, 2 * num_rows) * (last.astype(np.uint64) + np.uint64(1)) >> np.uint64(32)
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
    """Replace each noise span by one sentinel in the inputs, and each non-noise span by one in the targets.

    Args:
        tokens: int64[n, length].
        span_lengths: int64[n, num_spans, 2] as from `random_span_lengths`; all rows with equally many noise tokens.
        sentinel_ids: ids of sentinel 0, 1, ..., at least `num_spans`.
        eos_id: closes both sequences.

    Returns:
        (inputs, targets): int64[n, inputs_length] and int64[n, targets_length].

    Raises:
        ValueError: too few sentinels, or span lengths that do not sum to the length of every row.
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


@dataclass(frozen=True)
class SpanDenoiser:
    """Span corruption.

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
        """The same noise for rows of another length."""
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


def build(context: ObjectiveContext, tokens: TokenSource | Sequence[TokenSource]) -> SpanCorruptionDataset:
    """`--task span_corruption`."""
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


if TYPE_CHECKING:
    Denoiser = SpanDenoiser | PrefixDenoiser


class DenoisingDataset(TokenStreamDataset):
    """Denoising examples from rows of a token stream, by one denoiser or by several in round robin.

    The noise of a row is keyed by (seed, epoch, row).

    Args:
        tokens, vocab_size, seed: as `TokenStreamDataset`.
        denoisers: each reads rows of its own length.
        schedule: the denoiser of each row, repeated.
        pad_id: fills inputs; labels are filled with -100.
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
        """Tokens of inputs and of targets, int64[2, n], of global sample numbers."""
        epochs, rows = self.rows_of(samples)
        lengths = np.empty((2, len(rows)), np.int64)
        for denoiser, part in self._parts(rows):
            if not denoiser.varies:
                lengths[:, part] = [[denoiser.inputs_length], [denoiser.targets_length]]
                continue
            words = sample_words(self._noise_key, epochs[part], rows[part], denoiser.words_per_sample)
            lengths[0, part], lengths[1, part] = denoiser.lengths(denoiser.draw(words))
        return lengths

    def batch(self, samples: np.ndarray) -> dict[str, np.ndarray]:
        """Examples of global sample numbers int64[n], any order, any epochs.

        Returns:
            `input_ids` and `attention_mask` int64[n, inputs_length], `labels` int64[n, targets_length].
        """
        epochs, rows = self.rows_of(samples)
        starts = self.starts_of(epochs, rows)
        widths = {"input_ids": self.inputs_length, "attention_mask": self.inputs_length, "labels": self.targets_length}
        batch = {name: np.empty((len(rows), width), np.int64) for name, width in widths.items()}
        for denoiser, part in self._parts(rows):
            words = sample_words(self._noise_key, epochs[part], rows[part], denoiser.words_per_sample)
            self._fill(batch, part, denoiser, starts[part], denoiser.draw(words))
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
    """T5 pre-training examples.

    Args:
        tokens, vocab_size, seed: as `TokenStreamDataset`.
        inputs_length: tokens of an input, sentinels and EOS included.
        targets_length: maximum length of the targets, which are as long as they need; None sets no limit.
        sentinel_ids: ids of sentinel 0, 1, ...
        eos_id, pad_id: special ids; labels are padded with -100.
        noise_density: fraction of tokens to corrupt.
        mean_noise_span_length: average tokens per corrupted span.
        quiet: do not log that.

    Raises:
        UserError: targets that do not fit, or settings that `plan_spans` refuses.
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
        """The objective and the size of the data, for the log."""
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

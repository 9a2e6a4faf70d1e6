"""Denoising examples from a token stream: random access, no shuffling, no storage."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from lm_experiments_tools.data.objectives.denoisers import Denoiser, PrefixDenoiser, SpanDenoiser
from lm_experiments_tools.data.objectives.span_corruption import plan_spans
from lm_experiments_tools.data.objectives.token_stream import BLOCK, TokenSource, TokenStreamDataset
from lm_experiments_tools.data.order import sample_words, stream_key
from lm_experiments_tools.errors import UserError

if TYPE_CHECKING:
    from lm_experiments_tools.data.objectives.registry import ObjectiveContext

logger = logging.getLogger(__name__)


def build_span_corruption(
    context: ObjectiveContext, tokens: TokenSource | Sequence[TokenSource]
) -> SpanCorruptionDataset:
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


def build_prefix_lm(context: ObjectiveContext, tokens: TokenSource | Sequence[TokenSource]) -> PrefixLMDataset:
    """`--task prefix_lm`."""
    lengths = context.args.input_seq_len, context.args.target_seq_len
    return PrefixLMDataset(tokens, *lengths, eos_id=context.vocabulary.eos_id, **context.stream_options())


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


class PrefixLMDataset(DenoisingDataset):
    """Prefix LM (Raffel et al., 2020, section 3.1.4): the beginning of a row is the input, the rest the target.

    Rows have `inputs_length - 1` tokens, as in t5, but are cut from the token stream: none is short. See the worked
    example in denoisers.py.

    Args:
        tokens, eos_id, pad_id, vocab_size, seed: as `SpanCorruptionDataset`.
        inputs_length: tokens of an input, EOS included; at least 3.
        targets_length: longest target, EOS included; at least 2. Prefixes are longer where it is less than
            `inputs_length - 1`.
    """

    def __init__(
        self,
        tokens: TokenSource | Sequence[TokenSource],
        inputs_length: int,
        targets_length: int,
        *,
        eos_id: int,
        pad_id: int,
        vocab_size: int,
        seed: int = 0,
    ) -> None:
        if inputs_length < 3 or targets_length < 2:
            raise UserError(
                f"prefix LM needs at least 3 inputs and 2 targets, but --input_seq_len is {inputs_length} and "
                f"--target_seq_len {targets_length}."
            )
        self.denoiser = PrefixDenoiser(inputs_length - 1, 0.5, targets_length, eos_id, pad_id)
        super().__init__(tokens, [self.denoiser], pad_id=pad_id, vocab_size=vocab_size, seed=seed)

    def describe(self) -> str:
        """The objective and the size of the data, for the log."""
        longest = self.denoiser.tokens_length - 1
        return (
            f"prefix LM, {longest + 1} tokens -> a prefix of {self.denoiser.shortest} to {longest} and the rest; "
            f"{self.num_tokens:,} training tokens"
        )

    def settings(self) -> dict[str, Any]:
        denoiser = self.denoiser
        lengths, ids = [denoiser.tokens_length, denoiser.shortest], [denoiser.eos_id, self.pad_id]
        return {"task": "prefix_lm", "lengths": lengths, "ids": ids}

"""Denoising examples straight from a flat stream of tokens: random access, nothing to shuffle or to store."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from lm_experiments_tools.data.objectives.denoisers import Denoiser, PrefixDenoiser, SpanDenoiser
from lm_experiments_tools.data.objectives.span_corruption import plan_spans
from lm_experiments_tools.data.objectives.tape import BLOCK, TapeDataset, TokenSource
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
        **context.for_tape(),
    )


def build_prefix_lm(context: ObjectiveContext, tokens: TokenSource | Sequence[TokenSource]) -> PrefixLMDataset:
    """`--task prefix_lm`."""
    lengths = context.args.input_seq_len, context.args.target_seq_len
    return PrefixLMDataset(tokens, *lengths, eos_id=context.vocabulary.eos_id, **context.for_tape())


class DenoisingDataset(TapeDataset):
    """Inputs and targets made of rows of a tape by one denoiser, or by several in turn.

    The noise of a row is keyed by (seed, epoch, row).

    Args:
        tokens: an `IndexedDataset` or several, read one after the other.
        denoisers: each reads rows of its own length.
        turn: the denoiser of each row, over and over; None is the first for all.
        pad_id: fills inputs; labels are filled with -100.
        vocab_size: ids at or above it are refused.
        seed: fixes order, cut points and noise.
        targets_length: width of the labels; None is that of the longest targets.

    Raises:
        UserError: no tokens, or a token id outside the vocabulary.
    """

    def __init__(
        self,
        tokens: TokenSource | Sequence[TokenSource],
        denoisers: Sequence[Denoiser],
        turn: Sequence[int] | np.ndarray = (0,),
        *,
        pad_id: int,
        vocab_size: int,
        seed: int,
        targets_length: int | None = None,
    ) -> None:
        self.denoisers, self._turn = list(denoisers), np.asarray(turn, np.int64)
        super().__init__(tokens, vocab_size, [self.denoisers[k].tokens_length for k in self._turn.tolist()], seed)
        self.pad_id = pad_id
        self.inputs_length = max(denoiser.inputs_length for denoiser in self.denoisers)
        self.targets_length = targets_length or max(denoiser.targets_length for denoiser in self.denoisers)
        self._noise_key = stream_key(seed, "noise")
        self._last = self.denoisers[self._kinds(np.array([len(self) - 1]))[0]].for_length(self.last_row_length)
        if len(self) == 1 and self.last_row_is_short:
            logger.warning(
                "the data has %d tokens, fewer than one segment of %d: each epoch is one padded example",
                self.num_tokens,
                self.denoisers[self._turn[0]].tokens_length,
            )

    def _kinds(self, rows: np.ndarray) -> np.ndarray:
        return self._turn[rows % len(self._turn)]

    def _parts(self, rows: np.ndarray) -> list[tuple[Denoiser, slice | np.ndarray]]:
        """The denoiser of each of `rows`; for all of one kind a slice, which numpy indexes faster."""
        kinds = self._kinds(rows)
        parts: list[tuple[Denoiser, slice | np.ndarray]] = [(self.denoisers[0], slice(0, len(rows)))]
        if len(self.denoisers) > 1:
            parts = [(self.denoisers[k], np.flatnonzero(kinds == k)) for k in np.unique(kinds).tolist()]
        short = np.flatnonzero(self.is_short(rows))
        if short.size:  # once more, over what the denoiser of full rows made of it
            parts.append((self._last, short))
        return parts

    def lengths(self, samples: np.ndarray) -> np.ndarray:
        """Tokens of inputs and of targets, int64[2, n], of global sample numbers, without making the samples."""
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
        """Examples of global sample numbers.

        Args:
            samples: int64[n], any order, any epochs.

        Returns:
            `input_ids` and `attention_mask` int64[n, inputs_length], `labels` int64[n, targets_length].

        Raises:
            UserError: a token id outside the vocabulary.
        """
        epochs, rows = self.rows_of(samples)
        starts = self.starts_of(epochs, rows)
        batch = {
            "input_ids": np.empty((len(rows), self.inputs_length), np.int64),
            "attention_mask": np.empty((len(rows), self.inputs_length), np.int64),
            "labels": np.empty((len(rows), self.targets_length), np.int64),
        }
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
        whole = isinstance(part, slice)
        made = batch if whole else {name: np.empty((len(starts), v.shape[1]), v.dtype) for name, v in batch.items()}
        for begin in range(0, len(starts), BLOCK):
            here = slice(begin, begin + BLOCK)
            tokens = self.tape.read(starts[here], denoiser.tokens_length)
            denoiser.write(
                tokens, drawn[here], made["input_ids"][here], made["attention_mask"][here], made["labels"][here]
            )
        if not whole:
            for name, values in made.items():
                batch[name][part] = values


class SpanCorruptionDataset(DenoisingDataset):
    """T5 pre-training examples.

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
        quiet: do not say so.

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
        quiet: bool = False,
    ) -> None:
        self.sentinel_ids, self.eos_id = np.asarray(sentinel_ids, np.int64), eos_id
        self.noise_density, self.mean_noise_span_length = noise_density, mean_noise_span_length
        counts = plan_spans(inputs_length, noise_density, mean_noise_span_length, len(self.sentinel_ids))
        self.tokens_length, needed = counts.tokens_length, counts.targets_length
        asked = needed if targets_length is None else targets_length
        if asked < needed:
            raise UserError(
                f"targets_length {asked} (--target_seq_len) would cut the targets, {needed} long for inputs_length "
                f"{inputs_length}, noise_density {noise_density} and mean_noise_span_length {mean_noise_span_length}: "
                f"set it to {needed}, or leave it out."
            )
        if asked > needed and trim_targets and not quiet:
            logger.info(
                "targets are %d tokens long, not %d: the rest would be padding (inputs_length %d, noise_density %s)",
                needed,
                asked,
                inputs_length,
                noise_density,
            )
        denoiser = SpanDenoiser(counts, noise_density, mean_noise_span_length, self.sentinel_ids, eos_id, pad_id)
        width = needed if trim_targets else asked
        super().__init__(tokens, [denoiser], pad_id=pad_id, vocab_size=vocab_size, seed=seed, targets_length=width)
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

    Rows have `inputs_length - 1` tokens, as t5's pieces of documents, but out of the flat stream: none is short. The
    worked example of denoisers.py, with inputs and targets of 6 and so rows of 5 tokens:

        tokens     10 11 12 13 14
        inputs     10 11 12  1  0
        targets    13 14  1 -100 -100

    Args:
        tokens, eos_id, pad_id, vocab_size, seed: as `SpanCorruptionDataset`.
        inputs_length: tokens of an input, EOS included.
        targets_length: longest target, EOS included. Shorter than `inputs_length - 1`: prefixes are longer, so that
            the rest fits.

    Raises:
        UserError: no tokens, a token id outside the vocabulary, or lengths without room for one token.
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
                f"prefix LM with inputs of {inputs_length} (--input_seq_len) and targets of {targets_length} "
                "(--target_seq_len) has no room for a token and EOS on either side: they need 3 and 2."
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
        return {
            "task": "prefix_lm",
            "lengths": [denoiser.tokens_length, denoiser.shortest],
            "ids": [denoiser.eos_id, self.pad_id],
        }

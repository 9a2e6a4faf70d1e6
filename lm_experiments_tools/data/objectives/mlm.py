"""Masked language modelling for encoders.

Of the chosen tokens, 80 % become the mask token, 10 % a random token, and 10 % stay unchanged (Devlin et al., "BERT",
NAACL 2019, section 3.1). Each token has one random number u in [0, 1) that decides this. With probability 0.15::

    u below 0.12      mask token
            0.135     random token, selected by the position of u between 0.12 and 0.135
            0.15      unchanged
            1         not chosen, label -100

Example with the mask token 99, ordinary tokens 10 ... 19, and EOS 1, which is never chosen:

    tokens    10    11     12     13    1    14
    u         0.5   0.1    0.13   0.14  0.1  0.9
    inputs    10    99     16     13    1    14         0.13 is 2/3 of the way from 0.12 to 0.135: token 6 of 10
    labels  -100    11     12     13  -100  -100
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from lm_experiments_tools.data.loader import SampleDataset
from lm_experiments_tools.data.objectives.token_stream import BLOCK, TokenSource, TokenStreamDataset
from lm_experiments_tools.data.order import draw_integers, stream_key
from lm_experiments_tools.data.text.vocabulary import MASK_PIECES
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.files import json_sha256
from lm_experiments_tools.labels import IGNORED_LABEL

if TYPE_CHECKING:
    from lm_experiments_tools.data.objectives.registry import ObjectiveContext
    from lm_experiments_tools.data.text.vocabulary import Vocabulary

_32 = np.uint64(32)
_LAST = np.uint64(2**32 - 1)
_VERSION = 1  # of the mapping (seed, sample, row) -> masked row; part of the fingerprint
REPLACE = (0.8, 0.1, 0.1)  # of the chosen tokens: mask token, random token, unchanged


def build(context: ObjectiveContext, tokens: TokenSource | Sequence[TokenSource]) -> MaskedLMDataset:
    """Build the dataset of `--task mlm`. Special tokens (padding, EOS, unknown, sentinels) are never masked."""
    vocabulary = context.vocabulary
    return MaskedLMDataset(
        tokens,
        context.args.input_seq_len,
        mask_id=mask_id(vocabulary),
        special_ids=vocabulary.special_ids,
        probability=context.args.mlm_probability,
        **context.stream_options(),
    )


def mask_id(vocabulary: Vocabulary) -> int:
    """Return the id of a vocabulary's mask token, or of its first sentinel token if it has no mask token.

    Raises:
        UserError: the vocabulary has neither.
    """
    if vocabulary.mask_id is not None:
        return vocabulary.mask_id
    if vocabulary.num_sentinels == 0:
        raise UserError(
            f"--task mlm needs a token that hides others, but {vocabulary.path} has neither "
            f"{' nor '.join(MASK_PIECES)} nor a sentinel: add a mask_token, or train another by `lmtools vocab`."
        )
    return int(vocabulary.sentinel_ids[0])


def special_and_ordinary(special_ids: Sequence[int], vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Split a vocabulary into special and ordinary ids, the arguments that `mask_tokens` takes.

    Returns:
        bool[vocab_size], True for special ids, and int64[number of ordinary ids], all other ids.
    """
    special = np.zeros(vocab_size, bool)
    special[special_ids] = True
    return special, np.flatnonzero(~special)


def mask_tokens(
    tokens: np.ndarray,
    random_integers: np.ndarray,
    probability: float | np.ndarray,
    mask_id: int,
    ordinary_ids: np.ndarray,
    special: np.ndarray,
    replace: Sequence[float] = REPLACE,
    starts: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Mask random tokens for masked language modelling, and return inputs and labels.

    Args:
        tokens: int64 token ids of any shape.
        random_integers: uint64 of the shape of `tokens`, one number per token, uniform on [0, 2**32).
        probability: masking rate; a number, or an array [rows, 1] with a rate per row.
        mask_id: id of the mask token.
        ordinary_ids: int64 ids from which random tokens are drawn.
        special: bool[vocab_size], True for ids that are never masked.
        replace: fractions of the chosen tokens that become the mask token, become a random token, or stay unchanged.
        starts: bool of the shape of `tokens`, True at the first token of each word, to mask whole words; None masks
            single tokens.

    Returns:
        inputs and labels, int64 of the shape of `tokens`; the label of a token that was not chosen is -100.
    """
    parts = (replace[0], replace[0] + replace[1], 1.0)
    bounds = [np.rint(np.multiply(part, probability) * 2**32).astype(np.uint64) for part in parts]
    if starts is not None:
        random_integers = _by_words(random_integers, starts, bounds[2])
    chosen = (random_integers < bounds[2]) & ~special[tokens]
    inputs, labels = tokens.copy(), np.full_like(tokens, IGNORED_LABEL)
    places = np.nonzero(chosen)
    picked, drawn = tokens[places], random_integers[places]
    masked, replaced, _ = (np.broadcast_to(bound, tokens.shape)[places] for bound in bounds)
    labels[places] = picked
    replacement = np.where(drawn < masked, mask_id, picked)
    random = (masked <= drawn) & (drawn < replaced)
    spread = (drawn - masked)[random] * np.uint64(len(ordinary_ids)) // (replaced - masked)[random]
    replacement[random] = ordinary_ids[spread.astype(np.int64)]
    inputs[places] = replacement
    return inputs, labels


def _by_words(random_integers: np.ndarray, starts: np.ndarray, bound: np.ndarray) -> np.ndarray:
    """Random integers that are below `bound` in all tokens of a word or in none; how far below is each token's own."""
    columns = np.arange(random_integers.shape[-1])
    first = np.maximum.accumulate(np.where(starts, columns, 0), axis=-1)
    is_chosen = np.take_along_axis(random_integers < bound, first, axis=-1)
    return np.where(starts, random_integers, np.where(is_chosen, random_integers * bound >> _32, _LAST))


@dataclass(frozen=True)
class MaskingRate:
    """Masking rate that changes linearly from `start` to `end` over the first `num_samples` samples of a run.

    With `end=None` the rate stays `start`.
    """

    start: float
    end: float | None = None
    num_samples: int = 1

    def at(self, samples: np.ndarray) -> np.ndarray:
        """Return the masking rates float64[n] of the samples with the given numbers int64[n]."""
        end = self.start if self.end is None else self.end
        return self.start + (end - self.start) * np.minimum(samples / self.num_samples, 1.0)


class MaskedRows:
    """Masked LM samples: masks tokens in the rows of another dataset, for encoders such as BERT.

    The mask depends only on (seed, sample number).

    Args:
        rows: dataset whose batches have `input_ids` int64[number of rows, length of a row].
        rate: masking rate.
        mask_id: id of the mask token.
        special_ids: ids that are never masked and never used as random tokens, with padding.
        vocab_size: number of ids.
        replace: fractions of the chosen tokens that become the mask token, become a random token, or stay unchanged.
        starts_word: bool[vocab_size], subwords that begin a word, to mask whole words; None masks single tokens.
        seed: determines the mask.

    Attributes:
        ramp_start: number of the sample at which the rate begins to change. Samples are numbered by their position in
            the data, where a phase or a branch of a run may start anywhere.
    """

    ramp_start = 0

    def __init__(
        self, rows: SampleDataset, rate: MaskingRate, *, mask_id: int, special_ids: Sequence[int] | np.ndarray,
        vocab_size: int, replace: Sequence[float] = REPLACE, starts_word: np.ndarray | None = None, seed: int = 0,
    ) -> None:  # fmt: skip
        self.rows, self.rate, self.mask_id, self.seed = rows, rate, mask_id, seed
        self.replace, self.starts_word = replace, starts_word
        self._special, self._ordinary_ids = special_and_ordinary([*special_ids, mask_id], vocab_size)
        self._noise_key = stream_key(seed, "masks")

    def __len__(self) -> int:
        return len(self.rows)

    def describe(self) -> str:
        """Describe the objective and the data, for the log."""
        rate, unit = self.rate, "tokens" if self.starts_word is None else "words"
        end = "" if rate.end is None else f" to {rate.end:g} at sample {rate.num_samples:,}"
        parts = "/".join(f"{100 * part:g}" for part in self.replace)
        return f"masked LM, {rate.start:g}{end} of the {unit}, mask/random/keep {parts}; {self.rows.describe()}"

    @property
    def fingerprint(self) -> str:
        """sha256 over data and masking settings; equal fingerprints mean equal samples."""
        words = None if self.starts_word is None else np.flatnonzero(self.starts_word).tolist()
        special = np.flatnonzero(self._special).tolist()
        ids = [self.mask_id, special, words, len(self._special)]
        parts = [_VERSION, self.rows.fingerprint, astuple(self.rate), list(self.replace), self.seed, *ids]
        return json_sha256(parts)

    @property
    def order(self) -> str | None:
        """sha256 over the data and the order of the rows, without the masks; None if `rows` has no such hash."""
        return getattr(self.rows, "order", None)

    def batch(self, samples: np.ndarray) -> dict[str, np.ndarray]:
        """Make a batch of masked rows from their sample numbers int64[n], which count over all epochs.

        Returns:
            The batch of the dataset `rows` with masked `input_ids`, and `labels` int64[n, length], -100 for tokens
            that were not chosen.
        """
        samples = np.asarray(samples, np.int64)
        epochs, numbers, batch = self._keyed_rows(samples)
        ids = batch["input_ids"]
        labels = np.empty_like(ids)
        for begin in range(0, len(samples), BLOCK):
            here = slice(begin, begin + BLOCK)
            random_integers = draw_integers(self._noise_key, epochs[here], numbers[here], ids.shape[1]).T
            ids[here], labels[here] = self._masked(samples[here], random_integers, ids[here])
        return {**batch, "labels": labels}

    def will_need(self, samples: np.ndarray) -> None:
        """Prefetch the samples with the given numbers from the disk."""
        self.rows.will_need(samples)

    def _keyed_rows(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
        """Epochs and numbers that key the noise of rows, int64[n] each, and the rows."""
        return np.zeros_like(samples), samples, self.rows.batch(samples)

    def _masked(
        self, samples: np.ndarray, random_integers: np.ndarray, ids: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        starts = None
        if self.starts_word is not None:
            starts = self.starts_word[ids]
            starts[:, 1:] |= self._special[ids[:, :-1]]  # a word does not continue after a special token
        # One number for all rows is faster than an array.
        rate = self.rate.start if self.rate.end is None else self.rate.at(samples - self.ramp_start)[:, None]
        return mask_tokens(
            ids, random_integers, rate, self.mask_id, self._ordinary_ids, self._special, self.replace, starts
        )


class TokenBlocks(TokenStreamDataset):
    """Blocks of `length` tokens for an encoder, cut from the documents' tokens one after the other.

    No special tokens are added. `pad_id` fills the short last block of an epoch.
    """

    def __init__(
        self, tokens: TokenSource | Sequence[TokenSource], length: int, *, pad_id: int, vocab_size: int, seed: int = 0
    ) -> None:
        super().__init__(tokens, vocab_size, [length], seed)
        self.length, self.pad_id = length, pad_id

    def describe(self) -> str:
        """Describe the size of the data, for the log."""
        return f"blocks of {self.length} tokens; {self.num_tokens:,} training tokens"

    def settings(self) -> dict[str, Any]:
        return {"length": self.length, "pad_id": self.pad_id}

    def maps(self) -> tuple[np.ndarray, ...]:
        """Return the arrays, possibly memory-mapped, that the tokens are read from."""
        return tuple(source.tokens for source in self.sources)

    def batch(self, samples: np.ndarray) -> dict[str, np.ndarray]:
        """Return `input_ids` and `attention_mask`, int64[n, length], of the n samples with the given numbers."""
        return self.blocks(*self.rows_of(samples))

    def blocks(self, epochs: np.ndarray, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Return the blocks of text with the given numbers, before any masking.

        Args:
            epochs: int64[n], the epoch of each block.
            rows: int64[n], number of each block in its epoch.

        Returns:
            `input_ids` and `attention_mask`, int64[n, length].
        """
        ids = self.read(self.starts_of(epochs, rows), self.length)
        mask = np.ones_like(ids)
        mask[self.is_short(rows), self.last_row_length :] = 0
        return {"input_ids": np.where(mask, ids, self.pad_id), "attention_mask": mask}


class MaskedLMDataset(MaskedRows):
    """Masked LM examples: blocks of tokenized text in which random tokens are masked.

    The mask depends only on (seed, epoch, row).

    Args:
        tokens, vocab_size, seed: see `TokenStreamDataset`.
        length: tokens per block.
        mask_id: id of the mask token.
        special_ids: ids that are never masked and never used as random tokens; `pad_id` is added.
        pad_id: fills the short last block of an epoch.
        probability: masking rate.
    """

    rows: TokenBlocks

    def __init__(
        self,
        tokens: TokenSource | Sequence[TokenSource],
        length: int,
        *,
        mask_id: int,
        special_ids: Sequence[int],
        pad_id: int,
        vocab_size: int,
        probability: float = 0.15,
        seed: int = 0,
    ) -> None:
        rows = TokenBlocks(tokens, length, pad_id=pad_id, vocab_size=vocab_size, seed=seed)
        ids = {"mask_id": mask_id, "special_ids": [*special_ids, pad_id], "vocab_size": vocab_size}
        super().__init__(rows, MaskingRate(probability), seed=seed, **ids)
        self._noise_key = stream_key(seed, "noise")

    def _keyed_rows(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
        epochs, rows = self.rows.rows_of(samples)
        return epochs, rows, self.rows.blocks(epochs, rows)

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

from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass

import numpy as np
from numpy.random import Generator

from lm_experiments_tools.data.loader import SampleDataset
from lm_experiments_tools.data.objectives.objective import Objective
from lm_experiments_tools.data.objectives.token_stream import BLOCK
from lm_experiments_tools.data.order import row_generators, stream_key
from lm_experiments_tools.files import json_sha256
from lm_experiments_tools.labels import IGNORED_LABEL

_VERSION = 2  # of the mapping (seed, sample, row) -> masked row; part of the fingerprint
REPLACE = (0.8, 0.1, 0.1)  # of the chosen tokens: mask token, random token, unchanged


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
    random: np.ndarray,
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
        random: float of the shape of `tokens`, one number per token, uniform on [0, 1).
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
    if starts is not None:
        random = _by_words(random, starts, probability)
    chosen = (random < probability) & ~special[tokens]
    labels = np.where(chosen, tokens, IGNORED_LABEL)
    masked, replaced = np.multiply(replace[0], probability), np.multiply(replace[0] + replace[1], probability)
    inputs = np.where(chosen & (random < masked), mask_id, tokens)
    places = np.nonzero(chosen & (masked <= random) & (random < replaced))
    low, high = (np.broadcast_to(bound, tokens.shape)[places] for bound in (masked, replaced))
    spread = (random[places] - low) / (high - low) * len(ordinary_ids)
    inputs[places] = ordinary_ids[np.minimum(spread.astype(np.int64), len(ordinary_ids) - 1)]  # rounding may give 1.0
    return inputs, labels


def _by_words(random: np.ndarray, starts: np.ndarray, bound: float | np.ndarray) -> np.ndarray:
    """Random numbers that are below `bound` in all tokens of a word or in none; how far below is each token's own."""
    columns = np.arange(random.shape[-1])
    first = np.maximum.accumulate(np.where(starts, columns, 0), axis=-1)
    is_chosen = np.take_along_axis(random < bound, first, axis=-1)
    return np.where(starts, random, np.where(is_chosen, random * bound, 1.0))


class MaskedLM(Objective):
    """Masked LM in blocks of `input_length` tokens, without [CLS] and [SEP]. Special tokens are never masked.

    Args:
        mlm_probability: masking rate.

    Raises:
        UserError: the vocabulary has neither a mask token nor a sentinel.
    """

    def __init__(self, mlm_probability: float = 0.15) -> None:
        self.probability = mlm_probability

    def prepare(self) -> None:
        special = [*self.vocabulary.special_ids, self.vocabulary.pad_id, self.mask_id]
        self.special, self.ordinary_ids = special_and_ordinary(special, self.vocabulary.size)

    def example(self, tokens: np.ndarray, rng: Generator) -> dict[str, np.ndarray]:
        return self._masked(tokens, rng.random(len(tokens)))

    def examples(self, rows: np.ndarray, rngs: Iterator[Generator]) -> dict[str, np.ndarray]:
        # One call of numpy for many rows: five times as fast.
        return self._masked(rows, np.stack([rng.random(rows.shape[1]) for rng in rngs]))

    def _masked(self, tokens: np.ndarray, random: np.ndarray) -> dict[str, np.ndarray]:
        masking = self.probability, self.mask_id, self.ordinary_ids, self.special
        inputs, labels = mask_tokens(tokens, random, *masking)
        return {"input_ids": inputs, "labels": labels}

    def describe(self) -> str:
        return f"masked LM, {self.probability:g} of the tokens, blocks of {self.row_length} tokens"


class Blocks(Objective):
    """Blocks of `input_length` tokens without labels, which `MaskedRows` masks."""

    def example(self, tokens: np.ndarray, rng: Generator) -> dict[str, np.ndarray]:
        return {"input_ids": tokens}

    def examples(self, rows: np.ndarray, rngs: Iterator[Generator]) -> dict[str, np.ndarray]:
        return {"input_ids": rows}

    def describe(self) -> str:
        return f"blocks of {self.row_length} tokens"


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
        batch = self.rows.batch(samples)
        ids = batch["input_ids"]
        labels = np.empty_like(ids)
        for begin in range(0, len(samples), BLOCK):
            here = slice(begin, begin + BLOCK)
            generators = row_generators(self._noise_key, np.zeros_like(samples[here]), samples[here])
            random = np.stack([rng.random(ids.shape[1]) for rng in generators])
            ids[here], labels[here] = self._masked(samples[here], random, ids[here])
        return {**batch, "labels": labels}

    def will_need(self, samples: np.ndarray) -> None:
        """Prefetch the samples with the given numbers from the disk."""
        self.rows.will_need(samples)

    def _masked(self, samples: np.ndarray, random: np.ndarray, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        starts = None
        if self.starts_word is not None:
            starts = self.starts_word[ids]
            starts[:, 1:] |= self._special[ids[:, :-1]]  # a word does not continue after a special token
        # One number for all rows is faster than an array.
        rate = self.rate.start if self.rate.end is None else self.rate.at(samples - self.ramp_start)[:, None]
        return mask_tokens(ids, random, rate, self.mask_id, self._ordinary_ids, self._special, self.replace, starts)

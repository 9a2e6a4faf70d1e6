"""Masked language modelling on the rows of another dataset, with a masking rate that may change over the run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import astuple, dataclass

import numpy as np

from lm_experiments_tools.data.loader import SampleDataset
from lm_experiments_tools.data.objectives.mlm import REPLACE, mask_tokens, special_and_ordinary
from lm_experiments_tools.data.objectives.token_stream import BLOCK
from lm_experiments_tools.data.order import sample_words, stream_key

_VERSION = 1  # of the mapping (seed, sample, row) -> masked row; part of the fingerprint


@dataclass(frozen=True)
class MaskingRate:
    """Probability of a token to be chosen: `start` at sample 0, linear to `end` at `num_samples`; None is constant.

    It depends on the global sample number alone, so a resumed run and any number of workers agree.
    """

    start: float
    end: float | None = None
    num_samples: int = 1

    def at(self, samples: np.ndarray) -> np.ndarray:
        """float64[n] of global sample numbers int64[n]."""
        end = self.start if self.end is None else self.end
        return self.start + (end - self.start) * np.minimum(samples / self.num_samples, 1.0)


class MaskedRows:
    """A `SampleDataset` that masks the rows of another one; noise is a pure function of (seed, global sample number).

    Args:
        rows: its batches have `input_ids` [n, length].
        mask_id: replaces chosen tokens.
        special_ids: ids that are neither chosen nor used as random tokens, padding included; `mask_id` is added.
        replace: parts of the chosen tokens that become the mask token, a random token, or stay.
        starts_word: bool[vocab_size], subwords that begin a word, to choose whole words; None chooses tokens.
    """

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
        """The objective and the rows, for the log."""
        rate, unit = self.rate, "tokens" if self.starts_word is None else "words"
        end = "" if rate.end is None else f" to {rate.end:g} at sample {rate.num_samples:,}"
        parts = "/".join(f"{100 * part:g}" for part in self.replace)
        return f"masked LM, {rate.start:g}{end} of the {unit}, mask/random/keep {parts}; {self.rows.describe()}"

    @property
    def fingerprint(self) -> str:
        """sha256 over the rows and the settings."""
        words = None if self.starts_word is None else np.flatnonzero(self.starts_word).tolist()
        special = np.flatnonzero(self._special).tolist()
        ids = [self.mask_id, special, words, len(self._special)]
        parts = [_VERSION, self.rows.fingerprint, astuple(self.rate), list(self.replace), self.seed, *ids]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    @property
    def order(self) -> str | None:
        """sha256 over everything that determines a sample's text, before masking."""
        return getattr(self.rows, "order", None)

    def batch(self, samples: np.ndarray) -> dict[str, np.ndarray]:
        """The rows of global sample numbers int64[n], masked, and `labels` int64[n, length]: -100 where not chosen."""
        samples, batch = np.asarray(samples, np.int64), self.rows.batch(samples)
        ids = batch["input_ids"]
        labels = np.empty_like(ids)
        for begin in range(0, len(samples), BLOCK):
            here = slice(begin, begin + BLOCK)
            ids[here], labels[here] = self._masked(samples[here], ids[here])
        return {**batch, "labels": labels}

    def will_need(self, samples: np.ndarray) -> None:
        """See `SampleDataset.will_need`."""
        self.rows.will_need(samples)

    def _masked(self, samples: np.ndarray, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        words, starts = sample_words(self._noise_key, np.zeros_like(samples), samples, ids.shape[1]).T, None
        if self.starts_word is not None:
            starts = self.starts_word[ids]
            starts[:, 1:] |= self._special[ids[:, :-1]]  # a word does not continue after a special token
        rate = self.rate.at(samples)[:, None]
        return mask_tokens(ids, words, rate, self.mask_id, self._ordinary_ids, self._special, self.replace, starts)

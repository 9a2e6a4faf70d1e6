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
from typing import Any

import numpy as np
from numpy.random import Generator

from lm_experiments_tools.data.objectives.objective import Objective
from lm_experiments_tools.labels import IGNORED_LABEL


class MaskedLM(Objective):
    """Masked LM in rows of `input_length` tokens: of the token stream, or of documents (`DocumentRows`).

    Special tokens are never masked.

    Args:
        replace: fractions of the chosen tokens that become the mask token, become a random token, or stay unchanged.
        starts_word: bool[vocabulary size], subwords that begin a word, to mask whole words; None masks single tokens.

    Raises:
        UserError: the vocabulary has neither a mask token nor a sentinel.
    """

    def __init__(
        self,
        mlm_probability: float = 0.15,
        replace: Sequence[float] = (0.8, 0.1, 0.1),
        starts_word: np.ndarray | None = None,
    ) -> None:
        self.probability, self.replace, self.starts_word = mlm_probability, replace, starts_word

    def prepare(self) -> None:
        self.special = np.zeros(self.vocabulary.size, bool)
        self.special[[*self.vocabulary.special_ids, self.vocabulary.pad_id, self.mask_id]] = True
        self.ordinary_ids = np.flatnonzero(~self.special)

    def examples(self, rows: np.ndarray, rngs: Iterator[Generator]) -> dict[str, np.ndarray]:
        # One call of numpy for many rows: five times as fast.
        return self.masked(rows, np.stack([rng.random(rows.shape[1]) for rng in rngs]))

    def masked(self, tokens: np.ndarray, random: np.ndarray) -> dict[str, np.ndarray]:
        """Mask the tokens int64[n, length] that random numbers of the same shape, uniform on [0, 1), choose."""
        if self.starts_word is not None:
            random = self._by_words(tokens, random)
        chosen = (random < self.probability) & ~self.special[tokens]
        labels = np.where(chosen, tokens, IGNORED_LABEL)
        bound, replaced = self.replace[0] * self.probability, sum(self.replace[:2]) * self.probability
        inputs = np.where(chosen & (random < bound), self.mask_id, tokens)
        places = np.nonzero(chosen & (bound <= random) & (random < replaced))
        spread = (random[places] - bound) / (replaced - bound) * len(self.ordinary_ids)
        last = len(self.ordinary_ids) - 1  # rounding may give 1.0
        inputs[places] = self.ordinary_ids[np.minimum(spread.astype(np.int64), last)]
        return {"input_ids": inputs, "labels": labels}

    def _by_words(self, tokens: np.ndarray, random: np.ndarray) -> np.ndarray:
        """Random numbers that choose all tokens of a word or none; how far below the bound is each token's own."""
        starts = self.starts_word[tokens]
        starts[:, 1:] |= self.special[tokens[:, :-1]]  # a word does not continue after a special token
        first = np.maximum.accumulate(np.where(starts, np.arange(random.shape[1]), 0), axis=1)
        is_chosen = np.take_along_axis(random < self.probability, first, axis=1)
        return np.where(starts, random, np.where(is_chosen, random * self.probability, 1.0))

    def describe(self) -> str:
        unit = "tokens" if self.starts_word is None else "words"
        parts = "/".join(f"{100 * part:g}" for part in self.replace)
        shares = f"{self.probability:g} of the {unit}, mask/random/keep {parts}"
        return f"masked LM, {shares}, rows of {self.row_length} tokens"

    def settings(self) -> dict[str, Any]:
        words = None if self.starts_word is None else np.flatnonzero(self.starts_word).tolist()
        options = {"mlm_probability": self.probability, "replace": list(self.replace), "starts_word": words}
        return {**super().settings(), "options": options}

"""Objectives of the literature: BART's text infilling with sentence permutation, and sentence-level MASS.

    python run_t5_pretraining.py --task examples.objectives:TextInfilling --task_options period_id=5 ...
    python run_t5_pretraining.py --task examples.objectives:MASS --task_options period_id=5 ...

`period_id` is the id of the token that ends a sentence. Example of sentences with the period 5 and the mask token 9:

    tokens           11 12 13 5 | 21 22 5
    TextInfilling    21 22 5 9 13 5       labels 11 12 13 5 21 22 5
    MASS             11 9 9 5 9 22 5      labels 12 13 21
"""

import numpy as np

from lm_experiments_tools import Objective


def sentences(tokens, period_id):
    """The sentences of a row, each with its period; the last one may be cut."""
    return [part for part in np.split(tokens, np.flatnonzero(tokens == period_id) + 1) if part.size]


class TextInfilling(Objective):
    """BART's noise (Lewis et al., ACL 2020, section 2.2): sentences in random order, spans replaced by one mask token.

    Span lengths follow a Poisson distribution with mean 3. A span of length 0 inserts a mask token. Spans may overlap:
    a density of 0.3 hides 28.6 % of the tokens.
    """

    models = ("encoder-decoder",)

    def __init__(self, period_id: int, density: float = 0.3):
        self.period_id, self.density = period_id, density

    def prepare(self):
        self.row_length = self.input_length * 4 // 5  # inserted mask tokens can make inputs longer than rows

    def example(self, tokens, rng):
        parts = sentences(tokens, self.period_id)
        text = [token for k in rng.permutation(len(parts)) for token in parts[k].tolist()]
        lengths = rng.poisson(3, max(1, round(self.density * len(text) / 3)))
        for length in lengths.tolist():
            start = int(rng.integers(0, max(1, len(text) - length + 1)))
            text[start : start + length] = [self.mask_id]
        return {"input_ids": text, "labels": tokens}


class MASS(Objective):
    """MASS (Song et al., ICML 2019, section 3.1) of each sentence: half of it is masked, the target is that half."""

    models = ("encoder-decoder",)

    def __init__(self, period_id: int):
        self.period_id = period_id

    def example(self, tokens, rng):
        inputs, labels = tokens.copy(), []
        for sentence in sentences(inputs, self.period_id):
            length = len(sentence) // 2
            start = int(rng.integers(0, len(sentence) - length + 1))
            labels += sentence[start : start + length].tolist()
            sentence[start : start + length] = self.mask_id
        return {"input_ids": inputs, "labels": labels}

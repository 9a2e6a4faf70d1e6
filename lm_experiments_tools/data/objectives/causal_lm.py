"""Causal language modelling: predict each token of a block of text from the tokens before it.

Example with the token stream 10 11 ... 19, which continues at 10 after 19. The epoch starts at token 14:

    decoder, blocks of 6                     encoder-decoder, blocks of 5, EOS 1
    inputs   13 14 15 16 17 18               inputs   1
    labels -100 14 15 16 17 18               labels   14 15 16 17 18
    inputs   18 19 10 11 12 13               inputs   1
    labels -100 19 10 11 12 13               labels   19 10 11 12 13

Hugging Face's decoders shift the labels themselves and never predict the first token of a block. Consecutive blocks
therefore overlap by one token, whose label is -100. An encoder-decoder gets EOS as its input and predicts all labels.
Both predict every token once per epoch. A block may contain the end of one document and the beginning of the next.
"""

from __future__ import annotations

import numpy as np
from numpy.random import Generator

from lm_experiments_tools.data.objectives.objective import Objective
from lm_experiments_tools.labels import IGNORED_LABEL


class CausalLM(Objective):
    """Causal LM in blocks of `input_length` tokens."""

    def prepare(self) -> None:
        self.row_length = self.target_length = self.input_length
        if self.model_kind == "encoder-decoder":
            self.input_length, self.with_eos = 1, ("input_ids",)
        else:
            self.overlap = 1

    def example(self, tokens: np.ndarray, rng: Generator) -> dict[str, np.ndarray]:
        if self.model_kind == "encoder-decoder":
            return {"input_ids": tokens[:0], "labels": tokens}
        return {"input_ids": tokens, "labels": np.concatenate([[IGNORED_LABEL], tokens[1:]])}

    def describe(self) -> str:
        return f"causal LM ({self.model_kind}), blocks of {self.row_length} tokens"

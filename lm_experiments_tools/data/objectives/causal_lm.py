"""Causal language modelling: predict each token of a block of text from the tokens before it.

Example with the token stream 10 11 ... 19, which continues at 10 after 19. The epoch starts at token 14:

    decoder, blocks of 6                     encoder-decoder, blocks of 5, EOS 1
    inputs   13 14 15 16 17 18               inputs   1
    labels -100 14 15 16 17 18               labels   14 15 16 17 18
    inputs   18 19 10 11 12 13               inputs   1
    labels -100 19 10 11 12 13               labels   19 10 11 12 13

Hugging Face's decoders shift the labels themselves and never predict the first token of a block. Consecutive blocks
therefore overlap by one token, whose label is -100. An encoder-decoder gets EOS as its input and predicts all labels.
Both predict every token once per epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from lm_experiments_tools.data.objectives.token_stream import TokenSource, TokenStreamDataset
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.labels import IGNORED_LABEL

if TYPE_CHECKING:
    from lm_experiments_tools.data.objectives.registry import ObjectiveContext


def build(context: ObjectiveContext, tokens: TokenSource | Sequence[TokenSource]) -> CausalLMDataset:
    """Build the training or validation dataset of `--task causal_lm` from tokenized text."""
    return CausalLMDataset(
        tokens,
        context.args.input_seq_len,
        eos_id=context.vocabulary.eos_id,
        encoder_decoder=context.model_kind == "encoder-decoder",
        **context.stream_options(),
    )


class CausalLMDataset(TokenStreamDataset):
    """Causal LM examples: blocks of `length` tokens, cut from the documents' tokens one after the other.

    A block may contain the end of one document and the beginning of the next. The model sees this boundary only if the
    documents were tokenized with `append_eos`.

    Args:
        tokens, vocab_size, seed: see `TokenStreamDataset`.
        length: tokens per block, at least 2.
        eos_id: input of an encoder-decoder.
        pad_id: fills the short last block of an epoch.
        encoder_decoder: True for encoder-decoder models, False for decoders.
    """

    def __init__(
        self,
        tokens: TokenSource | Sequence[TokenSource],
        length: int,
        *,
        eos_id: int,
        pad_id: int,
        vocab_size: int,
        encoder_decoder: bool = False,
        seed: int = 0,
    ) -> None:
        if length < 2:
            raise UserError(f"causal LM needs blocks of at least 2 tokens, but --input_seq_len is {length}.")
        self.context = 0 if encoder_decoder else 1  # tokens of a block without a label
        super().__init__(tokens, vocab_size, [length - self.context], seed)
        self.length, self.eos_id, self.pad_id, self.encoder_decoder = length, eos_id, pad_id, encoder_decoder

    def describe(self) -> str:
        """Describe the objective and the size of the data, for the log."""
        kind = "encoder-decoder" if self.encoder_decoder else "decoder"
        return f"causal LM ({kind}), blocks of {self.length} tokens; {self.num_tokens:,} training tokens"

    def settings(self) -> dict[str, Any]:
        ids = [self.eos_id, self.pad_id]
        return {"task": "causal_lm", "length": self.length, "encoder_decoder": self.encoder_decoder, "ids": ids}

    def batch(self, samples: np.ndarray) -> dict[str, np.ndarray]:
        """Make a batch of examples from their sample numbers int64[n], which count over all epochs.

        Returns:
            `input_ids`, `attention_mask` and `labels`, int64[n, length]; the first two are int64[n, 1] for an
            encoder-decoder.
        """
        epochs, rows = self.rows_of(samples)
        starts = (self.starts_of(epochs, rows) - self.context) % self.num_tokens
        tokens = self.read(starts, self.length)
        labels = tokens.copy()
        labels[:, : self.context] = IGNORED_LABEL
        short, end = self.is_short(rows), self.context + self.last_row_length
        labels[short, end:] = IGNORED_LABEL
        if self.encoder_decoder:
            inputs = np.full((len(rows), 1), self.eos_id, np.int64)
            return {"input_ids": inputs, "attention_mask": np.ones_like(inputs), "labels": labels}
        mask = np.ones_like(tokens)
        tokens[short, end:], mask[short, end:] = self.pad_id, 0
        return {"input_ids": tokens, "attention_mask": mask, "labels": labels}

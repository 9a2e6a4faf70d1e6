"""Masked language modelling for encoders: some tokens are masked, the model predicts them.

Of the tokens chosen, 80 % become the mask token, 10 % a random token, 10 % stay as they are (Devlin et al., "BERT",
NAACL 2019, section 3.1). One 32-bit word u decides about a token, with probability 0.15::

    u / 2**32 below 0.12      mask token
                    0.135     random token: the position of u between the two bounds picks it
                    0.15      itself
                    1         not chosen, label -100

One worked example, mask token 99, ordinary tokens 10 ... 19, EOS 1 (never chosen), u / 2**32 below each token:

    tokens    10    11     12     13    1    14
    u         0.5   0.1    0.13   0.14  0.1  0.9
    inputs    10    99     16     13    1    14         0.13 is 2/3 of the way from 0.12 to 0.135: token 6 of 10
    labels  -100    11     12     13  -100  -100
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from lm_experiments_tools.data.objectives.token_stream import BLOCK, TokenSource, TokenStreamDataset
from lm_experiments_tools.data.order import sample_words, stream_key
from lm_experiments_tools.data.text.vocabulary import MASK_PIECES
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.labels import IGNORED_LABEL

if TYPE_CHECKING:
    from lm_experiments_tools.data.objectives.registry import ObjectiveContext
    from lm_experiments_tools.data.text.vocabulary import Vocabulary

_32 = np.uint64(32)
_LAST = np.uint64(2**32 - 1)
REPLACE = (0.8, 0.1, 0.1)  # of the chosen tokens: mask token, random token, unchanged


def build(context: ObjectiveContext, tokens: TokenSource | Sequence[TokenSource]) -> MaskedLMDataset:
    """Builder of `--task mlm`. Special tokens (padding, EOS, unknown, sentinels) are never masked."""
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
    """The id of the mask token, else of sentinel 0. Raises UserError where there is neither."""
    if vocabulary.mask_id is not None:
        return vocabulary.mask_id
    if vocabulary.num_sentinels == 0:
        raise UserError(
            f"--task mlm needs a token that hides others, but {vocabulary.path} has neither "
            f"{' nor '.join(MASK_PIECES)} nor a sentinel: give another vocabulary, or train one by `lmtools vocab`."
        )
    return int(vocabulary.sentinel_ids[0])


def special_and_ordinary(special_ids: Sequence[int], vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Mask of the special ids, bool[vocab_size], and all other ids: arguments of `mask_tokens`."""
    special = np.zeros(vocab_size, bool)
    special[special_ids] = True
    return special, np.flatnonzero(~special)


def mask_tokens(
    tokens: np.ndarray,
    words: np.ndarray,
    probability: float | np.ndarray,
    mask_id: int,
    ordinary_ids: np.ndarray,
    special: np.ndarray,
    replace: Sequence[float] = REPLACE,
    starts: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Mask tokens int64[...], each by its own random bits.

    Args:
        words: uint64[...], uniform on [0, 2**32).
        probability: masking rate; a number or an array [rows, 1].
        ordinary_ids: int64[m], candidates for a random token.
        special: bool[vocabulary], ids that are never chosen.
        replace: parts of the chosen tokens that become the mask token, a random token, or stay.
        starts: bool[...], first tokens of words; the random bits of such a token choose its whole word.

    Returns:
        inputs and labels int64[...]; labels are -100 where nothing was chosen.
    """
    parts = (replace[0], replace[0] + replace[1], 1.0)
    bounds = [np.rint(np.multiply(part, probability) * 2**32).astype(np.uint64) for part in parts]
    if starts is not None:
        words = _by_words(words, starts, bounds[2])
    chosen = (words < bounds[2]) & ~special[tokens]
    inputs, labels = tokens.copy(), np.full_like(tokens, IGNORED_LABEL)
    places = np.nonzero(chosen)
    picked, drawn = tokens[places], words[places]
    masked, replaced, _ = (np.broadcast_to(bound, tokens.shape)[places] for bound in bounds)
    labels[places] = picked
    replacement = np.where(drawn < masked, mask_id, picked)
    random = (masked <= drawn) & (drawn < replaced)
    spread = (drawn - masked)[random] * np.uint64(len(ordinary_ids)) // (replaced - masked)[random]
    replacement[random] = ordinary_ids[spread.astype(np.int64)]
    inputs[places] = replacement
    return inputs, labels


def _by_words(words: np.ndarray, starts: np.ndarray, bound: np.ndarray) -> np.ndarray:
    """Random bits that are below `bound` in all tokens of a word or in none; how far below is each token's own."""
    columns = np.arange(words.shape[-1])
    first = np.maximum.accumulate(np.where(starts, columns, 0), axis=-1)
    is_chosen = np.take_along_axis(words < bound, first, axis=-1)
    return np.where(starts, words, np.where(is_chosen, words * bound >> _32, _LAST))


class TokenBlocks(TokenStreamDataset):
    """Full blocks of `length` tokens of the token stream; no token is added, and `pad_id` fills the short last one."""

    def __init__(
        self, tokens: TokenSource | Sequence[TokenSource], length: int, *, pad_id: int, vocab_size: int, seed: int = 0
    ) -> None:
        super().__init__(tokens, vocab_size, [length], seed)
        self.length, self.pad_id = length, pad_id

    def describe(self) -> str:
        """The size of the data, for the log."""
        return f"blocks of {self.length} tokens; {self.num_tokens:,} training tokens"

    def settings(self) -> dict[str, Any]:
        return {"length": self.length, "pad_id": self.pad_id}

    def maps(self) -> tuple[np.ndarray, ...]:
        """Arrays that may be memory-mapped."""
        return tuple(source.tokens for source in self.sources)

    def batch(self, samples: np.ndarray) -> dict[str, np.ndarray]:
        """Blocks of global sample numbers int64[n]: `input_ids` and `attention_mask`, int64[n, length]."""
        return self.blocks(*self.rows_of(samples))

    def blocks(self, epochs: np.ndarray, rows: np.ndarray) -> dict[str, np.ndarray]:
        """As `batch`, of epochs and rows int64[n]."""
        ids = self.read(self.starts_of(epochs, rows), self.length)
        mask = np.ones_like(ids)
        mask[self.is_short(rows), self.last_row_length :] = 0
        return {"input_ids": np.where(mask, ids, self.pad_id), "attention_mask": mask}


class MaskedLMDataset(TokenBlocks):
    """`TokenBlocks` with some tokens masked.

    Args:
        tokens, vocab_size, seed: as `TokenStreamDataset`.
        length: tokens of a block.
        special_ids: ids that are neither chosen nor used as random tokens; `mask_id` is added.
        pad_id: fills the short last block.
        probability: masking rate.
    """

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
        super().__init__(tokens, length, pad_id=pad_id, vocab_size=vocab_size, seed=seed)
        self.mask_id, self.probability = mask_id, probability
        self._special, self._ordinary_ids = special_and_ordinary([*special_ids, mask_id], vocab_size)
        self._noise_key = stream_key(seed, "noise")

    def describe(self) -> str:
        """The objective and the size of the data, for the log."""
        return (
            f"masked LM, blocks of {self.length} tokens, {self.probability:g} of them predicted; "
            f"{self.num_tokens:,} training tokens"
        )

    def settings(self) -> dict[str, Any]:
        return {
            "task": "mlm",
            "length": self.length,
            "probability": self.probability,
            "ids": [self.mask_id, self.pad_id, np.flatnonzero(self._special).tolist()],
            "vocab_size": self.vocab_size,
        }

    def batch(self, samples: np.ndarray) -> dict[str, np.ndarray]:
        """Examples of global sample numbers int64[n], any order, any epochs.

        Returns:
            `input_ids`, `attention_mask` and `labels`, int64[n, length]; labels are -100 where nothing is predicted.
        """
        epochs, rows = self.rows_of(samples)
        batch = self.blocks(epochs, rows)
        ids, labels = batch["input_ids"], np.empty_like(batch["input_ids"])
        for begin in range(0, len(rows), BLOCK):
            here = slice(begin, begin + BLOCK)
            words = sample_words(self._noise_key, epochs[here], rows[here], self.length).T
            ids[here], labels[here] = mask_tokens(
                ids[here], words, self.probability, self.mask_id, self._ordinary_ids, self._special
            )
        padding = batch["attention_mask"] == 0
        ids[padding], labels[padding] = self.pad_id, IGNORED_LABEL
        return {**batch, "labels": labels}

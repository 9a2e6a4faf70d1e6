"""UTF-8 bytes of the text that each token ID stands for: the denominator of bits per byte.

- Bytes (ByT5), byte-level BPE and byte fallback (`<0x0A>`): the bytes that the token encodes.
- SentencePiece and its copies in `tokenizers`: the UTF-8 bytes of the piece, with one byte for each mark of a space.
- WordPiece: the UTF-8 bytes of the piece without `##`. A piece without `##` that is no single punctuation character
  counts one byte more, for the lost space in front of it.
- Special tokens, sentinels, padding and the unknown token: 0.
- Tokenizers that do not mark spaces: unknown, so there are no bits per byte.

The sum over a document is `len(text.encode())` if the tokenizer is lossless. Otherwise it is the length of the
normalized text. A vocabulary that puts a space in front of each text counts one byte more.
"""

from __future__ import annotations

import re
import unicodedata
from typing import TYPE_CHECKING

import numpy as np

from lm_experiments_tools.data.text.fast_tokenizer import WORD_MARKS, FastTokenizer, components

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_FALLBACK = re.compile(r"<0x[0-9A-F]{2}>")
_SPACE, _BYTE_LEVEL_SPACE = WORD_MARKS


def pretrained_token_bytes(tokenizer: PreTrainedTokenizerBase) -> np.ndarray | None:
    """int64[IDs]: bytes of each token of a transformers tokenizer; None where they are unknown."""
    if tokenizer.__class__.__name__ == "ByT5Tokenizer":
        from lm_experiments_tools.data.text.byte_vocabulary import ByteVocabulary

        return ByteVocabulary().token_bytes
    if not tokenizer.is_fast:
        return None
    return fast_token_bytes(FastTokenizer(tokenizer.backend_tokenizer.to_str()), {*tokenizer.all_special_ids})


def fast_token_bytes(tokenizer: FastTokenizer, special_ids: set[int]) -> np.ndarray | None:
    """int64[IDs]: bytes of each token; None where they are unknown.

    Args:
        special_ids: IDs without text, in addition to the tokenizer's own special tokens.
    """
    mark, model = _space_mark(tokenizer), tokenizer.settings["model"]
    if not mark and tokenizer.kind != "WordPiece":
        return None
    added = {token["id"] for token in tokenizer.settings["added_tokens"]}
    counts = np.zeros(tokenizer.size, np.int64)
    for piece, index in tokenizer.pieces.items():
        if index in special_ids or index in tokenizer.special_ids:
            continue
        if model.get("byte_fallback") and _FALLBACK.fullmatch(piece):
            counts[index] = 1
        elif index in added:
            counts[index] = len(piece.encode())
        elif tokenizer.kind == "WordPiece":
            counts[index] = _wordpiece_bytes(piece, model["continuing_subword_prefix"])
        else:
            counts[index] = len(piece) if mark == _BYTE_LEVEL_SPACE else len(piece.replace(mark, " ").encode())
    return counts


def _space_mark(tokenizer: FastTokenizer) -> str:
    """The character that subwords have for a space; "" if there is none."""
    replaced = [part.get("content") for part in components(tokenizer.settings["normalizer"])]
    return tokenizer.word_mark or (_SPACE if _SPACE in replaced else "")


def _wordpiece_bytes(piece: str, prefix: str) -> int:
    if piece.startswith(prefix) and piece != prefix:
        return len(piece[len(prefix) :].encode())
    # BERT's normalizer sets punctuation and Chinese characters apart from each other, without a space in the text.
    is_apart = len(piece) == 1 and (unicodedata.category(piece)[0] in "PS" or "CJK" in unicodedata.name(piece, ""))
    return len(piece.encode()) + (not is_apart)

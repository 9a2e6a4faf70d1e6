"""The wrapper of Hugging Face's Rust `tokenizers`, shared by T5's vocabularies and BERT's tokenizers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import tokenizers

from lm_experiments_tools.errors import UserError, first_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WORD_MARKS = ("\u2581", "\u0120")  # of the space before a word: SentencePiece's, byte-level BPE's


class FastTokenizer:
    """A Rust tokenizer that encodes special tokens in a text as ordinary text.

    Args:
        content: text of a tokenizer.json.

    Attributes:
        settings: `content`, parsed.
        kind: kind of model: BPE, WordPiece, Unigram, WordLevel.
        pieces: subword -> id.
        size: every id is below this (a vocabulary may have unused ids).
        special_ids: IDs of special tokens.
    """

    def __init__(self, content: str):
        self.content, self.settings = content, json.loads(content)
        self.backend = tokenizers.Tokenizer.from_str(content)
        self.backend.no_truncation()
        self.backend.no_padding()
        self.backend.encode_special_tokens = True  # as ordinary text
        self.kind = self.settings["model"]["type"]
        self.pieces = self.backend.get_vocab(with_added_tokens=True)
        self.size = max(self.pieces.values()) + 1
        self.special_ids = {token["id"] for token in self.settings["added_tokens"] if token["special"]}

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text; by several threads unless TOKENIZERS_PARALLELISM is "false", as in workers."""
        return [encoding.ids for encoding in self.backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    def digest(self, *facts: Any) -> str:
        """sha256 of everything that determines IDs (subwords, normalization, model) and of `facts`."""
        parts = {part: self.settings[part] for part in ("normalizer", "pre_tokenizer", "model")}
        if isinstance(parts["model"].get("vocab"), dict):  # in arbitrary order; the pieces are listed below
            parts["model"] = {key: value for key, value in parts["model"].items() if key != "vocab"}
        pieces = sorted(self.pieces.items(), key=lambda item: (item[1], item[0]))
        content = json.dumps([_without_nulls(parts), pieces, *facts], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()

    @cached_property
    def starts_word(self) -> np.ndarray | None:
        """bool[size]: True where a subword begins a word, and for unused ids; None where that is not marked.

        WordPiece marks the other subwords with "##"; SentencePiece and byte-level BPE mark the space before a word.
        """
        is_wordpiece, starts = self.kind == "WordPiece", np.ones(self.size, bool)
        mark = self.settings["model"]["continuing_subword_prefix"] if is_wordpiece else self.word_mark
        if not mark:
            return None
        for piece, index in self.pieces.items():
            starts[index] = piece.startswith(mark) != is_wordpiece
        return starts

    @property
    def word_mark(self) -> str:
        """The character with which subwords mark the space before a word; "" if there is none."""
        marks = {"Metaspace": "replacement", "Prepend": "prepend"}
        for part in (*components(self.settings["normalizer"]), *components(self.settings["pre_tokenizer"])):
            if part["type"] == "ByteLevel":
                return WORD_MARKS[1]
            if part["type"] in marks:
                return part[marks[part["type"]]]
        return ""


def open_pretrained(what: str, load: Callable[[], PreTrainedTokenizerBase], remedy: str) -> PreTrainedTokenizerBase:
    """The fast tokenizer that `load` returns; `what` names it in messages. Raises UserError if it cannot be used."""
    try:
        pretrained = load()
    except UserError:
        raise
    except Exception as error:  # OSError, ValueError, KeyError, ..., plain Exception: as the files are damaged
        raise UserError(f"{what} cannot be loaded ({type(error).__name__}): {first_line(error)}; {remedy}") from error
    if pretrained.__class__.__name__ == "ByT5Tokenizer":
        return pretrained
    if not pretrained.is_fast:
        raise UserError(f"{what} is a {type(pretrained).__name__} in Python: give one that has a tokenizer.json")
    special = {index for index, token in pretrained.added_tokens_decoder.items() if token.special}
    pieces = pretrained.get_vocab().items()  # transformers makes T5's of a config alone, with the mark of a space
    if not any(index not in special and piece.strip("".join(WORD_MARKS)) for piece, index in pieces):
        raise UserError(f"{what} has no tokens but special ones: save the tokenizer there too")
    return pretrained


def components(settings: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """A normalizer or pre-tokenizer, or the parts of a sequence of them."""
    if settings is None:
        return
    if settings["type"] == "Sequence":
        for part in settings.get("normalizers", settings.get("pretokenizers")):
            yield from components(part)
    else:
        yield settings


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value

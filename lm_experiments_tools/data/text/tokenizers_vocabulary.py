"""Vocabularies of Hugging Face tokenizers: BPE, WordPiece, Unigram and others.

Special ids come from the tokenizer's config files. For a single `tokenizer.json`, special tokens are found by the
names in `fast_tokenizer.ROLES`. Sentinels, which mark the spans in span corruption, are those of `find_sentinels`. If
there are none, they are the largest set of <unused0>, ..., of [unused0], ..., or of additional special tokens.

Worker processes use the Rust tokenizer without transformers.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lm_experiments_tools.data.text.fast_tokenizer import ROLES, WORD_MARKS, FastTokenizer, read_pretrained
from lm_experiments_tools.data.text.vocabulary import MODEL_NAMES, Vocabulary, family, find_sentinels
from lm_experiments_tools.errors import UserError, first_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_RARE = "\U00013080"  # a hieroglyph

_UNUSED = ("<unused{}>", "[unused{}]")


class TokenizersVocabulary(Vocabulary):
    """A vocabulary of a fast Hugging Face tokenizer.

    Args:
        path: file or folder of the tokenizer.
        content: content of its tokenizer.json.
        roles: ids of the special tokens pad, eos, unk (-1 for none) and mask (None for none).
        sentinel_ids: ids of sentinel 0, 1, ..., which mark the spans in span corruption.
        pretrained: the transformers tokenizer, needed only to save.
    """

    def __init__(
        self,
        path: Path,
        content: str,
        roles: dict[str, Any],
        sentinel_ids: np.ndarray,
        pretrained: PreTrainedTokenizerBase | None = None,
    ) -> None:
        self.path, self.sentinel_ids, self.num_sentinels = path, sentinel_ids, len(sentinel_ids)
        self._roles, self._pretrained = roles, pretrained
        self.pad_id, self.eos_id, self.unk_id, self.mask_id = (roles[name] for name in ("pad", "eos", "unk", "mask"))
        self.bos_id = None if pretrained is None else pretrained.bos_token_id
        self._tokenizer = FastTokenizer(content)
        self.size = self.num_pieces = self._tokenizer.size
        with_role = {i for i in roles.values() if i is not None and i >= 0}
        self.special_ids = sorted(self._tokenizer.special_ids | with_role | set(sentinel_ids.tolist()))
        self._encoder = _without_forged(self._tokenizer, {*self.special_ids} - {self.unk_id})

    @classmethod
    def of(cls, pretrained: PreTrainedTokenizerBase, path: Path) -> TokenizersVocabulary:
        """Convert a transformers tokenizer. Raises UserError if it has no end-of-text token."""
        _check_unknown(pretrained, path)
        eos = pretrained.eos_token_id if pretrained.eos_token_id is not None else pretrained.sep_token_id
        if eos is None:
            raise UserError(f"vocabulary {path} has no eos_token or sep_token: set one in its tokenizer_config.json")
        pad, unk = pretrained.pad_token_id, pretrained.unk_token_id
        roles = {
            "pad": eos if pad is None else pad,
            "eos": eos,
            "unk": -1 if unk is None or unk == eos else unk,  # GPT-2's is the end of a text, and never met
            "mask": pretrained.mask_token_id,
        }
        sentinels = _sentinels(pretrained, {*roles.values(), *(getattr(pretrained, f"{name}_id") for name in ROLES)})
        settings = json.loads(pretrained.backend_tokenizer.to_str())
        special = {*roles.values(), *sentinels}
        for token in settings["added_tokens"]:
            token["special"] = token["special"] or token["id"] in special  # else text could forge it
        return cls(path, json.dumps(settings), roles, np.array(sentinels, np.int64), pretrained)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of several texts, see `FastTokenizer.encode_batch`."""
        return self._encoder.encode_batch(texts)

    def find(self, piece: str) -> int | None:
        return self._tokenizer.pieces.get(piece)

    def _starts_word(self, index: int) -> bool:
        piece = self._piece(index)
        if self._tokenizer.kind == "WordPiece":
            return not piece.startswith("##")
        return self._tokenizer.kind == "WordLevel" or piece.startswith(WORD_MARKS)

    def _decode_chunk(self, ids: list[int], leading_space: bool) -> str:
        text = self._tokenizer.backend.decode(
            [i for i in ids if i >= 0 and i not in (self.pad_id, self.eos_id)], skip_special_tokens=False
        )
        begins = bool(ids) and ids[0] >= 0 and self._starts_word(ids[0])
        return " " + text if leading_space and begins and text and not text.startswith(" ") else text

    def _piece(self, index: int) -> str:
        return self._tokenizer.backend.id_to_token(index) or f"<{index}>"

    @property
    def token_bytes(self) -> np.ndarray | None:
        return self._tokenizer.token_bytes({*self.special_ids})

    @cached_property
    def identity(self) -> str:
        added = sorted(self._tokenizer.settings["added_tokens"], key=lambda token: token["id"])
        return self._tokenizer.digest(added, [sorted(self._roles.items()), self.sentinel_ids.tolist()])

    @property
    def sha256(self) -> str:
        return self.identity

    def save_tokenizer(self, directory: str | os.PathLike) -> None:
        """Write tokenizer files for `AutoTokenizer`. Raises UserError if transformers reads other ids from them."""
        for name in MODEL_NAMES:  # of another vocabulary, which `load` would prefer
            (Path(directory) / name).unlink(missing_ok=True)
        pretrained = self._pretrained or read_pretrained(self.path)
        pretrained.save_pretrained(str(directory))
        if Vocabulary.load(directory).identity != self.identity:
            raise UserError(f"vocabulary {self.path}: its copy saved to {directory} gives other ids")

    def __reduce__(self) -> tuple:
        return TokenizersVocabulary, (self.path, self._tokenizer.content, self._roles, self.sentinel_ids)


def _check_unknown(pretrained: PreTrainedTokenizerBase, path: Path) -> None:
    """Refuse a tokenizer that fails at an unknown character; warn of one that drops it."""
    try:
        found = pretrained.backend_tokenizer.encode(_RARE, add_special_tokens=False).ids
    except Exception as error:  # tokenizers raises plain ones
        raise UserError(
            f"vocabulary {path} has no token for what it does not know, and ends at the first such word "
            f"({first_line(error)}): give it an unk_token in its model"
        ) from error
    if not found:
        logger.warning("vocabulary %s has no token for characters that it does not know, and leaves them out", path)


def _without_forged(tokenizer: FastTokenizer, special: set[int]) -> FastTokenizer:
    """The tokenizer, or one of the same ids that does not find its special tokens in text."""
    pieces = [piece for piece, i in tokenizer.pieces.items() if i in special]
    probes = [text for piece in pieces for text in (piece, f"a{piece}b", f"a {piece} b")]
    if all(special.isdisjoint(ids) for ids in tokenizer.encode_batch(probes)):
        return tokenizer
    settings = json.loads(tokenizer.content)
    model = settings["model"]
    if isinstance(model["vocab"], dict):
        hidden = {piece for piece, i in model["vocab"].items() if i in special}
        model["vocab"] = {_hidden(piece) if piece in hidden else piece: i for piece, i in model["vocab"].items()}
        pairs = ((pair, pair.split(" ") if isinstance(pair, str) else pair) for pair in model.get("merges", ()))
        merges = [pair for pair, parts in pairs if hidden.isdisjoint([*parts, "".join(parts)])]
        model.update({"merges": merges} if "merges" in model else {})
    else:  # of a Unigram model, to which the unknown token is a number
        hidden = {piece for i, (piece, _) in enumerate(model["vocab"]) if i in special or i == model["unk_id"]}
        model["vocab"] = [[_hidden(p) if p in hidden else p, score] for p, score in model["vocab"]]
    settings["added_tokens"] = [token for token in settings["added_tokens"] if token["content"] not in hidden]
    return FastTokenizer(json.dumps(settings))


def _hidden(piece: str) -> str:
    return f"\0{piece}"  # documents with a NUL are refused


def _sentinels(pretrained: PreTrainedTokenizerBase, taken: set[int | None]) -> list[int]:
    """Ids of the sentinel tokens for masked spans, in order (see the top of this file)."""
    ids = pretrained.get_vocab()
    additional = [ids[str(token)] for token in pretrained.extra_special_tokens if str(token) in ids]
    additional = [index for index in dict.fromkeys(additional) if index not in taken]
    is_unigram = type(pretrained.backend_tokenizer.model).__name__ == "Unigram"
    return find_sentinels(ids, is_unigram) or max([additional, *(family(ids, name) for name in _UNUSED)], key=len)

"""The vocabulary of a Hugging Face tokenizer: BPE, WordPiece, Unigram, ..., as AutoTokenizer reads it.

Special ids come from the roles that its files name; a `tokenizer.json` without the files beside it names none, so
there they are looked for by the names in `_NAMES`. Sentinels are its tokens <extra_id_0>, <extra_id_1>, ..., else the
most numerous of <unused0>, ..., [unused0], ... and its additional special tokens in their order.

Workers encode by the Rust tokenizer alone, without transformers.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Sequence
from functools import cached_property
from itertools import count, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tokenizers

from lm_experiments_tools.data.text.vocabulary import MASK_PIECES, MODEL_NAMES, Vocabulary, read_config
from lm_experiments_tools.errors import UserError, first_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_NAMES = {
    "pad_token": ("<pad>", "[PAD]", "<|padding|>"),
    "eos_token": ("</s>", "<eos>", "[EOS]", "<|endoftext|>", "<|end_of_text|>"),
    "sep_token": ("[SEP]",),
    "bos_token": ("<s>", "<bos>"),
    "cls_token": ("[CLS]",),
    "unk_token": ("<unk>", "[UNK]"),
    "mask_token": MASK_PIECES,
}
_SENTINELS = "<extra_id_{}>"
_UNUSED = ("<unused{}>", "[unused{}]")
_RARE = "\U00013080"  # a hieroglyph
_WORD_MARKS = ("\u2581", "\u0120")  # of the space before a word: SentencePiece's, byte-level BPE's


def read_pretrained(path: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder, or of a tokenizer.json; that of its folder where the files beside it say more.

    Raises:
        UserError: it cannot be read, or encodes in Python alone.
    """
    from transformers import AutoTokenizer, BertTokenizerFast

    folder = path if path.is_dir() else path.parent
    names = {file.name for file in folder.iterdir()}
    try:
        if path.is_dir() and "tokenizer.json" in names and not names & {"tokenizer_config.json", "config.json"}:
            return _of_one_file(path / "tokenizer.json")
        if not path.is_dir() and not (path.name == "tokenizer.json" and read_config(folder)):
            return _of_one_file(path)
        if "vocab.txt" in names and not names & {"tokenizer.json", "tokenizer_config.json"}:
            return BertTokenizerFast.from_pretrained(str(folder))
        return AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
    except UserError:
        raise
    except Exception as error:  # OSError, ValueError, KeyError, ..., plain Exception: as the files are damaged
        raise UserError(
            f"vocabulary {path}: no tokenizer can be read from it ({type(error).__name__}: {first_line(error)}); give "
            "the folder that a tokenizer's save_pretrained() wrote, or its tokenizer.json"
        ) from error


def _of_one_file(path: Path) -> PreTrainedTokenizerBase:
    from transformers import PreTrainedTokenizerFast

    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    found = {
        role: next((name for name in names if tokenizer.token_to_id(name) is not None), None)
        for role, names in _NAMES.items()
    }
    others = [token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special]
    extra = [name for name in others if name not in found.values()]
    roles = {role: name for role, name in found.items() if name is not None}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, extra_special_tokens=extra, **roles)


class TokenizersVocabulary(Vocabulary):
    """A fast tokenizer.

    Args:
        path: where it comes from.
        content: of its tokenizer.json.
        roles: ids of pad, eos, unk (-1: none) and mask (None: none).
        sentinel_ids: of sentinel 0, 1, ...
        pretrained: the tokenizer of transformers, which only saving needs.
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
        self._content, self._roles, self._pretrained = content, roles, pretrained
        self.pad_id, self.eos_id, self.unk_id, self.mask_id = (roles[name] for name in ("pad", "eos", "unk", "mask"))
        self._backend = tokenizers.Tokenizer.from_str(content)
        self._backend.no_truncation()
        self._backend.no_padding()
        self._backend.encode_special_tokens = True  # as ordinary text
        self._ids = self._backend.get_vocab(with_added_tokens=True)
        self.size = self.num_pieces = max(self._ids.values()) + 1
        added = self._backend.get_added_tokens_decoder().items()
        own = {i for i in roles.values() if i is not None and i >= 0}
        self.special_ids = sorted({i for i, token in added if token.special} | own | set(sentinel_ids.tolist()))
        settings = json.loads(content)
        self._kind = settings["model"]["type"]
        self._encoder = _without_forged(self._backend, settings, {*self.special_ids} - {self.unk_id})

    @classmethod
    def of(cls, pretrained: PreTrainedTokenizerBase, path: Path) -> TokenizersVocabulary:
        """The vocabulary of a tokenizer of transformers.

        Raises:
            UserError: it encodes in Python alone, has no word, or nothing that ends a text.
        """
        if not pretrained.is_fast:
            raise UserError(
                f"vocabulary {path} is a {type(pretrained).__name__}, which runs in Python alone and is too slow "
                "for a corpus: give a tokenizer that has a tokenizer.json"
            )
        if not _has_words(pretrained):
            raise UserError(
                f"vocabulary {path} has no tokens but special ones, so that every word would be "
                f"{pretrained.unk_token}: save the tokenizer there too, or give another folder"
            )
        _check_unknown(pretrained, path)
        eos = pretrained.eos_token_id if pretrained.eos_token_id is not None else pretrained.sep_token_id
        if eos is None:
            raise UserError(
                f"vocabulary {path} has no token that ends a text (eos_token, sep_token): name one in its "
                f"tokenizer_config.json, or give one of {', '.join(_NAMES['eos_token'] + _NAMES['sep_token'])} to it"
            )
        pad, unk = pretrained.pad_token_id, pretrained.unk_token_id
        roles = {
            "pad": eos if pad is None else pad,
            "eos": eos,
            "unk": -1 if unk is None or unk == eos else unk,  # GPT-2's is the end of a text, and never met
            "mask": pretrained.mask_token_id,
        }
        sentinels = _sentinels(pretrained, {*roles.values(), *(getattr(pretrained, f"{name}_id") for name in _NAMES)})
        settings = json.loads(pretrained.backend_tokenizer.to_str())
        special = {*roles.values(), *sentinels}
        for token in settings["added_tokens"]:
            token["special"] = token["special"] or token["id"] in special  # else text could forge it
        return cls(path, json.dumps(settings), roles, np.array(sentinels, np.int64), pretrained)

    def encode(self, text: str) -> list[int]:
        return self._encoder.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` for many texts; by several threads unless TOKENIZERS_PARALLELISM is "false", as in workers."""
        return [encoding.ids for encoding in self._encoder.encode_batch_fast(list(texts), add_special_tokens=False)]

    def find(self, piece: str) -> int | None:
        return self._ids.get(piece)

    def starts_word(self, index: int) -> bool:
        piece = self._piece(index)
        if self._kind == "WordPiece":
            return not piece.startswith("##")
        return self._kind == "WordLevel" or piece.startswith(_WORD_MARKS)

    def _decode_chunk(self, ids: list[int], leading_space: bool) -> str:
        text = self._backend.decode(
            [i for i in ids if i >= 0 and i not in (self.pad_id, self.eos_id)], skip_special_tokens=False
        )
        begins = bool(ids) and ids[0] >= 0 and self.starts_word(ids[0])
        return " " + text if leading_space and begins and text and not text.startswith(" ") else text

    def _piece(self, index: int) -> str:
        return self._backend.id_to_token(index) or f"<{index}>"

    @cached_property
    def identity(self) -> str:
        settings = json.loads(self._content)
        parts = {part: settings[part] for part in ("normalizer", "pre_tokenizer", "model")}
        if isinstance(parts["model"].get("vocab"), dict):  # in an order of its own; the pieces are listed below
            del parts["model"]["vocab"]
        pieces = sorted(self._ids.items(), key=lambda item: (item[1], item[0]))
        added = sorted(settings["added_tokens"], key=lambda token: token["id"])
        roles = [sorted(self._roles.items()), self.sentinel_ids.tolist()]
        content = json.dumps([_without_nulls(parts), pieces, added, roles], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()

    @property
    def sha256(self) -> str:
        return self.identity

    def save_tokenizer(self, directory: str | os.PathLike) -> None:
        """See `Vocabulary.save_tokenizer`. Raises UserError where transformers gives other ids after reading them."""
        for name in MODEL_NAMES:  # of another vocabulary, which `load` would prefer
            (Path(directory) / name).unlink(missing_ok=True)
        pretrained = self._pretrained or read_pretrained(self.path)
        pretrained.save_pretrained(str(directory))
        if Vocabulary.load(directory).identity != self.identity:
            raise UserError(
                f"vocabulary {self.path}: transformers reads other ids from the copy that it saved to {directory}; "
                "save the tokenizer by this version of transformers first, and give that folder"
            )

    def __reduce__(self) -> tuple:
        return TokenizersVocabulary, (self.path, self._content, self._roles, self.sentinel_ids)


def _has_words(pretrained: PreTrainedTokenizerBase) -> bool:
    """False for what transformers makes of a tokenizer_config.json alone: T5's then has the mark of a space."""
    special = {i for i, token in pretrained.added_tokens_decoder.items() if token.special}
    pieces = pretrained.get_vocab().items()
    return any(i not in special and piece.strip("".join(_WORD_MARKS)) for piece, i in pieces)


def _check_unknown(pretrained: PreTrainedTokenizerBase, path: Path) -> None:
    """Refuse a tokenizer that fails at a character it does not know, and warn of one that passes over it."""
    try:
        found = pretrained.backend_tokenizer.encode(_RARE, add_special_tokens=False).ids
    except Exception as error:  # tokenizers raises plain ones
        raise UserError(
            f"vocabulary {path} has no token for what it does not know, and ends at the first such word "
            f"({first_line(error)}): give it an unk_token in its model"
        ) from error
    if not found:
        logger.warning("vocabulary %s has no token for characters that it does not know, and leaves them out", path)


def _without_forged(
    backend: tokenizers.Tokenizer, settings: dict[str, Any], special: set[int]
) -> tokenizers.Tokenizer:
    """The tokenizer, or one of the same ids that does not find its special tokens in text.

    To `encode_special_tokens` they are text for the model, which has them among its pieces: Unigram and word-level
    models take "</s>" for such a piece. So they get names there that no text has. `settings` are changed.
    """
    pieces = [piece for piece, i in backend.get_vocab(with_added_tokens=True).items() if i in special]
    probes = [text for piece in pieces for text in (piece, f"a{piece}b", f"a {piece} b")]
    if all(special.isdisjoint(found.ids) for found in backend.encode_batch_fast(probes, add_special_tokens=False)):
        return backend
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
    encoder = tokenizers.Tokenizer.from_str(json.dumps(settings))
    encoder.no_truncation()
    encoder.no_padding()
    encoder.encode_special_tokens = True
    return encoder


def _hidden(piece: str) -> str:
    return f"\0{piece}"  # documents with a NUL are refused


def _sentinels(pretrained: PreTrainedTokenizerBase, taken: set[int | None]) -> list[int]:
    """Ids of the tokens that stand for masked spans, in their order (see the top of this file)."""
    ids = pretrained.get_vocab()

    def family(name: str) -> list[int]:
        return [ids[piece] for piece in takewhile(ids.__contains__, (name.format(k) for k in count()))]

    additional = [ids[str(token)] for token in pretrained.extra_special_tokens if str(token) in ids]
    additional = [index for index in dict.fromkeys(additional) if index not in taken]
    return family(_SENTINELS) or max([additional, *map(family, _UNUSED)], key=len)


def _without_nulls(value: Any) -> Any:
    """Settings that are not set are left out, so that a release that knows more of them changes no identity."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value

"""Tokenizers of Hugging Face: BPE, WordPiece, Unigram and others.

Special ids come from the tokenizer's config files. For a single `tokenizer.json`, special tokens are found by the
names in `_ROLES`. Sentinels, which mark the spans in span corruption, are those of `find_sentinels`. If there are
none, they are the largest set of <unused0>, ..., of [unused0], ..., or of additional special tokens.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import tempfile
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import tokenizers

from lm_experiments_tools.data.text.tokenizer import (
    MASK_PIECES,
    MODEL_NAMES,
    Tokenizer,
    family,
    find_sentinels,
    read_config,
)
from lm_experiments_tools.errors import UserError, first_line
from lm_experiments_tools.files import json_sha256, naming

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")

logger = logging.getLogger(__name__)

_DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
_BRACKETED = re.compile(r"\[.*\]|<.*>")
_PLAIN_PARTS = re.compile(r"[!-/:-@\[-`{-~]|[A-Za-z0-9]+")
# All are required, because transformers gives missing ones ids at the end.
_BERT_TOKENS = {"unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "pad": "[PAD]", "mask": "[MASK]"}
_ROLES = {  # of special tokens, and their names
    "pad": ("<pad>", "[PAD]", "<|padding|>"),
    "eos": ("</s>", "<eos>", "[EOS]", "<|endoftext|>", "<|end_of_text|>"),
    "sep": ("[SEP]",),
    "bos": ("<s>", "<bos>"),
    "cls": ("[CLS]",),
    "unk": ("<unk>", "[UNK]"),
    "mask": MASK_PIECES,
}
_SPACE, _BYTE_LEVEL = "\u2581", "\u0120"  # marks of the space before a word: SentencePiece's, byte-level BPE's
_UNUSED = ("<unused{}>", "[unused{}]")


class HFTokenizer(Tokenizer):
    """A fast tokenizer of Hugging Face."""

    def __init__(self, path: Path, content: str, roles: Mapping[str, int | None], sentinel_ids: Sequence[int]) -> None:
        self.path, self._content = path, content
        self._source = path.absolute() if path.exists() else path  # to `save` from another working directory
        self._settings = settings = json.loads(content)
        self._backend, model = _backend(content), settings["model"]
        self.pieces = self._backend.get_vocab(with_added_tokens=True)
        self.size = max(self.pieces.values()) + 1
        self._is_wordpiece = model["type"] == "WordPiece"
        mark = _word_mark(settings["normalizer"]) or _word_mark(settings["pre_tokenizer"])
        self.word_mark = "" if self._is_wordpiece else mark
        self.continuation = model["continuing_subword_prefix"] if self._is_wordpiece else ""
        self._set_ids(roles, sentinel_ids, (token["id"] for token in settings["added_tokens"] if token["special"]))
        hidden = _unforgeable(settings, {*self.special_ids.tolist()} - {self.unk_id})
        self._encoder = self._backend if hidden is None else _backend(json.dumps(hidden))
        parts = [(settings[part] or {}).get("type") for part in ("normalizer", "pre_tokenizer", "model")]
        is_bert = parts == ["BertNormalizer", "BertPreTokenizer", "WordPiece"]
        # Other added tokens may extend over several words.
        by_word = is_bert and all(token["special"] for token in settings["added_tokens"])
        self._words = _WordTable(self._encoder, self.lowercase) if by_word else None

    @classmethod
    def of(cls, pretrained: PreTrainedTokenizerBase, path: Path) -> HFTokenizer:
        roles = {role: getattr(pretrained, f"{role}_token_id") for role in _ROLES}
        return cls.of_backend(pretrained.backend_tokenizer, path, roles, map(str, pretrained.extra_special_tokens))

    @classmethod
    def of_backend(
        cls, backend: tokenizers.Tokenizer, path: Path, roles: Mapping[str, int | None], extra: Iterable[str]
    ) -> HFTokenizer:
        """Convert a tokenizer of the package `tokenizers`; `extra` are special tokens without a role."""
        ids = backend.get_vocab()
        additional = [ids[name] for name in dict.fromkeys(extra) if name in ids and ids[name] not in roles.values()]
        sentinels = find_sentinels(ids, is_unigram=isinstance(backend.model, tokenizers.models.Unigram))
        sentinels = sentinels or max([additional, *(family(ids, name) for name in _UNUSED)], key=len)
        settings, special = json.loads(backend.to_str()), {*roles.values(), *sentinels}
        for token in settings["added_tokens"]:
            token["special"] = token["special"] or token["id"] in special  # else text could forge it
        return cls(path, json.dumps(settings), roles, sentinels)

    def _check(self) -> None:
        """Refuse a tokenizer that fails at an unknown character; warn of one that drops it."""
        super()._check()
        model = self._settings["model"]
        is_unigram = model["type"] == "Unigram"
        has_unknown = model["unk_id"] is not None if is_unigram else model["unk_token"] in self.pieces
        if not has_unknown and model["type"] != "BPE":
            raise UserError(
                f"vocabulary {self.path} has no token for what it does not know, and ends at the first such word: "
                "give it an unk_token in its model"
            )
        if not (has_unknown or model["byte_fallback"] or self.word_mark == _BYTE_LEVEL):
            logger.warning("vocabulary %s has no token for unknown characters, and leaves them out", self.path)

    def __reduce__(self) -> tuple:
        return HFTokenizer, (self.path, self._content, self.roles, self.sentinel_ids)

    @property
    def lowercase(self) -> bool:
        """True if the tokenizer converts text to lower case."""
        return bool((self._settings["normalizer"] or {}).get("lowercase"))

    @cached_property
    def fingerprint(self) -> str:
        parts = [self._settings[part] for part in ("normalizer", "pre_tokenizer", "model", "added_tokens")]
        return json_sha256([*parts, self.roles, self.sentinel_ids.tolist()])

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text. Uses several threads unless TOKENIZERS_PARALLELISM is "false"."""
        if self._words is None:
            return _encode(self._encoder, texts)
        ids, lengths = self.encode_arrays(texts)
        return [part.tolist() for part in np.split(ids, np.cumsum(lengths)[:-1])] if len(texts) else []

    def encode_arrays(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        return super().encode_arrays(texts) if self._words is None else self._words.encode(texts)

    def _decode(self, ids: list[int]) -> str:
        return self._backend.decode(ids, skip_special_tokens=False)

    @cached_property
    def token_bytes(self) -> np.ndarray | None:
        self._added = {token["id"] for token in self._settings["added_tokens"]}
        return super().token_bytes

    def _num_bytes(self, index: int, piece: str) -> int:
        if self._settings["model"].get("byte_fallback") and _BYTE.fullmatch(piece):
            return 1
        if index in self._added:
            return len(piece.encode())
        if not self._is_wordpiece:
            return len(piece) if self.word_mark == _BYTE_LEVEL else super()._num_bytes(index, piece)
        if piece.startswith(self.continuation) and piece != self.continuation:
            return len(piece[len(self.continuation) :].encode())
        # BERT's normalizer sets punctuation and Chinese characters apart from each other, without a space in the text.
        is_apart = len(piece) == 1 and (unicodedata.category(piece)[0] in "PS" or "CJK" in unicodedata.name(piece, ""))
        return len(piece.encode()) + (not is_apart)

    def save(self, directory: str | os.PathLike) -> None:
        """Write tokenizer files for `AutoTokenizer`. Raises UserError if transformers reads other ids from them."""
        directory = Path(directory)
        for name in MODEL_NAMES:  # of another tokenizer, which `load` would prefer
            (directory / name).unlink(missing_ok=True)
        read_pretrained(self._source, self.lowercase).save_pretrained(str(directory))
        if self._is_wordpiece:
            # An id without a piece belonged to a repeated one; the last piece, whose later line wins, fills its line.
            pieces = {i: piece for piece, i in self._backend.get_vocab(with_added_tokens=False).items()}
            lines = [pieces.get(index, pieces[max(pieces)]) for index in range(max(pieces) + 1)]
            (directory / "vocab.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
        if Tokenizer.load(directory).fingerprint != self.fingerprint:
            raise UserError(f"vocabulary {self.path}: its copy saved to {directory} gives other ids")


class _WordTable:
    """Cache of the ids of words, which makes encoding with BERT's rules ten times faster."""

    MAX_WORDS = 500_000
    MAX_CHARACTERS = 20_000_000

    def __init__(self, backend: tokenizers.Tokenizer, lowercase: bool):
        self._backend, self._model, self._lowercase = backend, backend.model, lowercase
        self._reset()

    def _reset(self) -> None:
        self._number: dict[str, int] = {}
        self._table = np.empty(0, np.int32)
        self._starts = np.zeros(1, np.int64)
        self._num_characters = 0

    def encode(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """(ids int32[total], lengths int64[len(texts)])."""
        words: list[str] = []
        num_words = np.empty(len(texts), np.int64)
        for index, text in enumerate(texts):
            # Not split(): it takes more characters for spaces than BERT, which deletes \x1c and the like.
            found = text.replace("\n", " ").replace("\t", " ").replace("\r", " ").split(" ")
            num_words[index] = len(found)
            words += found
        self._add(set(words).difference(self._number))
        numbers = np.fromiter(map(self._number.__getitem__, words), np.int64, len(words))
        starts = self._starts[numbers]
        word_ends = np.cumsum(self._starts[numbers + 1] - starts)
        word_starts = np.concatenate([[0], word_ends[:-1]]) if len(words) else word_ends
        positions = np.repeat(starts - word_starts, word_ends - word_starts)
        positions += np.arange(len(positions))
        ids = self._table[positions]
        text_ends = np.concatenate([[0], word_ends])[np.cumsum(num_words)]
        if len(self._number) > self.MAX_WORDS or self._num_characters > self.MAX_CHARACTERS:
            self._reset()
        return ids, np.diff(text_ends, prepend=0)

    def _add(self, words: set[str]) -> None:
        plain = [word for word in words if word.isascii() and word.isprintable()]
        others = list(words.difference(plain))
        rows = [*map(self._encode_plain, plain), *_encode(self._backend, others)]
        lengths = np.fromiter(map(len, rows), np.int64, len(rows))
        first = len(self._number)
        self._number.update(zip([*plain, *others], range(first, first + len(rows)), strict=True))
        ids = np.fromiter(chain.from_iterable(rows), np.int32, int(lengths.sum()))
        self._table = np.concatenate([self._table, ids])
        self._starts = np.concatenate([self._starts, self._starts[-1] + np.cumsum(lengths)])
        self._num_characters += sum(map(len, words))

    def _encode_plain(self, word: str) -> list[int]:
        """Ids of a word in printable ASCII, whose normalization and splitting are simple, in a third of the time."""
        word = word.lower() if self._lowercase else word
        return [token.id for part in _PLAIN_PARTS.findall(word) for token in self._model.tokenize(part)]


def _backend(content: str) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer.from_str(content)
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True  # as ordinary text
    return backend


def _encode(backend: tokenizers.Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    return [encoding.ids for encoding in backend.encode_batch_fast(list(texts), add_special_tokens=False)]


def _word_mark(part: dict[str, Any] | None) -> str:
    """The mark that a normalizer or pre-tokenizer puts for the space before a word; "" if none."""
    if part is None:
        return ""
    if part["type"] == "Sequence":
        members = part.get("normalizers", part.get("pretokenizers"))
        return next((mark for mark in map(_word_mark, members) if mark), "")
    if part["type"] == "Replace":
        return _SPACE if part["content"] == _SPACE else ""
    marks = {"ByteLevel": _BYTE_LEVEL, "Metaspace": part.get("replacement"), "Prepend": part.get("prepend")}
    return marks.get(part["type"]) or ""


def _unforgeable(settings: dict[str, Any], special: set[int]) -> dict[str, Any] | None:
    """Settings of a tokenizer of the same ids whose model makes no special token of text; None if it makes none."""
    model = settings["model"]
    vocab = model["vocab"] if isinstance(model["vocab"], dict) else {p: i for i, (p, _) in enumerate(model["vocab"])}
    hidden = {piece for piece, i in vocab.items() if i in special or i == model.get("unk_id")}
    hidden = {piece for piece in hidden if not (model.get("byte_fallback") and _BYTE.fullmatch(piece))}
    pairs = [(pair, pair.split(" ") if isinstance(pair, str) else pair) for pair in model.get("merges", ())]
    made = {"".join(parts) for _, parts in pairs} | {piece for piece in hidden if len(piece) == 1}
    if model["type"] == "BPE" and not model.get("ignore_merges") and hidden.isdisjoint(made):
        return None
    renamed = {piece: f"\0{piece}" for piece in hidden}  # documents with a NUL are refused
    model = {**model, "vocab": {renamed.get(piece, piece): i for piece, i in vocab.items()}}
    if "merges" in model:
        model["merges"] = [pair for pair, parts in pairs if hidden.isdisjoint([*parts, "".join(parts)])]
    if model["type"] == "Unigram":
        model["vocab"] = [[renamed.get(piece, piece), score] for piece, score in settings["model"]["vocab"]]
    added = [token for token in settings["added_tokens"] if token["content"] not in hidden]
    return {**settings, "model": model, "added_tokens": added}


# ---- loading --------------------------------------------------------------------------------------------------------
def load_pretrained(what: str, load: Callable[[], T], remedy: str) -> T:
    """Call a function that loads a model or tokenizer, and turn any exception into a UserError."""
    try:
        return load()
    except Exception as error:  # OSError, ValueError, KeyError, ..., plain Exception: as the files are damaged
        if isinstance(error, UserError) or getattr(error, "errno", None) in _DISK_FULL:
            raise
        reason = first_line(error).removesuffix(" from one of: ")  # a list follows, of which nothing helps
        raise UserError(f"{what} cannot be loaded ({type(error).__name__}): {reason}; {remedy}") from error


def read_tokenizer(path: Path, lowercase: bool | None) -> Tokenizer:
    """Read a tokenizer of Hugging Face or ByT5, one of a single file without transformers; see `Tokenizer.load`."""
    what = f"vocabulary {path}"
    remedy = "give the folder that a tokenizer's save_pretrained() wrote, or its tokenizer.json"
    if (file := _single_file(path)) is not None:
        backend, names, extra = load_pretrained(what, lambda: _read_file(file, lowercase), remedy)
        roles = {role: None if name is None else backend.token_to_id(name) for role, name in names.items()}
        return HFTokenizer.of_backend(backend, path, roles, extra)
    pretrained = load_pretrained(what, lambda: read_pretrained(path), remedy)
    if pretrained.__class__.__name__ != "ByT5Tokenizer":
        if not pretrained.is_fast:
            raise UserError(f"{what} is a {type(pretrained).__name__} in Python: give one that has a tokenizer.json")
        check_words(pretrained, what)
    return Tokenizer.of(pretrained, path)


def read_pretrained(path: Path, lowercase: bool | None = None) -> PreTrainedTokenizerBase:
    """Load a tokenizer of transformers from a folder or file; what does not exist is a name on the hub.

    Args:
        lowercase: treatment of case by BERT's vocab.txt; None to infer it: cased if it has capital letters.
    """
    from transformers import AutoTokenizer, BertTokenizerFast, PreTrainedTokenizerFast

    if path.is_file() and path.suffix not in (".json", ".txt"):  # a SentencePiece model
        with tempfile.TemporaryDirectory() as folder, naming(Path(folder)):
            Tokenizer.load(path).save(folder)
            return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    if not path.exists() or (file := _single_file(path)) is None:
        folder = path.parent if path.is_file() else path
        return AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
    backend, names, extra = _read_file(file, lowercase)
    if file.suffix == ".txt":
        vocab = backend.get_vocab(with_added_tokens=False)
        return BertTokenizerFast(vocab=vocab, do_lower_case=backend.normalizer.lowercase)
    special = {f"{role}_token": name for role, name in names.items()}
    return PreTrainedTokenizerFast(tokenizer_object=backend, extra_special_tokens=extra, **special)


def _single_file(path: Path) -> Path | None:
    """The vocab.txt or tokenizer.json that is the whole tokenizer; None for a folder that AutoTokenizer reads.

    Raises UserError: the files of a folder do not tell the kind of tokenizer.
    """
    folder = path.parent if path.is_file() else path
    names = {file.name for file in folder.iterdir()}
    if path.is_file() and not (path.name == "tokenizer.json" and "tokenizer_config.json" in names):
        return path
    if "tokenizer_config.json" in names:
        return None
    kind = read_config(folder, "config.json").get("model_type")
    # AutoTokenizer would read BERT's vocab.txt in lower case, whether it has capital letters or not.
    if "tokenizer.json" not in names and "vocab.txt" in names and (kind is None or _is_of_bert(folder / "vocab.txt")):
        if names.isdisjoint(("added_tokens.json", "special_tokens_map.json")):
            return folder / "vocab.txt"
    elif kind is not None:
        return None
    elif "tokenizer.json" in names:
        return folder / "tokenizer.json"
    raise UserError(
        f"{folder} has no tokenizer_config.json, which tells the kind of tokenizer: give a folder that "
        "save_pretrained() wrote, or name its .model file, vocab.txt or tokenizer.json"
    )


def _is_of_bert(path: Path) -> bool:
    return {*path.read_text("utf-8", "replace").splitlines()} >= {*_BERT_TOKENS.values()}


def _read_file(path: Path, lowercase: bool | None) -> tuple[tokenizers.Tokenizer, dict[str, str | None], list[str]]:
    """The tokenizer of a vocab.txt or tokenizer.json, the token of each role, and its other special tokens.

    Tokens and ids are those that transformers makes of the file.
    """
    if path.suffix == ".txt":
        backend = _read_bert(path, lowercase)
        names: dict[str, str | None] = dict.fromkeys(_ROLES) | _BERT_TOKENS
    else:
        backend = tokenizers.Tokenizer.from_file(str(path))
        pieces = backend.get_vocab()
        names = {role: next(filter(pieces.__contains__, known), None) for role, known in _ROLES.items()}
    added = {token.content: token.special for token in backend.get_added_tokens_decoder().values()}
    backend.add_special_tokens([name for name in names.values() if name is not None and name not in added])
    return backend, names, [name for name, is_special in added.items() if is_special and name not in names.values()]


def _read_bert(path: Path, lowercase: bool | None) -> tokenizers.Tokenizer:
    """The tokenizer of a vocab.txt, with the settings of transformers' BertTokenizer."""
    try:
        lines = path.read_bytes().decode("utf-8-sig").removesuffix("\n").split("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"the vocabulary {path} is not UTF-8 text (byte {error.start}); give a vocab.txt") from None
    pieces = [line.removesuffix("\r") for line in lines]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    if missing := [piece for piece in _BERT_TOKENS.values() if piece not in vocab]:
        raise UserError(f"{path} is no WordPiece vocabulary of BERT: it has no line {' and no '.join(missing)}")
    if len(vocab) < len(pieces):
        twice = next(piece for index, piece in enumerate(pieces) if vocab[piece] != index)
        logger.warning("%s names %r twice; the last line counts, as in transformers", path, twice)
    if lowercase is None:
        # Uncased ones too have names in brackets with capital letters: [CLS], and <S> in multilingual BERT's.
        lowercase = all(piece == piece.lower() for piece in vocab if not _BRACKETED.fullmatch(piece))
        logger.info("%s is read as BERT's %s vocabulary", path, "uncased" if lowercase else "cased")
    backend = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocab, unk_token="[UNK]"))
    backend.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=lowercase)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    backend.decoder = tokenizers.decoders.WordPiece()
    return backend


def pretrained_token_bytes(tokenizer: PreTrainedTokenizerBase) -> np.ndarray | None:
    """Return the number of bytes of each token of a transformers tokenizer, see `Tokenizer.token_bytes`."""
    if not (tokenizer.is_fast or tokenizer.__class__.__name__ == "ByT5Tokenizer"):
        return None
    return Tokenizer.of(tokenizer, Path(tokenizer.name_or_path)).token_bytes


def check_words(tokenizer: PreTrainedTokenizerBase, what: str) -> None:
    """Raise UserError for the tokenizer that transformers makes of a config without files: it has no words."""
    special = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    pieces = tokenizer.get_vocab().items()  # T5's has the mark of a space
    if not any(index not in special and piece.strip(_SPACE + _BYTE_LEVEL) for piece, index in pieces):
        raise UserError(
            f"{what}: there is no vocabulary (special tokens alone): save it too, or name one by --tokenizer"
        )

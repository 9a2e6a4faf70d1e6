"""Wrapper of Hugging Face's Rust tokenizers, for T5's vocabularies and BERT's tokenizers."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import re
import tempfile
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import tokenizers

from lm_experiments_tools.data.text.vocabulary import MASK_PIECES, MODEL_NAMES, Vocabulary, read_config
from lm_experiments_tools.errors import UserError, first_line
from lm_experiments_tools.files import naming

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")

logger = logging.getLogger(__name__)

_DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
_BRACKETED = re.compile(r"\[.*\]|<.*>")
_BERT_PIECES = ("[UNK]", "[CLS]", "[SEP]")  # without which transformers adds ids beyond the vocabulary
ROLES = {  # of special tokens, and their names
    "pad_token": ("<pad>", "[PAD]", "<|padding|>"),
    "eos_token": ("</s>", "<eos>", "[EOS]", "<|endoftext|>", "<|end_of_text|>"),
    "sep_token": ("[SEP]",),
    "bos_token": ("<s>", "<bos>"),
    "cls_token": ("[CLS]",),
    "unk_token": ("<unk>", "[UNK]"),
    "mask_token": MASK_PIECES,
}
WORD_MARKS = ("\u2581", "\u0120")  # of the space before a word: SentencePiece's, byte-level BPE's


class FastTokenizer:
    """A Rust tokenizer of Hugging Face that encodes special tokens in a text as ordinary text.

    Args:
        content: content of a tokenizer.json.

    Attributes:
        settings: `content`, parsed.
        kind: BPE, WordPiece, Unigram or WordLevel.
        pieces: mapping from subwords to ids.
        size: all ids are smaller.
        special_ids: ids of special tokens.
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
        """Return the ids of each text. Uses several threads unless TOKENIZERS_PARALLELISM is "false"."""
        return [encoding.ids for encoding in self.backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    def digest(self, *facts: Any) -> str:
        """Return a sha256 hash of everything that determines the ids of a text: subwords, normalization and model.

        Args:
            facts: further JSON values to include in the hash.
        """
        parts = {part: self.settings[part] for part in ("normalizer", "pre_tokenizer", "model")}
        if isinstance(parts["model"].get("vocab"), dict):  # in arbitrary order; the pieces are listed below
            parts["model"] = {key: value for key, value in parts["model"].items() if key != "vocab"}
        pieces = sorted(self.pieces.items(), key=lambda item: (item[1], item[0]))
        content = json.dumps([_without_nulls(parts), pieces, *facts], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()

    @cached_property
    def starts_word(self) -> np.ndarray | None:
        """bool[size]: True for subwords that begin a word, and for unused ids; None if words are not marked.

        WordPiece marks the other subwords with "##". SentencePiece and byte-level BPE mark the space before a word.
        """
        is_wordpiece, starts = self.kind == "WordPiece", np.ones(self.size, bool)
        mark = self.settings["model"]["continuing_subword_prefix"] if is_wordpiece else self.word_mark
        if not mark:
            return None
        for piece, index in self.pieces.items():
            starts[index] = piece.startswith(mark) != is_wordpiece
        return starts

    def token_bytes(self, special_ids: set[int]) -> np.ndarray | None:
        """Return the number of bytes of each token's text in UTF-8, for bits per byte.

        - SentencePiece: bytes of the subword; a space mark counts as one byte.
        - Byte-level BPE and byte fallback (`<0x0A>`): the bytes that the token encodes.
        - WordPiece: bytes of the subword without `##`, and one byte for the space before a word. Single punctuation
          characters have no space.
        - Special tokens: 0.

        The sum over a document is `len(text.encode())` for a lossless tokenizer, else the length of the normalized
        text. Vocabularies that put a space before each text count one byte more.

        Args:
            special_ids: additional ids that count 0.

        Returns:
            int64[ids]; None for tokenizers that do not mark spaces.
        """
        replaced = [part.get("content") for part in components(self.settings["normalizer"])]
        mark, model = self.word_mark or (WORD_MARKS[0] if WORD_MARKS[0] in replaced else ""), self.settings["model"]
        if not mark and self.kind != "WordPiece":
            return None
        added = {token["id"] for token in self.settings["added_tokens"]}
        counts = np.zeros(self.size, np.int64)
        for piece, index in self.pieces.items():
            if index in special_ids or index in self.special_ids:
                continue
            if model.get("byte_fallback") and _BYTE.fullmatch(piece):
                counts[index] = 1
            elif index in added:
                counts[index] = len(piece.encode())
            elif self.kind == "WordPiece":
                counts[index] = _wordpiece_bytes(piece, model["continuing_subword_prefix"])
            else:
                counts[index] = len(piece) if mark == WORD_MARKS[1] else len(piece.replace(mark, " ").encode())
        return counts

    @property
    def word_mark(self) -> str:
        """The character that marks the space before a word in subwords; "" if there is none."""
        marks = {"Metaspace": "replacement", "Prepend": "prepend"}
        for part in (*components(self.settings["normalizer"]), *components(self.settings["pre_tokenizer"])):
            if part["type"] == "ByteLevel":
                return WORD_MARKS[1]
            if part["type"] in marks:
                return part[marks[part["type"]]]
        return ""


def _wordpiece_bytes(piece: str, prefix: str) -> int:
    if piece.startswith(prefix) and piece != prefix:
        return len(piece[len(prefix) :].encode())
    # BERT's normalizer sets punctuation and Chinese characters apart from each other, without a space in the text.
    is_apart = len(piece) == 1 and (unicodedata.category(piece)[0] in "PS" or "CJK" in unicodedata.name(piece, ""))
    return len(piece.encode()) + (not is_apart)


def pretrained_token_bytes(tokenizer: PreTrainedTokenizerBase) -> np.ndarray | None:
    """Return the number of bytes of each token of a transformers tokenizer, see `FastTokenizer.token_bytes`."""
    if tokenizer.__class__.__name__ == "ByT5Tokenizer":
        from lm_experiments_tools.data.text.byte_vocabulary import ByteVocabulary

        return ByteVocabulary().token_bytes
    if not tokenizer.is_fast:
        return None
    return FastTokenizer(tokenizer.backend_tokenizer.to_str()).token_bytes({*tokenizer.all_special_ids})


def load_pretrained(what: str, load: Callable[[], T], remedy: str) -> T:
    """Call a function that loads a model or tokenizer, and turn any exception into a UserError.

    Args:
        what: what is loaded, for the error message.
        load: the function.
        remedy: advice for the error message.
    """
    try:
        return load()
    except Exception as error:  # OSError, ValueError, KeyError, ..., plain Exception: as the files are damaged
        if isinstance(error, UserError) or getattr(error, "errno", None) in _DISK_FULL:
            raise
        reason = first_line(error).removesuffix(" from one of: ")  # a list follows, of which nothing helps
        raise UserError(f"{what} cannot be loaded ({type(error).__name__}): {reason}; {remedy}") from error


def read_pretrained(path: Path) -> PreTrainedTokenizerBase:
    """Load a tokenizer as AutoTokenizer does, and from files that it does not read alone.

    Args:
        path: a folder, a tokenizer.json, vocab.txt or SentencePiece model. Without tokenizer_config.json and a
            config.json that names the model's type, a folder may have only a tokenizer.json, a vocab.txt (BERT's
            WordPiece, cased if it has capital letters), vocab.json and merges.txt (byte-level BPE of RoBERTa or
            GPT-2), or a SentencePiece model. What does not exist is a name on the hub.
    """
    from transformers import AutoTokenizer, BertTokenizerFast, GPT2TokenizerFast, RobertaTokenizerFast, T5Tokenizer

    if not path.exists():
        return AutoTokenizer.from_pretrained(str(path), trust_remote_code=False)
    folder, suffix = (path.parent, path.suffix) if path.is_file() else (path, "")
    names = {file.name for file in folder.iterdir()}
    if suffix == ".json" and not ("tokenizer_config.json" in names and path.name == "tokenizer.json"):
        return _of_one_file(path)
    is_bare = not suffix and not names & {"tokenizer.json", "tokenizer_config.json"}
    if suffix == ".txt" or (is_bare and "vocab.txt" in names):
        vocab = read_wordpiece(path if suffix else folder / "vocab.txt")
        missing = [piece for piece in _BERT_PIECES if piece not in vocab]
        if missing and not suffix and "model_type" in read_config(folder, "config.json"):  # MPNet, ESM
            return AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
        if missing:
            raise UserError(f"{path} is no WordPiece vocabulary of BERT: it has no line {' and no '.join(missing)}")
        # Uncased vocabularies too have names in brackets with capital letters: [CLS], and <S> in multilingual BERT's.
        is_cased = any(piece != piece.lower() for piece in vocab if not _BRACKETED.fullmatch(piece))
        logger.info("%s is read as a %s vocabulary of BERT", path, "cased" if is_cased else "uncased")
        if not suffix and names & {"added_tokens.json", "special_tokens_map.json"}:
            return BertTokenizerFast.from_pretrained(str(folder), do_lower_case=not is_cased)
        return BertTokenizerFast(vocab=vocab, do_lower_case=not is_cased)
    if suffix not in ("", ".json"):
        return _of_sentencepiece(path)
    if "tokenizer_config.json" in names or "model_type" in read_config(folder, "config.json"):
        return AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
    if "tokenizer.json" in names:
        return _of_one_file(folder / "tokenizer.json")
    if names >= {"vocab.json", "merges.txt"}:
        vocab = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
        cls = RobertaTokenizerFast if "<s>" in vocab else GPT2TokenizerFast
        return cls.from_pretrained(str(folder), trust_remote_code=False)
    if names.isdisjoint(MODEL_NAMES):
        raise ValueError("there is no tokenizer_config.json, which tells the kind of tokenizer")
    return T5Tokenizer.from_pretrained(str(folder)) if "added_tokens.json" in names else _of_sentencepiece(folder)


def read_wordpiece(path: Path) -> dict[str, int]:
    """Read a vocab.txt: the id of each subword is its line, from 0. Raises UserError if it is not UTF-8 text."""
    try:
        lines = path.read_bytes().decode("utf-8-sig").removesuffix("\n").split("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"the vocabulary {path} is not UTF-8 text (byte {error.start}); give a vocab.txt") from None
    pieces = [line.removesuffix("\r") for line in lines]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    if len(vocab) < len(pieces):
        twice = next(piece for index, piece in enumerate(pieces) if vocab[piece] != index)
        logger.warning("%s names %r twice; the last line counts, as in transformers", path, twice)
    return vocab


def _of_one_file(path: Path) -> PreTrainedTokenizerBase:
    from transformers import PreTrainedTokenizerFast

    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    pieces = tokenizer.get_vocab()
    found = {role: next(filter(pieces.__contains__, names), None) for role, names in ROLES.items()}
    others = [token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special]
    extra = [name for name in others if name not in found.values()]
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, extra_special_tokens=extra, **found)


def _of_sentencepiece(path: Path) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory() as folder, naming(Path(folder)):
        Vocabulary.load(path).save_tokenizer(folder)
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


def open_pretrained(what: str, path: Path) -> PreTrainedTokenizerBase:
    """Load a Hugging Face tokenizer by `read_pretrained` and check that it can be used.

    Args:
        what: name of the tokenizer in error messages.

    Raises:
        UserError: the tokenizer cannot be loaded, is not a fast tokenizer, or has only special tokens.
    """
    remedy = "give the folder that a tokenizer's save_pretrained() wrote, or its tokenizer.json"
    pretrained = load_pretrained(what, lambda: read_pretrained(path), remedy)
    if pretrained.__class__.__name__ == "ByT5Tokenizer":
        return pretrained
    if not pretrained.is_fast:
        raise UserError(f"{what} is a {type(pretrained).__name__} in Python: give one that has a tokenizer.json")
    check_words(pretrained, what)
    return pretrained


def check_words(tokenizer: PreTrainedTokenizerBase, what: str) -> None:
    """Raise UserError for the tokenizer that transformers makes of a config without files: it has no words."""
    special = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    pieces = tokenizer.get_vocab().items()  # T5's has the mark of a space
    if not any(index not in special and piece.strip("".join(WORD_MARKS)) for piece, index in pieces):
        raise UserError(
            f"{what}: there is no vocabulary (special tokens alone): save it too, or name one by --tokenizer"
        )


def components(settings: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """Yield the parts of a tokenizer's normalizer or pre-tokenizer: the members of a sequence, or the single one.

    Args:
        settings: the normalizer or pre-tokenizer in a tokenizer.json; None if there is none.
    """
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

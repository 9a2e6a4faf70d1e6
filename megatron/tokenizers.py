"""Tokenizers for BERT: WordPiece from a vocab.txt, or any fast Hugging Face tokenizer.

| `tokenizer_type` | input | tokenizer |
|---|---|---|
| `BertWordPieceLowerCase` | `vocab_file`, one subword per line | BERT's uncased tokenizer: lower case, no accents |
| `BertWordPieceCase` | `vocab_file` | BERT's cased tokenizer |
| `HFTokenizer` | `name_or_path`, a folder, a file or a name on the hub | the result of `read_pretrained` |

Special tokens in a text are encoded as ordinary text: "[MASK]" becomes `[`, `mask`, `]`, as in Google's BERT and with
transformers' `split_special_tokens=True`. Otherwise ids equal those of transformers' tokenizers.
"""

import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from lm_experiments_tools.checkpoint.manifest import verify_model
from lm_experiments_tools.data.text.fast_tokenizer import FastTokenizer, open_pretrained, read_wordpiece
from lm_experiments_tools.data.tokens.indexed import IndexedDataset
from lm_experiments_tools.data.tokens.tokenize import report_unknown
from lm_experiments_tools.errors import UserError

logger = logging.getLogger(__name__)

WORDPIECE_TYPES = ("BertWordPieceLowerCase", "BertWordPieceCase")
TOKENIZER_TYPES = ("HFTokenizer", *WORDPIECE_TYPES)
_BERT_ROLES = {"unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]", "pad": "[PAD]"}
_ROLES = ("cls", "sep", "mask", "pad")
_BLOCK_CHARACTERS = 1_000_000
_PLAIN_PARTS = re.compile(r"[!-/:-@\[-`{-~]|[A-Za-z0-9]+")


def build_tokenizer(
    tokenizer_type: str, *, vocab_file: str | os.PathLike | None = None, name_or_path: str | os.PathLike | None = None
) -> "BertDataTokenizer":
    """Load a tokenizer for BERT's training data.

    Args:
        tokenizer_type: "BertWordPieceLowerCase", "BertWordPieceCase" or "HFTokenizer".
        vocab_file: a vocab.txt, or a folder that contains one, for WordPiece.
        name_or_path: folder, file or hub name of an HFTokenizer.

    Raises:
        UserError: the tokenizer cannot be loaded, or lacks a special token that BERT needs.
    """
    if tokenizer_type in WORDPIECE_TYPES:
        if vocab_file is None:
            raise UserError(f"--tokenizer-type {tokenizer_type} needs --vocab-file, a vocab.txt")
        return _from_vocab_file(Path(vocab_file), lowercase=tokenizer_type == "BertWordPieceLowerCase")
    if tokenizer_type == "HFTokenizer":
        if name_or_path is None:
            raise UserError("--tokenizer-type HFTokenizer needs --tokenizer-name-or-path, a folder or a hub name")
        return _from_pretrained(os.fspath(name_or_path))
    raise UserError(f"--tokenizer-type {tokenizer_type} is none of {', '.join(TOKENIZER_TYPES)}, which BERT needs")


def check_tokenizer(data: IndexedDataset, tokenizer: "BertDataTokenizer") -> None:
    """Raise UserError if a token file was made with another tokenizer than `tokenizer`, as its PREFIX.json records.

    The share of its unknown tokens is logged.
    """
    made_with = data.meta.get("vocab_sha256")
    if made_with is not None and made_with != tokenizer.fingerprint:
        if tokenizer.other_case is not None and made_with == tokenizer.other_case().fingerprint:
            raise UserError(_other_case(data, tokenizer))
        raise UserError(
            f"the tokens {data.prefix} were made with the tokenizer {data.meta.get('vocab_file')} (fingerprint "
            f"{made_with[:12]}), not with {tokenizer.name} (fingerprint {tokenizer.fingerprint[:12]}): give that one"
        )
    report_unknown(data, tokenizer.unk)


def _other_case(data: IndexedDataset, tokenizer: "BertDataTokenizer") -> str:
    """Error message for tokens of the same vocabulary in the other case."""
    remedy = "give --no_lower_case" if tokenizer.lowercase else "leave out --no_lower_case"
    return f"the tokens {data.prefix} were made with the other case of {tokenizer.name}: {remedy}"


class BertDataTokenizer:
    """Tokenizer for BERT's training data: encodes and decodes text, and knows which ids begin a word, for masking.

    Use `build_tokenizer` to make one.

    Args:
        content: content of a tokenizer.json.
        special: ids of cls, sep, mask, pad and eod. The last one ends a document: eos, or sep if there is no eos.
        name: the file, folder or hub name that the tokenizer was loaded from.
        pretrained: the transformers tokenizer; None for a vocab.txt.
        other_case: function that makes the tokenizer of the same vocab.txt with the other treatment of case (lower
            case or cased); None if there is none.

    Attributes:
        vocab_size: every id is below this (a vocabulary may have unused ids).
        special_ids: int64, sorted: all special tokens, which are never masked.
    """

    def __init__(
        self,
        content: str,
        special: dict[str, int],
        name: str,
        pretrained: Any = None,
        other_case: "Callable[[], BertDataTokenizer] | None" = None,
    ):
        self.name, self.other_case = name, other_case
        self._tokenizer, self._special, self._pretrained = FastTokenizer(content), special, pretrained
        self.vocab_size = self._tokenizer.size
        self.cls, self.sep, self.mask, self.pad = (special[role] for role in _ROLES)
        self.eod = special["eod"]
        self.special_ids = np.array(sorted(self._tokenizer.special_ids | set(special.values())), np.int64)
        self._words = _WordTable(self._tokenizer, self.lowercase) if self._encodes_words_apart else None

    @property
    def token_bytes(self) -> np.ndarray | None:
        """Number of UTF-8 bytes of each token's text, int64 indexed by id; None if unknown."""
        return self._tokenizer.token_bytes({*self.special_ids.tolist()})

    @property
    def _encodes_words_apart(self) -> bool:
        """True if BERT's normalizer, pre-tokenizer and model encode each word between spaces independently."""
        settings = self._tokenizer.settings
        kinds = [(settings[part] or {}).get("type") for part in ("normalizer", "pre_tokenizer", "model")]
        only_special = all(token["special"] for token in settings["added_tokens"])
        return kinds == ["BertNormalizer", "BertPreTokenizer", "WordPiece"] and only_special

    def tokenize(self, text: str) -> list[int]:
        """Return the ids of a text, without special tokens."""
        return self.tokenize_batch([text])[0]

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of several texts, without special tokens."""
        ids, lengths = self.tokenize_arrays(texts)
        return [part.tolist() for part in np.split(ids, np.cumsum(lengths)[:-1])] if len(texts) else []

    def tokenize_arrays(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of several texts as one array, which is faster than lists.

        Returns:
            The ids of all texts, int32, one text after the other, and the number of ids of each text,
            int64[len(texts)].
        """
        encode = self._words.encode if self._words is not None else partial(_encode, self._tokenizer)
        parts = [encode(block) for block in _blocks(texts)]
        if not parts:
            return np.empty(0, np.int32), np.empty(0, np.int64)
        ids, lengths = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        return ids, lengths

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`, with special tokens and without ignored labels (-100)."""
        return self._tokenizer.backend.decode([int(i) for i in ids if i >= 0], skip_special_tokens=False)

    @property
    def unk(self) -> int | None:
        """Id of the unknown token; None if the tokenizer has none."""
        model = self._tokenizer.settings["model"]
        return model["unk_id"] if model["type"] == "Unigram" else self._tokenizer.pieces.get(model["unk_token"])

    @property
    def lowercase(self) -> bool:
        """True if the tokenizer converts text to lower case."""
        return bool((self._tokenizer.settings["normalizer"] or {}).get("lowercase"))

    @cached_property
    def starts_word(self) -> np.ndarray:
        """bool[vocab_size], indexed by id: True for subwords that begin a word, and for special tokens."""
        if self._tokenizer.starts_word is None:
            raise UserError(f"{self.name} does not mark where words begin: use WordPiece, SentencePiece or BPE")
        starts = self._tokenizer.starts_word.copy()
        starts[self.special_ids] = True
        return starts

    @cached_property
    def fingerprint(self) -> str:
        """sha256 of everything that determines a text's ids: subwords, normalization, model, special tokens."""
        return self._tokenizer.digest(sorted(self._special.items()))

    def save(self, directory: str | os.PathLike) -> None:
        """Write the tokenizer's files to a folder, from which AutoTokenizer loads a tokenizer with the same ids."""
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        if self._pretrained is not None:
            self._pretrained.save_pretrained(str(directory))
            return
        from transformers import BertTokenizer

        vocab = self._tokenizer.backend.get_vocab(with_added_tokens=False)
        BertTokenizer(vocab=vocab, do_lower_case=self.lowercase).save_pretrained(directory)
        pieces = dict(zip(vocab.values(), vocab, strict=True))
        last = pieces[self.vocab_size - 1]
        # An id without a piece belonged to a repeated one; the last piece, whose later line wins, fills its line.
        lines = [pieces.get(index, last) for index in range(self.vocab_size)]
        (directory / "vocab.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


class _WordTable:
    """Cache of the ids of words, which makes encoding ten times faster."""

    MAX_WORDS = 500_000
    MAX_CHARACTERS = 20_000_000

    def __init__(self, tokenizer: FastTokenizer, lowercase: bool):
        self._tokenizer = tokenizer
        self._model = tokenizer.backend.model
        self._lowercase = lowercase
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
        rows = [self._encode_plain(word) for word in plain]
        new = [*plain, *words.difference(plain)]
        ids, lengths = _encode(self._tokenizer, new[len(plain) :])
        lengths = np.concatenate([np.fromiter(map(len, rows), np.int64, len(rows)), lengths])
        plain_ids = np.fromiter(chain.from_iterable(rows), np.int32, int(lengths[: len(rows)].sum()))
        self._number.update(zip(new, range(len(self._number), len(self._number) + len(new)), strict=True))
        self._table = np.concatenate([self._table, plain_ids, ids])
        self._starts = np.concatenate([self._starts, self._starts[-1] + np.cumsum(lengths)])
        self._num_characters += sum(map(len, new))

    def _encode_plain(self, word: str) -> list[int]:
        """Of a word in printable ASCII, whose normalization and cutting at punctuation are simple, in a third of the
        time."""
        word = word.lower() if self._lowercase else word
        return [token.id for part in _PLAIN_PARTS.findall(word) for token in self._model.tokenize(part)]


def _blocks(texts: Sequence[str]) -> Iterator[Sequence[str]]:
    """Slices of about a million characters: words and ids are many times as large as their text while lists."""
    first = size = 0
    for index, text in enumerate(texts):
        size += len(text)
        if size > _BLOCK_CHARACTERS:
            yield texts[first : index + 1]
            first, size = index + 1, 0
    if first < len(texts):
        yield texts[first:]


def _encode(tokenizer: FastTokenizer, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    encoded = tokenizer.encode_batch(texts)
    lengths = np.fromiter(map(len, encoded), np.int64, len(encoded))
    return np.fromiter(chain.from_iterable(encoded), np.int32, int(lengths.sum())), lengths


def _from_vocab_file(path: Path, lowercase: bool) -> BertDataTokenizer:
    verify_model(path)
    path = path / "vocab.txt" if path.is_dir() else path
    if not path.is_file():
        raise UserError(f"the vocabulary {path} does not exist; `lmtools vocab --type wordpiece` makes one from text")
    vocab = read_wordpiece(path)
    missing = [piece for piece in _BERT_ROLES.values() if piece not in vocab]
    if missing:
        raise UserError(f"the vocabulary {path} ({len(vocab)} lines) has no {', '.join(missing)}")
    backend = tokenizers.BertWordPieceTokenizer(vocab=vocab, lowercase=lowercase)._tokenizer
    special = {role: vocab[_BERT_ROLES[role]] for role in _ROLES}
    other_case = partial(_from_vocab_file, path, not lowercase)
    roles = {**special, "eod": special["sep"]}
    return BertDataTokenizer(backend.to_str(), roles, str(path), other_case=other_case)


def _from_pretrained(name: str) -> BertDataTokenizer:
    verify_model(Path(name))
    pretrained = open_pretrained(f"the tokenizer {name}", Path(name))
    special = {role: getattr(pretrained, f"{role}_token_id") for role in _ROLES}
    bos, eos = pretrained.bos_token_id, pretrained.eos_token_id  # of a decoder's tokenizer, which has neither role
    special["cls"] = special["cls"] if special["cls"] is not None else eos if bos is None else bos
    special["sep"] = special["sep"] if special["sep"] is not None else eos
    missing = [f"{role}_token" for role in _ROLES if special[role] is None]
    if missing:
        raise UserError(
            f"the tokenizer {name} has no {', '.join(missing)}, which BERT needs: add them by "
            f"tokenizer.add_special_tokens({{{missing[0]!r}: '[{missing[0][:-6].upper()}]'}}) and save_pretrained()"
        )
    special["eod"] = special["sep"] if pretrained.eos_token_id is None else pretrained.eos_token_id
    return BertDataTokenizer(pretrained.backend_tokenizer.to_str(), special, name, pretrained)

"""Tokenizers: text to ids and back, and the ids of special tokens.

| name | tokenizer | module |
|---|---|---|
| a `.model` file, a folder with `spiece.model` | SentencePiece | sentencepiece_tokenizer.py |
| `tokenizer.json`, `vocab.txt`, a folder of a Hugging Face tokenizer | AutoTokenizer's | hf_tokenizer.py |
| `bytes`, a folder of a ByT5 tokenizer | bytes of UTF-8, as ByT5 | byte_tokenizer.py |

Special tokens in a text, such as "<extra_id_0>", "[MASK]" or "</s>", are encoded as ordinary text, as with
transformers' `split_special_tokens=True`. Otherwise ids equal AutoTokenizer's without special tokens.
"""

from __future__ import annotations

import logging
import os
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import count, takewhile
from pathlib import Path
from typing import Any

import numpy as np

from lm_experiments_tools.errors import UserError
from lm_experiments_tools.files import read_json
from lm_experiments_tools.names import resolve_name

logger = logging.getLogger(__name__)

DEFAULT_EXTRA_IDS = 100
UNKNOWN_LIMIT = 0.01  # share of unknown tokens from which on a warning is logged
_REMEDY = "is the vocabulary that of this language, made with enough --character_coverage (lmtools vocab)?"
BYTES = "bytes"  # the name that is no file
MASK_PIECES = ("[MASK]", "<mask>")
MODEL_NAMES = ("spiece.model", "sentencepiece.model")  # of SentencePiece, in a folder


def sentinel_piece(index: int) -> str:
    """Return the name of a sentinel token, which marks a span in span corruption: `<extra_id_0>` for index 0."""
    return f"<extra_id_{index}>"


def family(pieces: Mapping[str, int], name: str) -> list[int]:
    """Return the ids of numbered subwords: for "<unused{}>" those of <unused0>, <unused1>, ... without a gap."""
    return [pieces[piece] for piece in takewhile(pieces.__contains__, map(name.format, count()))]


def find_sentinels(pieces: Mapping[str, int], is_unigram: bool) -> list[int]:
    """Return the ids of <extra_id_0>, <extra_id_1>, ..., or of mT5's ▁<extra_id_0>, ... where these are missing.

    mT5's are looked for in Unigram models alone: pieces of byte-pair encoding may be the same text.
    """
    return family(pieces, "<extra_id_{}>") or (family(pieces, "▁<extra_id_{}>") if is_unigram else [])


def warn_of_unknown(num_unknown: int, num_tokens: int, what: str, remedy: str = _REMEDY) -> float:
    """Return the share of unknown tokens, 0 to 1, and log a warning from `UNKNOWN_LIMIT` on."""
    share = num_unknown / max(num_tokens, 1)
    if share >= UNKNOWN_LIMIT:
        logger.warning("%.1f %% of the tokens of %s are unknown tokens: %s", 100 * share, what, remedy)
    return share


class Tokenizer(ABC):
    """Converts text to token ids and back, and knows the ids of special tokens. `Tokenizer.load` makes one.

    It can be pickled, and worker processes unpickle it without transformers.

    Attributes:
        path: file or folder of the tokenizer.
        pieces: id of each subword, with special tokens.
        size: every id is smaller; the minimum number of embedding rows.
        eos_id, pad_id, cls_id, sep_id: ids of special tokens. SEP replaces a missing EOS and EOS a missing PAD or SEP;
            BOS or EOS replaces a missing CLS, as in decoders' tokenizers.
        bos_id, mask_id: ids of special tokens; None if there is none.
        unk_id: id of the unknown token; -1 if every text can be encoded.
        roles: ids of the tokens that have the role of pad, eos, ... in the tokenizer's files; None for missing ones.
        sentinel_ids: int64, the id of <extra_id_k> at index k; sentinels mark the spans in span corruption.
        control_ids: int64, sorted: all special tokens.
        special_ids: int64, sorted: all special tokens and sentinels, which may be unused tokens of BERT.
        encode_by: "line" if lines can be encoded separately, else "document".
        word_mark: beginning of subwords that begin a word (for the space before it); "" if there is none.
        continuation: beginning of subwords that continue a word, WordPiece's "##"; "" if there is none.
    """

    path: Path
    pieces: dict[str, int]
    size: int
    encode_by = "document"
    word_mark = continuation = ""

    @staticmethod
    def load(path: str | os.PathLike, extra_ids: int | None = None, lowercase: bool | None = None) -> Tokenizer:
        """Load a tokenizer of any kind in the table above.

        Args:
            extra_ids: number of sentinels to add to a SentencePiece model without sentinels; None for those of the T5
                tokenizer in the same folder, else 100.
            lowercase: treatment of case by a `vocab.txt`; None to infer it from the file or its folder.

        Raises:
            UserError: the file is missing, of an unknown kind or damaged, or has no special tokens.
        """
        if os.fspath(path) == BYTES:
            return _module("byte_tokenizer:ByteTokenizer")()
        path = Path(path)
        if path.name in MODEL_NAMES and extra_ids is None and (path.parent / "tokenizer_config.json").is_file():
            path = path.parent
        if not path.exists():
            raise UserError(f"vocabulary {path} does not exist; `lmtools vocab` trains one from text")
        found = _module("sentencepiece_tokenizer:read_model")(path, extra_ids)
        if found is None:
            found = _module("hf_tokenizer:read_tokenizer")(path, lowercase)
            found._check()
        return found

    @staticmethod
    def of(pretrained: Any, path: Path) -> Tokenizer:
        """Convert a tokenizer of transformers, a fast one or ByT5's."""
        is_bytes = pretrained.__class__.__name__ == "ByT5Tokenizer"
        kind = "byte_tokenizer:ByteTokenizer" if is_bytes else "hf_tokenizer:HFTokenizer"
        return _module(kind).of(pretrained, path)

    def _check(self) -> None:
        if self.eos_id is None:
            raise UserError(f"vocabulary {self.path} has no eos_token or sep_token: set one in tokenizer_config.json")

    def _set_ids(
        self, roles: Mapping[str, int | None], sentinel_ids: Sequence[int], special_ids: Iterable[int] = ()
    ) -> None:
        def first(*names: str) -> int | None:
            return next((roles[name] for name in names if roles.get(name) is not None), None)

        self.roles, self.sentinel_ids = dict(roles), np.array(sentinel_ids, np.int64)
        self.eos_id, self.pad_id = first("eos", "sep"), first("pad", "eos", "sep")
        self.cls_id, self.sep_id = first("cls", "bos", "eos"), first("sep", "eos")
        self.bos_id, self.mask_id, unk_id = first("bos"), first("mask"), first("unk")
        self.unk_id = -1 if unk_id in (None, self.eos_id) else unk_id  # GPT-2's is the end of a text, and never met
        known = {*roles.values(), *special_ids} - {None}
        self.control_ids = np.array(sorted(known), np.int64)
        self.special_ids = np.union1d(self.control_ids, self.sentinel_ids)

    @property
    def special_tokens(self) -> dict[str, int | None]:
        """Id of each special token that a model's configuration names, by role; None for one that is missing."""
        return {"pad": self.pad_id, "eos": self.eos_id, "bos": self.bos_id, "mask": self.mask_id}

    @property
    def recorded_as(self) -> str:
        """Name by which other files refer to this tokenizer. `load` accepts it in any working directory."""
        return os.path.abspath(self.path)

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """sha256 of everything that determines ids; equal fingerprints mean equal ids."""

    @abstractmethod
    def save(self, directory: str | os.PathLike) -> None:
        """Write Hugging Face tokenizer files from which `AutoTokenizer.from_pretrained` gives the same ids."""

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> Sequence[Sequence[int]]:
        """Return the ids of several texts, without special tokens."""

    @abstractmethod
    def _decode(self, ids: list[int]) -> str:
        """The text of ids among which is no sentinel; without the space before its first word."""

    def encode(self, text: str) -> Sequence[int]:
        """Return the ids of `text`, without special tokens. "<extra_id_0>" in the text is ordinary text."""
        return self.encode_batch([text])[0]

    def encode_arrays(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of several texts as one array, which is faster than lists.

        Returns:
            The ids of all texts, int32, one text after the other, and the number of ids of each text,
            int64[len(texts)].
        """
        encoded = self.encode_batch(texts)
        lengths = np.fromiter(map(len, encoded), np.int64, len(encoded))
        return np.frombuffer(b"".join(array("i", ids) for ids in encoded), np.int32), lengths

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids` without padding, EOS and ignored labels (-100). Unknown ids are shown as " ⁇ "."""
        text, chunk = "", []
        for index in [*(i if i < self.size else self.unk_id for i in map(int, ids) if i >= 0), None]:
            if index is not None and index not in self._sentinel_number:
                chunk += [index] if index not in (-1, self.pad_id, self.eos_id) else []
                continue
            part = self._decode(chunk) if chunk else ""
            text += " " + part if text and part[:1].strip() and self._begins_word(chunk[0]) else part
            chunk = []
            if index is not None:
                text += (" " if text else "") + sentinel_piece(self._sentinel_number[index])
        return text

    def find(self, piece: str) -> int | None:
        """Return the id of a subword, or None if the tokenizer does not contain it."""
        return self.pieces.get(piece)

    def piece(self, index: int) -> str:
        """Return the subword of an id, with the tokenizer's own mark for a space."""
        number = self._sentinel_number.get(index)
        return self._names.get(index, f"<{index}>") if number is None else sentinel_piece(number)

    @cached_property
    def starts_word(self) -> np.ndarray:
        """bool[size]: True for subwords that begin a word, and for special and unused ids. Raises UserError."""
        if not (self.word_mark or self.continuation):
            raise UserError(f"{self.path} does not mark where words begin: use WordPiece, SentencePiece or BPE")
        starts = np.ones(self.size, bool)
        starts[list(self._names)] = list(map(self._begins_word, self._names))
        starts[self.special_ids] = True
        return starts

    @cached_property
    def token_bytes(self) -> np.ndarray | None:
        """Number of UTF-8 bytes of each token's text, int64[size], from which bits per byte are computed.

        A mark of a space counts as one byte, also before WordPiece's words, and special tokens as none. The sum over
        a document is `len(text.encode())` for a lossless tokenizer, else the length of the normalized text; tokenizers
        that put a space before each text count one byte more. None if spaces are not marked.
        """
        if not (self.word_mark or self.continuation):
            return None
        counts = np.zeros(self.size, np.int64)
        for index, piece in self._names.items():
            counts[index] = self._num_bytes(index, piece)
        counts[self.special_ids] = 0
        return counts

    def _num_bytes(self, index: int, piece: str) -> int:
        return len(piece.replace(self.word_mark, " ").encode())

    def _begins_word(self, index: int) -> bool:
        piece = self._names.get(index, "")
        if self.continuation:
            return not piece.startswith(self.continuation)
        return bool(self.word_mark) and piece.startswith(self.word_mark)

    @cached_property
    def _names(self) -> dict[int, str]:
        return {index: piece for piece, index in self.pieces.items()}

    @cached_property
    def _sentinel_number(self) -> dict[int, int]:
        return {int(index): k for k, index in enumerate(self.sentinel_ids)}


def _module(name: str) -> Any:
    # On first use, because transformers and sentencepiece take seconds to import.
    return resolve_name(f"lm_experiments_tools.data.text.{name}")


def read_config(folder: Path, name: str = "tokenizer_config.json") -> dict[str, Any]:
    """Read a JSON file of a tokenizer's folder; {} if it does not exist. Raises UserError if it is damaged."""
    path = folder / name
    return read_json(path) if path.is_file() else {}

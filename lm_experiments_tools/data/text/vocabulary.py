"""Vocabularies: text to ids and back, and special ids.

| `--vocab` | is | module |
|---|---|---|
| a `.model` file, a folder with `spiece.model` | SentencePiece | sentencepiece_vocabulary.py |
| `tokenizer.json`, `vocab.txt`, a folder of a Hugging Face tokenizer | AutoTokenizer's | tokenizers_vocabulary.py |
| `bytes`, a folder of a ByT5 tokenizer | bytes of UTF-8, as ByT5 | byte_vocabulary.py |

Special tokens in a text, such as "<extra_id_0>", "[MASK]" or "</s>", are encoded as ordinary text, as with
transformers' `split_special_tokens=True`. Otherwise ids equal AutoTokenizer's without special tokens.
"""

from __future__ import annotations

import logging
import os
from abc import ABC, abstractmethod
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
BYTES = "bytes"  # the --vocab that is no file
MASK_PIECES = ("[MASK]", "<mask>")
MODEL_NAMES = ("spiece.model", "sentencepiece.model")  # of SentencePiece, in a folder
_ROOM = "lm_experiments_tools.data.text"
_BESIDE_MODEL = ("tokenizer.json", "tokenizer_config.json", "added_tokens.json")  # the last two for T5Tokenizer
_HF_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "vocab.json", "tokenizer.model")


def sentinel_piece(index: int) -> str:
    """Return the name of a sentinel token, which marks a span in span corruption: `<extra_id_0>` for index 0."""
    return f"<extra_id_{index}>"


def family(pieces: Mapping[str, int], name: str) -> list[int]:
    """Return the ids of numbered subwords: for "<unused{}>" those of <unused0>, <unused1>, ... without a gap."""
    return [pieces[piece] for piece in takewhile(pieces.__contains__, map(name.format, count()))]


def find_sentinels(pieces: Mapping[str, int], is_unigram: bool) -> list[int]:
    """Return the ids of <extra_id_0>, <extra_id_1>, ..., or of mT5's ▁<extra_id_0>, ... where these are missing.

    Args:
        pieces: id of each subword.
        is_unigram: True to look for mT5's, which the pieces of byte-pair encoding resemble where a text holds them.
    """
    return family(pieces, "<extra_id_{}>") or (family(pieces, "▁<extra_id_{}>") if is_unigram else [])


def warn_of_unknown(
    num_unknown: int, num_tokens: int, what: str, remedy: str = "is the vocabulary that of this language?"
) -> float:
    """Return the share of unknown tokens, 0 to 1, and log a warning from `UNKNOWN_LIMIT` on.

    Args:
        what: the text, for the warning.
        remedy: advice for the warning.
    """
    share = num_unknown / max(num_tokens, 1)
    if share >= UNKNOWN_LIMIT:
        logger.warning("%.1f %% of the tokens of %s are unknown tokens: %s", 100 * share, what, remedy)
    return share


class Vocabulary(ABC):
    """A vocabulary: converts text to token ids and back, and knows the ids of special tokens.

    A vocabulary is made by `Vocabulary.load` and can be pickled.

    Attributes:
        path: file or folder of the vocabulary.
        size: number of ids, the minimum number of embedding rows.
        num_pieces: number of ids in the file.
        num_sentinels, sentinel_ids: number of sentinels (tokens that mark the spans in span corruption), and
            int64[num_sentinels], the id of <extra_id_k> at index k.
        pad_id, eos_id, special_ids: ids of special tokens.
        unk_id: id of the unknown token; -1 if every text can be encoded.
        mask_id, bos_id: ids of the mask token and of the token that begins a text; None if there is none.
        sha256: hash of the file; `identity` if there are several files or none.
        encode_by: "line" if lines can be encoded separately, else "document".
    """

    path: Path
    size: int
    num_pieces: int
    num_sentinels: int
    sentinel_ids: np.ndarray
    pad_id: int
    eos_id: int
    unk_id: int
    mask_id: int | None
    bos_id: int | None = None
    special_ids: Sequence[int]
    sha256: str
    encode_by = "document"

    @staticmethod
    def load(path: str | os.PathLike, extra_ids: int | None = None) -> Vocabulary:
        """Load a vocabulary of any kind in the table above.

        Args:
            extra_ids: number of sentinels to add to a SentencePiece model without sentinels; None for those of the T5
                tokenizer in the same folder, else 100.

        Raises:
            UserError: the file is missing, of an unknown kind or damaged, or has no special tokens.
        """
        if os.fspath(path) == BYTES:
            return _kind("byte_vocabulary:ByteVocabulary")()
        path, own = Path(path), None
        if path.name in MODEL_NAMES and extra_ids is None and (path.parent / "tokenizer_config.json").is_file():
            path = path.parent
        if _is_sentencepiece(path):
            own = _kind("sentencepiece_vocabulary:SentencePieceVocabulary").read(path, extra_ids)
            beside = _BESIDE_MODEL if own.path.name == "spiece.model" else _BESIDE_MODEL[:1]
            if not path.is_dir() or not any((path / name).is_file() for name in beside):
                return own
        # Two files describe one tokenizer, or the only one is transformers'.
        pretrained = _kind("fast_tokenizer:open_pretrained")(f"vocabulary {path}", path)
        if own is not None:
            if not (difference := own.first_difference(pretrained)):
                return own
            logger.warning("%s is read by AutoTokenizer, because %s is not all of it: %s", path, own.path, difference)
        if pretrained.__class__.__name__ == "ByT5Tokenizer":
            return _kind("byte_vocabulary:ByteVocabulary").of(pretrained, path)
        return _kind("tokenizers_vocabulary:TokenizersVocabulary").of(pretrained, path)

    @property
    def special_tokens(self) -> dict[str, int | None]:
        """Id of each special token that a model's configuration names, by role; None for one that is missing."""
        return {"pad": self.pad_id, "eos": self.eos_id, "bos": self.bos_id, "mask": self.mask_id}

    @property
    def recorded_as(self) -> str:
        """Name by which other files refer to this vocabulary. `load` accepts it in any working directory."""
        return os.path.abspath(self.path)

    def encode(self, text: str) -> Sequence[int]:
        """Return the ids of `text`, without special tokens. "<extra_id_0>" in the text is ordinary text."""
        return self.encode_batch([text])[0]

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> Sequence[Sequence[int]]:
        """Return the ids of several texts."""

    @abstractmethod
    def find(self, piece: str) -> int | None:
        """Return the id of a subword, or None if the vocabulary does not contain it."""

    @property
    @abstractmethod
    def token_bytes(self) -> np.ndarray | None:
        """Number of UTF-8 bytes of each token's text, indexed by id, from which bits per byte are computed.

        See `FastTokenizer.token_bytes`. None if the numbers are unknown.
        """

    @property
    @abstractmethod
    def identity(self) -> str:
        """Hash of everything that determines ids; equal identities mean equal ids."""

    @abstractmethod
    def save_tokenizer(self, directory: str | os.PathLike) -> None:
        """Write Hugging Face tokenizer files from which `AutoTokenizer.from_pretrained` gives the same ids."""

    @abstractmethod
    def _decode_chunk(self, ids: list[int], leading_space: bool) -> str:
        """Text of ids among which is no sentinel; with `leading_space` begun by it where a word begins."""

    @abstractmethod
    def _piece(self, index: int) -> str:
        """The subword of an id that is no sentinel."""

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids` without padding, EOS and ignored labels (-100). Unknown ids are shown as " ⁇ "."""
        text, chunk = "", []
        for index in [*(i if i < self.size else self.unk_id for i in map(int, ids) if i >= 0), None]:
            if index is not None and index not in self._sentinel_number:
                chunk.append(index)
                continue
            text += self._decode_chunk(chunk, leading_space=bool(text))
            chunk = []
            if index is not None:
                text += (" " if text else "") + sentinel_piece(self._sentinel_number[index])
        return text

    def piece(self, index: int) -> str:
        """Return the subword of an id, with the vocabulary's own mark for a space."""
        if index in self._sentinel_number:
            return sentinel_piece(self._sentinel_number[index])
        return self._piece(index)

    @cached_property
    def _sentinel_number(self) -> dict[int, int]:
        return {int(index): k for k, index in enumerate(self.sentinel_ids)}

    def __len__(self) -> int:
        return self.size


def _kind(name: str):
    return resolve_name(f"{_ROOM}.{name}")


def _is_sentencepiece(path: Path) -> bool:
    """True for a SentencePiece model, False for what AutoTokenizer reads; UserError for what is neither."""
    if path.is_dir():
        names = {file.name for file in path.iterdir()}
        class_name = str(read_config(path).get("tokenizer_class") or "T5Tokenizer")
        if class_name.startswith("T5Tokenizer") and names & {*MODEL_NAMES}:
            return True
        if names & {*_HF_FILES}:
            return False
        raise UserError(f"vocabulary folder {path} has none of {', '.join((*MODEL_NAMES, *_HF_FILES))}")
    if not path.is_file():
        raise UserError(f"vocabulary {path} does not exist; `lmtools vocab --output {path}` trains one from text")
    return path.suffix not in (".json", ".txt")


def read_config(folder: Path, name: str = "tokenizer_config.json") -> dict[str, Any]:
    """Read a JSON file of a tokenizer's folder; {} if it does not exist. Raises UserError if it is damaged."""
    path = folder / name
    return read_json(path) if path.is_file() else {}

"""ByT5's vocabulary (Xue et al., "ByT5", TACL 2022): each byte of UTF-8 is a token.

Ids: <pad> 0, </s> 1, <unk> 2 (unused), byte b 3 + b, <extra_id_k> 259 + k, as in transformers.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lm_experiments_tools.data.text.vocabulary import BYTES, MODEL_NAMES, Vocabulary, sentinel_piece
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.files import json_sha256

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SPECIAL = ("<pad>", "</s>", "<unk>")
_FIRST, _END = len(_SPECIAL), len(_SPECIAL) + 256  # ids of bytes
_BYT5_SENTINELS = 125


class ByteVocabulary(Vocabulary):
    """ByT5's vocabulary: one token for each of the 256 bytes, and `num_sentinels` sentinel tokens for span corruption.

    The argument `path` is None for ByT5's original vocabulary; the attribute is then `Path("bytes")`.
    """

    pad_id, eos_id, unk_id, mask_id = 0, 1, 2, None
    num_pieces = _END

    def __init__(self, num_sentinels: int = _BYT5_SENTINELS, path: Path | None = None) -> None:
        self.path, self._is_named = path or Path(BYTES), path is None
        self.num_sentinels, self.size = num_sentinels, _END + num_sentinels
        self.sentinel_ids = np.arange(_END, self.size, dtype=np.int64)
        self.special_ids = [*range(_FIRST), *self.sentinel_ids.tolist()]

    @classmethod
    def of(cls, pretrained: PreTrainedTokenizerBase, path: Path) -> ByteVocabulary:
        """Convert a ByT5Tokenizer. Raises UserError if it has other tokens than bytes and sentinels."""
        number = len(pretrained) - _END
        names = [*_SPECIAL, *map(sentinel_piece, range(number))]
        if pretrained.convert_tokens_to_ids(names) != [*range(_FIRST), *range(_END, _END + number)]:
            raise UserError(f"vocabulary {path} is a ByT5 tokenizer with other tokens: save it without added tokens")
        return cls(number, path)

    @property
    def recorded_as(self) -> str:
        return BYTES if self._is_named else super().recorded_as

    def encode_batch(self, texts: Sequence[str]) -> list[array]:
        numbers = (np.frombuffer(text.encode(), np.uint8).astype(np.int32) + _FIRST for text in texts)
        return [array("i", ids.tobytes()) for ids in numbers]

    def find(self, piece: str) -> int | None:
        if piece in _SPECIAL:
            return _SPECIAL.index(piece)
        content = piece.encode()
        return content[0] + _FIRST if len(content) == 1 else None

    def _decode_chunk(self, ids: list[int], leading_space: bool) -> str:
        return bytes(i - _FIRST for i in ids if _FIRST <= i < _END).decode("utf-8", errors="replace")

    def _piece(self, index: int) -> str:
        if index < _FIRST:
            return _SPECIAL[index]
        character = chr(index - _FIRST)
        return character if character.isascii() and character.isprintable() else f"<0x{index - _FIRST:02X}>"

    @property
    def token_bytes(self) -> np.ndarray:
        ids = np.arange(self.size)
        return ((ids >= _FIRST) & (ids < _END)).astype(np.int64)

    @cached_property
    def identity(self) -> str:
        return json_sha256([BYTES, self.num_sentinels])

    @property
    def sha256(self) -> str:
        return self.identity

    def save_tokenizer(self, directory: str | os.PathLike) -> None:
        from transformers import ByT5Tokenizer

        for name in ("tokenizer.json", *MODEL_NAMES):  # of another vocabulary
            (Path(directory) / name).unlink(missing_ok=True)
        ByT5Tokenizer(extra_ids=self.num_sentinels).save_pretrained(str(directory))

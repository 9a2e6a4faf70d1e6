"""ByT5's vocabulary (Xue et al., "ByT5", TACL 2022): each byte of UTF-8 is a token.

Ids: <pad> 0, </s> 1, <unk> 2 (unused), byte b 3 + b, <extra_id_k> 259 + k, as in transformers. But the published
models were trained with other sentinels (t5's, of a vocabulary without extra ids): sentinel k is 258 - k, a byte. No
text in UTF-8 has such a byte for k < 11, and ByT5 masks about 9 spans. From k = 11 on sentinel k is <extra_id_k>.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lm_experiments_tools.data.text.tokenizer import BYTES, MODEL_NAMES, Tokenizer, sentinel_piece
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.files import json_sha256

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SPECIAL = ("<pad>", "</s>", "<unk>")
_FIRST, _END = len(_SPECIAL), len(_SPECIAL) + 256  # ids of bytes
_BYT5_SENTINELS = 125
_NO_TEXT = 11  # the bytes 0xF5 to 0xFF


def swap_sentinels(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> Sequence[int]:
    """Map ByT5Tokenizer's <extra_id_k> to the published sentinels and back; ids of other tokenizers are unchanged."""
    if tokenizer.__class__.__name__ != "ByT5Tokenizer":
        return ids
    return [2 * _END - 1 - i if _END - _NO_TEXT <= i < _END + _NO_TEXT else i for i in ids]


class ByteTokenizer(Tokenizer):
    """ByT5's tokenizer: one token for each of the 256 bytes, and `extra_ids` tokens after them.

    The argument `path` is None for ByT5's original vocabulary; the attribute is then `Path("bytes")`.
    """

    def __init__(self, extra_ids: int = _BYT5_SENTINELS, path: Path | None = None) -> None:
        self.path, self._is_named = path or Path(BYTES), path is None
        characters = [chr(b) if 0x20 <= b < 0x7F else f"<0x{b:02X}>" for b in range(256)]
        names = [*_SPECIAL, *characters, *map(sentinel_piece, range(extra_ids))]
        self.pieces, self.size = {name: index for index, name in enumerate(names)}, len(names)
        numbers = np.arange(max(extra_ids, _NO_TEXT), dtype=np.int64)
        sentinel_ids = np.where(numbers < _NO_TEXT, _END - 1 - numbers, _END + numbers)
        self._set_ids({"pad": 0, "eos": 1, "unk": 2}, sentinel_ids, range(_END, self.size))

    @classmethod
    def of(cls, pretrained: PreTrainedTokenizerBase, path: Path) -> ByteTokenizer:
        """Convert a ByT5Tokenizer. Raises UserError if it has other tokens than bytes and sentinels."""
        number = len(pretrained) - _END
        names = [*_SPECIAL, *map(sentinel_piece, range(number))]
        if pretrained.convert_tokens_to_ids(names) != [*range(_FIRST), *range(_END, _END + number)]:
            raise UserError(f"vocabulary {path} is a ByT5 tokenizer with other tokens: save it without added tokens")
        return cls(number, path)

    @property
    def recorded_as(self) -> str:
        return BYTES if self._is_named else super().recorded_as

    @property
    def fingerprint(self) -> str:
        return json_sha256([BYTES, self.size])

    @property
    def token_bytes(self) -> np.ndarray:
        ids = np.arange(self.size)
        return ((ids >= _FIRST) & (ids < _END - _NO_TEXT)).astype(np.int64)

    def encode_batch(self, texts: Sequence[str]) -> list[array]:
        numbers = (np.frombuffer(text.encode(), np.uint8).astype(np.int32) + _FIRST for text in texts)
        return [array("i", ids.tobytes()) for ids in numbers]

    def _decode(self, ids: list[int]) -> str:
        return bytes(i - _FIRST for i in ids if _FIRST <= i < _END).decode("utf-8", errors="replace")

    def save(self, directory: str | os.PathLike) -> None:
        from transformers import ByT5Tokenizer

        for name in ("tokenizer.json", *MODEL_NAMES):  # of another tokenizer
            (Path(directory) / name).unlink(missing_ok=True)
        ByT5Tokenizer(extra_ids=self.size - _END).save_pretrained(str(directory))

"""Text -> ids as the token files hold them: what decides the ids, and the encoding of many documents at a time."""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lm_experiments_tools.data.text.vocabulary import Vocabulary


@dataclass(frozen=True)
class Encoding:
    """Everything that decides the ids of a text."""

    vocab_path: str
    vocab_sha256: str
    text_key: str = "text"
    append_eos: bool = False
    encode_by: str = "line"

    @classmethod
    def of(
        cls, vocabulary: Vocabulary, text_key: str = "text", append_eos: bool = False, encode_by: str | None = None
    ) -> "Encoding":
        """The encoding by a vocabulary; `encode_by` None: as suits it (`Vocabulary.encode_by`)."""
        return cls(vocabulary.recorded_as, vocabulary.sha256, text_key, append_eos, encode_by or vocabulary.encode_by)

    def identity(self) -> dict[str, Any]:
        """The settings without the place of the vocabulary."""
        return {name: value for name, value in asdict(self).items() if name != "vocab_path"}


def encode_documents(texts: Sequence[str], vocabulary: Vocabulary, encoding: Encoding) -> Iterator[array]:
    """The ids of each text, as `array("i")`; one call into the vocabulary for all of them."""
    eos = [vocabulary.eos_id] if encoding.append_eos else []
    if encoding.encode_by == "document":
        encoded = iter(vocabulary.encode_batch(texts))
        num_parts = [1] * len(texts)
    else:
        lines = [text.split("\n") for text in texts]
        encoded = iter(vocabulary.encode_batch([line for parts in lines for line in parts]))
        num_parts = [len(parts) for parts in lines]
    for parts in num_parts:
        ids = array("i")
        for _ in range(parts):
            ids.extend(next(encoded))
        ids.extend(eos)
        yield ids


def num_bytes(text: str) -> int:
    """Bytes of `text` in UTF-8."""
    return len(text) if text.isascii() else len(text.encode())

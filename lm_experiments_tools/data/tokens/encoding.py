"""Text to token ids, for `lmtools tokenize`, `--streaming`, `lmtools inspect` and BERT's preprocess_data.py.

    records (records.py) -> Encoder.parts -> batches of documents -> Encoder.encode -> token files, chunks of a stream

`TextEncoder` is for T5, with one sequence per document. `megatron.encoding.SentenceEncoder` is for BERT.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np

from lm_experiments_tools.data.text.records import (
    Record,
    RejectedRecords,
    TooManyRejected,
    converted,
    read_shard,
    utf8_length,
)
from lm_experiments_tools.data.text.sources import Shard
from lm_experiments_tools.data.text.tokenizer import Tokenizer
from lm_experiments_tools.data.tokens.indexed import IndexedDataset, IndexedDatasetWriter, token_dtype
from lm_experiments_tools.data.workers import Caller
from lm_experiments_tools.errors import UserError

logger = logging.getLogger(__name__)
T = TypeVar("T")

_BATCH_CHARACTERS = 1 << 19  # per call into a tokenizer: a tenth of a second for BERT's


@dataclass
class EncodedDocuments:
    """Token ids of consecutive documents. A document has one or more sequences, such as its sentences.

    Attributes:
        ids: ids of all sequences, concatenated.
        sequence_lengths: number of ids of each sequence.
        num_sequences: number of sequences of each document.
        num_bytes: bytes of the text.
        num_empty: documents without tokens, which were dropped.
    """

    ids: np.ndarray
    sequence_lengths: np.ndarray
    num_sequences: np.ndarray
    num_bytes: int
    num_empty: int = 0


class Encoder(Protocol):
    """Interface of classes that convert records of text to token ids. Encoders are pickled for the worker processes.

    Attributes:
        key: key of the text in a JSON record; None passes all fields to `parts`.
        suffixes: suffixes of the output file names. One token file per suffix is written.
        dtype: dtype of the ids.
        max_bytes: larger records are rejected; None for the default.
        identity: JSON value; equal identities give equal ids.
    """

    key: str | None
    suffixes: Sequence[str]
    dtype: np.dtype
    max_bytes: int | None
    identity: Any

    def parts(self, record: Record) -> list[list[str]]:
        """Split a record into texts, one list per output file. Raises BadRecord if the record cannot be used."""

    def encode(self, documents: Sequence[Sequence[str]]) -> EncodedDocuments:
        """Encode documents, each a list of texts."""


@dataclass(frozen=True)
class TextEncoder:
    """Converts documents to token ids with a vocabulary, for T5: each document becomes one sequence.

    Attributes:
        key: key of the text in a JSON record.
        append_eos: append EOS to each document.
        encode_by: "line" or "document", see `tokenize_corpus`.
    """

    vocabulary: Tokenizer
    key: str
    append_eos: bool
    encode_by: str
    suffixes = ("",)
    max_bytes = None

    @classmethod
    def of(
        cls, vocabulary: Tokenizer, text_key: str = "text", append_eos: bool = False, encode_by: str | None = None
    ) -> "TextEncoder":
        """Build a text encoder from a vocabulary.

        Args:
            vocabulary: converts text to ids.
            text_key: key of the text in a JSON record.
            append_eos: append EOS to each document.
            encode_by: "line" or "document", see `tokenize_corpus`; None uses `Tokenizer.encode_by`.
        """
        if encode_by not in (None, "line", "document"):
            raise UserError(f"encode_by is {encode_by!r}, not 'line' or 'document'")
        if encode_by == "line" != vocabulary.encode_by:
            logger.warning("%s reads newlines, and encode_by=line leaves them all out", vocabulary.path)
        return cls(vocabulary, text_key, append_eos, encode_by or vocabulary.encode_by)

    @property
    def dtype(self) -> np.dtype:
        return token_dtype(self.vocabulary.size)

    @property
    def identity(self) -> dict[str, Any]:
        return {
            "vocab_sha256": self.vocabulary.fingerprint,
            "text_key": self.key,
            "append_eos": self.append_eos,
            "encode_by": self.encode_by,
        }

    def parts(self, record: Record) -> list[list[str]]:
        return [[record.value] if self.encode_by == "document" else record.value.split("\n")]

    def encode(self, documents: Sequence[Sequence[str]]) -> EncodedDocuments:
        """Encode documents, each a list of texts that are concatenated."""
        parts = [part for document in documents for part in document]
        ids, part_lengths = self.vocabulary.encode_arrays(parts)
        num_parts = np.fromiter(map(len, documents), np.int64, len(documents))
        ends = np.cumsum(part_lengths)[np.cumsum(num_parts) - 1]
        lengths = np.diff(ends, prepend=0)
        if self.append_eos:
            ids, lengths = np.insert(ids, ends, self.vocabulary.eos_id), lengths + 1
        num_bytes = sum(map(utf8_length, parts)) + len(parts) - len(documents)  # newlines between parts
        return EncodedDocuments(ids, lengths, np.ones(len(documents), np.int64), num_bytes)


def batches(items: Iterable[T], size_of: Callable[[T], int], size: int) -> Iterator[list[T]]:
    """Group consecutive items, such as documents, into lists of about equal total size.

    A list ends with the item at which its total size reaches `size`.

    Args:
        items: the items to group.
        size_of: function that returns the size of an item.
        size: minimum total size of a list.
    """
    batch: list[T] = []
    filled = 0
    for item in items:
        batch.append(item)
        filled += size_of(item)
        if filled >= size:
            yield batch
            batch, filled = [], 0
    if batch:
        yield batch


class EncodedWriter(IndexedDatasetWriter):
    """Writer of token files that also counts the bytes of the text and the empty documents."""

    num_bytes = num_empty = 0

    def add(self, encoded: EncodedDocuments) -> None:
        """Append encoded documents to the token file, and add to its counts."""
        self.add_documents(encoded.ids, encoded.sequence_lengths, encoded.num_sequences)
        self.num_bytes += encoded.num_bytes
        self.num_empty += encoded.num_empty

    def add_shard(self, shard: IndexedDataset) -> None:
        """Append the token file of a shard (a part of the text that was encoded separately), and add its counts."""
        self.add_dataset(shard)
        self.num_bytes += shard.meta["num_bytes"]
        self.num_empty += shard.meta["empty_documents"]


def encode_shard(shard: Shard, prefix: str, encoder: Encoder, limit: int | None) -> tuple[int, bool]:
    """Encode a shard (a part of the text) into token files, one per suffix of the encoder.

    Rejected records are listed in `prefix`.bad.jsonl.

    Args:
        shard: the part of the text.
        prefix: path of the output files, without their suffixes.
        encoder: converts text to ids.
        limit: maximum number of rejected records; None for the default limit.

    Returns:
        Number of rejected records, and False if they were too many and the shard was abandoned.
    """
    rejected = RejectedRecords(limit, f"{prefix}.bad.jsonl", of_part=True)
    try:
        with closing(rejected), ExitStack() as stack:
            names = [prefix + suffix for suffix in encoder.suffixes]
            writers = [stack.enter_context(EncodedWriter(name, encoder.dtype, durable=False)) for name in names]
            documents = converted(read_shard(shard, encoder.key, max_bytes=encoder.max_bytes), encoder.parts, rejected)
            for batch in batches(documents, _num_characters, _BATCH_CHARACTERS):
                for writer, texts in zip(writers, zip(*batch, strict=True), strict=True):
                    writer.add(encoder.encode(texts))
            for writer in writers:
                writer.finalize({
                    "num_lines": rejected.lines - rejected.count,
                    "bad_lines": rejected.count,
                    "num_documents": writer.num_documents,
                    "num_bytes": writer.num_bytes,
                    "empty_documents": writer.num_empty + rejected.num_empty,
                    "bin_sha256": writer.bin_sha256,
                })  # fmt: skip
    except TooManyRejected:
        return rejected.count, False
    return rejected.count, True


def _num_characters(parts: list[list[str]]) -> int:
    return sum(len(text) for texts in parts for text in texts)


def work(caller: Caller) -> None:
    """Run a worker process of the tokenization: encode each shard (part of the text) that the parent requests."""
    caller.serve(lambda settings: lambda job: encode_shard(*job, *settings))

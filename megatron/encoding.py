"""JSON lines -> token ids: a batch of lines, and a piece of a text into token files.

What a line gives, by the kind of its field and the settings:

| field | `split_sentences` | sequences of the document |
|---|---|---|
| a string | yes | its sentences |
| a string | no | one: the whole text |
| a list of strings | yes | its items, taken for sentences that are split already |
| a list of strings | no | one: the items joined |

A sequence without tokens is left out, and so is a document without sequences (it is counted as empty). `split_tokens`
makes each token a sequence; `append_eod` ends the last sequence of a document with the end-of-document id.
"""

import json
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from lm_experiments_tools.data.text.bad_lines import ANY_NUMBER, BadLine, EmptyText, Quarantine, is_hopeless, no_key
from lm_experiments_tools.data.text.documents import (
    Piece,
    excerpt,
    parse_json_object,
    read_lines,
    read_piece,
    unusable_characters,
)
from lm_experiments_tools.data.tokens.indexed import IndexedDataset, IndexedDatasetWriter, token_dtype
from lm_experiments_tools.data.tokens.pieces import EncodePiece
from lm_experiments_tools.errors import UserError
from megatron.sentences import SentenceSplitter, splitter_version
from megatron.tokenizers import BertDataTokenizer, build_tokenizer

_VERSION = 1  # raise when the ids of the same text would change: pieces of another version are not reused
_BATCH_BYTES = 1 << 19  # of lines for one call of the tokenizer: a tenth of a second


@dataclass(frozen=True, kw_only=True)
class EncodingSettings:
    """Everything that decides the ids of a line."""

    json_keys: tuple[str, ...]
    tokenizer_type: str
    vocab_file: str | None
    tokenizer_name_or_path: str | None
    split_sentences: bool
    sentence_splitter: str
    keep_newlines: bool
    split_tokens: bool
    append_eod: bool
    max_document_bytes: int

    @property
    def suffixes(self) -> list[str]:
        """What the names of the token files of a piece end with, one a key."""
        return [f"-{number}" for number in range(len(self.json_keys))]

    def identity(self, tokenizer: BertDataTokenizer) -> list[Any]:
        """Changes whenever the ids of a text could, as JSON takes it."""
        places = {"vocab_file", "tokenizer_name_or_path", "tokenizer_type"}
        rules = {name: value for name, value in asdict(self).items() if name not in places}
        version = splitter_version(self.sentence_splitter) if self.split_sentences else ""
        return [_VERSION, rules, tokenizer.fingerprint, version]

    def tokenizer(self) -> BertDataTokenizer:
        """UserError where it cannot be built."""
        return build_tokenizer(
            self.tokenizer_type, vocab_file=self.vocab_file, name_or_path=self.tokenizer_name_or_path
        )


@dataclass
class LineBatch:
    """Lines of one piece, each with its number."""

    lines: list[tuple[int, bytes]] = field(default_factory=list)
    bad_lines: list[BadLine] = field(default_factory=list)  # that were no text to begin with


@dataclass
class EncodedKey:
    """The documents of a batch under one key, as IndexedDatasetWriter.add_documents takes them."""

    ids: np.ndarray
    sequence_lengths: np.ndarray
    num_sequences: np.ndarray
    num_empty: int
    num_bytes: int


@dataclass
class EncodedBatch:
    """The result of a LineBatch: `keys` are in the order of the settings' json_keys."""

    keys: list[EncodedKey]
    num_lines: int
    bad_lines: list[BadLine] = field(default_factory=list)


class Encoder:
    """Encodes batches of lines. Raises UserError where tokenizer or sentence splitter cannot be built."""

    def __init__(self, settings: EncodingSettings):
        self.settings = settings
        self.tokenizer = settings.tokenizer()
        self._dtype = token_dtype(self.tokenizer.vocab_size)
        self._split = SentenceSplitter(settings.sentence_splitter, settings.keep_newlines)

    def encode(self, batch: LineBatch) -> EncodedBatch:
        """The ids of a batch; depends on its lines alone."""
        keys = self.settings.json_keys
        sentences: list[list[str]] = [[] for _ in keys]
        num_sentences: list[list[int]] = [[] for _ in keys]
        bad_lines = list(batch.bad_lines)
        for number, line in batch.lines:
            document = self._document(line)
            if isinstance(document, str):
                bad_lines.append(BadLine(number, document, excerpt(line)))
                continue
            for index, parts in enumerate(document):
                sentences[index] += parts
                num_sentences[index].append(len(parts))
        encoded = [self._encode_key(*pair) for pair in zip(sentences, num_sentences, strict=True)]
        num_lines = len(batch.lines) + len(batch.bad_lines)
        return EncodedBatch(encoded, num_lines, bad_lines)

    def _document(self, line: bytes) -> list[list[str]] | str:
        """The sentences under each key, or the reason why the line is bad."""
        record = parse_json_object(line, self.settings.max_document_bytes)
        if isinstance(record, tuple):
            return record[0]
        document = []
        for key in self.settings.json_keys:
            if key not in record:
                return no_key(record, key)
            value = record[key]
            parts = value if isinstance(value, list) else [value]
            for part in parts:
                if not isinstance(part, str):
                    kind = type(part).__name__
                    found = f"a list with a {kind} in it" if isinstance(value, list) else f"of type {kind}"
                    return f"{key!r} is {found}, not a string or a list of strings"
                if reason := unusable_characters(part):
                    return f"{key!r} {reason}"
            try:
                document.append(self._sentences(value))
            except UserError as error:  # of the sentence splitter, about this text
                return f"{key!r}: {error}"
        return document

    def _sentences(self, value: str | list[str]) -> list[str]:
        if not self.settings.split_sentences:
            return [value if isinstance(value, str) else "".join(value)]
        return self._split(value) if isinstance(value, str) else value

    def _encode_key(self, sentences: list[str], num_sentences: list[int]) -> EncodedKey:
        ids, lengths = self.tokenizer.tokenize_arrays(sentences)
        document = np.repeat(np.arange(len(num_sentences)), num_sentences)[lengths > 0]
        lengths = lengths[lengths > 0]
        num_sequences = np.bincount(document, minlength=len(num_sentences))
        if self.settings.split_tokens:
            num_sequences = np.bincount(np.repeat(document, lengths), minlength=len(num_sentences))
            lengths = np.ones(len(ids), np.int64)
        has_tokens = num_sequences > 0
        num_sequences = num_sequences[has_tokens]
        if self.settings.append_eod and len(ids):
            last = np.cumsum(num_sequences) - 1
            ids = np.insert(ids, np.cumsum(lengths)[last], self.tokenizer.eod)
            lengths[last] += 1
        num_bytes = sum(len(part) if part.isascii() else len(part.encode()) for part in sentences)
        return EncodedKey(
            ids.astype(self._dtype), lengths.astype(np.int32), num_sequences, int((~has_tokens).sum()), num_bytes
        )


def prepare(settings: tuple[EncodingSettings, int | None]) -> EncodePiece:
    """The function that encodes a piece (see pieces.py), by settings and the limit of bad lines."""
    encoder, limit = Encoder(settings[0]), settings[1]
    return lambda job: encode_piece(*job, encoder, limit)


def encode_piece(piece: Piece, prefix: str, encoder: Encoder, limit: int | None) -> tuple[int, bool]:
    """Encode a piece into a token file a key; returns its number of bad lines, and if it is whole.

    They go to `prefix`.bad.jsonl, counted from the start of the piece. Where they are hopelessly many the piece is
    left unfinished.
    """
    quarantine = Quarantine(f"{prefix}.bad.jsonl", ANY_NUMBER)
    dtype = token_dtype(encoder.tokenizer.vocab_size)
    with ExitStack() as stack:
        stack.enter_context(closing(quarantine))
        prefixes = [prefix + suffix for suffix in encoder.settings.suffixes]
        writers = [stack.enter_context(KeyWriter(name, dtype, durable=False)) for name in prefixes]
        for batch in line_batches(piece, encoder.settings):
            encoded = encoder.encode(batch)
            for bad in encoded.bad_lines:
                quarantine.list_line(piece.path, bad)
            quarantine.read(encoded.num_lines - len(encoded.bad_lines))
            if is_hopeless(limit, quarantine.count, quarantine.lines):
                for writer in writers:
                    writer.abort()
                return quarantine.count, False
            for writer, part in zip(writers, encoded.keys, strict=True):
                writer.add(part)
        quarantine.close()
        num_lines = quarantine.lines - quarantine.count
        for writer in writers:
            writer.finish({"num_lines": num_lines, "bad_lines": quarantine.count})
    return quarantine.count, True


class KeyWriter(IndexedDatasetWriter):
    """A token file of one key and the counts that belong in its .json."""

    def __init__(self, prefix: str, dtype: np.dtype, *, durable: bool = True):
        super().__init__(prefix, dtype, durable=durable)
        self.counts = dict.fromkeys(("num_documents", "num_sequences", "num_bytes", "empty_documents"), 0)

    def add(self, part: EncodedKey) -> None:
        """Append the documents of a batch."""
        self.add_documents(part.ids, part.sequence_lengths, part.num_sequences)
        self._count(len(part.num_sequences), len(part.sequence_lengths), part.num_bytes, part.num_empty)

    def add_finished(self, part: IndexedDataset) -> None:
        """Append the token file of a piece."""
        self.add_dataset(part)
        self._count(*(part.meta[name] for name in self.counts))

    def _count(self, *more: int) -> None:
        for name, number in zip(self.counts, more, strict=True):
            self.counts[name] += number

    def finish(self, meta: dict[str, Any]) -> dict[str, Any]:
        """Publish the files; returns what the .json holds."""
        counts = {
            "num_documents": self.counts["num_documents"],
            "num_sequences": self.counts["num_sequences"],
            "num_tokens": self.num_tokens,
            "num_bytes": self.counts["num_bytes"],
            "empty_documents": self.counts["empty_documents"],
            "dtype": self.dtype.name,
            "bin_sha256": self.bin_sha256,
        }
        self.finalize(meta | counts)
        return meta | counts


def line_batches(piece: Piece, settings: EncodingSettings) -> Iterator[LineBatch]:
    """The lines of a piece, so many at a time that one call of the tokenizer takes a tenth of a second."""
    batch, size = LineBatch(), 0
    for item in json_lines(piece, settings):
        if isinstance(item, BadLine):
            batch.bad_lines.append(item)
            continue
        batch.lines.append(item)
        size += len(item[1])
        if size >= _BATCH_BYTES:
            yield batch
            batch, size = LineBatch(), 0
    if batch.lines or batch.bad_lines:
        yield batch


def json_lines(piece: Piece, settings: EncodingSettings) -> Iterator[tuple[int, bytes] | BadLine]:
    """(line number, JSON line) of each document; one of a text file is written as such a line."""
    if piece.kind == "json":
        lines = read_lines(piece, max_bytes=settings.max_document_bytes)
        yield from ((number, line) for number, line in lines if not line.isspace())
        return
    for item in read_piece(piece):
        if isinstance(item, BadLine):
            if not isinstance(item, EmptyText):
                yield item
        else:
            line = json.dumps({settings.json_keys[0]: item.text}, ensure_ascii=False).encode()
            yield int(item.source.rpartition(":")[2]), line

"""JSON lines -> token ids: one batch of lines in one process, and many batches in many processes, in order.

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

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from lm_experiments_tools.data.text.bad_lines import BadLine, no_key
from lm_experiments_tools.data.text.documents import excerpt, parse_json_object, unusable_characters
from lm_experiments_tools.data.tokens.indexed import token_dtype
from lm_experiments_tools.data.workers import Caller, WorkerEnded, WorkerPool
from lm_experiments_tools.errors import UserError
from megatron.sentences import SentenceSplitter
from megatron.tokenizers import BertDataTokenizer, build_tokenizer


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

    def tokenizer(self) -> BertDataTokenizer:
        """UserError where it cannot be built."""
        return build_tokenizer(
            self.tokenizer_type, vocab_file=self.vocab_file, name_or_path=self.tokenizer_name_or_path
        )


@dataclass
class LineBatch:
    """Lines of one file, each with its number."""

    path: str
    lines: list[tuple[int, bytes]] = field(default_factory=list)
    bad_lines: list[BadLine] = field(default_factory=list)  # that were no text to begin with

    @property
    def first_line(self) -> int:
        return min([*(number for number, _ in self.lines), *(bad.line for bad in self.bad_lines)])

    @property
    def num_bytes(self) -> int:
        return sum(len(line) for _, line in self.lines)


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

    path: str
    keys: list[EncodedKey]
    num_lines: int
    num_bytes: int
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
        return EncodedBatch(batch.path, encoded, num_lines, batch.num_bytes, bad_lines)

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


def encode_all(batches: Iterable[LineBatch], settings: EncodingSettings, workers: int) -> Iterator[EncodedBatch]:
    """Encode batches in order by `workers` processes (1: this one); holds no more than three batches for each.

    Closing the iterator, an exception or Ctrl-C ends the processes.
    """
    if workers == 1:
        yield from map(Encoder(settings).encode, batches)
        return
    with WorkerPool(work, settings, workers) as pool:
        try:
            yield from pool.map(batches)
        except WorkerEnded as end:
            raise UserError(
                f"a process of --workers {workers} ended with exit code {end.returncode} (-9: killed, often for want "
                f"of memory) at {end.request.path} from line {end.request.first_line} on; try again with fewer "
                f"workers or a smaller --max-document-mb"
            ) from None


def work(caller: Caller) -> None:
    """A worker process: told the settings, it answers each LineBatch with its EncodedBatch."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread a worker
    caller.serve(lambda settings: Encoder(settings).encode)

"""Records -> token ids of sentences, for BERT: an encoder of the text-to-tokens pipeline (data/tokens/pipeline.py).

What a record gives, by the kind of its field and the settings:

| field | `split_sentences` | sequences of the document |
|---|---|---|
| a string | yes | its sentences |
| a string | no | one: the whole text |
| a list of strings | yes | its items, taken for sentences that are split already |
| a list of strings | no | one: the items joined |

A sequence without tokens is left out, and so is a document without sequences (it is counted as empty). `split_tokens`
makes each token a sequence; `append_eod` ends the last sequence of a document with the end-of-document id.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

import numpy as np

from lm_experiments_tools.data.text.records import BadRecord, Record, field_of, unusable_characters, utf8_length
from lm_experiments_tools.data.tokens.indexed import token_dtype
from lm_experiments_tools.data.tokens.pipeline import EncodedDocuments
from lm_experiments_tools.errors import UserError
from megatron.sentences import SentenceSplitter, splitter_version
from megatron.tokenizers import BertDataTokenizer, build_tokenizer


@dataclass(frozen=True, kw_only=True)
class EncodingSettings:
    """Everything that decides the ids of a record."""

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


class SentenceEncoder:
    """A `pipeline.Encoder` by a BERT tokenizer. Raises UserError where tokenizer or splitter cannot be built."""

    key = None

    def __init__(self, settings: EncodingSettings):
        self.settings, self.max_bytes = settings, settings.max_document_bytes
        self.tokenizer = settings.tokenizer()
        self.dtype = token_dtype(self.tokenizer.vocab_size)
        self.suffixes = [f"-{number}" for number in range(len(settings.json_keys))]
        self._split = SentenceSplitter(settings.sentence_splitter, settings.keep_newlines)

    def __reduce__(self) -> tuple:
        return SentenceEncoder, (self.settings,)

    @property
    def identity(self) -> list[Any]:
        sources = {"vocab_file", "tokenizer_name_or_path", "tokenizer_type"}
        rules = {name: value for name, value in asdict(self.settings).items() if name not in sources}
        version = splitter_version(self.settings.sentence_splitter) if self.settings.split_sentences else ""
        return [rules, self.tokenizer.fingerprint, version]

    def parts(self, record: Record) -> list[list[str]]:
        """The sentences under each key. A text file has one key only."""
        fields = record.value if record.raw else {self.settings.json_keys[0]: record.value["text"]}
        return [self._sentences(key, field_of(fields, key)) for key in self.settings.json_keys]

    def _sentences(self, key: str, value: Any) -> list[str]:
        for text in value if isinstance(value, list) else [value]:
            if not isinstance(text, str):
                kind = type(text).__name__
                found = f"a list with a {kind} in it" if isinstance(value, list) else f"of type {kind}"
                raise BadRecord(f"{key!r} is {found}, not a string or a list of strings")
            if reason := unusable_characters(text):
                raise BadRecord(f"{key!r} {reason}")
        if not self.settings.split_sentences:
            return [value if isinstance(value, str) else "".join(value)]
        try:
            return self._split(value) if isinstance(value, str) else value
        except UserError as error:  # the sentence splitter fails on this text
            raise BadRecord(f"{key!r}: {error}") from None

    def encode(self, documents: Sequence[Sequence[str]]) -> EncodedDocuments:
        """The ids of documents, each a list of sentences."""
        sentences = list(chain.from_iterable(documents))
        ids, lengths = self.tokenizer.tokenize_arrays(sentences)
        document = np.repeat(np.arange(len(documents)), [len(document) for document in documents])[lengths > 0]
        lengths = lengths[lengths > 0]
        if self.settings.split_tokens:
            document, lengths = np.repeat(document, lengths), np.ones(len(ids), np.int64)
        num_sequences = np.bincount(document, minlength=len(documents))
        has_tokens = num_sequences > 0
        num_sequences = num_sequences[has_tokens]
        if self.settings.append_eod and len(ids):
            last = np.cumsum(num_sequences) - 1
            ids = np.insert(ids, np.cumsum(lengths)[last], self.tokenizer.eod)
            lengths[last] += 1
        num_bytes = sum(map(utf8_length, sentences))
        return EncodedDocuments(ids, lengths, num_sequences, num_bytes, int((~has_tokens).sum()))

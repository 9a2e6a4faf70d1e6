"""Convert JSON records to BERT's token sequences, one per sentence, for the command preprocess_data.py.

`SentenceEncoder` is an `Encoder` of the tokenization pipeline (data/tokens/tokenize.py). A field of a record gives
these sequences, depending on the setting `split_sentences`:

| field of the record | `split_sentences` | sequences of the document |
|---|---|---|
| a string | yes | its sentences |
| a string | no | one: the whole text |
| a list of strings | yes | its items, which are sentences already |
| a list of strings | no | one: the items joined |

Empty sequences and empty documents are dropped. The setting `split_tokens` makes each token a sequence. The setting
`append_eod` appends the end-of-document id to each document.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import chain
from typing import Any, Literal

import numpy as np

from lm_experiments_tools.data.text.records import BadRecord, Record, field_of, unusable_characters, utf8_length
from lm_experiments_tools.data.text.tokenizer import Tokenizer
from lm_experiments_tools.data.tokens.tokenize import EncodedDocuments
from lm_experiments_tools.errors import UserError
from megatron.sentences import SentenceSplitter, splitter_version
from megatron.tokenizers import build_tokenizer


@dataclass(frozen=True, kw_only=True)
class EncodingArgs:
    """How text becomes token sequences for BERT: JSON keys, tokenizer and sentence splitter."""

    json_keys: tuple[str, ...] = ("text",)
    """Keys of a line that hold text: a string, or a list of strings that are sentences already. A .txt file has one
    key only."""
    tokenizer_type: Literal["BertWordPieceLowerCase", "BertWordPieceCase", "HFTokenizer"]
    """Kind of tokenizer."""
    vocab_file: str | None = None
    """vocab.txt of a WordPiece tokenizer, one piece a line."""
    tokenizer_name_or_path: str | None = None
    """Folder or hub name of an HFTokenizer."""
    split_sentences: bool = False
    """Make each sentence a sequence, as BERT's samples need it; otherwise a document is one sequence."""
    sentence_splitter: str = "nupunkt"
    """nupunkt, sentencex (or sentencex:de for German), newline, or module:callable."""
    keep_newlines: bool = False
    """Leave the line breaks after a sentence in it; a tokenizer that knows them encodes them."""
    split_tokens: bool = False
    """Make each token a sequence."""
    append_eod: bool = False
    """End each document with the tokenizer's end-of-document id ([SEP] where it has none)."""


class SentenceEncoder:
    """Converts records to token ids for BERT: splits documents into sentences and tokenizes them.

    `vocabulary` is that of `args`, if already loaded. Raises UserError if it or the splitter cannot be loaded.
    """

    key = None

    def __init__(self, args: EncodingArgs, vocabulary: Tokenizer | None = None):
        # Not a subclass of a script's, which worker processes could not import.
        self.args = EncodingArgs(**{field.name: getattr(args, field.name) for field in fields(EncodingArgs)})
        self.vocabulary = vocabulary or build_tokenizer(
            args.tokenizer_type, vocab_file=args.vocab_file, name_or_path=args.tokenizer_name_or_path
        )
        self._split = SentenceSplitter(args.sentence_splitter, args.keep_newlines)
        settings = {
            "tokenizer_type": args.tokenizer_type,
            "level": "sentence" if args.split_sentences else "document",
            "sentence_splitter": args.sentence_splitter if args.split_sentences else None,
            "splitter_version": splitter_version(args.sentence_splitter) if args.split_sentences else None,
            "keep_newlines": args.keep_newlines,
            "split_tokens": args.split_tokens,
            "append_eod": args.append_eod,
        }
        self.outputs = [{"json_key": key, **settings} for key in args.json_keys]

    def __reduce__(self) -> tuple:
        return SentenceEncoder, (self.args, self.vocabulary)

    def parts(self, record: Record) -> list[list[str]]:
        """Split a record into sentences, one list for each JSON key that is tokenized."""
        values = record.value if record.raw else {self.args.json_keys[0]: record.value["text"]}
        return [self._sentences(key, field_of(values, key)) for key in self.args.json_keys]

    def _sentences(self, key: str, value: Any) -> list[str]:
        value = "" if value is None else value
        for text in value if isinstance(value, list) else [value]:
            if not isinstance(text, str):
                kind = type(text).__name__
                found = f"a list with a {kind} in it" if isinstance(value, list) else f"of type {kind}"
                raise BadRecord(f"{key!r} is {found}, not a string or a list of strings")
            if reason := unusable_characters(text):
                raise BadRecord(f"{key!r} {reason}")
        if not self.args.split_sentences:
            return [value if isinstance(value, str) else "".join(value)]
        try:
            return self._split(value) if isinstance(value, str) else value
        except UserError as error:  # the sentence splitter fails on this text
            raise BadRecord(f"{key!r}: {error}") from None

    def encode(self, documents: Sequence[Sequence[str]]) -> EncodedDocuments:
        """Convert documents, each a list of sentences, to token ids. Each sentence becomes one sequence."""
        sentences = list(chain.from_iterable(documents))
        ids, lengths = self.vocabulary.encode_arrays(sentences)
        document = np.repeat(np.arange(len(documents)), [len(document) for document in documents])[lengths > 0]
        lengths = lengths[lengths > 0]
        if self.args.split_tokens:
            document, lengths = np.repeat(document, lengths), np.ones(len(ids), np.int64)
        num_sequences = np.bincount(document, minlength=len(documents))
        has_tokens = num_sequences > 0
        num_sequences = num_sequences[has_tokens]
        if self.args.append_eod and len(ids):
            last = np.cumsum(num_sequences) - 1
            ids = np.insert(ids, np.cumsum(lengths)[last], self.vocabulary.eos_id)
            lengths[last] += 1
        num_bytes = sum(map(utf8_length, sentences))
        return EncodedDocuments(ids, lengths, num_sequences, num_bytes, int((~has_tokens).sum()))

"""Text -> token files for BERT, with the command line of Megatron-LM's preprocess_data.py.

    python megatron/preprocess_data.py --input FILE_OR_FOLDER --output-prefix PREFIX --split-sentences \\
        --tokenizer-type BertWordPieceLowerCase --vocab-file vocab.txt --workers 8

reads .json, .jsonl and .ndjson files (one object a line) and .txt files (documents between blank lines), also as .gz,
.bz2, .xz and .zst, and writes, for each key of --json-keys,

    PREFIX_text_sentence.bin, .idx   the tokens: one sequence a sentence, one document a line (Megatron's format)
    PREFIX_text_sentence.json        tokenizer, counts, settings
    PREFIX.bad_lines.jsonl           lines that could not be used, if any: file, line, reason

(`document` in place of `sentence` without --split-sentences). The files are the same for any number of workers, and
appear only when they are whole; a run that was stopped starts over. Runs to one PREFIX wait for each other.
"""

import json
import logging
import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

if __name__ == "__main__" and not __package__:
    # Run as a file: Python put this folder first on its path, where our tokenizers.py hides the package `tokenizers`.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from lm_experiments_tools.config.cli import parse, run_main
from lm_experiments_tools.config.flags import check_minimum
from lm_experiments_tools.data.text.bad_lines import NO_KEY, BadLine, EmptyText, Quarantine, allowed, no_documents
from lm_experiments_tools.data.text.documents import (
    Piece,
    plan_pieces,
    read_lines,
    read_piece,
)
from lm_experiments_tools.data.text.inputs import READABLE
from lm_experiments_tools.data.tokens.files import dataset_exists, remove_unfinished
from lm_experiments_tools.data.tokens.indexed import IndexedDatasetWriter, token_dtype
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.files import locked
from megatron.encoding import EncodedBatch, EncodedKey, EncodingSettings, LineBatch, encode_all
from megatron.sentences import SentenceSplitter
from megatron.tokenizers import BertDataTokenizer

logger = logging.getLogger(__name__)

_BATCH_BYTES = 1 << 19  # of lines for one call of a worker: a tenth of a second


@dataclass(frozen=True, kw_only=True)
class InputArgs:
    """The text."""

    input: str
    """A .json or .jsonl file, one object a line, or a .txt file, documents between blank lines (all also compressed),
    or a folder of them, read recursively in sorted order."""
    json_keys: tuple[str, ...] = ("text",)
    """Keys of a line that hold text: a string, or a list of strings that are sentences already. A .txt file has one
    key only."""
    split_sentences: bool = False
    """Make each sentence a sequence, as BERT's samples need it; otherwise a document is one sequence."""
    split_tokens: bool = False
    """Make each token a sequence."""
    keep_newlines: bool = False
    """Leave the line breaks after a sentence in it; a tokenizer that knows them encodes them."""
    sentence_splitter: str = "nupunkt"
    """nupunkt, sentencex (or sentencex:de for German), newline, or module:callable."""
    max_bad_lines: int | None = None
    """Lines that cannot be used to leave out, listed in PREFIX.bad_lines.jsonl, before it is an error. None: 100, or
    0.1 % of the lines read so far where that is more."""
    max_document_mb: int = 256
    """A longer line is a bad line; a worker needs 6 times the memory, 24 times without --split_sentences."""


@dataclass(frozen=True, kw_only=True)
class TokenizerArgs:
    """The tokenizer."""

    tokenizer_type: Literal["BertWordPieceLowerCase", "BertWordPieceCase", "HFTokenizer", "GPT2BPETokenizer"]
    """Kind of tokenizer (GPT2BPETokenizer is known, and refused: it lacks BERT's special tokens)."""
    vocab_file: str | None = None
    """vocab.txt of a WordPiece tokenizer, one piece a line."""
    merge_file: str | None = None
    """Belongs to GPT2BPETokenizer."""
    tokenizer_name_or_path: str | None = None
    """Folder or hub name of an HFTokenizer."""
    append_eod: bool = False
    """End each document with the tokenizer's end-of-document id ([SEP] where it has none)."""


@dataclass(frozen=True, kw_only=True)
class OutputArgs:
    """The token files."""

    output_prefix: str
    """PREFIX of PREFIX_KEY_sentence.bin and so on."""
    dataset_impl: Literal["mmap", "lazy", "cached"] = "mmap"
    """Format; only mmap is written."""


@dataclass(frozen=True, kw_only=True)
class RuntimeArgs:
    """Processes and messages."""

    workers: int = 1
    """Processes that tokenize; the files do not depend on it."""
    log_interval: int = 100
    """Documents between two lines of progress."""


@dataclass(frozen=True, kw_only=True)
class PreprocessArgs(RuntimeArgs, OutputArgs, TokenizerArgs, InputArgs):
    """The command line of preprocess_data.py."""

    def __post_init__(self) -> None:
        check_minimum(self, 1, "workers", "log_interval", "max_document_mb")
        check_minimum(self, 0, "max_bad_lines")
        if self.dataset_impl != "mmap":
            raise UserError(
                f"--dataset-impl {self.dataset_impl} is fairseq's old format, which nothing reads any more: take mmap."
            )
        if self.merge_file is not None and self.tokenizer_type != "GPT2BPETokenizer":
            raise UserError(
                f"--merge-file belongs to GPT2BPETokenizer, not to --tokenizer-type {self.tokenizer_type}."
            )
        if self.tokenizer_type == "HFTokenizer" and self.vocab_file is not None:
            raise UserError("--vocab-file belongs to BertWordPiece...; HFTokenizer takes --tokenizer-name-or-path.")
        if self.tokenizer_type != "HFTokenizer" and self.tokenizer_name_or_path is not None:
            raise UserError(
                f"--tokenizer-name-or-path belongs to HFTokenizer; {self.tokenizer_type} has --vocab-file."
            )
        twice = {key for key in self.json_keys if self.json_keys.count(key) > 1 or "/" in key}
        if twice:
            raise UserError(f"--json-keys {twice.pop()!r} cannot name a file: given twice, or with a / in it.")
        if self.output_prefix.endswith(("/", ".bin", ".idx")):
            raise UserError(f"--output-prefix {self.output_prefix} must be a prefix, such as tokens/train.")

    @property
    def level(self) -> str:
        """The kind of a sequence, in the names of the files."""
        return "sentence" if self.split_sentences else "document"

    def settings(self) -> EncodingSettings:
        """The part of the settings that the workers need."""
        names = {field.name for field in fields(EncodingSettings)} - {"max_document_bytes"}
        same = {name: getattr(self, name) for name in names}
        return EncodingSettings(**same, max_document_bytes=self.max_document_mb << 20)


def preprocess(args: PreprocessArgs) -> dict[str, dict[str, Any]]:
    """Write the token files; returns, by prefix, what their .json holds.

    Raises:
        UserError: no such input, tokenizer or sentence splitter; too many bad lines; a key that no line has, or
            without any text.
    """
    settings = args.settings()
    tokenizer = settings.tokenizer()
    SentenceSplitter(args.sentence_splitter)  # refused here rather than in a worker
    pieces = _input_files(args.input, args.json_keys)
    if not args.split_sentences:
        logger.warning(
            "without --split-sentences a document is one sequence, of which BERT makes no sentence pairs and reads no "
            "more than the length of a sample"
        )
    if args.keep_newlines and not args.split_sentences:
        logger.warning("--keep-newlines changes nothing without --split-sentences")
    with locked(Path(f"{args.output_prefix}.lock")):
        return _write(args, settings, tokenizer, pieces)


def _write(
    args: PreprocessArgs, settings: EncodingSettings, tokenizer: BertDataTokenizer, pieces: list[Piece]
) -> dict[str, dict[str, Any]]:
    """`preprocess` while no other run writes to the same prefix."""
    prefixes = [f"{args.output_prefix}_{key}_{args.level}" for key in args.json_keys]
    for prefix in prefixes:
        remove_unfinished(prefix)
        if dataset_exists(prefix):
            logger.warning("%s.bin and .idx are there already: they are replaced when this run ends", prefix)
    bad_lines = Quarantine(f"{args.output_prefix}.bad_lines.jsonl", args.max_bad_lines)
    with ExitStack() as stack:
        stack.enter_context(closing(bad_lines))
        writers = [stack.enter_context(_Writer(prefix, tokenizer)) for prefix in prefixes]
        encoded = stack.enter_context(closing(encode_all(_line_batches(pieces, settings), settings, args.workers)))
        _check_and_add(_with_progress(encoded, args.log_interval), writers, bad_lines, args)
        for key, writer in zip(args.json_keys, writers, strict=True):
            if not writer.num_documents:
                if not writer.num_empty:
                    raise no_documents([args.input], bad_lines.count)
                raise UserError(f"all {writer.num_empty} documents of {args.input} are empty under the key {key!r}")
        metas = [
            writer.finish(_meta(args, key, tokenizer, bad_lines.count))
            for key, writer in zip(args.json_keys, writers, strict=True)
        ]
    if bad_lines.count:
        logger.warning("%s", bad_lines)
    return dict(zip(prefixes, metas, strict=True))


def _check_and_add(
    encoded: Iterable[EncodedBatch], writers: Sequence["_Writer"], bad_lines: Quarantine, args: PreprocessArgs
) -> None:
    """Give documents to the writers and bad lines to the quarantine; UserError for too many, or a key no line has."""
    num_lines = num_lacking = 0
    first = ""
    for batch in encoded:
        num_lines += batch.num_lines
        num_lacking += sum(bad.reason.startswith(NO_KEY) for bad in batch.bad_lines)
        first = first or next((f"{batch.path}:{bad.line}: {bad.reason}" for bad in batch.bad_lines), "")
        if num_lacking == num_lines > allowed(args.max_bad_lines, num_lines):
            break
        bad_lines.read(batch.num_lines - len(batch.bad_lines))
        for bad in batch.bad_lines:
            bad_lines.list_line(batch.path, bad)
        for writer, part in zip(writers, batch.keys, strict=True):
            writer.add(part)
    if num_lacking == num_lines > 0:
        bad_lines.close()
        bad_lines.path.unlink(missing_ok=True)  # a list of all lines helps nobody
        raise UserError(
            f"none of the {num_lines} lines read from {args.input} has the text that --json-keys "
            f"{' '.join(args.json_keys)} names; the first is {first}: name the keys that hold text"
        )


class _Writer(IndexedDatasetWriter):
    """A token file and the counts that belong in its .json."""

    def __init__(self, prefix: str, tokenizer: BertDataTokenizer):
        super().__init__(prefix, token_dtype(tokenizer.vocab_size))
        self.num_documents = self.num_sequences = self.num_empty = self.num_bytes = 0

    def add(self, part: EncodedKey) -> None:
        """Append the documents of a batch."""
        self.add_documents(part.ids, part.sequence_lengths, part.num_sequences)
        self.num_documents += len(part.num_sequences)
        self.num_sequences += len(part.sequence_lengths)
        self.num_empty += part.num_empty
        self.num_bytes += part.num_bytes

    def finish(self, meta: dict[str, Any]) -> dict[str, Any]:
        """Publish the files; returns what the .json holds."""
        counts = {
            "num_documents": self.num_documents,
            "num_sequences": self.num_sequences,
            "num_tokens": self.num_tokens,
            "num_bytes": self.num_bytes,
            "empty_documents": self.num_empty,
            "dtype": self.dtype.name,
            "bin_sha256": self.bin_sha256,
        }
        self.finalize(meta | counts)
        return meta | counts


def _meta(args: PreprocessArgs, key: str, tokenizer: BertDataTokenizer, num_bad: int) -> dict[str, Any]:
    return {
        "vocab_sha256": tokenizer.fingerprint,
        "vocab_file": tokenizer.name,
        "vocab_size": tokenizer.vocab_size,
        "tokenizer_type": args.tokenizer_type,
        "json_key": key,
        "level": args.level,
        "sentence_splitter": args.sentence_splitter if args.split_sentences else None,
        "keep_newlines": args.keep_newlines,
        "split_tokens": args.split_tokens,
        "append_eod": args.append_eod,
        "bad_lines": num_bad,
    }


def _input_files(path: str, json_keys: Sequence[str]) -> list[Piece]:
    if not os.path.exists(path):
        raise UserError(f"--input {path} does not exist")
    pieces = plan_pieces([path], piece_bytes=sys.maxsize)
    if any(piece.kind == "dataset" for piece in pieces):
        raise UserError(f"--input {path} has no {READABLE} file: put each document on a line as JSON")
    texts = [piece for piece in pieces if piece.kind == "text"]
    if texts and len(json_keys) > 1:
        raise UserError(
            f"{texts[0].path} has one text a document, but --json-keys {' '.join(json_keys)} names {len(json_keys)}: "
            "name one key"
        )
    if texts:
        logger.info("%d text files in %s: a document ends at a blank line", len(texts), path)
    return pieces


def _line_batches(pieces: Iterable[Piece], settings: EncodingSettings) -> Iterator[LineBatch]:
    for piece in pieces:
        batch, size = LineBatch(piece.path), 0
        for item in _lines(piece, settings):
            if isinstance(item, BadLine):
                batch.bad_lines.append(item)
                continue
            batch.lines.append(item)
            size += len(item[1])
            if size >= _BATCH_BYTES:
                yield batch
                batch, size = LineBatch(piece.path), 0
        if batch.lines or batch.bad_lines:
            yield batch


def _lines(piece: Piece, settings: EncodingSettings) -> Iterator[tuple[int, bytes] | BadLine]:
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


def _with_progress(encoded: Iterable[EncodedBatch], interval: int) -> Iterator[EncodedBatch]:
    start, num_lines, num_bytes = time.perf_counter(), 0, 0
    for batch in encoded:
        yield batch
        passed = (num_lines + batch.num_lines) // interval > num_lines // interval
        num_lines += batch.num_lines
        num_bytes += batch.num_bytes
        if passed:
            seconds = time.perf_counter() - start
            rates = num_lines / seconds, num_bytes / 1e6 / seconds
            logger.info("Processed %d documents (%.1f docs/s, %.2f MB/s).", num_lines, *rates)


def main(argv: Sequence[str] | None = None) -> None:
    args, _ = parse(PreprocessArgs, argv, description=__doc__)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # --workers says how many cores to use
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # cleans up on the way out
    start = time.perf_counter()
    for prefix, meta in preprocess(args).items():
        print(
            f"{prefix}: {meta['num_documents']:,} documents, {meta['num_sequences']:,} sequences, "
            f"{meta['num_tokens']:,} tokens ({meta['dtype']}) of {meta['vocab_size']:,} ids; "
            f"{meta['empty_documents']} empty, {meta['bad_lines']} bad lines"
        )
    print(f"{time.perf_counter() - start:.1f} s")


if __name__ == "__main__":
    run_main(main)

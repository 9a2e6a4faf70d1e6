"""Describe the token files of a run: number and lengths of documents, token frequencies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from lm_experiments_tools.data.tokens.indexed import IndexedDataset, IndexedDatasetWriter
from lm_experiments_tools.errors import UserError

Facts = list[tuple[str, str]]  # (name, text); an empty name continues the fact above
PERCENTILES = {0: "min", 5: "5 %", 25: "25 %", 50: "median", 75: "75 %", 95: "95 %", 99: "99 %", 100: "max"}
MAX_COUNTED = 1_000_000_000  # tokens of a file whose frequencies are counted
_BLOCK = 1 << 24  # tokens counted at a time


@dataclass(frozen=True)
class TokenSource:
    """The tokens of one data path that `lmtools inspect` describes."""

    path: str
    tokens: IndexedDataset
    is_whole: bool = True

    def title(self) -> str:
        """Title of the section on this data path: the path and the number of inspected documents."""
        return self.path if self.is_whole else f"{self.path}: the first {self.tokens.num_documents:,} documents"


def open_source(path: str, tokens: IndexedDataset, args: Any, scratch: Path) -> TokenSource:
    """Select the documents of a data path that `lmtools inspect` describes: the first `args.documents`, or all.

    Args:
        scratch: folder to which the first documents are copied.

    Raises:
        UserError: all are inspected, and the file differs from its recorded sha256.
    """
    if args.documents is None or args.documents >= tokens.num_documents:
        tokens.check_content()
        return TokenSource(path, tokens)
    with IndexedDatasetWriter(scratch, tokens.dtype) as writer:
        for first, end in pairwise(tokens.document_indices[: args.documents + 1].tolist()):
            for index in range(first, end):
                writer.add_sequence(tokens[index])
            writer.end_document()
        entries = ("vocab_file", "vocab_sha256", "vocab_size", "append_eos", "append_eod")
        writer.finalize({name: tokens.meta[name] for name in entries if name in tokens.meta})
    return TokenSource(path, IndexedDataset(scratch), is_whole=False)


def document_lengths(tokens: IndexedDataset) -> tuple[np.ndarray, np.ndarray]:
    """Return the number of tokens and of sequences of each document, int64[num_documents] each."""
    lengths, sizes, done = np.empty(tokens.num_documents, np.int64), np.empty(tokens.num_documents, np.int64), 0
    for bounds in tokens.document_bounds():
        block = slice(done, done + len(bounds) - 1)
        lengths[block], sizes[block], done = np.diff(tokens.offsets(bounds)), np.diff(bounds), block.stop
    return lengths, sizes


def token_frequencies(tokens: IndexedDataset, vocab_size: int) -> np.ndarray:
    """Count how often each token id occurs in a token file; returns int64[vocab_size].

    A large file is sampled: the counts are those of evenly spaced blocks of at most about `MAX_COUNTED` tokens in all.

    Raises:
        UserError: an id is outside the vocabulary.
    """
    step = max(1, -(-tokens.num_tokens // MAX_COUNTED))
    frequencies = np.zeros(vocab_size, np.int64)
    for start in range(0, tokens.num_tokens, _BLOCK * step):
        block = np.asarray(tokens.tokens[start : start + _BLOCK])
        if int(block.max()) >= vocab_size or int(block.min()) < 0:
            wrong = int(block.max()) if int(block.max()) >= vocab_size else int(block.min())
            raise UserError(
                f"{tokens.bin_path} holds id {wrong}, but the vocabulary has ids 0 to {vocab_size - 1}: give the "
                "vocabulary that it was tokenized with, or tokenize again"
            )
        frequencies += np.bincount(block, minlength=vocab_size)
    return frequencies


def percentiles(lengths: np.ndarray) -> dict[str, int]:
    """Compute percentiles of lengths, as {name: tokens}; {} for no lengths."""
    values = np.percentile(lengths, list(PERCENTILES), method="inverted_cdf") if len(lengths) else ()
    return {name: int(value) for name, value in zip(PERCENTILES.values(), values, strict=False)}


def token_facts(
    source: TokenSource,
    args: Any,
    vocab_size: int,
    unk_id: int | None,
    subword: Callable[[int], str],
    has_sentences: bool = False,
) -> Facts:
    """Describe tokens: documents, lengths, frequent ids, rate of unknown tokens.

    Args:
        subword: returns the text of an id.
        has_sentences: True if the sequences of a document are sentences, to describe their lengths too.
    """
    tokens = source.tokens
    lengths, sizes = document_lengths(tokens)
    frequencies = token_frequencies(tokens, vocab_size)
    counted = max(int(frequencies.sum()), 1)
    text = ""
    if num_bytes := tokens.meta.get("num_bytes"):
        text = f" from {num_bytes / 1e6:,.1f} MB of text, {num_bytes / max(tokens.num_tokens, 1):.2f} bytes a token"
    facts = [("documents", f"{tokens.num_documents:,}")]
    facts += [("sentences", f"{len(tokens):,}")] if has_sentences else []
    facts += [("tokens", f"{tokens.num_tokens:,}{text}")]
    facts += [("length", _length(lengths, "tokens of a document"))]
    if has_sentences:
        facts += [("", _length(tokens.sequence_lengths, "tokens of a sentence"))]
        facts += [("", _length(sizes, "sentences of a document"))]
    unknown = 0 if unk_id is None else int(frequencies[unk_id])
    sample = "" if counted >= tokens.num_tokens else f" (of {counted:,} tokens counted)"
    used = f"{np.count_nonzero(frequencies):,} of {vocab_size:,} ids occur{sample}"
    facts += [("vocabulary", f"{used}; unknown {unknown / counted:.4%} of the tokens")]
    most = np.argsort(-frequencies, kind="stable")[: min(args.frequent, np.count_nonzero(frequencies))]
    facts += [("frequent", "  ".join(f"{subword(i)!r} {frequencies[i] / counted:.2%}" for i in most.tolist()))]
    return facts


def _length(lengths: np.ndarray, what: str) -> str:
    return f"{'  '.join(f'{name} {value:,}' for name, value in percentiles(lengths).items())}   ({what})"

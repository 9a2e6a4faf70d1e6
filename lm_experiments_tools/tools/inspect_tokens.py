"""Describe the token files of a run: number and lengths of documents."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lm_experiments_tools.data.tokens.indexed import IndexedDataset, IndexedDatasetWriter

Facts = list[tuple[str, str]]  # (name, text); an empty name continues the fact above
PERCENTILES = {0: "min", 5: "5 %", 25: "25 %", 50: "median", 75: "75 %", 95: "95 %", 99: "99 %", 100: "max"}


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

    The first ones are copied to the folder `scratch`. UserError if the whole file differs from its recorded sha256.
    """
    if args.documents is None or args.documents >= tokens.num_documents:
        tokens.check_content()
        return TokenSource(path, tokens)
    with IndexedDatasetWriter(scratch, tokens.dtype) as writer:
        for block in tokens.blocks(args.documents):
            writer.add_documents(*block)
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


def percentiles(lengths: np.ndarray) -> dict[str, int]:
    """Compute percentiles of lengths, as {name: tokens}; {} for no lengths."""
    values = np.percentile(lengths, list(PERCENTILES), method="inverted_cdf") if len(lengths) else ()
    return {name: int(value) for name, value in zip(PERCENTILES.values(), values, strict=False)}


def token_facts(source: TokenSource, has_sentences: bool = False) -> Facts:
    """Describe documents, tokens and lengths of a token file, also of sentences if its sequences are such."""
    tokens = source.tokens
    lengths, sizes = document_lengths(tokens)
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
    return facts


def _length(lengths: np.ndarray, what: str) -> str:
    return f"{'  '.join(f'{name} {value:,}' for name, value in percentiles(lengths).items())}   ({what})"

"""Facts about token files: documents, lengths, token frequencies."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from lm_experiments_tools.data.tokens.indexed import IndexedDataset, IndexedDatasetWriter
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.tools.inspection.args import TokenArgs
from lm_experiments_tools.tools.inspection.section import Section

PERCENTILES = {0: "min", 5: "5 %", 25: "25 %", 50: "median", 75: "75 %", 95: "95 %", 99: "99 %", 100: "max"}
MAX_COUNTED = 1_000_000_000  # tokens of a file whose frequencies are counted
_BLOCK = 1 << 24  # tokens counted at a time
_VOCABULARY = ("vocab_file", "vocab_sha256", "vocab_size")  # entries of PREFIX.json


@dataclass(frozen=True)
class TokenSource:
    """The inspected tokens of one data path.

    Attributes:
        path: value of --data_path.
        tokens: of all documents, or of the first ones.
        fraction: inspected fraction of the data, 1.0 for all; None if the size of the data is unknown.
        content: result of the comparison with the recorded sha256; "" for text.
    """

    path: str
    tokens: IndexedDataset
    fraction: float | None = 1.0
    content: str = ""

    def title(self) -> str:
        """The path, and how much of it is inspected."""
        if self.fraction == 1.0:
            return self.path
        part = "a part of unknown size" if self.fraction is None else f"{self.fraction:.2%}"
        return f"{self.path}: the first {self.tokens.num_documents:,} documents, {part} of it"


def open_source(path: str, tokens: IndexedDataset, args: TokenArgs, scratch: Path) -> TokenSource:
    """The first `args.documents` documents of a token file, copied to the prefix `scratch`; None: the file itself.

    Raises:
        UserError: the whole file is inspected and differs from its recorded sha256.
    """
    if args.documents is None or args.documents >= tokens.num_documents:
        return TokenSource(path, tokens, content=_content(tokens, args.check_gigabytes))
    bounds = pairwise(tokens.document_indices[: args.documents + 1].tolist())
    documents = ([tokens[index] for index in range(first, end)] for first, end in bounds)
    meta = {name: tokens.meta[name] for name in _VOCABULARY if name in tokens.meta}
    copied = write_documents(scratch, tokens.dtype, documents, meta)
    fraction = copied.num_tokens / max(tokens.num_tokens, 1)
    return TokenSource(path, copied, fraction, "not compared with its record, because of --documents")


def write_documents(
    prefix: Path, dtype: Any, documents: Iterable[Iterable[Iterable[int]]], meta: dict[str, Any]
) -> IndexedDataset:
    """Write a token file of documents, each a list of sequences; `meta` is completed while documents are made."""
    with IndexedDatasetWriter(prefix, dtype) as writer:
        for document in documents:
            for sequence in document:
                writer.add_sequence(sequence)
            writer.end_document()
        writer.finalize(meta)
    return IndexedDataset(prefix)


def _content(tokens: IndexedDataset, max_gigabytes: float) -> str:
    gigabytes = tokens.bin_path.stat().st_size / 1e9
    if gigabytes > max_gigabytes:
        return f"not compared with its record: {gigabytes:.3g} GB, more than --check_gigabytes {max_gigabytes:g}"
    return "as written (sha256)" if tokens.check_content() else f"unknown: no sha256 in {tokens.meta_path}"


def document_lengths(tokens: IndexedDataset) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and sequences of each document, int64[num_documents] each; the index is read in blocks."""
    lengths, sizes, done = np.empty(tokens.num_documents, np.int64), np.empty(tokens.num_documents, np.int64), 0
    for bounds in tokens.document_bounds():
        block = slice(done, done + len(bounds) - 1)
        lengths[block], sizes[block], done = np.diff(tokens.offsets(bounds)), np.diff(bounds), block.stop
    return lengths, sizes


def token_frequencies(tokens: IndexedDataset, vocab_size: int) -> np.ndarray:
    """Occurrences of each id, int64[vocab_size], over evenly spaced blocks of at most about `MAX_COUNTED` tokens.

    Raises:
        UserError: an id outside the vocabulary.
    """
    step = max(1, -(-tokens.num_tokens // MAX_COUNTED))
    frequencies = np.zeros(vocab_size, np.int64)
    for start in range(0, tokens.num_tokens, _BLOCK * step):
        block = np.asarray(tokens.tokens[start : start + _BLOCK])
        if int(block.max()) >= vocab_size or int(block.min()) < 0:
            wrong = int(block.max()) if int(block.max()) >= vocab_size else int(block.min())
            raise UserError(
                f"{tokens.bin_path} holds id {wrong}, but the vocabulary has ids 0 to {vocab_size - 1}: it was "
                "tokenized with another vocabulary; give that one, or tokenize again"
            )
        frequencies += np.bincount(block, minlength=vocab_size)
    return frequencies


def percentiles(lengths: np.ndarray) -> dict[str, int]:
    """Name -> the smallest length that at least so many percent of `lengths` do not exceed; {} for no lengths."""
    values = np.percentile(lengths, list(PERCENTILES), method="inverted_cdf") if len(lengths) else ()
    return {name: int(value) for name, value in zip(PERCENTILES.values(), values, strict=False)}


def token_section(
    source: TokenSource,
    args: Any,
    *,
    vocab_size: int,
    unk_id: int | None,
    piece: Callable[[int], str],
    sentences: bool = False,
) -> Section:
    """Documents, tokens, lengths, frequent ids, the unknown rate; `--output` writes a histogram.

    Args:
        args: of the run, and `TokenArgs`.
        piece: text of an id.
        sentences: the sequences of a document are sentences, with lengths of their own.
    """
    tokens, section = source.tokens, Section(source.title())
    lengths, sizes = document_lengths(tokens)
    frequencies = token_frequencies(tokens, vocab_size)
    counted = max(int(frequencies.sum()), 1)
    section.add("documents", f"{tokens.num_documents:,}")
    if sentences:
        section.add("sentences", f"{len(tokens):,}")
    text = ""
    if num_bytes := tokens.meta.get("num_bytes"):
        text = f" from {num_bytes / 1e6:,.1f} MB of text, {num_bytes / max(tokens.num_tokens, 1):.2f} bytes a token"
    section.add("tokens", f"{tokens.num_tokens:,}{text}")
    if source.content:
        section.add("content", source.content)
    section.add("length", _length(lengths, "tokens of a document"))
    if sentences:
        section.add("", _length(tokens.sequence_lengths, "tokens of a sentence"))
        section.add("", _length(sizes, "sentences of a document"))
    unknown = 0 if unk_id is None else int(frequencies[unk_id])
    sample = "" if counted >= tokens.num_tokens else f" (of {counted:,} tokens counted)"
    used = f"{np.count_nonzero(frequencies):,} of {vocab_size:,} ids occur{sample}"
    section.add("vocabulary", f"{used}; unknown {unknown / counted:.4%} of the tokens")
    most = np.argsort(-frequencies, kind="stable")[: min(args.frequent, np.count_nonzero(frequencies))]
    section.add("frequent", "  ".join(f"{piece(i)!r} {frequencies[i] / counted:.2%}" for i in most.tolist()))
    if args.output is not None:
        name = re.sub(r"[^\w.-]+", "_", source.path).strip("_")
        kinds = {"documents": lengths} | ({"sentences": tokens.sequence_lengths} if sentences else {})
        limits = {flag: getattr(args, flag) for flag in ("input_seq_len", "target_seq_len") if hasattr(args, flag)}
        section.add("picture", str(plot_lengths(kinds, limits, Path(args.output) / f"{name}.png")))
    return section


def _length(lengths: np.ndarray, what: str) -> str:
    return f"{'  '.join(f'{name} {value:,}' for name, value in percentiles(lengths).items())}   ({what})"


def plot_lengths(kinds: Mapping[str, np.ndarray], limits: Mapping[str, int], path: Path) -> Path:
    """Write a PNG with a histogram of lengths for each kind, and vertical lines at `limits` (name -> tokens).

    Raises:
        UserError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError(f"--output draws with matplotlib, which is not importable ({error}): install it") from None
    figure = Figure(figsize=(6, 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for kind, lengths in kinds.items():
        if len(lengths):
            axes.hist(np.maximum(lengths, 1), np.geomspace(1, lengths.max() + 2, 60), alpha=0.7, label=kind)
    for name, tokens in limits.items():
        axes.axvline(tokens, color="C3", linewidth=1)
        axes.annotate(f" {name} {tokens:,}", (tokens, 0.97), xycoords=("data", "axes fraction"), fontsize=8)
    axes.set(xscale="log", yscale="log" if len(kinds) > 1 else "linear", xlabel="tokens")
    axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return path

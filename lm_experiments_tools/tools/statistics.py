"""Counts of a token file: documents, lengths, token frequencies; known before any GPU hour."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lm_experiments_tools.data.tokens.indexed import IndexedDataset
from lm_experiments_tools.errors import UserError

PERCENTILES = (0, 5, 25, 50, 75, 95, 99, 100)
_BLOCK = 1 << 24  # tokens counted at a time


@dataclass(frozen=True)
class TokenStatistics:
    """Counts of one token file.

    Attributes:
        document_lengths: int64[num_documents], tokens of each document.
        document_sequences: int64[num_documents], sequences of each document (sentences, for BERT).
        sequence_lengths: int32[num_sequences], tokens of each sequence.
        frequencies: int64[ids], how often each id occurs among the `num_counted` tokens that were counted.
        num_counted: all tokens, or an even sample of them where there are more than `max_counted`.
    """

    document_lengths: np.ndarray
    document_sequences: np.ndarray
    sequence_lengths: np.ndarray
    frequencies: np.ndarray
    num_counted: int

    def rate(self, token_id: int) -> float:
        """Share of the counted tokens that are `token_id`."""
        if not self.num_counted or not 0 <= token_id < len(self.frequencies):
            return 0.0
        return int(self.frequencies[token_id]) / self.num_counted

    def most_frequent(self, number: int) -> list[tuple[int, int]]:
        """(id, count) of the `number` commonest ids, the commonest first; ids that do not occur are left out."""
        order = np.argsort(-self.frequencies, kind="stable")[:number]
        return [(int(i), int(self.frequencies[i])) for i in order if self.frequencies[i]]

    @property
    def ids_in_use(self) -> int:
        """Number of different ids among the counted tokens."""
        return int(np.count_nonzero(self.frequencies))


def length_percentiles(lengths: np.ndarray) -> dict[int, int]:
    """Percentile -> a length that so many percent of `lengths` [n] do not exceed; {} for none."""
    if not len(lengths):
        return {}
    values = np.percentile(lengths, PERCENTILES, method="inverted_cdf")
    return dict(zip(PERCENTILES, map(int, values), strict=True))


def token_statistics(tokens: IndexedDataset, vocab_size: int, max_counted: int = 1_000_000_000) -> TokenStatistics:
    """Count a token file: lengths exactly, frequencies over about `max_counted` tokens at most, in even blocks.

    One worked example: documents [[5, 6], [7]] and [[5, 5]] (a document is a list of sequences) give document_lengths
    [3, 2], frequencies 3 for id 5, 1 for 6, 1 for 7, and percentiles 0 -> 2, 50 -> 2, 100 -> 3.

    Raises:
        UserError: an id at or above `vocab_size`, which means another vocabulary made the file.
    """
    lengths, sizes, done = np.empty(tokens.num_documents, np.int64), np.empty(tokens.num_documents, np.int64), 0
    for bounds in tokens.document_bounds():
        block = slice(done, done + len(bounds) - 1)
        lengths[block], sizes[block], done = np.diff(tokens.offsets(bounds)), np.diff(bounds), block.stop
    step = max(1, -(-tokens.num_tokens // max(max_counted, 1)))
    frequencies, counted = np.zeros(vocab_size, np.int64), 0
    for start in range(0, tokens.num_tokens, _BLOCK * step):
        block = np.asarray(tokens.tokens[start : start + _BLOCK])
        if int(block.max()) >= vocab_size or int(block.min()) < 0:
            wrong = int(block.max()) if int(block.max()) >= vocab_size else int(block.min())
            raise UserError(
                f"{tokens.bin_path} holds id {wrong}, but the vocabulary has ids 0 to {vocab_size - 1}: it was "
                "tokenized with another vocabulary; give that one, or tokenize again"
            )
        frequencies += np.bincount(block, minlength=vocab_size)
        counted += block.size
    return TokenStatistics(
        document_lengths=lengths,
        document_sequences=sizes,
        sequence_lengths=tokens.sequence_lengths,
        frequencies=frequencies,
        num_counted=counted,
    )


def plot_statistics(statistics: TokenStatistics, path: str | os.PathLike, marks: Mapping[str, int]) -> Path:
    """Write a PNG: histogram of lengths (logarithmic), and Zipf's curve.

    The lengths are those of documents, and of sentences where there are any, with vertical lines at `marks` (name ->
    tokens).

    Raises:
        UserError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError(
            f"the histogram needs matplotlib, which cannot be imported ({error}): pip install it"
        ) from None
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    kinds = {"documents": statistics.document_lengths}
    if len(statistics.sequence_lengths) > len(statistics.document_lengths):
        kinds["sentences"] = statistics.sequence_lengths
    for (kind, lengths), color in zip(kinds.items(), ("#3b6ea5", "#8fb56a"), strict=False):
        if len(lengths):
            bins = np.geomspace(1, lengths.max() + 2, 60)
            left.hist(np.maximum(lengths, 1), bins=bins, color=color, alpha=0.8, label=kind)
    if len(kinds) > 1:
        left.set_yscale("log")
        left.legend(frameon=False, loc="upper right")
    for name, length in marks.items():
        left.axvline(length, color="#c44e52", linewidth=1)
        left.annotate(
            f" {name} {length:,}", (length, 0.97), xycoords=("data", "axes fraction"), color="#c44e52", fontsize=8
        )
    left.set(xscale="log", xlabel="tokens", ylabel=" or ".join(kinds))
    ordered = np.sort(statistics.frequencies[statistics.frequencies > 0])[::-1]
    right.plot(np.arange(1, len(ordered) + 1), ordered, color="#3b6ea5")
    right.set(xscale="log", yscale="log", xlabel="rank of the token id", ylabel="occurrences")
    for axes in (left, right):
        axes.spines[["right", "top"]].set_visible(False)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return path

"""Shared by `lmtools inspect` and `lmtools inspect_bert`: counts of token files, steps, padding, samples."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm_experiments_tools.config.flags import check_minimum

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from lm_experiments_tools.config.training import BatchArgs
    from lm_experiments_tools.data.tokens.indexed import IndexedDataset
    from lm_experiments_tools.tools.samples import Wording

MEASURED_MICRO_BATCHES = 64
_DOCUMENTS_AT_ONCE = 1 << 14
_ORIGIN = ("vocab_file", "vocab_sha256", "vocab_size")  # of PREFIX.json: what made the ids


@dataclass(frozen=True, kw_only=True)
class LookArgs:
    """Looking at data."""

    samples: int = 3
    """Samples to show, the first ones of the run."""
    frequent: int = 12
    """Most frequent tokens to show."""
    documents: int | None = None
    """Look at the first so many documents of each --data_path only. None: all; 10000 of a Hugging Face dataset and
    with --streaming."""
    world_size: int = 1
    """Workers of the run to come: the steps of an epoch, and what stands in a micro-batch, depend on it."""
    check_gigabytes: float = 8.0
    """Compare the content of token files with the sha256 of their record up to this size (1 s a GB). 0: never."""
    output: str | None = None
    """Folder for a PNG of document lengths and token frequencies, for each --data_path. None: none."""

    def check(self) -> None:
        check_minimum(self, 0, "samples", "frequent", "check_gigabytes")
        check_minimum(self, 1, "documents", "world_size")


@dataclass(frozen=True)
class Source:
    """The tokens that are looked at, of one data path.

    Attributes:
        path: as it was given.
        tokens: of all documents, or of the first ones.
        share: the part of the data that they are, 1.0 for all; None where its size is not known.
        content: tells if the file is as it was written; "" for text.
    """

    path: str
    tokens: IndexedDataset
    share: float | None = 1.0
    content: str = ""

    def heading(self) -> str:
        if self.share == 1.0:
            return self.path
        part = "a part of unknown size" if self.share is None else f"{self.share:.2%}"
        return f"{self.path}: the first {self.tokens.num_documents:,} documents, {part} of it"


def first_documents(path: str, tokens: IndexedDataset, args: LookArgs, scratch: Path) -> Source:
    """The first `args.documents` of a token file, copied to the prefix `scratch`; all of them where it is None.

    Raises UserError where all are looked at and they are not what was written.
    """
    import numpy as np

    from lm_experiments_tools.data.tokens.indexed import IndexedDataset, IndexedDatasetWriter

    limit = args.documents
    if limit is None or limit >= tokens.num_documents:
        return Source(path, tokens, content=_content(tokens, args.check_gigabytes))
    with IndexedDatasetWriter(scratch, tokens.dtype) as writer:
        for start in range(0, limit, _DOCUMENTS_AT_ONCE):
            bounds = tokens.document_indices[start : min(start + _DOCUMENTS_AT_ONCE, limit) + 1]
            lengths = tokens.sequence_lengths[bounds[0] : bounds[-1]].astype(np.int64)
            ids = np.asarray(tokens.tokens[writer.num_tokens : writer.num_tokens + int(lengths.sum())])
            writer.add_documents(ids, lengths, np.diff(bounds))
        writer.finalize({name: tokens.meta[name] for name in _ORIGIN if name in tokens.meta})
    share = writer.num_tokens / max(tokens.num_tokens, 1)
    return Source(path, IndexedDataset(scratch), share, "not compared with its record, because of --documents")


def _content(tokens: IndexedDataset, max_gigabytes: float) -> str:
    gigabytes = tokens.bin_path.stat().st_size / 1e9
    if gigabytes > max_gigabytes:
        return f"not compared with its record: {gigabytes:.3g} GB, more than --check_gigabytes {max_gigabytes:g}"
    return "as written (sha256)" if tokens.check_content() else f"unknown: no sha256 in {tokens.meta_path}"


def show_counts(
    source: Source,
    args: LookArgs,
    *,
    vocab_size: int,
    unk_id: int,
    piece: Callable[[int], str],
    marks: Mapping[str, int],
    sentences: bool = False,
) -> None:
    """Print documents, tokens, lengths, frequent ids and the unknown rate; write the picture if one is asked for.

    Args:
        marks: name -> tokens, lengths to mark in the picture.
        sentences: the sequences of a document are sentences, with lengths of their own.
    """
    from lm_experiments_tools.tools.statistics import plot_statistics, token_statistics

    tokens, counts = source.tokens, token_statistics(source.tokens, vocab_size)
    text = ""
    if num_bytes := tokens.meta.get("num_bytes"):
        per_token = num_bytes / max(tokens.num_tokens, 1)
        text = f" from {num_bytes / 1e6:,.1f} MB of text, {per_token:.2f} bytes a token"
    print(f"\n{source.heading()}\n  documents  {tokens.num_documents:,}")
    if sentences:
        print(f"  sentences  {len(tokens):,}")
    print(f"  tokens     {tokens.num_tokens:,}{text}")
    if source.content:
        print(f"  content    {source.content}")
    print(f"  length     {_percentiles(counts.document_lengths)}   (tokens of a document)")
    if sentences:
        print(f"             {_percentiles(counts.sequence_lengths)}   (tokens of a sentence)")
        print(f"             {_percentiles(counts.document_sequences)}   (sentences of a document)")
    counted = "" if counts.num_counted == tokens.num_tokens else f" (of {counts.num_counted:,} tokens counted)"
    print(
        f"  vocabulary {counts.ids_in_use:,} of {vocab_size:,} ids occur{counted}; unknown "
        f"{counts.rate(unk_id):.4%} of the tokens"
    )
    frequent = (f"{piece(i)!r} {n / counts.num_counted:.2%}" for i, n in counts.most_frequent(args.frequent))
    print(f"  frequent   {'  '.join(frequent)}")
    if args.output is not None:
        name = re.sub(r"[^\w.-]+", "_", source.path).strip("_")
        print(f"  picture    {plot_statistics(counts, Path(args.output) / f'{name}.png', marks)}")


def _percentiles(lengths: np.ndarray) -> str:
    from lm_experiments_tools.tools.statistics import length_percentiles

    names = {0: "min", 50: "median", 100: "max"}
    return "  ".join(f"{names.get(p, f'{p} %')} {n:,}" for p, n in length_percentiles(lengths).items())


def whole_epoch(samples: int, sources: list[Source], weights: list[float]) -> float | None:
    """Samples in an epoch of all the data, from those of the documents looked at; None where nobody knows.

    A source gives samples in proportion to its tokens times its weight. One worked example: 30 samples of two sources
    with 100 and 200 tokens, weight 1 each, the first a tenth of its file and the second all of it, are
    30 * (1000 + 200) / (100 + 200) = 120.
    """
    if any(source.share is None or not source.share for source in sources):
        return None
    tokens = [source.tokens.num_tokens * weight for source, weight in zip(sources, weights, strict=True)]
    return samples * (sum(t / s.share for t, s in zip(tokens, sources, strict=True)) / sum(tokens))


def show_samples(
    batches: Iterable[Mapping[str, Tensor]],
    samples: int | None,
    sources: list[Source],
    args: Any,
    has_decoder: bool,
    wording: Wording,
) -> None:
    """Print the steps of an epoch, what part of the first micro-batches is padding, and the first samples of the run.

    Args:
        batches: as `forward_passes`.
        samples: in an epoch of `sources`, which is not gone beyond to measure padding; None where it is known at its
            end only.
        args: of the run, and `LookArgs`.
    """
    from lm_experiments_tools.tools.samples import render_sample

    print(_steps(samples, sources, args))
    wanted = min(MEASURED_MICRO_BATCHES, ceil((samples or 1 << 62) / args.batch_size))
    padding = Padding(wording.labels_at_inputs)
    shown: list[tuple[str, dict[str, Any]]] = []
    first = 0
    for micro_batches in forward_passes(batches, args, has_decoder):
        for micro_batch in micro_batches[: max(wanted - padding.micro_batches, 0)]:
            padding.add(micro_batch)
        for row, rank in itertools.product(range(args.batch_size), range(args.world_size)):
            if len(shown) < args.samples:
                worker = f" (worker {rank})" if args.world_size > 1 else ""
                values = {name: entries[row].numpy() for name, entries in micro_batches[rank].items()}
                shown.append((f"sample {first + row * args.world_size + rank}{worker}", values))
        first += args.batch_size * args.world_size
        if padding.micro_batches >= wanted and len(shown) >= args.samples:
            break
    print(padding.describe(args))
    for title, row in shown:
        print("\n" + "\n  ".join([title, *render_sample(row, wording)]))


def _steps(samples: int | None, sources: list[Source], args: Any) -> str:
    """The line on the steps of an epoch: of all the data, estimated where documents were left out."""
    rows = args.global_batch_size(args.world_size)
    shape = f"{args.batch_size} x {args.gradient_accumulation_steps} accumulated x {args.world_size} worker(s)"
    if samples is None:
        return f"steps        {rows} examples each ({shape}); the examples of an epoch are known at its end only"
    weighted = args.data_weights and args.data_blending == "proportional"
    epoch = whole_epoch(samples, sources, list(args.data_weights) if weighted else [1.0] * len(sources))
    # --data_n_samples is for all documents: of more of them, fewer passes; --data_maximum is no part of a file.
    limited = args.data_maximum is not None or getattr(args, "data_n_samples", None) is not None
    if epoch is None or (epoch != samples and limited):
        return (
            f"an epoch     of these documents has {samples:,} examples = {samples / rows:,.1f} steps of {rows} "
            f"({shape}); of all the data it is not known from them"
        )
    about, why = ("", "") if epoch == samples else ("about ", ", estimated from these documents")
    return (
        f"an epoch     {about}{round(epoch):,} examples = {about}{epoch / rows:,.1f} steps of {rows} ({shape}){why}; "
        f"--iters {args.iters:,} = {about}{args.iters * rows / epoch:.2f} epochs"
    )


def forward_passes(
    batches: Iterable[Mapping[str, Tensor]], args: Any, has_decoder: bool
) -> Iterator[list[dict[str, Tensor]]]:
    """Batches as the model gets them, pass by pass: by rank, a micro-batch cut as the loop cuts it.

    Args:
        batches: whole steps, global samples in their order: rows `rank::world_size` are a worker's (see
            data/loader.py).
        args: of the run, and `LookArgs`.
    """
    import torch

    from lm_experiments_tools.training.micro_batches import split_batch

    where = torch.device("cpu"), has_decoder, ("labels",), args.trim_to()
    for batch in batches:
        own = [
            {name: rows[rank :: args.world_size] for name, rows in batch.items()} for rank in range(args.world_size)
        ]
        steps = [split_batch(rows, args.batch_size, set(rows), *where).micro_batches for rows in own]
        for micro_batches in zip(*steps, strict=True):
            yield [micro_batch.batch for micro_batch in micro_batches]


class Padding:
    """Counts cells of micro-batches, and those that hold nothing.

    Args:
        labels_at_inputs: labels are of masked words: counted is what is predicted, not what is padded.
    """

    def __init__(self, labels_at_inputs: bool) -> None:
        self.labels_at_inputs = labels_at_inputs
        self.micro_batches = self._inputs = self._attended = self._targets = self._predicted = 0
        self._widths: dict[str, set[int]] = {"input_ids": set(), "labels": set()}

    def add(self, micro_batch: Mapping[str, Tensor]) -> None:
        from lm_experiments_tools.labels import IGNORED_LABEL

        mask, labels = micro_batch["attention_mask"], micro_batch["labels"]
        self.micro_batches += 1
        self._inputs += mask.numel()
        self._attended += int(mask.sum())
        self._targets += labels.numel()
        self._predicted += int((labels != IGNORED_LABEL).sum())
        for name, widths in self._widths.items():
            widths.add(micro_batch[name].shape[1])

    def describe(self, args: BatchArgs) -> str:
        """The line that is printed."""
        inputs = f"{1 - self._attended / self._inputs:.2%} of the inputs"
        if self.labels_at_inputs:
            rates = f"{inputs}; {self._predicted / self._attended:.2%} of the other tokens are to be predicted"
        else:
            rates = f"{inputs}, {1 - self._predicted / self._targets:.2%} of the targets"
        spans = {name: " to ".join(map(str, sorted({min(w), max(w)}))) for name, w in self._widths.items()}
        measured = f"measured on {self.micro_batches} micro-batches of {args.batch_size} rows"
        return f"padding      {rates}: {measured}, {spans['input_ids']} inputs, {spans['labels']} targets wide"

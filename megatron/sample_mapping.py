"""The sentences of each BERT sample: Megatron's packing of consecutive sentences, vectorised and cached on disk.

Sentences of one document are packed until they reach a target length, document after document:

    target      `max_length`, or with probability `short_seq_prob` uniform on 2 ... max_length
    sample      ends at the first sentence with which it has its target and at least `min_sentences` sentences, if more
                than one sentence is left over; otherwise with the document
    left out    documents with fewer than `min_sentences` sentences, and where `max_sentence_length` is set (Megatron's
                512) documents of several sentences one of which is longer
    unread      documents that are left out, and the tokens of a sentence beyond `max_length`

One worked example, max_length 10, min_sentences 2, no short targets: two documents with sentences of 4 3 5 6 2 and
7 8 tokens give the rows [first sentence, end, target]

    [0, 3, 10]   4 + 3 + 5 = 12 reaches 10, two sentences are left
    [3, 5, 10]   the rest
    [5, 7, 10]

With short_seq_prob 0 the rows are those of `build_mapping` in megatron/core/datasets/helpers.cpp. Otherwise the draws
are keyed by (seed, epoch, document, sample), and a short length is independent of the decision to draw it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from lm_experiments_tools.data.order import sample_words, stream_key
from lm_experiments_tools.data.tokens.indexed import IndexedDataset, search_sorted
from lm_experiments_tools.files import locked, replacing, write_atomic

logger = logging.getLogger(__name__)

_VERSION = 3  # of the rows and counts that settings and data give; part of the cache's name
_CHUNK = 1 << 20  # sentences looked at together: bounds the memory of building
_HASH_BLOCK = 1 << 20


@dataclass(frozen=True)
class MappingSettings:
    """Settings that decide the rows besides the data.

    Attributes:
        max_length: most tokens of text in a sample, special tokens not counted; at least 2.
        min_sentences: 2 where a sample is split in a pair.
        max_sentence_length: documents with a longer sentence are left out; None keeps them, and the sentence is cut.
        num_epochs: epochs over the documents, each with its own short targets.
        max_num_samples: start no further epoch at this number; None sets no limit.
    """

    max_length: int
    min_sentences: int = 2
    short_seq_prob: float = 0.1
    max_sentence_length: int | None = None
    seed: int = 0
    num_epochs: int = 1
    max_num_samples: int | None = None


@dataclass
class MappingCounts:
    """Documents and tokens of one epoch, and the tokens that fit in no sample.

    Attributes:
        few_sentences_tokens: of documents with fewer than `min_sentences` sentences.
        long_sentence_tokens: of documents with a sentence of more than `max_sentence_length` tokens.
        overlong_tokens: of sentences, beyond `max_length`.
    """

    documents: int = 0
    tokens: int = 0
    few_sentences_tokens: int = 0
    long_sentence_tokens: int = 0
    overlong_tokens: int = 0

    @property
    def unread(self) -> float:
        """The fraction of all tokens that fit in no sample of an epoch."""
        unread = self.few_sentences_tokens + self.long_sentence_tokens + self.overlong_tokens
        return unread / max(self.tokens, 1)

    def describe(self) -> str:
        """Log text: size of the data, and how many tokens fit in no sample."""
        return (
            f"{self.documents:,} documents with {self.tokens:,} tokens; {self.unread:.1%} of the tokens fit in no "
            f"sample: {self.few_sentences_tokens:,} in documents with too few sentences, "
            f"{self.long_sentence_tokens:,} in documents with a sentence that is too long, {self.overlong_tokens:,} "
            "at the ends of long sentences"
        )


@dataclass
class SampleMapping:
    """Rows [first sentence, end sentence, target length] of all samples, and what was left out.

    `path` is the file that `rows` is mapped from, None where they are in memory.
    """

    rows: np.ndarray
    counts: MappingCounts = field(default_factory=MappingCounts)
    path: Path | None = None


def build_mapping(
    document_indices: np.ndarray, sequence_lengths: np.ndarray, settings: MappingSettings
) -> SampleMapping:
    """Pack sentences into samples, in memory.

    Args:
        document_indices: int64[documents + 1], first sentence of each document.
        sequence_lengths: int32[sentences], in tokens.

    Returns:
        Rows uint32[n, 3], uint64 where there are more than 2**32 sentences; in the order of the text, by epoch.
    """
    counts, dtype = MappingCounts(), _row_dtype(sequence_lengths)
    rows = [np.empty((0, 3), dtype), *_packed(document_indices, sequence_lengths, settings, counts)]
    return SampleMapping(np.concatenate(rows), counts)


def _row_dtype(sequence_lengths: np.ndarray) -> np.dtype:
    return np.dtype(np.uint32 if len(sequence_lengths) < 1 << 32 else np.uint64)


def _packed(
    document_indices: np.ndarray, sequence_lengths: np.ndarray, settings: MappingSettings, counts: MappingCounts
) -> Iterator[np.ndarray]:
    """The rows of `build_mapping`, a chunk of documents at a time; what they leave out is added to `counts`."""
    dtype, num_samples = _row_dtype(sequence_lengths), 0
    enough = np.inf if settings.max_num_samples is None else settings.max_num_samples
    for number in range(settings.num_epochs):
        counted = counts if number == 0 else MappingCounts()
        for first, last in _chunks(document_indices):
            bounds = np.asarray(document_indices[first : last + 1], np.int64)
            offset = int(bounds[0])
            lengths = np.asarray(sequence_lengths[offset : int(bounds[-1])], np.int64)
            counted.documents += last - first
            counted.tokens += int(lengths.sum())
            documents, starts, ends = _usable(bounds - offset, lengths, settings, counted)
            rows = _pack(first + documents, starts, ends, lengths, settings, number)
            num_samples += len(rows)
            yield (rows + [offset, offset, 0]).astype(dtype)
        if num_samples == 0 or num_samples >= enough:
            break


def _chunks(document_indices: np.ndarray) -> Iterator[tuple[int, int]]:
    """Runs of documents [first, last) with about `_CHUNK` sentences each."""
    first, end = 0, len(document_indices) - 1
    while first < end:
        last = int(search_sorted(document_indices, document_indices[first] + _CHUNK, side="right")) - 1
        last = min(max(last, first + 1), first + _CHUNK, end)
        yield first, last
        first = last


def _usable(
    bounds: np.ndarray, lengths: np.ndarray, settings: MappingSettings, counts: MappingCounts
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Numbers and sentence ranges (starts, ends) of the documents to pack; `counts` gets all documents."""
    numbers = np.flatnonzero(np.diff(bounds))
    starts, ends = bounds[numbers], bounds[numbers + 1]
    if not starts.size:
        return numbers, starts, ends
    few = ends - starts < settings.min_sentences
    long = np.zeros_like(few)
    if settings.max_sentence_length is not None:
        longest = np.maximum.reduceat(lengths, starts)
        long = ~few & (ends - starts > 1) & (longest > settings.max_sentence_length)
    used = ~few & ~long
    tokens = np.add.reduceat(lengths, starts)
    counts.few_sentences_tokens += int(tokens[few].sum())
    counts.long_sentence_tokens += int(tokens[long].sum())
    excess = np.maximum(lengths - settings.max_length, 0)
    counts.overlong_tokens += int(np.add.reduceat(excess, starts)[used].sum())
    return numbers[used], starts[used], ends[used]


def _pack(
    documents: np.ndarray,
    positions: np.ndarray,
    ends: np.ndarray,
    lengths: np.ndarray,
    settings: MappingSettings,
    number: int,
) -> np.ndarray:
    """Rows int64[n, 3] of epoch `number` over documents."""
    offsets = np.concatenate([[0], np.cumsum(lengths)])  # of each sentence, in tokens
    rows, step = [np.empty((0, 3), np.int64)], 0
    words = column = np.empty((0, 0), np.uint64)  # a document's words are those of its column
    while documents.size:
        targets = np.full(documents.size, settings.max_length)
        if settings.short_seq_prob > 0:
            if 2 * step == len(words):  # enough words for as many steps again
                key = stream_key(settings.seed, "short sequences")
                words = sample_words(key, np.full_like(documents, number), documents, max(4, 4 * step))
                column = np.arange(documents.size)
            coin, length = words[2 * step, column], words[2 * step + 1, column]
            short = coin < np.uint64(settings.short_seq_prob * 2**32)
            lengths_of_short = 2 + (length * np.uint64(settings.max_length - 1) >> np.uint64(32)).astype(np.int64)
            targets = np.where(short, lengths_of_short, targets)
        stops = np.searchsorted(offsets, offsets[positions] + targets)
        stops = np.maximum(stops, positions + settings.min_sentences)
        stops = np.where(ends - stops > 1, stops, ends)
        rows.append(np.stack([positions, stops, targets], axis=1))
        going = stops < ends
        documents, positions, ends = documents[going], stops[going], ends[going]
        column = column[going] if settings.short_seq_prob > 0 else column
        step += 1
    joined = np.concatenate(rows)
    return joined[joined[:, 0].argsort(kind="stable")]


def load_mapping(
    tokens: IndexedDataset, settings: MappingSettings, cache_dir: str | os.PathLike | None = None
) -> SampleMapping:
    """The mapping of a data file, from the cache if it is valid, else built and cached.

    The cache is NAME.rows (`SampleMapping.rows`) and NAME.json (counts, checksum) in `cache_dir`, by default next to
    the data; NAME has a hash of data and settings. Any number of processes may do this at the same time: one builds,
    the others wait. Where nothing can be written, the mapping is built in memory and a warning is logged.
    """
    key = json.dumps([_VERSION, tokens.fingerprint, asdict(settings)], sort_keys=True)
    name = f"{Path(tokens.prefix).name}_samples_{settings.max_length}_{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    path = (Path(tokens.prefix).parent if cache_dir is None else Path(cache_dir)) / f"{name}.rows"
    dtype = _row_dtype(tokens.sequence_lengths)
    try:
        with locked(path.with_suffix(".lock")):
            if (mapping := _read(path, dtype)) is None:
                mapping = _write(path, dtype, tokens, settings)
            return mapping
    except OSError as error:
        reason = error.strerror
    if (mapping := _read(path, dtype)) is None:
        logger.warning("%s cannot be written (%s), so each start builds it again", path, reason)
        mapping = build_mapping(tokens.document_indices, tokens.sequence_lengths, settings)
    return mapping


def _read(path: Path, dtype: np.dtype) -> SampleMapping | None:
    """A mapping from its files; None where there is none, or (warning) a damaged one."""
    record = path.with_suffix(".json")
    if not record.is_file():
        return None
    try:
        known = json.loads(record.read_bytes())
        counts = MappingCounts(**known["counts"])
        if known["crc32"] != _checksum(path):
            raise ValueError("its checksum differs")
    except (OSError, ValueError, LookupError, TypeError) as error:
        logger.warning("the sample mapping %s is damaged (%s) and is built again", path, error)
        return None
    return SampleMapping(_mapped(path, dtype), counts, path)


def _write(path: Path, dtype: np.dtype, tokens: IndexedDataset, settings: MappingSettings) -> SampleMapping:
    """Build the mapping into its files, a chunk of documents at a time."""
    counts, checksum = MappingCounts(), 0
    with replacing(path) as file:
        for rows in _packed(tokens.document_indices, tokens.sequence_lengths, settings, counts):
            content = rows.tobytes()
            checksum = zlib.crc32(content, checksum)
            file.write(content)
    write_atomic(path.with_suffix(".json"), json.dumps({"crc32": checksum, "counts": asdict(counts)}))
    return SampleMapping(_mapped(path, dtype), counts, path)


def _mapped(path: Path, dtype: np.dtype) -> np.ndarray:
    rows = np.memmap(path, dtype, "r") if path.stat().st_size else np.empty(0, dtype)  # numpy maps no empty file
    return rows.reshape(-1, 3)


def _checksum(path: Path) -> int:
    crc = 0
    with open(path, "rb") as file:
        while block := file.read(_HASH_BLOCK):
            crc = zlib.crc32(block, crc)
    return crc

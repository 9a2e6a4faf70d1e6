"""Pack consecutive sentences into BERT samples, as Megatron's `build_mapping`, vectorized and cached on disk.

The result, called the sample mapping, lists the range of sentences of each sample. The rules of packing:

    target length    `max_length`, or with probability `short_seq_prob` uniform on 2 ... max_length
    end of a sample  the first sentence with which the sample has its target length and at least `min_sentences`
                     sentences, if more than one sentence follows; otherwise the end of the document
    dropped          documents with fewer than `min_sentences` sentences; if `max_sentence_length` is set (512 in
                     Megatron), also documents of several sentences with a longer one
    unread           tokens of dropped documents, and tokens of a sentence beyond `max_length`

Example with max_length 10, min_sentences 2 and no short samples: two documents with sentences of 4 3 5 6 2 and 7 8
tokens give the rows [first sentence, end, target length]

    [0, 3, 10]   4 + 3 + 5 = 12 reaches 10, and two sentences follow
    [3, 5, 10]   the rest of the document
    [5, 7, 10]

With short_seq_prob 0 the rows equal those of megatron/core/datasets/helpers.cpp. Short samples are drawn by (seed,
epoch, document, sample).
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import uuid
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np
from numpy.lib.format import dtype_to_descr, write_array_header_1_0

from lm_experiments_tools.data.order import draw_integers, stream_key
from lm_experiments_tools.data.tokens.indexed import IndexedDataset
from lm_experiments_tools.files import write_atomic

logger = logging.getLogger(__name__)

_VERSION = 2  # of the rows and counts that settings and data give; part of the cache's name
_CHUNK = 1 << 20  # sentences looked at together: bounds the memory of building


@dataclass(frozen=True)
class MappingSettings:
    """Settings for packing sentences into BERT samples.

    Attributes:
        max_length: maximum tokens per sample, without special tokens; at least 2.
        min_sentences: minimum sentences per sample; 2 for pairs.
        short_seq_prob: probability of a shorter sample.
        max_sentence_length: drop documents with a longer sentence; None truncates the sentence instead.
        seed: determines which samples are shorter.
        num_epochs: how often all documents are packed, each time with other short samples.
        max_num_samples: pack the documents no further time once there are this many samples; None for no limit.
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
    """Numbers of documents and tokens of a data file, and of those that no BERT sample contains, by reason.

    Each document counts once, however often it is packed.
    """

    documents: int = 0
    tokens: int = 0
    empty_documents: int = 0
    few_sentences_documents: int = 0
    few_sentences_tokens: int = 0
    long_sentence_documents: int = 0
    long_sentence_tokens: int = 0
    truncated_tokens: int = 0
    overlong_sentences: int = 0  # longer than the longest sample
    overlong_tokens: int = 0  # of these, beyond the longest sample

    @property
    def unread(self) -> float:
        """Fraction of all tokens that are in no sample: those of dropped documents, and the ends of long sentences."""
        unread = self.few_sentences_tokens + self.long_sentence_tokens + self.overlong_tokens
        return unread / max(self.tokens, 1)

    def describe(self) -> str:
        """Return a line for the log about the documents and tokens that were left out of the samples."""

        def percent(number: int) -> str:
            return f"{number:,} tokens ({100 * number / max(self.tokens, 1):.2g} %)"

        return (
            f"of {self.documents:,} documents with {self.tokens:,} tokens, left out: {self.empty_documents:,} empty; "
            f"{self.few_sentences_documents:,} with too few sentences, {percent(self.few_sentences_tokens)}; "
            f"{self.long_sentence_documents:,} with a sentence that is too long, "
            f"{percent(self.long_sentence_tokens)}; "
            f"cut from samples: {percent(self.truncated_tokens)}, of which in {self.overlong_sentences:,} sentences "
            f"longer than any sample: {percent(self.overlong_tokens)}"
        )


@dataclass
class SampleMapping:
    """Result of packing sentences into BERT samples: the sentences and the target length of each sample.

    Attributes:
        rows: [number of samples, 3]: first sentence, end sentence (exclusive) and target length in tokens of each
            sample.
        counts: numbers of documents and tokens that were left out.
        path: file that `rows` is memory-mapped from; None if in memory.
    """

    rows: np.ndarray
    counts: MappingCounts = field(default_factory=MappingCounts)
    path: Path | None = None


def build_mapping(
    document_indices: np.ndarray, sequence_lengths: np.ndarray, settings: MappingSettings
) -> SampleMapping:
    """Pack consecutive sentences into BERT samples, in memory.

    Args:
        document_indices: int64[number of documents + 1], first sentence of each document.
        sequence_lengths: int32[number of sentences], in tokens.
        settings: settings of the packing.

    Returns:
        The samples as rows uint32[number of samples, 3] (uint64 for more than 2**32 sentences), in the order of the
        text. If the documents are packed several times, the samples of the first time come first.
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
            rows, truncated = _pack(first + documents, starts, ends, lengths, settings, number)
            counted.truncated_tokens += truncated
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
    counts.empty_documents += len(bounds) - 1 - len(numbers)
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
    counts.few_sentences_documents += int(few.sum())
    counts.few_sentences_tokens += int(tokens[few].sum())
    counts.long_sentence_documents += int(long.sum())
    counts.long_sentence_tokens += int(tokens[long].sum())
    excess = np.maximum(lengths - settings.max_length, 0)
    counts.overlong_tokens += int(np.add.reduceat(excess, starts)[used].sum())
    counts.overlong_sentences += int(np.add.reduceat(excess > 0, starts, dtype=np.int64)[used].sum())
    return numbers[used], starts[used], ends[used]


def _pack(
    documents: np.ndarray,
    positions: np.ndarray,
    ends: np.ndarray,
    lengths: np.ndarray,
    settings: MappingSettings,
    number: int,
) -> tuple[np.ndarray, int]:
    """Rows int64[n, 3] of epoch `number` over documents, and the tokens beyond their targets."""
    offsets = np.concatenate([[0], np.cumsum(lengths)])  # of each sentence, in tokens
    rows, truncated, step = [np.empty((0, 3), np.int64)], 0, 0
    drawn = column = np.empty((0, 0), np.uint64)  # those of a document are in its column
    while documents.size:
        targets = np.full(documents.size, settings.max_length)
        if settings.short_seq_prob > 0:
            if 2 * step == len(drawn):  # enough for as many steps again
                key = stream_key(settings.seed, "short sequences")
                drawn = draw_integers(key, np.full_like(documents, number), documents, max(4, 4 * step))
                column = np.arange(documents.size)
            coin, length = drawn[2 * step, column], drawn[2 * step + 1, column]
            short = coin < np.uint64(settings.short_seq_prob * 2**32)
            lengths_of_short = 2 + (length * np.uint64(settings.max_length - 1) >> np.uint64(32)).astype(np.int64)
            targets = np.where(short, lengths_of_short, targets)
        stops = np.searchsorted(offsets, offsets[positions] + targets)
        stops = np.maximum(stops, positions + settings.min_sentences)
        stops = np.where(ends - stops > 1, stops, ends)
        rows.append(np.stack([positions, stops, targets], axis=1))
        truncated += int(np.maximum(offsets[stops] - offsets[positions] - targets, 0).sum())
        going = stops < ends
        documents, positions, ends = documents[going], stops[going], ends[going]
        column = column[going] if settings.short_seq_prob > 0 else column
        step += 1
    joined = np.concatenate(rows)
    return joined[joined[:, 0].argsort(kind="stable")], truncated


def load_mapping(
    tokens: IndexedDataset, settings: MappingSettings, cache_dir: str | os.PathLike | None = None
) -> SampleMapping:
    """Return the BERT samples of a token file, packed from its sentences, from a cache on disk if it is valid.

    Otherwise the sentences are packed and the result is cached. The cache is NAME.npy and NAME.json (counts,
    checksum), where NAME has a hash of data and settings. Files are renamed when complete, the .json last, so any
    number of processes may do this at the same time. If nothing can be written, the result is used in memory and a
    warning is logged.

    Args:
        tokens: token file whose sequences are sentences.
        settings: settings of the packing.
        cache_dir: folder of the cache; None for the folder of the token file.
    """
    key = json.dumps([_VERSION, tokens.fingerprint, asdict(settings)], sort_keys=True)
    name = f"{Path(tokens.prefix).name}_samples_{settings.max_length}_{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    path = (Path(tokens.prefix).parent if cache_dir is None else Path(cache_dir)) / f"{name}.npy"
    damaged = path.with_suffix(".json").is_file()
    if (mapping := _read(path)) is not None:
        return mapping
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return _write(path, tokens, settings, damaged)
    except OSError as error:
        logger.warning("%s cannot be written (%s), so each start builds it again", path, error.strerror)
    return build_mapping(tokens.document_indices, tokens.sequence_lengths, settings)


def _read(path: Path) -> SampleMapping | None:
    """A mapping from its files; None where there is none, or (warning) a damaged one."""
    record = path.with_suffix(".json")
    if not record.is_file():
        return None
    try:
        known = json.loads(record.read_bytes())
        counts, checksum = MappingCounts(**known["counts"]), known["crc32"]
        if checksum != _checksum(path):  # before numpy parses it
            raise ValueError("its checksum differs")
    except (OSError, ValueError, LookupError, TypeError) as error:
        logger.warning("the sample mapping %s is damaged (%s) and is built again", path, error)
        return None
    return SampleMapping(np.load(path, mmap_mode="r"), counts, path)


def _write(path: Path, tokens: IndexedDataset, settings: MappingSettings, damaged: bool) -> SampleMapping:
    """Build the mapping into its files; `damaged` ones are replaced."""
    counts, temporary = MappingCounts(), path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with open(temporary, "wb") as file:
            rows = _packed(tokens.document_indices, tokens.sequence_lengths, settings, counts)
            _save(file, rows, _row_dtype(tokens.sequence_lengths))
            file.flush()
            os.fsync(file.fileno())
        # Another process may have been faster, and its file may be mapped by others already.
        if not damaged and (mapping := _read(path)) is not None:
            return mapping
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    write_atomic(path.with_suffix(".json"), json.dumps({"crc32": _checksum(path), "counts": asdict(counts)}))
    return SampleMapping(np.load(path, mmap_mode="r"), counts, path)


def _save(file: BinaryIO, parts: Iterable[np.ndarray], dtype: np.dtype) -> None:
    """np.save of rows [n, 3] that come in parts: numpy's header has the same size for any number of them."""

    def write_header(num_rows: int) -> None:
        shape = {"descr": dtype_to_descr(dtype), "fortran_order": False, "shape": (num_rows, 3)}
        write_array_header_1_0(file, shape)

    write_header(0)
    num_rows = 0
    for rows in parts:
        file.write(np.ascontiguousarray(rows))
        num_rows += len(rows)
    file.seek(0)
    write_header(num_rows)


def _checksum(path: Path) -> int:
    return zlib.crc32(np.memmap(path, np.uint8, "r"))


def search_sorted(array: np.ndarray, values: np.ndarray, side: Literal["left", "right"] = "left") -> np.ndarray:
    """Find where values would be inserted into a sorted array, as np.searchsorted does, without a copy of the array.

    np.searchsorted copies unaligned arrays, such as the memory-mapped arrays of an index file.
    """
    array, found = np.asarray(array), np.zeros(np.shape(values), np.int64)
    for bit in reversed(range(len(array).bit_length())):
        further = found + (1 << bit)
        passed = array[np.minimum(further, len(array)) - 1]
        below = passed <= values if side == "right" else passed < values
        found = np.where(below & (further <= len(array)), further, found)
    return found

"""Tokenize text into token files, in several processes: for `lmtools tokenize`, training and preprocess_data.py.

    text -> shards (sources.py) -> records (records.py) -> Encoder.parts -> batches of documents -> Encoder.encode
    -> token files of shards -> PREFIX.bin, .idx

The output has the same bytes for any number of shards and processes. An interrupted run resumes from the finished
shards. `TextEncoder` is for T5, with one sequence per document, also of `--streaming` and `lmtools
inspect`; `megatron.encoding.SentenceEncoder` is for BERT.
"""

import glob
import json
import logging
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import as_completed, wait
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from lm_experiments_tools.checkpoint.manifest import verify_model
from lm_experiments_tools.checkpoint.source import TOKENIZER_FILES, hub_folder, may_be_on_hub
from lm_experiments_tools.data.text import hf_datasets
from lm_experiments_tools.data.text.records import (
    BadRecord,
    Record,
    RejectedRecords,
    TooManyRejected,
    converted,
    count_lines,
    no_documents,
    read_shard,
    utf8_length,
)
from lm_experiments_tools.data.text.sources import Shard, datasets_of, plan_shards
from lm_experiments_tools.data.text.tokenizer import BYTES, Tokenizer, warn_of_unknown
from lm_experiments_tools.data.tokens.indexed import (
    IndexedDataset,
    IndexedDatasetWriter,
    dataset_exists,
    read_meta,
    remove_unfinished,
    token_dtype,
)
from lm_experiments_tools.data.workers import WorkerEnded, WorkerPool, available_cores
from lm_experiments_tools.errors import UserError, first_line
from lm_experiments_tools.files import json_sha256, locked

logger = logging.getLogger(__name__)
T = TypeVar("T")

FORMAT = 2  # raise when the ids of the same text would change: shards and caches of another format are not reused
_BATCH_CHARACTERS = 1 << 19  # per call into a tokenizer: a tenth of a second for BERT's
_BLOCK, _NUM_BLOCKS = 1 << 14, 64  # tokens read together and parts of a token file, to count unknown tokens


# ---- encoders ----


class EncodedDocuments(NamedTuple):
    """Token ids of consecutive documents. A document has one or more sequences, such as its sentences.

    Attributes:
        ids: ids of all sequences, concatenated.
        sequence_lengths: number of ids of each sequence.
        num_sequences: number of sequences of each document.
        num_empty: documents without tokens, which were dropped.
    """

    ids: np.ndarray
    sequence_lengths: np.ndarray
    num_sequences: np.ndarray
    num_bytes: int
    num_empty: int = 0


class Encoder(Protocol):
    """Interface of classes that convert records of text to token ids. Encoders are pickled for the worker processes.

    Attributes:
        key: key of the text in a JSON record; None passes all fields to `parts`.
        outputs: for each token file that is written, the settings that its PREFIX.json records. Equal settings and
            vocabularies give equal ids.
    """

    vocabulary: Tokenizer
    key: str | None
    outputs: Sequence[dict[str, Any]]

    def parts(self, record: Record) -> list[list[str]]:
        """Split a record into texts, one list per token file. Raises BadRecord if the record cannot be used."""

    def encode(self, documents: Sequence[Sequence[str]]) -> EncodedDocuments:
        """Encode documents, each a list of texts."""


@dataclass(frozen=True)
class TextEncoder:
    """Converts documents to token ids with a vocabulary, for T5: each document becomes one sequence."""

    vocabulary: Tokenizer
    key: str = "text"
    append_eos: bool = False

    @property
    def outputs(self) -> Sequence[dict[str, Any]]:
        settings = {"append_eos": self.append_eos, "encode_by": self.vocabulary.encode_by, "text_key": self.key}
        return (settings,)

    def parts(self, record: Record) -> list[list[str]]:
        return [[record.value] if self.vocabulary.encode_by == "document" else record.value.split("\n")]

    def encode(self, documents: Sequence[Sequence[str]]) -> EncodedDocuments:
        """Encode documents, each a list of texts that are concatenated."""
        parts = [part for document in documents for part in document]
        ids, part_lengths = self.vocabulary.encode_arrays(parts)
        num_parts = np.fromiter(map(len, documents), np.int64, len(documents))
        ends = np.cumsum(part_lengths)[np.cumsum(num_parts) - 1]
        lengths = np.diff(ends, prepend=0)
        if self.append_eos:
            ids, lengths = np.insert(ids, ends, self.vocabulary.eos_id), lengths + 1
        num_bytes = sum(map(utf8_length, parts)) + len(parts) - len(documents)  # newlines between parts
        return EncodedDocuments(ids, lengths, np.ones(len(documents), np.int64), num_bytes)


def batches(items: Iterable[T], size_of: Callable[[T], int], size: int) -> Iterator[list[T]]:
    """Group consecutive items into lists, each up to the item at which its total size reaches `size`."""
    batch: list[T] = []
    filled = 0
    for item in items:
        batch.append(item)
        filled += size_of(item)
        if filled >= size:
            yield batch
            batch, filled = [], 0
    if batch:
        yield batch


def encode_shard(shard: Shard, prefix: str, encoder: Encoder, limit: int) -> int:
    """Encode a shard (a part of the text) into the token files `prefix`-0, `prefix`-1, ..., one per output.

    Rejected records are listed in `prefix`.bad.jsonl. A shard with more than `limit` of them is abandoned.

    Returns:
        Number of rejected records.
    """
    rejected = RejectedRecords(limit, f"{prefix}.bad.jsonl")
    dtype, counts = token_dtype(encoder.vocabulary.size), [Counter() for _ in encoder.outputs]
    with suppress(TooManyRejected), closing(rejected), ExitStack() as stack:
        names = [f"{prefix}-{number}" for number in range(len(encoder.outputs))]
        writers = [stack.enter_context(IndexedDatasetWriter(name, dtype, durable=False)) for name in names]
        documents = converted(read_shard(shard, encoder.key), encoder.parts, rejected)
        for batch in batches(documents, _num_characters, _BATCH_CHARACTERS):
            for writer, count, texts in zip(writers, counts, zip(*batch, strict=True), strict=True):
                encoded = encoder.encode(texts)
                writer.add_documents(encoded.ids, encoded.sequence_lengths, encoded.num_sequences)
                count.update(num_bytes=encoded.num_bytes, empty_documents=encoded.num_empty)
        for writer, count in zip(writers, counts, strict=True):
            count.update(num_bytes=0, empty_documents=rejected.num_empty)
            writer.finalize({"bad_lines": rejected.count, **count})
    return rejected.count


def _num_characters(parts: list[list[str]]) -> int:
    return sum(len(text) for texts in parts for text in texts)


def prepare(settings: tuple[Encoder, int]) -> Callable[[tuple[Shard, str]], int]:
    """Return the function by which a worker process encodes a shard (part of the text)."""
    return lambda job: encode_shard(*job, *settings)


# ---- several processes ----


def _encode_shards(jobs: Sequence[tuple[Shard, str]], encoder: Encoder, workers: int, limit: int) -> Iterator[str]:
    """Encode shards, and yield the prefix of each that is finished; end early where too many records are rejected."""
    num_rejected, workers = 0, min(workers, len(jobs))
    with ExitStack() as stack:
        if workers <= 1:
            answers = ((job, encode_shard(*job, encoder, limit)) for job in jobs)
        else:
            pool = stack.enter_context(closing(WorkerPool(prepare, (encoder, limit), workers)))
            submitted = {pool.submit(job): job for job in jobs}
            answers = ((submitted[done], done.result()) for done in as_completed(submitted))
        try:
            for (_, prefix), count in answers:
                num_rejected += count
                if num_rejected > limit:
                    if workers > 1:  # so that no list of rejected records is cut off in a line
                        wait([future for future in submitted if not future.cancel()])
                    return
                yield prefix
        except WorkerEnded as end:
            raise UserError(
                f"a tokenization process {end} at {end.request[0].path}: try again with fewer workers"
            ) from None


@dataclass
class Tokenization:
    """One tokenization of a text by several processes.

    Finished shards are in PREFIX.shards-FINGERPRINT/, from which an interrupted tokenization of the same text resumes.
    Rejected records are listed in PREFIX.bad_lines.jsonl.

    Attributes:
        inputs: the text, as PREFIX.json records it.
        prefix: PREFIX. The caller must hold its lock.
        outputs: prefixes of the token files, one per output of the encoder.
        max_bad_lines: limit of rejected records.
        log_interval: documents between two lines of progress, of which there is at most one per shard.
    """

    inputs: Sequence[str]
    shards: Sequence[Shard]
    encoder: Encoder
    prefix: str
    outputs: Sequence[str]
    max_bad_lines: int
    workers: int
    log_interval: int = 100_000

    def __post_init__(self) -> None:
        self._fingerprint = plan_fingerprint(self.shards, self.encoder)
        self._folder = Path(f"{self.prefix}.shards-{self._fingerprint[:16]}")
        self._parts = [os.path.join(self._folder, f"{number:06d}") for number in range(len(self.shards))]

    def run(self) -> list[dict[str, Any]]:
        """Encode all shards that are not finished, then join all shards into the token files.

        Returns:
            The content of the .json file of each output.

        Raises:
            UserError: an output has no document, too many records are rejected, or the text has changed meanwhile.
        """
        for prefix in self.outputs:
            remove_unfinished(prefix)
        name = glob.escape(self._folder.name[:-16])
        for other in self._folder.parent.glob(name + "[0-9a-f]" * 16):  # of other text, or by another encoder
            if other != self._folder:
                shutil.rmtree(other)
        self._folder.mkdir(parents=True, exist_ok=True)
        try:
            self._encode()
            metas = self._join()
            shutil.rmtree(self._folder)
        finally:
            if any(self._folder.glob("*.idx")):
                logger.info("another run resumes from the finished shards in %s", self._folder)
            else:
                shutil.rmtree(self._folder, ignore_errors=True)
        return metas

    def _encode(self) -> None:
        jobs = [job for job in zip(self.shards, self._parts, strict=True) if not self._is_finished(job[1])]
        if finished := len(self.shards) - len(jobs):
            logger.info("%d of %d shards are there from an earlier run", finished, len(self.shards))
        start, num_documents, num_bytes = time.perf_counter(), 0, 0
        with closing(_encode_shards(jobs, self.encoder, self.workers, self.max_bad_lines)) as done:
            for part in done:
                meta, before = read_meta(f"{part}-0"), num_documents
                num_documents += meta["num_documents"] + meta["empty_documents"] + meta["bad_lines"]
                num_bytes += meta["num_bytes"]
                if num_documents // self.log_interval > before // self.log_interval:
                    seconds = time.perf_counter() - start
                    rates = num_documents / seconds, num_bytes / 1e6 / seconds
                    logger.info("Processed %d documents (%.1f docs/s, %.2f MB/s).", num_documents, *rates)
        self._check_unchanged()

    def _join(self) -> list[dict[str, Any]]:
        rejected, vocabulary = self._collect_rejected(), self.encoder.vocabulary
        with ExitStack() as stack:
            dtype = token_dtype(vocabulary.size)
            writers = [stack.enter_context(IndexedDatasetWriter(name, dtype)) for name in self.outputs]
            counts = [Counter() for _ in writers]
            for number, (writer, count) in enumerate(zip(writers, counts, strict=True)):
                for shard in (IndexedDataset(f"{part}-{number}") for part in self._parts):
                    for block in shard.blocks():
                        writer.add_documents(*block)
                    count.update({name: shard.meta[name] for name in ("num_bytes", "empty_documents")})
                if not writer.num_documents:
                    shutil.rmtree(self._folder)
                    rejected.num_empty = count["empty_documents"]
                    raise UserError(f"{self.outputs[number]}: {no_documents(self.inputs, rejected)}")
            common = {
                "vocab_sha256": vocabulary.fingerprint,
                "vocab_file": vocabulary.recorded_as,
                "vocab_size": vocabulary.size,
                "input": list(self.inputs),
                "bad_lines": rejected.count,
            }
            parts = zip(writers, self.encoder.outputs, counts, strict=True)
            return [writer.finalize({**common, **settings, **count}) for writer, settings, count in parts]

    def _is_finished(self, part: str) -> bool:
        """True for a shard with the recorded content: shards are not fsynced, and a power cut may damage them."""
        numbers = range(len(self.encoder.outputs))
        with suppress(UserError):
            return all(IndexedDataset(f"{part}-{number}").check_content() for number in numbers)
        return False

    def _check_unchanged(self) -> None:
        """Refuse to join shards of a text that has changed since it was planned."""
        for shard in {shard.path: shard for shard in self.shards}.values():
            shard.check_unchanged()
        if datasets_of(self.shards) and plan_fingerprint(self.shards, self.encoder) != self._fingerprint:
            raise UserError("files of the datasets were changed while they were being read: start again")

    def _collect_rejected(self) -> RejectedRecords:
        """The rejected records of all shards, with the lines of their files."""
        file, position, num_lines = "", 0, 0
        with closing(RejectedRecords(self.max_bad_lines, f"{self.prefix}.bad_lines.jsonl")) as rejected:
            for shard, part in zip(self.shards, self._parts, strict=True):
                if not (listed := Path(f"{part}.bad.jsonl")).is_file():
                    continue
                if shard.path != file:
                    file, position, num_lines = shard.path, 0, 0
                if shard.kind != "dataset":  # on from the shard before, so that each part of a file is read once
                    num_lines += count_lines(shard.path, position, shard.start)
                    position = shard.start
                for entry in map(json.loads, listed.read_text(encoding="utf-8").splitlines()):
                    line = entry["line"] and num_lines + entry["line"]
                    rejected.reject(BadRecord(entry["reason"], False, entry["file"], line, entry["content"]))
        if rejected.count:
            logger.warning("%s", rejected)
        return rejected


def plan_fingerprint(shards: Sequence[Shard], encoder: Encoder) -> str:
    """Hash everything that determines the tokens of a text: the input files, the vocabulary and the settings."""
    stamps = {os.path.abspath(shard.path): shard.stamp[1] for shard in shards if shard.stamp is not None}
    parts = [(os.path.abspath(s.path) if s.kind != "dataset" else s.path, s.kind, s.start, s.end) for s in shards]
    datasets = [hf_datasets.identity(name, with_times=True) for name in datasets_of(shards)]
    encoding = [encoder.vocabulary.fingerprint, *encoder.outputs]
    return json_sha256([FORMAT, parts, sorted(stamps.items()), datasets, encoding])


# ---- T5's token files ----


def tokenize_corpus(
    inputs: Sequence[str],
    vocab_path: str | os.PathLike | Tokenizer,
    output_prefix: str | os.PathLike,
    *,
    workers: int | None = None,
    append_eos: bool = False,
    text_key: str = "text",
    document_per_line: bool = False,
    max_bad_lines: int = 100,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Tokenize all documents of `inputs` and write the token file PREFIX.bin, PREFIX.idx and PREFIX.json.

    Args:
        inputs: files, folders and names of Hugging Face datasets.
        vocab_path: path of a vocabulary, or a loaded one.
        output_prefix: PREFIX.
        workers: number of processes; None for one per CPU.
        document_per_line: each line of a text file is a document, instead of the lines between blank lines.
        overwrite: replace token files of other inputs or of another vocabulary.

    Returns:
        The content of PREFIX.json.

    Raises:
        UserError: unreadable input or vocabulary, or an error of `Tokenization.run`; PREFIX has other text.
    """
    vocabulary = vocab_path if isinstance(vocab_path, Tokenizer) else open_tokenizer(vocab_path)
    prefix = os.fspath(output_prefix)
    # Files are recorded by their absolute paths, datasets by name.
    origin = [os.path.abspath(item) if os.path.exists(item) else item for item in inputs]
    shards = plan_shards(inputs, document_per_line=document_per_line)
    with locked(Path(f"{prefix}.lock")):
        if not overwrite:
            _check_replaceable(prefix, origin, vocabulary)
        encoder = TextEncoder(vocabulary, text_key, append_eos)
        workers = workers or available_cores()
        (meta,) = Tokenization(origin, shards, encoder, prefix, [prefix], max_bad_lines, workers).run()
    return meta


def _check_replaceable(prefix: str, inputs: list[str], vocabulary: Tokenizer) -> None:
    """Raise UserError if existing token files are of other inputs or another vocabulary, so must not be replaced."""
    if not dataset_exists(prefix):
        return
    meta = read_meta(prefix)
    if meta.get("input") == inputs and meta.get("vocab_sha256") == vocabulary.fingerprint:
        return
    made_of = ", ".join(meta.get("input", ["unknown text"]))
    raise UserError(
        f"{prefix}.bin and .idx exist, tokens of {made_of} with the vocabulary {meta.get('vocab_file', 'unknown')}, "
        f"not of {', '.join(inputs)} with {vocabulary.recorded_as}: choose another --output, or give --overwrite"
    )


def ensure_tokenized(path: str, vocabulary: Tokenizer, cache_dir: str | os.PathLike, **options: Any) -> str:
    """Tokenize a text into a cache folder, unless that has been done before, and return the prefix of the token file.

    Other processes that need the same text wait meanwhile. A text is tokenized again if names, sizes or times of the
    input files (or the revision of a hub dataset), the vocabulary or the options change.
    """
    encoder = TextEncoder(vocabulary, options.get("text_key", "text"), options.get("append_eos", False))
    shards = plan_shards([path], document_per_line=options.get("document_per_line", False))
    key = plan_fingerprint(shards, encoder)[:16]
    prefix = os.path.join(cache_dir, f"{Path(path).name.replace(':', '_')}-{key}")
    with locked(Path(f"{prefix}.cache.lock")):
        if not dataset_exists(prefix):
            tokenize_corpus([path], vocabulary, prefix, **options)
    return prefix


# ---- vocabularies of token files ----


def report_unknown(tokens: IndexedDataset, unk_id: int | None) -> float:
    """Log and return the share of unknown tokens in about a million tokens from all over a token file, 0 to 1.

    A warning is logged, once per file, if PREFIX.json does not say which vocabulary the ids belong to.
    """
    if tokens.meta.get("vocab_sha256") is None:
        _warn_unrecorded(tokens.meta_path)
    blocks = np.unique(np.linspace(0, max(tokens.num_tokens - 1, 0) // _BLOCK, _NUM_BLOCKS).astype(np.int64)) * _BLOCK
    sample = np.concatenate([tokens.tokens[start : start + _BLOCK] for start in blocks.tolist()])
    share = warn_of_unknown(np.count_nonzero(sample == unk_id), len(sample), tokens.prefix)
    logger.info("%s: %.2f %% of the tokens are unknown tokens", tokens.prefix, 100 * share)
    return share


@cache  # once, however often a run opens the file
def _warn_unrecorded(meta_path: Path) -> None:
    logger.warning(
        "%s does not exist or names no vocabulary, so the tokens cannot be verified: copy the .json of `lmtools "
        "tokenize` or preprocess_data.py too",
        meta_path,
    )


def check_vocabulary(tokens: IndexedDataset, vocabulary: Tokenizer) -> None:
    """Raise UserError if a token file was made with another vocabulary than this run's."""
    made_with = tokens.meta.get("vocab_sha256")
    if made_with in (None, vocabulary.fingerprint):  # None: written by another program, the ids are all there is
        return
    other_case = ", or read it in the other case (--no_lower_case)" if vocabulary.continuation else ""
    raise UserError(
        f"the tokens {tokens.prefix} were made with the vocabulary {tokens.meta.get('vocab_file')} (fingerprint "
        f"{made_with[:12]}), not with {vocabulary.path} (fingerprint {vocabulary.fingerprint[:12]}): give that "
        f"one{other_case} or tokenize again"
    )


def open_tokenizer(name: str | os.PathLike, flag: str = "--vocab", lowercase: bool | None = None) -> Tokenizer:
    """Load a tokenizer from a file, a folder or the Hugging Face Hub. The files of a checkpoint are verified first."""
    path = Path(name)
    if os.fspath(name) != BYTES and not path.exists() and may_be_on_hub(os.fspath(name)):
        try:
            path = hub_folder(os.fspath(name), flag, TOKENIZER_FILES)
        except OSError as error:
            raise UserError(
                f"{flag} {name}: neither this machine nor the Hub has it ({first_line(error)})."
            ) from error
    verify_model(path)
    return Tokenizer.load(path, lowercase=lowercase)

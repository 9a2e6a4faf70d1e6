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
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import as_completed
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

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
    dataset_paths,
    read_meta,
    remove_unfinished,
    token_dtype,
)
from lm_experiments_tools.data.workers import Caller, WorkerEnded, WorkerPool, available_cores
from lm_experiments_tools.errors import UserError, first_line
from lm_experiments_tools.files import json_sha256, locked

logger = logging.getLogger(__name__)
T = TypeVar("T")

FORMAT = 2  # raise when the ids of the same text would change: shards and caches of another format are not reused
_BATCH_CHARACTERS = 1 << 19  # per call into a tokenizer: a tenth of a second for BERT's
_BLOCK, _NUM_BLOCKS = 1 << 14, 64  # tokens read together and parts of a token file, to count unknown tokens


# ---- encoders ----


@dataclass
class EncodedDocuments:
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
        suffixes: suffixes of the output file names. One token file per suffix is written.
        identity: JSON value; equal identities give equal ids.
    """

    key: str | None
    suffixes: Sequence[str]
    dtype: np.dtype
    identity: Any

    def parts(self, record: Record) -> list[list[str]]:
        """Split a record into texts, one list per output file. Raises BadRecord if the record cannot be used."""

    def encode(self, documents: Sequence[Sequence[str]]) -> EncodedDocuments:
        """Encode documents, each a list of texts."""


@dataclass(frozen=True)
class TextEncoder:
    """Converts documents to token ids with a vocabulary, for T5: each document becomes one sequence."""

    vocabulary: Tokenizer
    key: str = "text"
    append_eos: bool = False
    suffixes = ("",)

    @property
    def dtype(self) -> np.dtype:
        return token_dtype(self.vocabulary.size)

    @property
    def identity(self) -> dict[str, Any]:
        return {
            "vocab_sha256": self.vocabulary.fingerprint,
            "text_key": self.key,
            "append_eos": self.append_eos,
            "encode_by": self.vocabulary.encode_by,
        }

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
    """Group consecutive items, such as documents, into lists of about equal total size.

    A list ends with the item at which its total size reaches `size`.
    """
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


class EncodedWriter(IndexedDatasetWriter):
    """Writer of token files that also counts the bytes of the text and the empty documents."""

    num_bytes = num_empty = 0

    def add(self, encoded: EncodedDocuments) -> None:
        self.add_documents(encoded.ids, encoded.sequence_lengths, encoded.num_sequences)
        self.num_bytes += encoded.num_bytes
        self.num_empty += encoded.num_empty

    def add_shard(self, shard: IndexedDataset) -> None:
        """Append the token file of a shard (a part of the text that was encoded separately), and add its counts."""
        self.add_dataset(shard)
        self.num_bytes += shard.meta["num_bytes"]
        self.num_empty += shard.meta["empty_documents"]


def encode_shard(shard: Shard, prefix: str, encoder: Encoder, limit: int) -> tuple[int, bool]:
    """Encode a shard (a part of the text) into token files, one per suffix of the encoder.

    Rejected records are listed in `prefix`.bad.jsonl.

    Returns:
        Number of rejected records, and False if they were too many and the shard was abandoned.
    """
    rejected = RejectedRecords(limit, f"{prefix}.bad.jsonl")
    try:
        with closing(rejected), ExitStack() as stack:
            names = [prefix + suffix for suffix in encoder.suffixes]
            writers = [stack.enter_context(EncodedWriter(name, encoder.dtype, durable=False)) for name in names]
            documents = converted(read_shard(shard, encoder.key), encoder.parts, rejected)
            for batch in batches(documents, _num_characters, _BATCH_CHARACTERS):
                for writer, texts in zip(writers, zip(*batch, strict=True), strict=True):
                    writer.add(encoder.encode(texts))
            for writer in writers:
                writer.finalize({
                    "bad_lines": rejected.count,
                    "num_documents": writer.num_documents,
                    "num_bytes": writer.num_bytes,
                    "empty_documents": writer.num_empty + rejected.num_empty,
                    "bin_sha256": writer.bin_sha256,
                })  # fmt: skip
    except TooManyRejected:
        return rejected.count, False
    return rejected.count, True


def _num_characters(parts: list[list[str]]) -> int:
    return sum(len(text) for texts in parts for text in texts)


def work(caller: Caller) -> None:
    """Run a worker process of the tokenization: encode each shard (part of the text) that the parent requests."""
    caller.serve(lambda settings: lambda job: encode_shard(*job, *settings))


# ---- several processes ----


def _encode_shards(
    jobs: Sequence[tuple[Shard, str]], encoder: Encoder, workers: int, limit: int
) -> Iterator[tuple[Shard, str]]:
    """The (shard, prefix) of each finished job; ends early where too many records are rejected."""
    num_rejected, workers = 0, min(workers, len(jobs))
    with ExitStack() as stack:
        if workers <= 1:
            answers = ((job, encode_shard(*job, encoder, limit)) for job in jobs)
        else:
            pool = stack.enter_context(WorkerPool(work, (encoder, limit), workers))
            submitted = {pool.submit(job): job for job in jobs}
            answers = ((submitted[done], done.result()) for done in as_completed(submitted))
        try:
            for job, (count, finished) in answers:
                num_rejected += count
                if not finished or num_rejected > limit:
                    return
                yield job
        except WorkerEnded as end:
            raise UserError(
                f"a tokenization process ended with exit code {end.returncode} (-9: killed, often for lack of memory) "
                f"at {end.request[0].path}: try again with fewer workers"
            ) from None


@dataclass
class Tokenization:
    """One tokenization of a text by several processes.

    Finished shards are in PREFIX.shards-FINGERPRINT/, from which an interrupted tokenization of the same text resumes.

    Attributes:
        prefix: PREFIX. The caller must hold its lock.
    """

    shards: Sequence[Shard]
    encoder: Encoder
    prefix: str
    outputs: Sequence[str]
    rejected: str
    limit: int
    workers: int

    def __post_init__(self) -> None:
        self._fingerprint = plan_fingerprint(self.shards, self.encoder.identity)
        self._folder = Path(f"{self.prefix}.shards-{self._fingerprint[:16]}")
        self._parts = [os.path.join(self._folder, f"{number:06d}") for number in range(len(self.shards))]

    def run(
        self,
        meta: Callable[[Sequence[EncodedWriter], RejectedRecords], Sequence[dict[str, Any]]],
        progress: Callable[[Sequence[tuple[Shard, str]], Iterable[tuple[Shard, str]]], None],
    ) -> list[dict[str, Any]]:
        """Encode all shards that are not finished, then join all shards into the token files.

        Args:
            progress: function that shows the progress. It gets the jobs and an iterator over finished jobs, which it
                must consume.
        """
        for prefix in self.outputs:
            remove_unfinished(prefix)
        name = glob.escape(self._folder.name[:-16])
        for other in self._folder.parent.glob(name + "[0-9a-f]" * 16):  # of other text, or by another encoder
            if other != self._folder:
                shutil.rmtree(other)
        self._folder.mkdir(parents=True, exist_ok=True)
        try:
            metas = self._run(meta, progress)
            shutil.rmtree(self._folder)
        finally:
            if any(record["num_documents"] for record in map(self._record, self._parts) if record):
                logger.info("another run resumes from the finished shards in %s", self._folder)
            else:
                shutil.rmtree(self._folder, ignore_errors=True)
        return metas

    def _run(self, meta: Callable, progress: Callable) -> list[dict[str, Any]]:
        jobs = [job for job in zip(self.shards, self._parts, strict=True) if not self._is_intact(job[1])]
        if finished := len(self.shards) - len(jobs):
            logger.info("%d of %d shards are there from an earlier run", finished, len(self.shards))
        with closing(_encode_shards(jobs, self.encoder, self.workers, self.limit)) as done:
            progress(jobs, done)
        self._check_unchanged()
        rejected = self._collect_rejected()
        with ExitStack() as stack:
            writers = [stack.enter_context(EncodedWriter(name, self.encoder.dtype)) for name in self.outputs]
            for writer, suffix in zip(writers, self.encoder.suffixes, strict=True):
                for part in self._parts:
                    writer.add_shard(IndexedDataset(part + suffix))
            metas = list(meta(writers, rejected))
            for writer, content in zip(writers, metas, strict=True):
                writer.finalize(content)
        return metas

    def _is_intact(self, part: str) -> bool:
        """True for a finished shard with the recorded content: shards are not fsynced, a power cut may damage them."""
        try:
            return all(IndexedDataset(part + suffix).check_content() for suffix in self.encoder.suffixes)
        except UserError:
            return False

    def _record(self, part: str) -> dict[str, Any]:
        """The .json of a finished shard (of the first suffix); {} where it is not finished."""
        names = [part + suffix for suffix in self.encoder.suffixes]
        with suppress(UserError):  # damaged
            return read_meta(names[0]) if all(map(dataset_exists, names)) else {}
        return {}

    def _check_unchanged(self) -> None:
        """Refuse to join shards of a text that has changed since it was planned."""
        for shard in {shard.path: shard for shard in self.shards}.values():
            shard.check_unchanged()
        if datasets_of(self.shards) and plan_fingerprint(self.shards, self.encoder.identity) != self._fingerprint:
            raise UserError("files of the datasets were changed while they were being read: start again")

    def _collect_rejected(self) -> RejectedRecords:
        """The rejected records of all shards, with the lines of their files."""
        file, position, num_lines = "", 0, 0
        with closing(RejectedRecords(self.limit, self.rejected)) as rejected:
            for shard, part in zip(self.shards, self._parts, strict=True):
                rejected.num_empty += self._record(part).get("empty_documents", 0)
                if not (listed := Path(f"{part}.bad.jsonl")).is_file():
                    continue
                if shard.path != file:
                    file, position, num_lines = shard.path, 0, 0
                if shard.kind != "dataset":
                    num_lines += count_lines(shard.path, position, shard.start)
                    position = shard.start
                for entry in map(json.loads, listed.read_text(encoding="utf-8").splitlines()):
                    line = num_lines + entry["line"]
                    rejected.reject(BadRecord(entry["reason"], False, shard.path, line, entry["content"]))
        if rejected.count:
            logger.warning("%s", rejected)
        return rejected


def plan_fingerprint(shards: Sequence[Shard], encoding: Any) -> str:
    """Hash everything that determines the tokens of a text: the input files and the encoder's identity."""
    stamps = {os.path.abspath(shard.path): shard.stamp[1] for shard in shards if shard.stamp is not None}
    parts = [(os.path.abspath(s.path) if s.kind != "dataset" else s.path, s.kind, s.start, s.end) for s in shards]
    datasets = [hf_datasets.identity(name, with_times=True) for name in datasets_of(shards)]
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
    show_progress: bool | None = None,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Tokenize all documents of `inputs` and write the token file PREFIX.bin, PREFIX.idx and PREFIX.json.

    Args:
        inputs: files, folders and names of Hugging Face datasets.
        vocab_path: path of a vocabulary, or a loaded one.
        output_prefix: PREFIX.
        workers: number of processes; None for one per CPU.
        append_eos: append EOS to each document.
        text_key: key of the text in a JSON record.
        document_per_line: each line of a text file is a document, instead of the lines between blank lines.
        max_bad_lines: limit of rejected records, listed in PREFIX.bad_lines.jsonl.
        show_progress: show a progress bar; None shows one on a terminal.
        overwrite: replace token files of other inputs or of another vocabulary.

    Returns:
        The content of PREFIX.json.

    Raises:
        UserError: unreadable input or vocabulary, no document, too many rejected records, or PREFIX has other text.
    """
    vocabulary = vocab_path if isinstance(vocab_path, Tokenizer) else open_tokenizer(vocab_path)
    encoder = TextEncoder(vocabulary, text_key, append_eos)
    prefix = os.fspath(output_prefix)
    origin = recorded_inputs(inputs)
    shards = plan_shards(inputs, document_per_line=document_per_line)
    with locked(Path(f"{prefix}.lock")):
        if not overwrite:
            check_replaceable(prefix, origin, vocabulary.recorded_as, vocabulary.fingerprint)
        run = Tokenization(
            shards, encoder, prefix, [prefix], rejected=f"{prefix}.bad_lines.jsonl", limit=max_bad_lines,
            workers=workers or available_cores(),
        )  # fmt: skip
        (meta,) = run.run(partial(_meta, encoder, shards, origin), partial(_show_progress, show_progress))
    return meta


def _meta(
    encoder: TextEncoder,
    shards: Sequence[Shard],
    origin: list[str],
    writers: Sequence[EncodedWriter],
    rejected: RejectedRecords,
) -> list[dict[str, Any]]:
    """The content of PREFIX.json. Raises UserError where there is no document."""
    (writer,) = writers
    if not writer.num_documents:
        raise no_documents(list(dict.fromkeys(shard.path for shard in shards)), rejected)
    meta = {
        "vocab_sha256": encoder.vocabulary.fingerprint,
        "vocab_file": encoder.vocabulary.recorded_as,
        "vocab_size": encoder.vocabulary.size,
        "num_documents": writer.num_documents,
        "num_tokens": writer.num_tokens,
        "num_bytes": writer.num_bytes,
        "append_eos": encoder.append_eos,
        "encode_by": encoder.vocabulary.encode_by,
        "text_key": encoder.key,
        "dtype": writer.dtype.name,
        "bin_sha256": writer.bin_sha256,
        "input": origin,
        "bad_lines": rejected.count,
    }
    return [meta | ({"empty_documents": rejected.num_empty} if rejected.num_empty else {})]


def _show_progress(show: bool | None, jobs: Sequence[tuple[Shard, str]], done: Iterable[tuple[Shard, str]]) -> None:
    if sys.stderr.isatty() if show is None else show:
        from tqdm import tqdm

        done = tqdm(done, total=len(jobs), unit="shard", desc="tokenize")
    for _ in done:
        pass


def ensure_tokenized(path: str, vocabulary: Tokenizer, cache_dir: str | os.PathLike, **options: Any) -> str:
    """Tokenize a text into a cache folder, unless that has been done before, and return the prefix of the token file.

    Other processes that need the same text wait meanwhile. A text is tokenized again if names, sizes or times of the
    input files (or the revision of a hub dataset), the vocabulary or the options change.
    """
    encoder = TextEncoder(vocabulary, options.get("text_key", "text"), options.get("append_eos", False))
    shards = plan_shards([path], document_per_line=options.get("document_per_line", False))
    key = plan_fingerprint(shards, encoder.identity)[:16]
    prefix = os.path.join(cache_dir, f"{Path(path).name.replace(':', '_')}-{key}")
    with locked(Path(f"{prefix}.cache.lock")):
        if not dataset_exists(prefix):
            tokenize_corpus([path], vocabulary, prefix, **options)
    return prefix


def report_unknown(tokens: IndexedDataset, unk_id: int | None) -> float:
    """Log and return the share of unknown tokens in about a million tokens from all over a token file, 0 to 1."""
    blocks = np.unique(np.linspace(0, max(tokens.num_tokens - 1, 0) // _BLOCK, _NUM_BLOCKS).astype(np.int64)) * _BLOCK
    sample = np.concatenate([tokens.tokens[start : start + _BLOCK] for start in blocks.tolist()])
    share = warn_of_unknown(np.count_nonzero(sample == unk_id), len(sample), tokens.prefix)
    logger.info("%s: %.2f %% of the tokens are unknown tokens", tokens.prefix, 100 * share)
    return share


def check_vocabulary(prefix: str, meta: Mapping[str, Any], vocabulary: Tokenizer) -> None:
    """Raise UserError if a token file was made with another vocabulary than this run's."""
    made_with = meta.get("vocab_sha256")
    if made_with in (None, vocabulary.fingerprint):  # None: written by another program, the ids are all there is
        return
    other_case = ", or read it in the other case (--no_lower_case)" if vocabulary.continuation else ""
    raise UserError(
        f"the tokens {prefix} were made with the vocabulary {meta.get('vocab_file')} (fingerprint {made_with[:12]}), "
        f"not with {vocabulary.path} (fingerprint {vocabulary.fingerprint[:12]}): give that one{other_case} or "
        "tokenize again"
    )


# ---- what a token file was made of ----


def recorded_inputs(inputs: Iterable[str]) -> list[str]:
    """Convert inputs to the form in which PREFIX.json records them: files by absolute path, datasets by name."""
    return [os.path.abspath(item) if os.path.exists(item) else item for item in inputs]


def check_replaceable(prefix: str, inputs: list[str], vocab_file: str, vocab_sha256: str) -> None:
    """Raise UserError if existing token files are of other inputs or another vocabulary, so must not be replaced."""
    if not dataset_exists(prefix):
        return
    try:
        meta = read_meta(prefix)
    except UserError:  # damaged: as good as none
        meta = {}
    if inputs and meta.get("input") == inputs and meta.get("vocab_sha256") == vocab_sha256:
        return
    made_of = ", ".join(map(str, meta.get("input") or ())) or "unknown text"
    raise UserError(
        f"{prefix}.bin and .idx exist, tokens of {made_of} with the vocabulary {meta.get('vocab_file') or 'unknown'}, "
        f"not of {', '.join(inputs) or 'unknown text'} with {vocab_file}: choose another --output, or give --overwrite"
    )


@cache  # once, however often a run opens the file
def _warn_unrecorded(meta_path: Path) -> None:
    fact = "records no vocabulary" if meta_path.is_file() else "does not exist"
    logger.warning(
        "%s %s, so the tokens cannot be verified: copy the .json of `lmtools tokenize` or preprocess_data.py too",
        meta_path,
        fact,
    )


def warn_unrecorded(prefix: str | os.PathLike, meta: dict[str, Any]) -> None:
    """Log a warning, once per file, if the PREFIX.json of a token file does not name a vocabulary."""
    if "vocab_sha256" not in meta:
        _warn_unrecorded(dataset_paths(prefix)[2])


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


def recorded_vocabulary(prefix: str | os.PathLike, meta: dict[str, Any]) -> Path | None:
    """Return the path of the vocabulary that a token file was made with; None if it does not exist."""
    if meta.get("vocab_file") is None:
        return None
    named = Path(meta["vocab_file"])
    if meta["vocab_file"] == BYTES:
        return named
    return next((path for path in (named, Path(prefix).parent / named.name) if path.exists()), None)

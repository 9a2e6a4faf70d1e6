"""Text -> token files, by several processes, resumable, with the same bytes whatever the number of processes.

The inputs are cut into pieces (documents.plan_pieces). Each piece becomes a small token file in `PREFIX.pieces/`; when
all are there they are joined in order into PREFIX.bin, .idx and .json and the folder goes away. A run that was killed
finds its finished pieces again. A document is one sequence, and its ids depend on its text alone, so neither the
cutting nor the order of work shows in the result.

A job array does the same over machines: job i of n takes the i-th of n consecutive parts of the pieces and writes
PREFIX-0000i-of-0000n; merge.py joins them to the bytes that one run would have written.
"""

import hashlib
import json
import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import as_completed
from contextlib import ExitStack, closing, contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any

from lm_experiments_tools.data.text import hf_datasets
from lm_experiments_tools.data.text.bad_lines import (
    ANY_NUMBER,
    BadLine,
    EmptyText,
    Quarantine,
    is_hopeless,
    no_documents,
)
from lm_experiments_tools.data.text.documents import Piece, count_lines, plan_pieces, read_piece
from lm_experiments_tools.data.text.encoding import Encoding, encode_documents, num_bytes
from lm_experiments_tools.data.text.vocabulary import Vocabulary
from lm_experiments_tools.data.tokens.files import (
    check_replaceable,
    dataset_exists,
    recorded_identity,
    remove_unfinished,
)
from lm_experiments_tools.data.tokens.indexed import (
    IndexedDataset,
    IndexedDatasetWriter,
    finished_record,
    token_dtype,
)
from lm_experiments_tools.data.workers import Caller, WorkerEnded, WorkerPool, available_cores
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.files import locked, write_atomic

logger = logging.getLogger(__name__)

FORMAT = 1  # raise when the ids of the same text would change: pieces and caches of another format are not reused
_PIECES_PER_SHARD = 4  # at least, so that shards come out of about equal size
_SMALLEST_PIECE = 1 << 16
_BATCH_BYTES = 1 << 18  # text per call into the vocabulary: below this the call itself costs more than 1 %


def tokenize_corpus(
    inputs: Sequence[str],
    vocab_path: str | os.PathLike | Vocabulary,
    output_prefix: str | os.PathLike,
    *,
    workers: int | None = None,
    append_eos: bool = False,
    text_key: str = "text",
    max_bad_lines: int | None = None,
    encode_by: str | None = None,
    show_progress: bool | None = None,
    shard: tuple[int, int] | None = None,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Encode all documents of `inputs` into PREFIX.bin / .idx / .json; returns what PREFIX.json holds.

    Args:
        inputs: files, folders and Hugging Face dataset names (see documents.py).
        vocab_path: a vocabulary (see vocabulary.py), or what has been read of it.
        workers: processes; None: one for each CPU this process may use.
        append_eos: end each document with EOS (t5 does not; nanoT5 does).
        max_bad_lines: lines to leave out, listed in PREFIX.bad_lines.jsonl (None: a rate, see bad_lines.py).
        encode_by: "line" encodes the lines of a document apart, so that ids do not depend on the document's length and
            equal those of Hugging Face tokenizers; "document" encodes it whole, as seqio does (25 % faster; a few near
            ties come out differently, because SentencePiece sums scores in float32). None: "line" unless the
            vocabulary knows newlines, which "line" would lose.
        show_progress: a progress bar on stderr; None shows it on a terminal.
        shard: (i, n) encodes the i-th of n parts, 0 <= i < n, into `shard_prefix(PREFIX, i, n)`.
        overwrite: replace token files of other inputs, or of another vocabulary.

    Raises:
        UserError: an unreadable input or vocabulary, no document, too many bad lines, or a PREFIX of something else.
    """
    if workers is not None and workers < 1:
        raise UserError(f"workers is {workers}; at least one process has to do the work")
    vocabulary = vocab_path if isinstance(vocab_path, Vocabulary) else Vocabulary.load(vocab_path)
    encoding = _encoding(vocabulary, text_key, append_eos, encode_by)
    prefix = os.fspath(output_prefix)
    origin: dict[str, Any] = {"input": [os.path.abspath(item) if os.path.exists(item) else item for item in inputs]}
    if shard is None:
        pieces = plan_pieces(inputs)
    else:
        pieces, source = _part_of_plan(inputs, *shard, encoding)
        origin["shard"] = {"number": shard[0], "of": shard[1], "source": source}
        prefix = shard_prefix(prefix, *shard)
    folder = Path(f"{prefix}.pieces")
    with locked(Path(f"{prefix}.lock")):
        if not overwrite:
            check_replaceable(prefix, origin["input"], vocabulary.recorded_as, vocabulary.sha256, vocabulary.identity)
        remove_unfinished(prefix)
        fingerprint = _prepare_folder(folder, _plan_fingerprint(pieces, encoding))
        with _kept_if_resumable(folder, len(pieces)):
            jobs = _jobs(pieces, folder)
            with _progress(pieces, jobs, show_progress) as advance:
                _run(jobs, vocabulary, encoding, max_bad_lines, workers or available_cores(), advance)
            _check_unchanged(pieces, encoding, fingerprint)
            bad_lines = _collect_bad_lines(pieces, folder, f"{prefix}.bad_lines.jsonl", max_bad_lines)
            meta = _join(pieces, folder, prefix, vocabulary, encoding, origin, bad_lines)
            shutil.rmtree(folder)
    return meta


def _encoding(vocabulary: Vocabulary, text_key: str, append_eos: bool, encode_by: str | None) -> Encoding:
    if encode_by not in (None, "line", "document"):
        raise UserError(f"encode_by is {encode_by!r}; it can be 'line' or 'document'")
    if encode_by == "line" != vocabulary.encode_by:
        logger.warning("%s knows newlines, and encode_by=line leaves them all out", vocabulary.path)
    return Encoding.of(vocabulary, text_key, append_eos, encode_by)


def ensure_tokenized(path: str, vocabulary: Vocabulary, cache_dir: str | os.PathLike, **options: Any) -> str:
    """The prefix of the tokens of a text (a file, a folder or a dataset), tokenized once into `cache_dir`.

    The cache is keyed by names, sizes and modification times of the input files (on the hub, the revision), the
    vocabulary and the encoding `options` (those of tokenize_corpus). Several processes may ask at once: one works, the
    others wait and use what it made.

    Raises:
        UserError: as tokenize_corpus.
    """
    settings = {name: options[name] for name in ("text_key", "append_eos", "encode_by") if name in options}
    encoding = Encoding.of(vocabulary, **settings)
    key = _plan_fingerprint(plan_pieces([path]), encoding)[:16]
    prefix = os.path.join(cache_dir, f"{Path(path).name.replace(':', '_')}-{key}")
    with locked(Path(f"{prefix}.cache.lock")):
        if not dataset_exists(prefix):
            tokenize_corpus([path], vocabulary, prefix, **options)
    return prefix


def check_vocabulary(prefix: str, meta: Mapping[str, Any], vocabulary: Vocabulary) -> None:
    """Refuse token files that record (`meta`, what PREFIX.json holds) a vocabulary of other ids.

    Another file may give the same ids, as a run's spiece.model does; that is seen where the recorded one is there.
    """
    made_with = meta.get("vocab_sha256")
    if made_with in (None, vocabulary.sha256):  # None: written by another program, the ids are all there is
        return
    if recorded_identity(prefix, meta) != vocabulary.identity:
        raise UserError(
            f"the tokens {prefix} were made with the vocabulary {meta.get('vocab_file')} (sha256 {made_with[:12]}, "
            f"{meta.get('vocab_size')} pieces), not with {vocabulary.path} (sha256 {vocabulary.sha256[:12]}, "
            f"{vocabulary.num_pieces} pieces); give that vocabulary or tokenize the text again"
        )


# ---- the plan and its folder ----


def shard_prefix(prefix: str, number: int, count: int) -> str:
    """PREFIX-00003-of-00064: where part `number` (from 0) of `count` goes."""
    return f"{prefix}-{number:05d}-of-{count:05d}"


def _part_of_plan(inputs: Sequence[str], number: int, count: int, encoding: Encoding) -> tuple[list[Piece], str]:
    """The pieces of one of `count` consecutive parts of about equal size, and what identifies the whole.

    Consecutive, so that the parts one after the other are the whole. A part may be empty.
    """
    if not count:
        raise UserError(f"--shard {number}/0 is a part of none: the number after the slash is at least 1")
    if not 0 <= number < count:
        raise UserError(
            f"shard {number}/{count} does not exist: the {count} shards are 0/{count} to {count - 1}/{count}"
        )
    pieces = plan_pieces(inputs)
    size = sum(piece.num_bytes for piece in pieces)
    if len(pieces) < _PIECES_PER_SHARD * count and size:
        pieces = plan_pieces(inputs, max(size // (_PIECES_PER_SHARD * count), _SMALLEST_PIECE))
    average = max(size // len(pieces), 1)  # for shards of a dataset, whose size is not known
    weights = [piece.num_bytes or average for piece in pieces]
    total, ends = sum(weights), accumulate(weights)
    own = [
        piece
        for piece, weight, end in zip(pieces, weights, ends, strict=True)
        if (2 * end - weight) * count // (2 * total) == number
    ]
    logger.info("shard %d/%d: %d of %d pieces", number, count, len(own), len(pieces))
    whole = [(os.path.basename(piece.path), piece.kind, piece.start, piece.end, piece.num_bytes) for piece in pieces]
    identities = [hf_datasets.identity(name) for name in _datasets_of(pieces)]
    return own, hashlib.sha256(json.dumps([FORMAT, whole, identities, encoding.identity()]).encode()).hexdigest()


def _datasets_of(pieces: list[Piece]) -> list[str]:
    return list(dict.fromkeys(piece.path for piece in pieces if piece.kind == "dataset"))


def _plan_fingerprint(pieces: list[Piece], encoding: Encoding) -> str:
    """Changes whenever the tokens could: which bytes are read, and how they are encoded."""
    stamps = {os.path.abspath(piece.path): piece.stamp[1] for piece in pieces if piece.stamp is not None}
    parts = [(os.path.abspath(p.path) if p.kind != "dataset" else p.path, p.kind, p.start, p.end) for p in pieces]
    identities = [hf_datasets.identity(name, with_times=True) for name in _datasets_of(pieces)]
    plan = [FORMAT, parts, sorted(stamps.items()), identities, encoding.identity()]
    return hashlib.sha256(json.dumps(plan).encode()).hexdigest()


def _check_unchanged(pieces: list[Piece], encoding: Encoding, fingerprint: str) -> None:
    """Refuse to join pieces of a text that is not that of the plan any more: its bounds were other documents'."""
    for piece in {piece.path: piece for piece in pieces}.values():
        piece.check_unchanged()
    names = _datasets_of(pieces)
    local = names and all(os.path.exists(hf_datasets.split_name(name)[0]) for name in names)  # the hub has revisions
    if local and _plan_fingerprint(pieces, encoding) != fingerprint:
        raise UserError(f"files of {', '.join(names)} were changed while they were being read: start again")


def _prepare_folder(folder: Path, fingerprint: str) -> str:
    """Keep the finished pieces of the same plan; start over where text, vocabulary or options changed.

    Returns the fingerprint of the plan.
    """
    plan = folder / "plan.json"
    if plan.is_file() and json.loads(plan.read_bytes()).get("fingerprint") == fingerprint:
        return fingerprint
    if folder.exists() and not plan.is_file() and any(folder.iterdir()):
        raise UserError(
            f"{folder} holds files that are not ours (no plan.json); move it away or choose another output"
        )
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write_atomic(plan, json.dumps({"fingerprint": fingerprint}))
    return fingerprint


def _jobs(pieces: list[Piece], folder: Path) -> list[tuple[Piece, str]]:
    """(piece, its prefix) of those that no earlier run has finished."""
    numbered = [(piece, _piece_prefix(folder, number)) for number, piece in enumerate(pieces)]
    jobs = [(piece, path) for piece, path in numbered if finished_record(path, "num_documents") is None]
    if len(jobs) < len(pieces):
        logger.info("%d of %d pieces are there from an earlier run", len(pieces) - len(jobs), len(pieces))
    return jobs


@contextmanager
def _kept_if_resumable(folder: Path, num_pieces: int) -> Iterator[None]:
    """However the work ends, leave the folder only where a later run would find something in it."""
    try:
        yield
    finally:
        if folder.exists():
            prefixes = (_piece_prefix(folder, number) for number in range(num_pieces))
            records = (finished_record(path, "num_documents") for path in prefixes)
            if any(record and record["num_documents"] for record in records):
                logger.info(
                    "finished pieces are kept in %s: another run over the same text goes on from there", folder
                )
            else:
                shutil.rmtree(folder)


def _piece_prefix(folder: Path, number: int) -> str:
    return str(folder / f"{number:06d}")


# ---- one piece ----


def tokenize_piece(
    piece: Piece, prefix: str, vocabulary: Vocabulary, encoding: Encoding, limit: int | None
) -> tuple[int, bool]:
    """Encode one piece into the token file `prefix`; returns its number of bad lines, and if it is whole.

    They go to `prefix`.bad.jsonl, counted from the start of the piece. Where they are hopelessly many the piece is
    left unfinished.
    """
    num_documents = num_empty = total_bytes = batch_bytes = 0
    batch: list[str] = []

    def flush() -> None:
        for ids in encode_documents(batch, vocabulary, encoding):
            writer.add_sequence(ids)
            writer.end_document()
        batch.clear()

    quarantine = Quarantine(f"{prefix}.bad.jsonl", ANY_NUMBER)
    writer = IndexedDatasetWriter(prefix, token_dtype(vocabulary.size))
    with writer, closing(quarantine):
        for item in read_piece(piece, encoding.text_key):
            if isinstance(item, EmptyText):
                num_empty += 1
                continue
            if isinstance(item, BadLine):
                quarantine.list_line(piece.path, item)
                if is_hopeless(limit, quarantine.count, quarantine.count + num_documents):
                    writer.abort()
                    return quarantine.count, False
                continue
            size = num_bytes(item.text)
            batch.append(item.text)
            batch_bytes += size
            total_bytes += size
            num_documents += 1
            if batch_bytes > _BATCH_BYTES:
                flush()
                batch_bytes = 0
        flush()
        quarantine.close()
        counts = {"num_documents": num_documents, "empty_documents": num_empty, "num_bytes": total_bytes}
        writer.finalize(counts | {"bad_lines": quarantine.count})
    return quarantine.count, True


# ---- all pieces ----


def _run(
    jobs: list[tuple[Piece, str]],
    vocabulary: Vocabulary,
    encoding: Encoding,
    limit: int | None,
    workers: int,
    advance: Callable[[Piece], None],
) -> None:
    """Tokenize (piece, prefix) jobs; returns early where it is clear that bad lines are too many."""
    num_bad, workers = 0, min(workers, len(jobs))
    with ExitStack() as stack:
        if workers <= 1:
            counts = ((piece, tokenize_piece(piece, prefix, vocabulary, encoding, limit)) for piece, prefix in jobs)
        else:
            pool = stack.enter_context(WorkerPool(work, (vocabulary, encoding, limit), workers))
            piece_of = {pool.submit(job): job[0] for job in jobs}
            counts = ((piece_of[done], done.result()) for done in as_completed(piece_of))
        try:
            for piece, (count, whole) in counts:
                num_bad += count
                if not whole or (limit is not None and num_bad > limit):
                    return
                advance(piece)
        except WorkerEnded as end:
            raise UserError(
                f"a tokenization process ended with exit code {end.returncode} (-9: killed, often for want of memory) "
                f"at {end.request[0].path}; finished pieces are kept: try again with fewer workers"
            ) from None


def work(caller: Caller) -> None:
    """A worker process: told vocabulary, encoding and limit, it answers (piece, prefix) as tokenize_piece."""

    def prepare(settings: tuple[Vocabulary, Encoding, int | None]) -> Callable[[tuple[Piece, str]], tuple[int, bool]]:
        return lambda job: tokenize_piece(*job, *settings)

    caller.serve(prepare)


@contextmanager
def _progress(
    pieces: list[Piece], jobs: list[tuple[Piece, str]], show: bool | None
) -> Iterator[Callable[[Piece], None]]:
    """A function to call with each finished piece: moves a bar of bytes read (pieces, where sizes are not known)."""
    if not (sys.stderr.isatty() if show is None else show):
        yield lambda piece: None
        return
    from tqdm import tqdm

    known = all(piece.kind != "dataset" for piece in pieces)

    def weight(piece: Piece) -> int:
        return piece.num_bytes if known else 1

    total, left = sum(map(weight, pieces)), sum(weight(piece) for piece, _ in jobs)
    unit = "B" if known else "shard"
    with tqdm(total=total, initial=total - left, unit=unit, unit_scale=known, desc="tokenize") as bar:
        yield lambda piece: bar.update(weight(piece))


# ---- joining ----


def _collect_bad_lines(pieces: list[Piece], folder: Path, path: str, limit: int | None) -> Quarantine:
    """One quarantine file of all pieces, with lines counted from the start of their file; UserError for too many."""
    quarantine = Quarantine(path, limit)
    where, position, lines = "", 0, 0
    with closing(quarantine):
        for number, piece in enumerate(pieces):
            prefix = _piece_prefix(folder, number)
            record = finished_record(prefix, "num_documents")
            quarantine.read(record["num_documents"] if record else 0)
            bad = Path(f"{prefix}.bad.jsonl")
            if not bad.is_file():
                continue
            if piece.path != where:
                where, position, lines = piece.path, 0, 0
            if piece.kind != "dataset":
                lines += count_lines(piece.path, position, piece.start)
                position = piece.start
            for line in bad.read_text(encoding="utf-8").splitlines():
                found = json.loads(line)
                quarantine.list_line(piece.path, BadLine(lines + found["line"], found["reason"], found["content"]))
            if record is None:
                raise UserError(f"most of the lines read of {piece.path} are bad: {quarantine}; give another --input")
    if quarantine.count:
        logger.warning("%s", quarantine)
    return quarantine


def _join(
    pieces: list[Piece],
    folder: Path,
    prefix: str,
    vocabulary: Vocabulary,
    encoding: Encoding,
    origin: dict[str, Any],
    bad_lines: Quarantine,
) -> dict[str, Any]:
    """Write the final files out of the finished pieces, in order; returns what the sidecar holds."""
    num_documents = num_empty = num_bytes = 0
    with IndexedDatasetWriter(prefix, token_dtype(vocabulary.size)) as writer:
        for number in range(len(pieces)):
            part = IndexedDataset(_piece_prefix(folder, number))
            writer.add_dataset(part)
            num_documents += part.meta["num_documents"]
            num_empty += part.meta.get("empty_documents", 0)  # which earlier versions counted as bad lines
            num_bytes += part.meta["num_bytes"]
        if not num_documents and "shard" not in origin:
            writer.abort()
            paths = list(dict.fromkeys(piece.path for piece in pieces))
            raise no_documents(paths, bad_lines.count, bad_lines.first, bad_lines.path, num_empty)
        meta = {
            "vocab_sha256": vocabulary.sha256,
            "vocab_file": encoding.vocab_path,
            "vocab_size": vocabulary.num_pieces,
            "num_documents": num_documents,
            "num_tokens": writer.num_tokens,
            "num_bytes": num_bytes,
            "append_eos": encoding.append_eos,
            "encode_by": encoding.encode_by,
            "text_key": encoding.text_key,
            "dtype": writer.dtype.name,
            "bin_sha256": writer.bin_sha256,
            **origin,
            "bad_lines": bad_lines.count,
            **({"empty_documents": num_empty} if num_empty else {}),
        }
        writer.finalize(meta)
    return meta

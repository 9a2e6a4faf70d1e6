"""Text -> token files, by several processes, resumable, with the same bytes whatever the number of processes.

Each piece of the inputs becomes a small token file (pieces.py); when all are there they are joined in order into
PREFIX.bin, .idx and .json, or in job i of n of a job array into PREFIX-0000i-of-0000n. A document is one sequence.
"""

import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from lm_experiments_tools.data.text.bad_lines import (
    ANY_NUMBER,
    BadLine,
    EmptyText,
    Quarantine,
    is_hopeless,
    no_documents,
)
from lm_experiments_tools.data.text.documents import Piece, plan_pieces, read_piece
from lm_experiments_tools.data.text.encoding import Encoding, encode_documents, num_bytes
from lm_experiments_tools.data.text.vocabulary import Vocabulary
from lm_experiments_tools.data.tokens.files import (
    check_replaceable,
    dataset_exists,
    load_vocabulary,
    recorded_identity,
    recorded_inputs,
    remove_unfinished,
)
from lm_experiments_tools.data.tokens.indexed import IndexedDatasetWriter, token_dtype
from lm_experiments_tools.data.tokens.pieces import (
    EncodePiece,
    PieceFiles,
    encode_pieces,
    part_of_plan,
    plan_fingerprint,
    shard_prefix,
)
from lm_experiments_tools.data.workers import available_cores
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.files import locked

logger = logging.getLogger(__name__)

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
    vocabulary = vocab_path if isinstance(vocab_path, Vocabulary) else load_vocabulary(vocab_path)
    encoding = _encoding(vocabulary, text_key, append_eos, encode_by)
    prefix = os.fspath(output_prefix)
    origin: dict[str, Any] = {"input": recorded_inputs(inputs)}
    if shard is None:
        pieces = plan_pieces(inputs)
    else:
        pieces, origin["shard"] = part_of_plan(inputs, *shard, encoding.identity())
        prefix = shard_prefix(prefix, *shard)
    with locked(Path(f"{prefix}.lock")):
        if not overwrite:
            check_replaceable(prefix, origin["input"], vocabulary.recorded_as, vocabulary.sha256, vocabulary.identity)
        remove_unfinished(prefix)
        files = PieceFiles(pieces, prefix, encoding.identity())
        with files.kept_if_resumable():
            jobs, settings = files.jobs(), (vocabulary, encoding, max_bad_lines)
            done = encode_pieces(jobs, _prepare, settings, workers or available_cores(), max_bad_lines)
            with _progress(pieces, jobs, show_progress) as advance, closing(done):
                for piece, _ in done:
                    advance(piece)
            files.check_unchanged()
            bad_lines = files.collect_bad_lines(f"{prefix}.bad_lines.jsonl", max_bad_lines)
            meta = _join(files, prefix, vocabulary, encoding, origin, bad_lines)
            files.remove()
    return meta


def _encoding(vocabulary: Vocabulary, text_key: str, append_eos: bool, encode_by: str | None) -> Encoding:
    if encode_by not in (None, "line", "document"):
        raise UserError(f"encode_by is {encode_by!r}; it can be 'line' or 'document'")
    if encode_by == "line" != vocabulary.encode_by:
        logger.warning("%s reads newlines, and encode_by=line leaves them all out", vocabulary.path)
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
    key = plan_fingerprint(plan_pieces([path]), encoding.identity())[:16]
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
    writer = IndexedDatasetWriter(prefix, token_dtype(vocabulary.size), durable=False)
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
        writer.finalize(counts | {"bad_lines": quarantine.count, "bin_sha256": writer.bin_sha256})
    return quarantine.count, True


def _prepare(settings: tuple[Vocabulary, Encoding, int | None]) -> EncodePiece:
    return lambda job: tokenize_piece(*job, *settings)


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


def _join(
    files: PieceFiles,
    prefix: str,
    vocabulary: Vocabulary,
    encoding: Encoding,
    origin: dict[str, Any],
    bad_lines: Quarantine,
) -> dict[str, Any]:
    """Write the final files out of the finished pieces, in order; returns what the sidecar holds."""
    num_documents = num_empty = num_bytes = 0
    with IndexedDatasetWriter(prefix, token_dtype(vocabulary.size)) as writer:
        for part in files.parts():
            writer.add_dataset(part)
            num_documents += part.meta["num_documents"]
            num_empty += part.meta.get("empty_documents", 0)  # which earlier versions counted as bad lines
            num_bytes += part.meta["num_bytes"]
        if not num_documents and "shard" not in origin:
            writer.abort()
            paths = list(dict.fromkeys(piece.path for piece in files.pieces))
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

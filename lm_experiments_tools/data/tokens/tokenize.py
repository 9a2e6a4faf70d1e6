"""Tokenize text for T5 and similar models, with one sequence per document."""

import logging
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from lm_experiments_tools.data.text.records import RejectedRecords, no_documents
from lm_experiments_tools.data.text.sources import Shard, plan_shards
from lm_experiments_tools.data.text.tokenizer import Tokenizer, warn_of_unknown
from lm_experiments_tools.data.tokens.encoding import EncodedWriter, TextEncoder
from lm_experiments_tools.data.tokens.files import (
    check_replaceable,
    dataset_exists,
    open_tokenizer,
    recorded_inputs,
)
from lm_experiments_tools.data.tokens.indexed import IndexedDataset
from lm_experiments_tools.data.tokens.pipeline import Tokenization, part_of_plan, plan_fingerprint, shard_prefix
from lm_experiments_tools.data.workers import available_cores
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.files import locked

logger = logging.getLogger(__name__)

_BLOCK, _NUM_BLOCKS = 1 << 14, 64  # tokens read together and parts of a token file, to count unknown tokens


def tokenize_corpus(
    inputs: Sequence[str],
    vocab_path: str | os.PathLike | Tokenizer,
    output_prefix: str | os.PathLike,
    *,
    workers: int | None = None,
    append_eos: bool = False,
    text_key: str = "text",
    document_per_line: bool = False,
    max_bad_lines: int | None = None,
    encode_by: str | None = None,
    show_progress: bool | None = None,
    shard: tuple[int, int] | None = None,
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
        max_bad_lines: limit of rejected records, listed in PREFIX.bad_lines.jsonl; None for max(100, 0.1 %).
        encode_by: "line" encodes each line separately and gives the ids of Hugging Face tokenizers; "document" gives
            those of seqio; None uses `Tokenizer.encode_by`.
        show_progress: show a progress bar; None shows one on a terminal.
        shard: (i, n) encodes the i-th of n parts, 0 <= i < n, into `shard_prefix(PREFIX, i, n)`; None encodes all.
        overwrite: replace token files of other inputs or of another vocabulary.

    Returns:
        The content of PREFIX.json.

    Raises:
        UserError: unreadable input or vocabulary, no document, too many rejected records, or PREFIX has other text.
    """
    vocabulary = vocab_path if isinstance(vocab_path, Tokenizer) else open_tokenizer(vocab_path)
    encoder = TextEncoder.of(vocabulary, text_key, append_eos, encode_by)
    prefix = os.fspath(output_prefix)
    origin: dict[str, Any] = {"input": recorded_inputs(inputs)}
    if shard is None:
        shards = plan_shards(inputs, document_per_line=document_per_line)
    else:
        shards, origin["shard"] = part_of_plan(inputs, *shard, encoder.identity, document_per_line)
        prefix = shard_prefix(prefix, *shard)
    with locked(Path(f"{prefix}.lock")):
        if not overwrite:
            check_replaceable(prefix, origin["input"], vocabulary.recorded_as, vocabulary.fingerprint)
        run = Tokenization(
            shards, encoder, prefix, [prefix], rejected=f"{prefix}.bad_lines.jsonl", limit=max_bad_lines,
            workers=workers or available_cores(),
        )  # fmt: skip
        (meta,) = run.run(partial(_meta, encoder, shards, origin), partial(_show_progress, shards, show_progress))
    return meta


def _meta(
    encoder: TextEncoder,
    shards: Sequence[Shard],
    origin: dict[str, Any],
    writers: Sequence[EncodedWriter],
    rejected: RejectedRecords,
) -> list[dict[str, Any]]:
    """The content of PREFIX.json. Raises UserError where there is no document."""
    (writer,) = writers
    if not writer.num_documents and "shard" not in origin:
        raise no_documents(list(dict.fromkeys(shard.path for shard in shards)), rejected)
    meta = {
        "vocab_sha256": encoder.vocabulary.fingerprint,
        "vocab_file": encoder.vocabulary.recorded_as,
        "vocab_size": encoder.vocabulary.size,
        "num_documents": writer.num_documents,
        "num_tokens": writer.num_tokens,
        "num_bytes": writer.num_bytes,
        "append_eos": encoder.append_eos,
        "encode_by": encoder.encode_by,
        "text_key": encoder.key,
        "dtype": writer.dtype.name,
        "bin_sha256": writer.bin_sha256,
        **origin,
        "bad_lines": rejected.count,
    }
    return [meta | ({"empty_documents": rejected.num_empty} if rejected.num_empty else {})]


def _show_progress(
    shards: Sequence[Shard], show: bool | None, jobs: Sequence[tuple[Shard, str]], done: Iterable[tuple[Shard, str]]
) -> None:
    """A bar of bytes read, or of shards where sizes are not known."""
    if not (sys.stderr.isatty() if show is None else show):
        for _ in done:
            pass
        return
    from tqdm import tqdm

    known = all(shard.kind != "dataset" for shard in shards)

    def weight(shard: Shard) -> int:
        return shard.num_bytes if known else 1

    total, left = sum(map(weight, shards)), sum(weight(shard) for shard, _ in jobs)
    unit = "B" if known else "shard"
    with tqdm(total=total, initial=total - left, unit=unit, unit_scale=known, desc="tokenize") as bar:
        for shard, _ in done:
            bar.update(weight(shard))


def ensure_tokenized(path: str, vocabulary: Tokenizer, cache_dir: str | os.PathLike, **options: Any) -> str:
    """Tokenize a text into a cache folder, unless that has been done before, and return the prefix of the token file.

    Other processes that need the same text wait meanwhile. A text is tokenized again if names, sizes or times of the
    input files (or the revision of a hub dataset), the vocabulary or the options change.

    Args:
        path: file, folder or dataset.
        vocabulary: converts text to ids.
        cache_dir: the cache folder.
        options: arguments of `tokenize_corpus`.
    """
    settings = {name: options[name] for name in ("text_key", "append_eos", "encode_by") if name in options}
    encoder = TextEncoder.of(vocabulary, **settings)
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
    """Raise UserError if a token file was made with another vocabulary than this run's.

    Args:
        prefix: path of the token file, without suffix.
        meta: content of PREFIX.json.
        vocabulary: vocabulary of the run.
    """
    made_with = meta.get("vocab_sha256")
    if made_with in (None, vocabulary.fingerprint):  # None: written by another program, the ids are all there is
        return
    other_case = ", or read it in the other case (--no_lower_case)" if vocabulary.continuation else ""
    raise UserError(
        f"the tokens {prefix} were made with the vocabulary {meta.get('vocab_file')} (fingerprint {made_with[:12]}), "
        f"not with {vocabulary.path} (fingerprint {vocabulary.fingerprint[:12]}): give that one{other_case} or "
        "tokenize again"
    )

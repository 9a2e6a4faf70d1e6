"""Data of run_t5_pretraining.py: tokens of each data path, and the examples of the objective."""

from __future__ import annotations

import itertools
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from lm_experiments_tools.backends import get_backend
from lm_experiments_tools.data.text.records import RejectedRecords, records
from lm_experiments_tools.data.text.sources import plan_shards
from lm_experiments_tools.data.tokens.indexed import IndexedDataset
from lm_experiments_tools.data.tokens.pipeline import EncodedWriter
from lm_experiments_tools.data.tokens.tokenize import TextEncoder
from lm_experiments_tools.recipes.common import model_source
from lm_experiments_tools.recipes.t5_data import pretraining_data
from lm_experiments_tools.recipes.t5_sources import T5Sources
from lm_experiments_tools.tools.inspection.batches import Wording, training_section
from lm_experiments_tools.tools.inspection.section import Section
from lm_experiments_tools.tools.inspection.tokens import TokenSource, open_source, token_section

STREAMED_DOCUMENTS = 10_000  # of a Hugging Face dataset and of --streaming, unless --documents is given
_DOCUMENTS_AT_ONCE = 64


def sections(args: Any) -> Iterator[Section]:
    """A section for each data path, and one for the training data made from them."""
    args = replace(args, valid_data_path=None, validate_only=False)
    data = T5Sources(args)
    os.chdir(args.working_folder())
    vocabulary, sources = data.vocabulary, []
    with tempfile.TemporaryDirectory() as folder:
        for number, path in enumerate(args.data_path):
            sources.append(_source(path, data, args, Path(folder) / str(number)))
            yield token_section(
                sources[-1], args, vocab_size=vocabulary.size, unk_id=vocabulary.unk_id, piece=vocabulary.piece
            )
        yield _training(args, sources, data)


def _training(args: Any, sources: list[TokenSource], data: T5Sources) -> Section:
    # One worker reads the rows of all: the same global batches, length grouping included.
    rows = args.batch_size * args.world_size
    settings = replace(_readable(args, sources, data), batch_size=rows, backend="local", model_path=None)
    backend = get_backend(settings)
    kinds = args.objective().models
    kind = kinds[0] if len(kinds) == 1 else model_source(settings, backend).kind
    vocabulary, read = data.vocabulary, pretraining_data(settings, backend, data, kind)
    shown = {vocabulary.pad_id: "<pad>", vocabulary.eos_id: "</s>", vocabulary.unk_id: "<unk>"}
    wording = Wording(vocabulary.decode, shown, labels_at_inputs=kind == "encoder")
    facts = [("objective", read.objective)]
    if args.streaming and settings.streaming != args.streaming:
        facts.append(("", "the run streams the text; steps and samples are those of its first documents, tokenized"))
    with closing(read.train):
        per_epoch = read.train.samples_per_epoch
        section = training_section(
            read.train, per_epoch, sources, args, kind == "encoder-decoder", wording, facts=facts
        )
    backend.close()
    return section


def _readable(args: Any, sources: list[TokenSource], data: T5Sources) -> Any:
    """Arguments that read the run's own data, or the tokens of the first documents."""
    if args.through_seqio() or (args.streaming and all(source.fraction == 1.0 for source in sources)):
        return args
    prefixes = tuple(data.add(source.tokens) for source in sources)
    return replace(args, data_path=prefixes, data_pipeline="native", streaming=False)


def _source(path: str, data: T5Sources, args: Any, scratch: Path) -> TokenSource:
    """The tokens that the run will read from a data path, or those of the first `--documents` in a scratch file."""
    if data.prefix(path) is not None:
        return open_source(path, data.tokens(path), args, scratch)
    limit = args.documents
    if limit is None and (args.streaming or any(shard.kind == "dataset" for shard in plan_shards([path]))):
        limit = STREAMED_DOCUMENTS
    if limit is None:
        return TokenSource(path, data.tokens(path))
    return _first_documents(path, limit, data.vocabulary, args, scratch)


def _first_documents(path: str, limit: int, vocabulary: Any, args: Any, scratch: Path) -> TokenSource:
    """The first `limit` documents of a text, tokenized as by the run; at most one more document is read."""
    encoder = TextEncoder.of(vocabulary, args.text_key, args.ends_documents())
    rejected = RejectedRecords(args.max_bad_lines, f"{scratch}.bad_lines.jsonl")
    documents = records([path], args.text_key, rejected)
    with closing(documents), closing(rejected), EncodedWriter(str(scratch), encoder.dtype) as writer:
        first = itertools.islice(documents, limit)
        while batch := list(itertools.islice(first, _DOCUMENTS_AT_ONCE)):
            writer.add(encoder.encode([parts for record in batch for parts in encoder.parts(record)]))
        following = next(documents, None)
        meta = {"vocab_sha256": vocabulary.sha256, "vocab_file": vocabulary.recorded_as}
        writer.finalize({"num_bytes": writer.num_bytes} | meta)
    fraction = 1.0 if following is None else _fraction_before(following.path, following.line, path)
    return TokenSource(path, IndexedDataset(scratch), fraction)


def _fraction_before(file: str, line: int, path: str) -> float | None:
    """Fraction of a text's bytes before a line of a file; None for compressed files and datasets."""
    shards = plan_shards([path], shard_bytes=sys.maxsize)
    if any(shard.kind == "dataset" or shard.end is None for shard in shards):
        return None
    before = sum(shard.num_bytes for shard in itertools.takewhile(lambda shard: shard.path != file, shards))
    with open(file, "rb") as lines:
        before += sum(map(len, itertools.islice(lines, line - 1)))
    return before / sum(shard.num_bytes for shard in shards)

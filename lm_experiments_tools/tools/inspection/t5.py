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
from lm_experiments_tools.data.text.documents import iter_documents, plan_pieces
from lm_experiments_tools.data.text.encoding import Encoding, encode_documents, num_bytes
from lm_experiments_tools.data.tokens.indexed import token_dtype
from lm_experiments_tools.recipes.common import model_source
from lm_experiments_tools.recipes.t5_data import pretraining_data
from lm_experiments_tools.recipes.t5_sources import T5Sources
from lm_experiments_tools.tools.inspection.batches import Wording, training_section
from lm_experiments_tools.tools.inspection.section import Section
from lm_experiments_tools.tools.inspection.tokens import TokenSource, open_source, token_section, write_documents

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
    if limit is None and (args.streaming or any(piece.kind == "dataset" for piece in plan_pieces([path]))):
        limit = STREAMED_DOCUMENTS
    if limit is None:
        return TokenSource(path, data.tokens(path))
    return _first_documents(path, limit, data.vocabulary, args, scratch)


def _first_documents(path: str, limit: int, vocabulary: Any, args: Any, scratch: Path) -> TokenSource:
    """The first `limit` documents of a text, tokenized as by the run; at most one more document is read."""
    encoding = Encoding.of(vocabulary, args.text_key, args.ends_documents())
    meta = {"num_bytes": 0, "vocab_sha256": vocabulary.sha256, "vocab_file": encoding.vocab_path}
    documents = iter_documents(
        [path], text_key=args.text_key, max_bad_lines=args.max_bad_lines, quarantine=f"{scratch}.bad_lines.jsonl"
    )

    def encoded() -> Iterator[list[Any]]:
        first = itertools.islice(documents, limit)
        while texts := [document.text for document in itertools.islice(first, _DOCUMENTS_AT_ONCE)]:
            meta["num_bytes"] += sum(map(num_bytes, texts))
            yield from ([ids] for ids in encode_documents(texts, vocabulary, encoding))

    with closing(documents):
        tokens = write_documents(scratch, token_dtype(vocabulary.size), encoded(), meta)
        following = next(documents, None)
    return TokenSource(path, tokens, 1.0 if following is None else _fraction_before(following.source, path))


def _fraction_before(source: str, path: str) -> float | None:
    """Fraction of a text's bytes before `file:line`; None for compressed files and datasets."""
    files = plan_pieces([path], piece_bytes=sys.maxsize)
    if any(file.kind == "dataset" or file.end is None for file in files):
        return None
    name, _, line = source.rpartition(":")
    before = sum(file.num_bytes for file in itertools.takewhile(lambda file: file.path != name, files))
    with open(name, "rb") as lines:
        before += sum(map(len, itertools.islice(lines, int(line) - 1)))
    return before / sum(file.num_bytes for file in files)

"""Describe the data of the pre-training scripts: token files, and the training examples made from them."""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from lm_experiments_tools.backends.backend import LocalBackend
from lm_experiments_tools.config.bert import SENTENCES
from lm_experiments_tools.data.loader import TrainLoader
from lm_experiments_tools.data.text.records import RejectedRecords, records
from lm_experiments_tools.data.text.sources import plan_shards
from lm_experiments_tools.data.text.tokenizer import Tokenizer
from lm_experiments_tools.data.tokens.holdout import hold_out
from lm_experiments_tools.data.tokens.indexed import IndexedDataset, IndexedDatasetWriter, token_dtype, token_prefix
from lm_experiments_tools.data.tokens.tokenize import TextEncoder, report_unknown
from lm_experiments_tools.models.from_args import model_source
from lm_experiments_tools.recipes.bert import (
    bert_datasets,
    bert_tokenizer,
    document_datasets,
    open_documents,
    open_sentences,
)
from lm_experiments_tools.recipes.t5_data import pretraining_data
from lm_experiments_tools.recipes.t5_sources import CACHE, T5Sources
from lm_experiments_tools.tools.inspect_samples import Rendering, Samples, training_section
from lm_experiments_tools.tools.inspect_tokens import Facts, TokenSource, open_source, token_facts
from megatron.tokenizers import check_tokenizer

Section = tuple[str, Facts, Samples]
STREAMED_DOCUMENTS = 10_000  # of a Hugging Face dataset and of --streaming, unless --documents is given
_DOCUMENTS_AT_ONCE = 64


def t5_sections(args: Any) -> Iterator[Section]:
    """Describe each data path of T5 pre-training, then the training examples made from all of them."""
    valid, data = args.valid_data_path, T5Sources(replace(args, validate_only=False))
    args = replace(args, valid_data_path=None, validate_only=False)
    os.chdir(args.working_folder())
    sources = []
    with tempfile.TemporaryDirectory() as folder:
        for number, path in enumerate(args.data_path):
            source = _t5_source(path, data, args, Path(folder) / str(number))
            sources.append(source)
            yield source.title(), token_facts(source), []
        if valid is not None and not args.is_registered_task():
            source = _t5_source(valid, data, args, Path(folder) / "valid")
            yield f"validation: {source.title()}", [], []
        yield _t5_training(args, sources, data, folder)


def _t5_source(path: str, data: T5Sources, args: Any, scratch: Path) -> TokenSource:
    """The tokens that the run will read from a data path, or those of the first `--documents` in a scratch file."""
    if data.is_tokenized(path):
        return open_source(path, data.tokens(path), args, scratch)
    first = _first_documents(path, data.vocabulary, args.ends_documents(), args, scratch)
    return first or TokenSource(path, data.tokens(path))


def _first_documents(
    path: str, vocabulary: Tokenizer, append_eos: bool, args: Any, scratch: Path
) -> TokenSource | None:
    """Tokenize the first `--documents` of a text to a scratch file; None if all of it is inspected."""
    limit = args.documents
    shards = plan_shards([path], document_per_line=args.document_per_line)
    if limit is None and (getattr(args, "streaming", False) or any(shard.kind == "dataset" for shard in shards)):
        limit = STREAMED_DOCUMENTS
    if limit is None:
        return None
    encoder = TextEncoder(vocabulary, args.text_key, append_eos)
    rejected = RejectedRecords(args.max_bad_lines, f"{scratch}.bad_lines.jsonl")
    documents = records([path], args.text_key, rejected, args.document_per_line)
    with closing(documents), closing(rejected), IndexedDatasetWriter(scratch, token_dtype(vocabulary.size)) as writer:
        first, num_bytes = itertools.islice(documents, limit), 0
        while batch := list(itertools.islice(first, _DOCUMENTS_AT_ONCE)):
            encoded = encoder.encode([parts for record in batch for parts in encoder.parts(record)])
            writer.add_documents(encoded.ids, encoded.sequence_lengths, encoded.num_sequences)
            num_bytes += encoded.num_bytes
        is_whole = next(documents, None) is None
        meta = {"vocab_sha256": vocabulary.fingerprint, "vocab_file": vocabulary.recorded_as}
        writer.finalize({"num_bytes": num_bytes} | meta)
    tokens = IndexedDataset(scratch)
    report_unknown(tokens, vocabulary.unk_id)
    return TokenSource(path, tokens, is_whole)


def _training_tokens(args: Any, sources: list[TokenSource], scratch: str) -> tuple[list[IndexedDataset], Facts]:
    """The tokens without those that `--valid_fraction` holds out, and a line about these."""
    tokens = [source.tokens for source in sources]
    if args.valid_fraction is None:
        return tokens, []
    if not all(source.is_whole for source in sources):  # the first documents may have none to hold out
        return tokens, [("validation", f"the run holds out {args.valid_fraction:.3g} of all documents, here none")]
    prefixes, held_out = hold_out(tokens, args.valid_fraction, CACHE if args.documents is None else scratch)
    count, total = IndexedDataset(held_out).num_documents, sum(dataset.num_documents for dataset in tokens)
    return [IndexedDataset(prefix) for prefix in prefixes], [("validation", f"{count:,} of {total:,} documents")]


def _t5_training(args: Any, sources: list[TokenSource], data: T5Sources, scratch: str) -> Section:
    is_whole, settings = all(source.is_whole for source in sources), args
    tokens, held_out = _training_tokens(args, sources, scratch)
    if not args.is_registered_task() and not (args.streaming and is_whole):
        prefixes = tuple(map(data.add, tokens))
        settings = replace(args, data_path=prefixes, streaming=False, valid_fraction=None)
    # One worker reads the rows of all: the same global batches, length grouping included.
    rows = args.batch_size * args.world_size
    settings = replace(settings, batch_size=rows, fp16_allreduce=False, model_path=None)
    backend = LocalBackend.from_args(settings)
    kinds = args.objective().models
    kind = kinds[0] if len(kinds) == 1 else model_source(settings, backend).kind
    vocabulary, read = data.vocabulary, pretraining_data(settings, backend, data, kind)
    shown = {vocabulary.pad_id: "<pad>", vocabulary.eos_id: "</s>", vocabulary.unk_id: "<unk>"}
    rendering = Rendering(vocabulary.decode, shown, labels_at_inputs=kind == "encoder")
    facts = [("objective", read.objective), *held_out]
    if args.streaming and not settings.streaming:
        facts.append(("", "the run streams the text; steps and samples are those of its first documents, tokenized"))
    with closing(read.train) as train:
        has_decoder = kind == "encoder-decoder"
        section = training_section(train, train.samples_per_epoch, is_whole, args, has_decoder, rendering, facts)
    backend.close()
    return section


def bert_sections(args: Any) -> Iterator[Section]:
    """Change to `--working_dir`; describe each data path of BERT pre-training, then the examples made from all."""
    os.chdir(args.working_folder())
    tokenizer, sources = bert_tokenizer(args), []
    with tempfile.TemporaryDirectory() as folder:
        for number, path in enumerate(args.data_path):
            source = _bert_source(path, tokenizer, args, Path(folder) / str(number))
            sources.append(source)
            yield source.title(), token_facts(source, args.packing == SENTENCES), []
        if args.valid_data_path is not None:
            source = _bert_source(args.valid_data_path, tokenizer, args, Path(folder) / "valid")
            yield f"validation: {source.title()}", [], []
        yield _bert_training(args, sources, tokenizer, folder)


def _bert_source(path: str, tokenizer: Any, args: Any, scratch: Path) -> TokenSource:
    if args.packing == SENTENCES:
        tokens = open_sentences(path)
        check_tokenizer(tokens, tokenizer)
        return open_source(path, tokens, args, scratch)
    first = None if token_prefix(path) is not None else _first_documents(path, tokenizer, False, args, scratch)
    return first or open_source(path, open_documents(path, args, tokenizer), args, scratch)


def _bert_training(args: Any, sources: list[TokenSource], tokenizer: Any, folder: str) -> Section:
    is_whole = all(source.is_whole for source in sources)
    tokens, held_out = _training_tokens(args, sources, folder)
    opened = {dataset.prefix: dataset for dataset in tokens}
    settings = replace(args, data_path=tuple(opened), valid_data_path=None, validate_only=False)
    if args.packing == SENTENCES:  # a run has no use for the sample mapping of a part, and refuses data it cannot read
        settings = replace(settings, data_name=args.data_name if args.documents is None else folder, max_unread=1.0)
    make = bert_datasets if args.packing == SENTENCES else document_datasets
    dataset, _ = make(settings, tokenizer, opened.__getitem__)
    facts = [("objective", f"{dataset.describe()}, vocabulary {tokenizer.size:,}"), *held_out]
    pairs = zip(sources, dataset.members, strict=True) if args.packing == SENTENCES else ()
    for source, member in pairs:
        counts = member.mapping.counts
        lost = f"{counts.unread:.2%} of the tokens of {source.path} fit in no sample"
        limit = f"; more than --max_unread {args.max_unread:g}, so that training refuses it"
        facts.append(("not read", lost + (limit if counts.unread > args.max_unread else "")))
    rendering = Rendering(
        tokenizer.decode,
        {tokenizer.pad_id: "[PAD]", tokenizer.sep_id: "[SEP]", tokenizer.mask_id: "MASK"},
        labels_at_inputs=True,
    )
    with closing(TrainLoader(dataset, args.global_batch_size(args.world_size))) as train:  # the rows of all workers
        return training_section(train, len(dataset), is_whole, args, False, rendering, facts)

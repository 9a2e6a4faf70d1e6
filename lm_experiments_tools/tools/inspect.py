"""Look before you train: counts, lengths, frequencies, padding, steps, and samples exactly as the model gets them.

    lmtools inspect --config run.yaml
    lmtools inspect --data_path text.jsonl --vocab my.model --task prefix_lm --output look/
    lmtools inspect --data_path big.jsonl --vocab my.model --documents 2000

Flags and YAML files are those of run_t5_pretraining.py; nothing is trained.
"""

import dataclasses
import itertools
import os
import sys
import tempfile
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lm_experiments_tools.config.flags import check_groups
from lm_experiments_tools.config.objectives import ObjectiveArgs
from lm_experiments_tools.config.pretraining import DataArgs, MixtureArgs, T5PretrainingArgs
from lm_experiments_tools.config.training import BatchArgs, RunArgs
from lm_experiments_tools.tools.look import LookArgs, Source, first_documents, show_counts, show_samples

if TYPE_CHECKING:
    from lm_experiments_tools.recipes.t5_sources import T5Sources

STREAMED_DOCUMENTS = 10_000  # of a Hugging Face dataset or of --streaming, where --documents does not say
_DOCUMENTS_AT_ONCE = 64


@dataclass(frozen=True, kw_only=True)
class InspectArgs(T5PretrainingArgs, LookArgs):
    """The flags of run_t5_pretraining.py, so that its YAML files are read as they are, and what to look at."""

    def __post_init__(self) -> None:
        # What concerns the model or its training need not be complete to look at the data.
        check_groups(self, (DataArgs, MixtureArgs, ObjectiveArgs, BatchArgs, RunArgs, LookArgs))


def run(args: InspectArgs) -> None:
    """Print what there is to know of the data of a run."""
    from lm_experiments_tools.recipes.t5_sources import T5Sources

    args = dataclasses.replace(args, valid_data_path=None, validate_only=False)
    data = T5Sources(args)
    os.chdir(args.working_folder())
    with tempfile.TemporaryDirectory() as folder:
        sources = []
        for number, path in enumerate(args.data_path):
            sources.append(_source(path, data, args, Path(folder) / str(number)))
            show_counts(
                sources[-1],
                args,
                vocab_size=data.vocabulary.size,
                unk_id=data.vocabulary.unk_id,
                piece=data.vocabulary.piece,
                marks={"input": args.input_seq_len, "target": args.target_seq_len},
            )
        _show_run(args, sources, data)


def _show_run(args: InspectArgs, sources: list[Source], data: "T5Sources") -> None:
    """Print what the run makes of the data: objective, steps, padding, samples."""
    from lm_experiments_tools.backends import get_backend
    from lm_experiments_tools.recipes.common import model_source
    from lm_experiments_tools.recipes.t5_data import pretraining_data
    from lm_experiments_tools.tools.samples import Wording

    # One worker with the rows of all: the same global batches, buckets included.
    settings = dataclasses.replace(
        _readable(args, sources, data),
        batch_size=args.batch_size * args.world_size,
        backend="local",
        model_path=None,
    )
    backend = get_backend(settings)
    kinds = args.objective().models
    kind = kinds[0] if len(kinds) == 1 else model_source(settings, backend).kind
    vocabulary, read = data.vocabulary, pretraining_data(settings, backend, data, kind)
    print(f"\nobjective    {read.objective}")
    shown = {vocabulary.pad_id: "<pad>", vocabulary.eos_id: "</s>", vocabulary.unk_id: "<unk>"}
    wording = Wording(vocabulary.decode, shown, labels_at_inputs=kind == "encoder")
    with closing(read.train):
        show_samples(read.train, read.train.samples_per_epoch, sources, args, kind == "encoder-decoder", wording)
    backend.close()


def _readable(args: InspectArgs, sources: list[Source], data: "T5Sources") -> InspectArgs:
    """`args` that read what is looked at: the run's own data, or the tokens of the first documents."""
    if args.through_seqio() or (args.streaming and all(source.share == 1.0 for source in sources)):
        return args
    if args.streaming:
        print("\nThe run reads the text as a stream; samples and steps below are of its first documents, tokenized.")
    prefixes = tuple(data.add(source.tokens) for source in sources)
    return dataclasses.replace(args, data_path=prefixes, data_pipeline="native", streaming=False)


def _source(path: str, data: "T5Sources", args: InspectArgs, scratch: Path) -> Source:
    """The tokens behind a data path: those the run will read, or of the first `--documents` in a scratch file."""
    from lm_experiments_tools.data.text.sources import plan_shards

    if data.prefix(path) is not None:
        return first_documents(path, data.tokens(path), args, scratch)
    limit = args.documents
    if limit is None and (args.streaming or any(shard.kind == "dataset" for shard in plan_shards([path]))):
        limit = STREAMED_DOCUMENTS
    if limit is None:
        return Source(path, data.tokens(path))
    return _encode(path, limit, data, args, scratch)


def _encode(path: str, limit: int, data: "T5Sources", args: InspectArgs, scratch: Path) -> Source:
    """The first `limit` documents of a text as the run would tokenize them; no more than one further is read."""
    from lm_experiments_tools.data.text.records import RejectedRecords, records
    from lm_experiments_tools.data.tokens.indexed import IndexedDataset
    from lm_experiments_tools.data.tokens.pipeline import EncodedWriter
    from lm_experiments_tools.data.tokens.tokenize import TextEncoder

    vocabulary = data.vocabulary
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
    share = 1.0 if following is None else _share_before(following.path, following.line, path)
    return Source(path, IndexedDataset(scratch), share)


def _share_before(file: str, line: int, path: str) -> float | None:
    """The fraction of a text's bytes before a line of a file; None for compressed files and datasets."""
    from lm_experiments_tools.data.text.sources import plan_shards

    shards = plan_shards([path], shard_bytes=sys.maxsize)
    if any(shard.kind == "dataset" or shard.end is None for shard in shards):
        return None
    before = sum(shard.num_bytes for shard in itertools.takewhile(lambda shard: shard.path != file, shards))
    with open(file, "rb") as lines:
        before += sum(map(len, itertools.islice(lines, line - 1)))
    return before / sum(shard.num_bytes for shard in shards)

"""Look before you train: counts, lengths, frequencies, padding, steps, and samples exactly as the model gets them.

lmtools inspect --config run.yaml                         # the settings of run_t5_pretraining.py
lmtools inspect --data_path text.jsonl --vocab my.model --task prefix_lm --output look/
lmtools inspect --data_path big.jsonl --vocab my.model --documents 2000      # reads no more than these
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
from lm_experiments_tools.config.pretraining import DataArgs, T5PretrainingArgs
from lm_experiments_tools.config.training import BatchArgs, RunArgs
from lm_experiments_tools.tools.look import (
    LookArgs,
    Source,
    Wording,
    first_documents,
    show_batches,
    show_counts,
    show_steps,
    whole_epoch,
)

if TYPE_CHECKING:
    from lm_experiments_tools.data.text.vocabulary import Vocabulary

STREAMED_DOCUMENTS = 10_000  # of a Hugging Face dataset or of --streaming, where --documents does not say
_DOCUMENTS_AT_ONCE = 64


@dataclass(frozen=True, kw_only=True)
class InspectArgs(T5PretrainingArgs, LookArgs):
    """The flags of run_t5_pretraining.py, so that its YAML files are read as they are, and what to look at."""

    def __post_init__(self) -> None:
        # What concerns the model or its training need not be complete to look at the data.
        check_groups(self, (DataArgs, ObjectiveArgs, BatchArgs, RunArgs, LookArgs))


def run(args: InspectArgs) -> None:
    """Print what there is to know of the data of a run."""
    from lm_experiments_tools.data.text.vocabulary import Vocabulary
    from lm_experiments_tools.recipes.t5_data import vocabulary_path

    os.chdir(args.working_dir)
    args = dataclasses.replace(args, vocab=str(vocabulary_path(args)))
    vocabulary = Vocabulary.load(args.vocab)
    with tempfile.TemporaryDirectory() as folder:
        sources = []
        for number, path in enumerate(args.data_path):
            sources.append(_source(path, vocabulary, args, Path(folder) / str(number)))
            show_counts(
                sources[-1],
                args,
                vocab_size=vocabulary.size,
                unk_id=vocabulary.unk_id,
                piece=vocabulary.piece,
                marks={"input": args.input_seq_len, "target": args.target_seq_len},
            )
        _show_run(args, sources, vocabulary)


def _show_run(args: InspectArgs, sources: list[Source], vocabulary: "Vocabulary") -> None:
    """What the run makes of the data: objective, steps, padding, samples."""
    from lm_experiments_tools.backends import get_backend
    from lm_experiments_tools.recipes.objectives import trained_kind
    from lm_experiments_tools.recipes.t5_data import pretraining_data

    # One worker with the rows of all: the same global batches, buckets included.
    settings = dataclasses.replace(
        _readable(args, sources),
        batch_size=args.batch_size * args.world_size,
        backend="local",
        model_path=None,
        valid_data_path=None,
    )
    backend = get_backend(settings)
    data = pretraining_data(settings, backend)
    print(f"\nobjective    {data.objective}")
    samples = data.train.samples_per_epoch
    weighted = args.data_weights and args.data_blending == "proportional"
    weights = list(args.data_weights) if weighted else [1.0] * len(sources)
    show_steps(samples, samples and whole_epoch(samples, sources, weights), args)
    shown = {vocabulary.pad_id: "<pad>", vocabulary.eos_id: "</s>", vocabulary.unk_id: "<unk>"}
    kind = trained_kind(args)
    wording = Wording(vocabulary.decode, shown, labels_at_inputs=kind == "encoder")
    has_decoder = kind == "encoder-decoder"
    with closing(data.train):
        show_batches(data.train, samples, args, has_decoder, wording)
    backend.close()


def _readable(args: InspectArgs, sources: list[Source]) -> InspectArgs:
    """`args` that read what is looked at: the run's own data, or the tokens of the first documents."""
    from lm_experiments_tools.recipes.t5_data import choose_pipeline

    through_seqio = choose_pipeline(args) == "seqio"
    whole = all(source.share == 1.0 for source in sources)
    if args.data_pipeline == "seqio" or (whole and (through_seqio or args.streaming)):
        return args
    if through_seqio or args.streaming:
        way = "through seqio" if through_seqio else "as a stream"
        print(f"\nThe run reads the text {way}; samples and steps below are of the first documents, read natively.")
    prefixes = tuple(source.tokens.prefix for source in sources)
    return dataclasses.replace(args, data_path=prefixes, data_pipeline="native", streaming=False)


def _source(path: str, vocabulary: "Vocabulary", args: InspectArgs, scratch: Path) -> Source:
    """The tokens behind a data path: those the run will read, or of the first `--documents` in a scratch file."""
    from lm_experiments_tools.data.text.documents import plan_pieces
    from lm_experiments_tools.data.tokens.indexed import token_prefix
    from lm_experiments_tools.recipes.t5_data import open_tokens

    vocab_path = Path(args.vocab)
    if token_prefix(path) is not None:
        return first_documents(path, open_tokens(path, vocab_path, args), args, scratch)
    limit = args.documents
    if limit is None and (args.streaming or any(piece.kind == "dataset" for piece in plan_pieces([path]))):
        limit = STREAMED_DOCUMENTS
    if limit is None:
        return Source(path, open_tokens(path, vocab_path, args))
    return _encode(path, limit, vocabulary, args, scratch)


def _encode(path: str, limit: int, vocabulary: "Vocabulary", args: InspectArgs, scratch: Path) -> Source:
    """The first `limit` documents of a text as the run would tokenize them; no more than one further is read."""
    from lm_experiments_tools.data.text.documents import iter_documents
    from lm_experiments_tools.data.text.encoding import Encoding, encode_documents, num_bytes
    from lm_experiments_tools.data.tokens.indexed import IndexedDataset, IndexedDatasetWriter, token_dtype

    encoding = Encoding(os.path.abspath(vocabulary.path), vocabulary.sha256, args.text_key)
    documents = iter_documents(
        [path], text_key=args.text_key, max_bad_lines=args.max_bad_lines, quarantine=f"{scratch}.bad_lines.jsonl"
    )
    size = 0
    with closing(documents), IndexedDatasetWriter(scratch, token_dtype(vocabulary.size)) as writer:
        first = itertools.islice(documents, limit)
        while texts := [document.text for document in itertools.islice(first, _DOCUMENTS_AT_ONCE)]:
            size += sum(map(num_bytes, texts))
            for ids in encode_documents(texts, vocabulary, encoding):
                writer.add_sequence(ids)
                writer.end_document()
        following = next(documents, None)
        writer.finalize({"num_bytes": size, "vocab_sha256": vocabulary.sha256, "vocab_file": encoding.vocab_path})
    share = 1.0 if following is None else _share_before(following.source, path)
    return Source(path, IndexedDataset(scratch), share)


def _share_before(source: str, path: str) -> float | None:
    """The part of a text's bytes that stands before `file:line`; None for compressed files and datasets."""
    from lm_experiments_tools.data.text.documents import plan_pieces

    pieces = plan_pieces([path], piece_bytes=sys.maxsize)
    if any(piece.kind == "dataset" or piece.end is None for piece in pieces):
        return None
    name, _, line = source.rpartition(":")
    before = sum(piece.num_bytes for piece in itertools.takewhile(lambda piece: piece.path != name, pieces))
    with open(name, "rb") as file:
        before += sum(map(len, itertools.islice(file, int(line) - 1)))
    return before / sum(piece.num_bytes for piece in pieces)

"""Look before you train: counts, lengths, frequencies, padding, steps, and samples exactly as the model gets them.

lmtools inspect --config run.yaml                         # the settings of run_t5_pretraining.py
lmtools inspect --data_path text.jsonl --vocab my.model --task prefix_lm --output look/
"""

import dataclasses
import itertools
import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lm_experiments_tools.args import BatchArgs, RunArgs, check_minimum
from lm_experiments_tools.pretraining_args import DataArgs, ObjectiveArgs, T5PretrainingArgs

if TYPE_CHECKING:
    from lm_experiments_tools.data.indexed import IndexedDataset
    from lm_experiments_tools.data.loader import TrainSource
    from lm_experiments_tools.data.vocabulary import Vocabulary

STREAMED_DOCUMENTS = 10_000  # of a Hugging Face dataset or of --streaming, where --documents does not say


@dataclass(frozen=True, kw_only=True)
class LookArgs:
    """What to look at."""

    samples: int = 3
    """Samples to show, the first ones of the run."""
    frequent: int = 12
    """Most frequent tokens to show."""
    documents: int | None = None
    """Count the first so many documents of each text only. None: all; 10000 of a Hugging Face dataset."""
    world_size: int = 1
    """Workers of the run to come, for the number of steps."""
    output: str | None = None
    """Folder for a PNG of document lengths and token frequencies, for each --data_path. None: none."""

    def check(self) -> None:
        check_minimum(self, 0, "samples", "frequent")
        check_minimum(self, 1, "documents", "world_size")


@dataclass(frozen=True, kw_only=True)
class InspectArgs(T5PretrainingArgs, LookArgs):
    """The flags of run_t5_pretraining.py, so that its YAML files are read as they are, and what to look at."""

    def __post_init__(self) -> None:
        # What concerns the model or its training need not be complete to look at the data.
        for group in (DataArgs, ObjectiveArgs, BatchArgs, RunArgs, LookArgs):
            group.check(self)


def run(args: InspectArgs) -> None:
    """Print what there is to know of the data of a run."""
    from lm_experiments_tools.backends import get_backend
    from lm_experiments_tools.data.pretraining import pretraining_data, vocabulary_path
    from lm_experiments_tools.data.vocabulary import Vocabulary

    os.chdir(args.working_dir)
    vocab_path = vocabulary_path(args)
    vocabulary = Vocabulary.load(vocab_path)
    with tempfile.TemporaryDirectory() as folder:
        for number, path in enumerate(args.data_path):
            tokens = _tokens(path, vocab_path, args, Path(folder) / str(number))
            _show_statistics(path, tokens, vocabulary, args)
    backend = get_backend(dataclasses.replace(args, backend="local"))
    data = pretraining_data(dataclasses.replace(args, model_path=None, valid_data_path=None), backend)
    print(f"\nobjective    {data.objective}")
    _show_steps(data.train.samples_per_epoch, args)
    _show_samples(data.train, vocabulary, args)
    data.train.close()
    backend.close()


def _tokens(path: str, vocab_path: Path, args: InspectArgs, scratch: Path) -> "IndexedDataset":
    """The tokens behind a data path: those the run will read, or the first `--documents` in a scratch file."""
    from lm_experiments_tools.data.documents import iter_documents
    from lm_experiments_tools.data.indexed import IndexedDataset, IndexedDatasetWriter, dataset_exists, token_dtype
    from lm_experiments_tools.data.pretraining import open_tokens
    from lm_experiments_tools.data.vocabulary import Vocabulary

    is_tokens = dataset_exists(path.removesuffix(".bin").removesuffix(".idx"))
    limit = args.documents
    if limit is None and (args.streaming or not (is_tokens or os.path.exists(path))):
        limit = STREAMED_DOCUMENTS
    if is_tokens or limit is None:
        return open_tokens(path, vocab_path, args)
    vocabulary = Vocabulary.load(vocab_path)
    documents = iter_documents(
        [path], text_key=args.text_key, max_bad_lines=args.max_bad_lines, quarantine=f"{scratch}.bad_lines.jsonl"
    )
    num_bytes = 0
    with IndexedDatasetWriter(scratch, token_dtype(vocabulary.size)) as writer:
        for document in itertools.islice(documents, limit):
            num_bytes += len(document.text.encode())
            writer.add_sequence([i for line in vocabulary.encode_batch(document.text.splitlines()) for i in line])
            writer.end_document()
        documents.close()
        writer.finalize({"num_bytes": num_bytes})
    print(f"{path}: the first {limit:,} documents")
    return IndexedDataset(scratch)


def _show_statistics(path: str, tokens: "IndexedDataset", vocabulary: "Vocabulary", args: InspectArgs) -> None:
    from lm_experiments_tools.data.statistics import plot_statistics, token_statistics

    counts = token_statistics(tokens, vocabulary.size)
    text = ""
    if counts.num_bytes:
        text = (
            f" from {counts.num_bytes / 1e6:,.1f} MB of text, {counts.num_bytes / counts.num_tokens:.2f} bytes a token"
        )
    print(f"\n{path}\n  documents  {counts.num_documents:,}")
    print(f"  tokens     {counts.num_tokens:,}{text}")
    names = {0: "min", 50: "median", 100: "max"}
    lengths = "  ".join(f"{names.get(p, f'{p} %')} {n:,}" for p, n in counts.length_percentiles().items())
    print(f"  length     {lengths}   (tokens of a document)")
    counted = "" if counts.num_counted == counts.num_tokens else f" (of {counts.num_counted:,} tokens counted)"
    print(
        f"  vocabulary {counts.ids_in_use:,} of {vocabulary.size:,} ids occur{counted}; unknown "
        f"{counts.rate(vocabulary.unk_id):.4%} of the tokens"
    )
    frequent = (
        f"{vocabulary.piece(i)!r} {n / counts.num_counted:.2%}" for i, n in counts.most_frequent(args.frequent)
    )
    print(f"  frequent   {'  '.join(frequent)}")
    if args.output is not None:
        name = re.sub(r"[^\w.-]+", "_", path).strip("_")
        marks = {"input": args.input_seq_len, "target": args.target_seq_len}
        print(f"  picture    {plot_statistics(counts, Path(args.output) / f'{name}.png', marks)}")


def _show_steps(samples_per_epoch: int | None, args: InspectArgs) -> None:
    rows = args.global_batch_size(args.world_size)
    shape = f"{args.batch_size} x {args.gradient_accumulation_steps} accumulated x {args.world_size} worker(s)"
    if samples_per_epoch is None:
        print(f"steps        {rows} examples each ({shape}); the examples of an epoch are known at its end only")
        return
    print(
        f"an epoch     {samples_per_epoch:,} examples = {samples_per_epoch / rows:,.1f} steps of {rows} ({shape}); "
        f"--iters {args.iters:,} = {args.iters * rows / samples_per_epoch:.2f} epochs"
    )


def _show_samples(train: "TrainSource", vocabulary: "Vocabulary", args: InspectArgs) -> None:
    from lm_experiments_tools.data.samples import render_sample

    shown = {vocabulary.pad_id: "<pad>", vocabulary.eos_id: "</s>", vocabulary.unk_id: "<unk>"}
    batches = iter(train)
    rows: list[dict] = []
    while len(rows) < args.samples:
        batch = {name: tensor.numpy() for name, tensor in next(batches).items()}
        rows += [{name: values[i] for name, values in batch.items()} for i in range(len(batch["input_ids"]))]
    for number, row in enumerate(rows[: args.samples]):
        lines = render_sample(row, vocabulary.decode, shown, labels_at_inputs=args.task == "mlm")
        print("\n" + "\n".join([f"sample {number}", *(f"  {line}" for line in lines)]))

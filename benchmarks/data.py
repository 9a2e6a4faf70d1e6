"""Examples per CPU-second of several data pipelines, side by side, and the time to the first batch of each.

    python benchmarks/data.py --corpus train-*.jsonl --vocab sentencepiece.model --bert_vocab vocab.txt

T5, span corruption, 512 inputs, 114 targets, batches of 64:

* native: our memory-mapped tokens and span corruption, out of `TrainLoader` as torch tensors.
* an objective of your own: that of docs/new_objective.md, 512 targets, from the same files.
* datasets + collator: rows in an Arrow table of `datasets` (`with_format("numpy")`), corrupted row by row in numpy.
* seqio cached: `t5.data.preprocessors.span_corruption` in a seqio Task over tokens in a TFRecord file.

BERT, sentence pairs of up to 128 and 512 tokens: ours and megatron-core's dataset over the same files.
Encoding: sentencepiece and Hugging Face `tokenizers` with the same vocabulary, in MB of text per CPU-second.

Each measurement is a process of its own, pinned to one core; the CPU time of all its threads counts, after a warm-up.
Rounds are interleaved (A B C, A B C, ...) because a shared machine drifts; medians are printed. A pipeline whose
packages are missing is left out and named.
"""

import argparse
import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np

BATCH, INPUTS, TARGETS, TOKENS, NOISE, SPANS = 64, 512, 114, 568, 85, 28
ROOT = Path(__file__).resolve().parents[1]
BERT_DATA = "bert_text_sentence"


@dataclass(frozen=True)
class Inputs:
    """Inputs of the measurements: a folder made by `prepare`, a SentencePiece model, a WordPiece vocab.txt."""

    folder: Path
    vocab: Path
    bert_vocab: Path | None


def native(inputs: Inputs, is_built_in: bool = True) -> Iterator[float]:
    """Span corruption, or the objective of docs/new_objective.md, which makes one example at a time."""
    from lm_experiments_tools import Objective
    from lm_experiments_tools.data.dataset import Dataset
    from lm_experiments_tools.data.loader import TrainLoader
    from lm_experiments_tools.data.objectives.span_corruption import SpanCorruption
    from lm_experiments_tools.data.objectives.token_rows import TokenRows
    from lm_experiments_tools.data.text.tokenizer import Tokenizer
    from lm_experiments_tools.data.tokens.indexed import IndexedDataset

    vocabulary = Tokenizer.load(inputs.vocab)

    class Deshuffling(Objective):
        def example(self, tokens: np.ndarray, rng: np.random.Generator) -> dict[str, np.ndarray]:
            return {"input_ids": rng.permutation(tokens), "labels": tokens}

    objective = (SpanCorruption if is_built_in else Deshuffling).create(vocabulary, INPUTS)
    dataset = Dataset(TokenRows(IndexedDataset(inputs.folder / "tokens"), objective))
    targets = TARGETS if is_built_in else INPUTS
    for rows in TrainLoader(dataset, BATCH, prefetch=False):
        assert rows["input_ids"].shape == (BATCH, INPUTS) and rows["labels"].shape == (BATCH, targets)
        yield BATCH


def sentencepiece(inputs: Inputs) -> Iterator[float]:
    """Megabytes of text encoded."""
    from lm_experiments_tools.data.text.tokenizer import Tokenizer

    vocabulary = Tokenizer.load(inputs.vocab)
    texts = (inputs.folder / "text.txt").read_text(encoding="utf-8").splitlines()
    while True:
        for text in texts:
            vocabulary.encode(text)
            yield len(text.encode()) / 1e6


def tokenizers(inputs: Inputs) -> Iterator[float]:
    """Megabytes of text encoded by the fast tokenizer that transformers makes of the same vocabulary."""
    from transformers import AutoTokenizer

    from lm_experiments_tools.data.text.tokenizer import Tokenizer

    Tokenizer.load(inputs.vocab).save(inputs.folder / "tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(inputs.folder / "tokenizer").backend_tokenizer
    texts = (inputs.folder / "text.txt").read_text(encoding="utf-8").splitlines()
    while True:
        for start in range(0, len(texts), 64):
            tokenizer.encode_batch_fast(texts[start : start + 64], add_special_tokens=False)
            yield sum(len(text.encode()) for text in texts[start : start + 64]) / 1e6


def corrupt_rows(rows: list[np.ndarray]) -> float:
    """A collator: one row at a time, shuffle the cut points, build the mask, sentinels by cumulative sums, filter."""
    import torch

    def part_lengths(total: int) -> np.ndarray:
        cuts = (np.arange(total - 1) < SPANS - 1).astype(np.int64)
        np.random.shuffle(cuts)
        return np.bincount(np.cumsum(np.pad(cuts, (1, 0))), minlength=SPANS)

    def with_sentinels(row: np.ndarray, mask: np.ndarray) -> np.ndarray:
        first = mask & ~np.concatenate([[False], mask[:-1]])
        replaced = np.where(first, 32_100 - np.cumsum(first), row)
        return np.concatenate([replaced[~(mask & ~first)], [1]])

    sources, targets = [], []
    for row in rows:
        lengths = np.stack([part_lengths(TOKENS - NOISE), part_lengths(NOISE)], axis=1).reshape(-1)
        mask = np.repeat(np.arange(2 * SPANS) % 2 == 1, lengths)
        sources.append(with_sentinels(row, mask))
        targets.append(with_sentinels(row, ~mask))
    batch = torch.from_numpy(np.stack(sources)), torch.from_numpy(np.stack(targets))
    assert batch[0].shape == (BATCH, INPUTS) and batch[1].shape == (BATCH, TARGETS)
    return BATCH


def datasets_collator(inputs: Inputs) -> Iterator[float]:
    from datasets import load_from_disk

    data = load_from_disk(str(inputs.folder / "arrow")).with_format("numpy")
    while True:
        rows = np.random.permutation(len(data))
        for start in range(0, len(rows) - BATCH, BATCH):
            yield corrupt_rows(list(data[rows[start : start + BATCH]]["tokens"]))


def seqio_cached(inputs: Inputs) -> Iterator[float]:
    import seqio
    import tensorflow as tf
    from t5.data import preprocessors

    def read(split: str, shuffle_files: bool, seed: int | None = None) -> tf.data.Dataset:
        def parse(record: tf.Tensor) -> dict[str, tf.Tensor]:
            features = {"targets": tf.io.VarLenFeature(tf.int64)}
            tokens = tf.io.parse_single_example(record, features)["targets"]
            return {"targets": tf.cast(tf.sparse.to_dense(tokens), tf.int32)}

        return tf.data.TFRecordDataset(str(inputs.folder / "tokens.tfrecord")).map(parse)

    vocabulary = seqio.SentencePieceVocabulary(str(inputs.vocab), extra_ids=100)
    seqio.TaskRegistry.add(
        "spans",
        source=seqio.FunctionDataSource(read, splits=["train"]),
        preprocessors=[preprocessors.span_corruption, seqio.preprocessors.append_eos_after_trim],
        output_features={name: seqio.Feature(vocabulary, add_eos=True) for name in ("inputs", "targets")},
    )
    lengths = {"inputs": INPUTS, "targets": TARGETS}
    data = seqio.get_mixture_or_task("spans").get_dataset(lengths, "train", shuffle=True, num_epochs=None, seed=0)
    shapes = {"inputs": [INPUTS], "targets": [TARGETS]}
    rows = data.map(lambda x: {name: x[name] for name in shapes}).padded_batch(BATCH, shapes)
    for batch in rows.as_numpy_iterator():
        yield len(batch["inputs"])


def bert_ours(inputs: Inputs, length: int) -> Iterator[float]:
    from lm_experiments_tools.data.dataset import Dataset
    from lm_experiments_tools.data.loader import TrainLoader
    from lm_experiments_tools.data.tokens.indexed import IndexedDataset
    from megatron.bert_dataset import BertDataset
    from megatron.tokenizers import build_tokenizer

    tokenizer = build_tokenizer("BertWordPieceLowerCase", vocab_file=inputs.bert_vocab)
    tokens = IndexedDataset(str(inputs.folder / BERT_DATA))
    dataset = Dataset(BertDataset(tokens, tokenizer, max_seq_length=length, cache_dir=inputs.folder))
    for rows in TrainLoader(dataset, BATCH, prefetch=False):
        assert rows["input_ids"].shape == (BATCH, length)
        yield BATCH


def bert_megatron_core(inputs: Inputs, length: int) -> Iterator[float]:
    import torch
    from megatron.core.datasets.bert_dataset import BERTMaskedWordPieceDataset, BERTMaskedWordPieceDatasetConfig
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from megatron.core.datasets.utils import Split

    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{inputs.folder}/{os.getpid()}", rank=0, world_size=1
    )
    pieces = inputs.bert_vocab.read_text(encoding="utf-8").splitlines()

    class Tokenizer:
        inv_vocab = dict(enumerate(pieces))
        cls, sep, mask, pad = (pieces.index(piece) for piece in ("[CLS]", "[SEP]", "[MASK]", "[PAD]"))
        unique_identifiers = {"class": "vocab.txt"}

    config = BERTMaskedWordPieceDatasetConfig(
        random_seed=1234,
        sequence_length=length,
        blend=([str(inputs.folder / BERT_DATA)], None),
        split="1,0,0",
        path_to_cache=str(inputs.folder),
        tokenizer=Tokenizer(),
        masking_probability=0.15,
        short_sequence_probability=0.1,
        masking_max_ngram=3,
        masking_do_full_word=True,
        masking_do_permutation=False,
        masking_use_longer_ngrams=False,
        masking_use_geometric_distribution=False,
        classification_head=True,
    )
    tokens = IndexedDataset(str(inputs.folder / BERT_DATA))
    documents = np.arange(len(tokens.document_indices) - 1, dtype=np.int32)
    samples = 100_000
    dataset = BERTMaskedWordPieceDataset(
        tokens, str(inputs.folder / BERT_DATA), documents, samples, Split.train, config
    )
    while True:
        for number in range(len(dataset)):
            assert dataset[number]["text"].shape == (length,)
            yield 1


T5, ENCODING = f"T5 {INPUTS}/{TARGETS}, ", "encoding, "  # beginnings of names; rates of one are compared
PIPELINES: dict[str, tuple[Callable[[Inputs], Iterator[float]], tuple[str, ...]]] = {
    f"{T5}native": (native, ()),
    f"{T5}an objective of your own": (partial(native, is_built_in=False), ()),
    f"{T5}datasets + collator": (datasets_collator, ("datasets",)),
    f"{T5}seqio cached": (seqio_cached, ("t5", "seqio")),
    f"{ENCODING}sentencepiece": (sentencepiece, ()),
    f"{ENCODING}tokenizers": (tokenizers, ("transformers",)),
    "BERT 128, ours": (partial(bert_ours, length=128), ()),
    "BERT 128, megatron-core": (partial(bert_megatron_core, length=128), ("megatron.core",)),
    "BERT 512, ours": (partial(bert_ours, length=512), ()),
    "BERT 512, megatron-core": (partial(bert_megatron_core, length=512), ("megatron.core",)),
}


def measure(name: str, inputs: Inputs, seconds: float, started: float) -> dict[str, float]:
    """Units per CPU-second after a warm-up, and seconds from `started` to the first batch."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    batches = PIPELINES[name][0](inputs)
    next(batches)
    first, start = time.time() - started, time.process_time()
    # seqio first fills shuffle and prefetch buffers of several batches, which would otherwise count as free.
    while time.process_time() - start < (seconds if "seqio" in name else 0.5):
        next(batches)
    units, start = 0.0, time.process_time()
    while time.process_time() - start < seconds:
        units += next(batches)
    return {"rate": units / (time.process_time() - start), "first": first}


def prepare(corpus: list[Path], vocab: Path, bert_vocab: Path | None, folder: Path) -> tuple[int, int]:
    """Write the corpus in the form that each path reads; returns bytes of text and tokens of the T5 vocabulary."""
    from lm_experiments_tools.data.text.tokenizer import Tokenizer
    from lm_experiments_tools.data.tokens.indexed import IndexedDatasetWriter

    vocabulary = Tokenizer.load(vocab)
    size, documents = 0, []
    with (folder / "text.txt").open("w", encoding="utf-8") as lines, (folder / "text.jsonl").open("w") as objects:
        for path in corpus:
            for line in path.open(encoding="utf-8"):
                text = " ".join(json.loads(line)["text"].split())
                ids = vocabulary.encode(text)
                if not ids:
                    continue
                lines.write(text + "\n")
                objects.write(json.dumps({"text": text}) + "\n")
                documents.append(ids)
                size += len(text.encode())
    lengths = np.array([len(ids) for ids in documents])
    with IndexedDatasetWriter(folder / "tokens", np.uint16) as writer:
        writer.add_documents(np.concatenate(documents), lengths, np.ones_like(lengths))
    tokens = np.memmap(folder / "tokens.bin", np.uint16, "r")
    if importlib.util.find_spec("datasets"):
        from datasets import Dataset

        rows = tokens[: tokens.size // TOKENS * TOKENS].reshape(-1, TOKENS).astype(np.int64)
        Dataset.from_dict({"tokens": list(rows)}).save_to_disk(str(folder / "arrow"))
    if importlib.util.find_spec("seqio"):
        (folder / "documents.json").write_text(json.dumps(documents))
        subprocess.run([sys.executable, "-c", _WRITE_RECORDS, str(folder)], check=True, capture_output=True)
    if bert_vocab is not None:
        command = [sys.executable, "-m", "megatron.preprocess_data", "--input", str(folder / "text.jsonl")]
        command += ["--output-prefix", str(folder / "bert"), "--split-sentences", "--vocab-file", str(bert_vocab)]
        command += ["--tokenizer-type", "BertWordPieceLowerCase"]
        subprocess.run(command, check=True, capture_output=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    return size, tokens.size


_WRITE_RECORDS = """
import json, sys, tensorflow as tf
with tf.io.TFRecordWriter(sys.argv[1] + "/tokens.tfrecord") as writer:
    for ids in json.load(open(sys.argv[1] + "/documents.json")):
        feature = {"targets": tf.train.Feature(int64_list=tf.train.Int64List(value=ids))}
        writer.write(tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString())
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, nargs="+", help=".jsonl files with a field `text`")
    parser.add_argument("--vocab", type=Path, required=True, help="a sentencepiece model")
    parser.add_argument("--bert_vocab", type=Path, help="a WordPiece vocab.txt; without it BERT is left out")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0, help="CPU-seconds of one measurement")
    parser.add_argument("--measure", nargs=3, metavar=("NAME", "FOLDER", "STARTED"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        name, folder, started = args.measure
        inputs = Inputs(Path(folder), args.vocab, args.bert_vocab)
        print(json.dumps(measure(name, inputs, args.seconds, float(started))))
        return
    if not args.corpus:
        parser.error("--corpus is needed")
    names = [name for name, (_, packages) in PIPELINES.items() if all(map(_installed, packages))]
    names = [name for name in names if args.bert_vocab or not name.startswith("BERT")]
    found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as folder:
        size, num_tokens = prepare(args.corpus, args.vocab, args.bert_vocab, Path(folder))
        for _ in range(args.rounds):
            for name in names:
                found[name].append(run_in_process(name, folder, args))
    print(f"{size / 1e6:.1f} MB of text, {num_tokens / 1e6:.2f} M tokens; {args.rounds} interleaved rounds, one core, "
          f"Python {platform.python_version()}, numpy {np.__version__}.\n")  # fmt: skip
    print("| pipeline | examples (or MB) per CPU-second, median | all rounds | first batch, s |\n|---|---|---|---|")
    for name, rounds in found.items():
        rates = [each["rate"] for each in rounds]
        first = median(each["first"] for each in rounds)
        print(f"| {name} | {median(rates):,.1f} | {', '.join(f'{rate:,.1f}' for rate in rates)} | {first:.1f} |")
    if missing := sorted(set(PIPELINES) - set(names)):
        print(f"\nNot measured, for want of their packages or of --bert_vocab: {'; '.join(missing)}.")


def _installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # of the package around a package
        return False


def run_in_process(name: str, folder: str, args: argparse.Namespace) -> dict[str, float]:
    command = [sys.executable, __file__, "--vocab", str(args.vocab), "--seconds", str(args.seconds)]
    command += ["--bert_vocab", str(args.bert_vocab)] if args.bert_vocab else []
    threads = {"OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment = os.environ | threads | {"CUDA_VISIBLE_DEVICES": "-1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, "--measure", name, folder, str(time.time())], env=environment, stdout=subprocess.PIPE, text=True,
        check=True,
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()

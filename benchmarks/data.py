"""Examples per CPU-second of the ways to training batches, side by side, and the time to the first batch of each.

    python benchmarks/data.py --corpus train-*.jsonl --vocab sentencepiece.model --bert_vocab vocab.txt

T5, span corruption, 512 inputs, 114 targets, batches of 64:

* native: our memory-mapped tokens and vectorised corruption, out of `TrainLoader` as torch tensors.
* collator: the same token file, corrupted row by row in Python and numpy.
* datasets + collator: the rows in an Arrow table of Hugging Face `datasets` (`with_format("numpy")`), same collator.
* seqio cached: `t5.data.preprocessors.span_corruption` in a seqio Task over tokens in a TFRecord file.
* seqio text: the same Task over plain lines of text, tokenized on the fly.
* seqio jsonl: the same over .jsonl, as `--data_pipeline seqio` reads it, with its process.

BERT, sentence pairs of up to 128 and 512 tokens: ours and megatron-core's dataset over the same files.
Encoding: sentencepiece and Hugging Face `tokenizers` with the same vocabulary, in MB of text per CPU-second.

Each measurement is a process of its own, pinned to one core where the system allows; the CPU time of all its threads
and children counts, after a warm-up. Rounds are interleaved (A B C, A B C, ...) because a shared machine drifts;
medians are printed. All text is in the page cache by then. A path whose packages are missing is left out and named.
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


def native(inputs: Inputs, batch: int = BATCH) -> Iterator[float]:
    from lm_experiments_tools.data.loader import TrainLoader
    from lm_experiments_tools.data.objectives.denoising import SpanCorruptionDataset
    from lm_experiments_tools.data.text.vocabulary import Vocabulary
    from lm_experiments_tools.data.tokens.indexed import IndexedDataset

    vocabulary = Vocabulary.load(inputs.vocab)
    dataset = SpanCorruptionDataset(
        IndexedDataset(inputs.folder / "tokens"),
        INPUTS,
        sentinel_ids=vocabulary.sentinel_ids,
        eos_id=vocabulary.eos_id,
        pad_id=vocabulary.pad_id,
        vocab_size=vocabulary.size,
    )
    for rows in TrainLoader(dataset, batch, prefetch=False):
        assert rows["input_ids"].shape == (batch, INPUTS) and rows["labels"].shape == (batch, TARGETS)
        yield batch


def sentencepiece(inputs: Inputs) -> Iterator[float]:
    """Megabytes of text encoded."""
    from lm_experiments_tools.data.text.vocabulary import Vocabulary

    vocabulary = Vocabulary.load(inputs.vocab)
    texts = (inputs.folder / "text.txt").read_text(encoding="utf-8").splitlines()
    while True:
        for text in texts:
            vocabulary.encode(text)
            yield len(text.encode()) / 1e6


def tokenizers(inputs: Inputs) -> Iterator[float]:
    """Megabytes of text encoded by the fast tokenizer that transformers makes of the same vocabulary."""
    from transformers import AutoTokenizer

    from lm_experiments_tools.data.text.vocabulary import Vocabulary

    Vocabulary.load(inputs.vocab).save_tokenizer(inputs.folder / "tokenizer")
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


def collator(inputs: Inputs) -> Iterator[float]:
    tokens = np.memmap(inputs.folder / "tokens.bin", np.uint16, "r")
    while True:
        rows = np.random.permutation(tokens.size // TOKENS)
        for start in range(0, len(rows) - BATCH, BATCH):
            cuts = (rows[start : start + BATCH] * TOKENS).tolist()
            yield corrupt_rows([np.asarray(tokens[cut : cut + TOKENS], np.int64) for cut in cuts])


def datasets_collator(inputs: Inputs) -> Iterator[float]:
    from datasets import load_from_disk

    data = load_from_disk(str(inputs.folder / "arrow")).with_format("numpy")
    while True:
        rows = np.random.permutation(len(data))
        for start in range(0, len(rows) - BATCH, BATCH):
            yield corrupt_rows(list(data[rows[start : start + BATCH]]["tokens"]))


def _seqio_batches(inputs: Inputs, read: Callable, tokenized: bool) -> Iterator[float]:
    import seqio as library
    import tensorflow as tf
    from t5.data import preprocessors

    vocabulary = library.SentencePieceVocabulary(str(inputs.vocab), extra_ids=100)
    steps = [preprocessors.span_corruption, library.preprocessors.append_eos_after_trim]
    library.TaskRegistry.add(
        "spans",
        source=library.FunctionDataSource(lambda split, shuffle_files, seed=None: read(tf), splits=["train"]),
        preprocessors=steps if tokenized else [library.preprocessors.tokenize, *steps],
        output_features={name: library.Feature(vocabulary, add_eos=True) for name in ("inputs", "targets")},
    )
    lengths = {"inputs": INPUTS, "targets": TARGETS}
    task = library.get_mixture_or_task("spans")
    data = task.get_dataset(lengths, "train", shuffle=True, num_epochs=None, seed=0)
    shapes = {"inputs": [INPUTS], "targets": [TARGETS]}
    rows = data.map(lambda x: {name: x[name] for name in shapes}).padded_batch(BATCH, shapes)
    for batch in rows.as_numpy_iterator():
        yield len(batch["inputs"])


def seqio_text(inputs: Inputs) -> Iterator[float]:
    def read(tf):
        return tf.data.TextLineDataset(str(inputs.folder / "text.txt")).map(lambda line: {"targets": line})

    return _seqio_batches(inputs, read, tokenized=False)


def seqio_cached(inputs: Inputs) -> Iterator[float]:
    def read(tf):
        def parse(record):
            features = {"targets": tf.io.VarLenFeature(tf.int64)}
            tokens = tf.io.parse_single_example(record, features)["targets"]
            return {"targets": tf.cast(tf.sparse.to_dense(tokens), tf.int32)}

        return tf.data.TFRecordDataset(str(inputs.folder / "tokens.tfrecord")).map(parse)

    return _seqio_batches(inputs, read, tokenized=True)


def seqio_jsonl(inputs: Inputs) -> Iterator[float]:
    """`--data_pipeline seqio` as run_t5_pretraining.py uses it."""
    from lm_experiments_tools.backends import get_backend
    from lm_experiments_tools.config.pretraining import T5PretrainingArgs
    from lm_experiments_tools.recipes.t5_data import pretraining_data
    from lm_experiments_tools.recipes.t5_sources import T5Sources

    args = T5PretrainingArgs(
        data_path=(str(inputs.folder / "text.jsonl"),), vocab=str(inputs.vocab), data_pipeline="seqio",
        input_seq_len=INPUTS, target_seq_len=TARGETS, batch_size=BATCH, model_cfg="t5-small", lr=1e-3, backend="local",
    )  # fmt: skip
    data = pretraining_data(args, get_backend(args), T5Sources(args), "encoder-decoder")
    for batch in data.train:
        yield len(batch["input_ids"])


def bert_ours(inputs: Inputs, length: int, batch: int = BATCH, nsp: str = "swap") -> Iterator[float]:
    from lm_experiments_tools.data.loader import TrainLoader
    from lm_experiments_tools.data.tokens.indexed import IndexedDataset
    from megatron.bert_dataset import BertDataset
    from megatron.tokenizers import build_tokenizer

    tokenizer = build_tokenizer("BertWordPieceLowerCase", vocab_file=inputs.bert_vocab)
    tokens = IndexedDataset(str(inputs.folder / BERT_DATA))
    dataset = BertDataset(tokens, tokenizer, max_seq_length=length, nsp=nsp, cache_dir=inputs.folder)
    for rows in TrainLoader(dataset, batch, prefetch=False):
        assert rows["input_ids"].shape == (batch, length)
        yield batch


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


PATHS: dict[str, tuple[Callable[[Inputs], Iterator[float]], tuple[str, ...]]] = {
    "native": (native, ()),
    "native, batches of 8": (partial(native, batch=8), ()),
    "collator": (collator, ()),
    "datasets + collator": (datasets_collator, ("datasets",)),
    "seqio cached": (seqio_cached, ("t5", "seqio")),
    "seqio text": (seqio_text, ("t5", "seqio")),
    "seqio jsonl": (seqio_jsonl, ("t5", "seqio")),
    "sentencepiece": (sentencepiece, ()),
    "tokenizers": (tokenizers, ("transformers",)),
    **{
        f"BERT {length}, {name}": (partial(function, length=length), needs)
        for length in (128, 512)
        for name, function, needs in (
            ("ours", bert_ours, ()),
            ("ours, batches of 8", partial(bert_ours, batch=8), ()),
            ("ours, other-document B", partial(bert_ours, nsp="random"), ()),
            ("megatron-core", bert_megatron_core, ("megatron.core",)),
        )
    },
}
ENCODERS = ("sentencepiece", "tokenizers")


def cpu_seconds() -> float:
    """CPU time of this process, its threads and its living children (Linux counts a child's in /proc)."""
    import psutil

    own = psutil.Process()
    times = [process.cpu_times() for process in [own, *own.children(recursive=True)]]
    return sum(t.user + t.system for t in times)


def measure(path: str, inputs: Inputs, warm_up: float, seconds: float, started: float) -> dict[str, float]:
    """Units per CPU-second after `warm_up` CPU-seconds of running, and seconds from `started` to the first batch."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    batches = PATHS[path][0](inputs)
    next(batches)
    first = time.time() - started
    clock = cpu_seconds if path == "seqio jsonl" else time.process_time
    start = clock()
    while clock() - start < warm_up:
        next(batches)
    units, start = 0.0, clock()
    while clock() - start < seconds:
        units += next(batches)
    return {"rate": units / (clock() - start), "first": first}


def prepare(corpus: list[Path], vocab: Path, bert_vocab: Path | None, folder: Path) -> tuple[int, int]:
    """Write the corpus in the form that each path reads; returns bytes of text and tokens of the T5 vocabulary."""
    from lm_experiments_tools.data.text.vocabulary import Vocabulary
    from lm_experiments_tools.data.tokens.indexed import IndexedDatasetWriter

    vocabulary = Vocabulary.load(vocab)
    writer = IndexedDatasetWriter(folder / "tokens", np.uint16)
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
                writer.add_sequence(ids)
                writer.end_document()
                documents.append(ids)
                size += len(text.encode())
    writer.finalize()
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
    parser.add_argument("--measure", nargs=3, metavar=("PATH", "FOLDER", "STARTED"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        path, folder, started = arguments.measure
        # seqio fills shuffle and prefetch buffers of several batches first, which would otherwise count as free.
        warm_up = arguments.seconds if path.startswith("seqio") else 0.5
        inputs = Inputs(Path(folder), arguments.vocab, arguments.bert_vocab)
        print(json.dumps(measure(path, inputs, warm_up, arguments.seconds, float(started))))
        return
    if not arguments.corpus:
        parser.error("--corpus is needed")
    paths = [path for path, (_, needs) in PATHS.items() if all(map(_installed, needs))]
    if arguments.bert_vocab is None:
        paths = [path for path in paths if not path.startswith("BERT")]
    found: dict[str, list[dict[str, float]]] = {path: [] for path in paths}
    with tempfile.TemporaryDirectory() as folder:
        size, num_tokens = prepare(arguments.corpus, arguments.vocab, arguments.bert_vocab, Path(folder))
        for _ in range(arguments.rounds):
            for path in paths:
                found[path].append(run_in_process(path, folder, arguments))
    report(found, size, num_tokens)
    missing = sorted(set(PATHS) - set(paths))
    if missing:
        print(f"\nNot measured, for want of their packages or of --bert_vocab: {', '.join(missing)}.")


def _installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # of the package around a package
        return False


def run_in_process(path: str, folder: str, arguments: argparse.Namespace) -> dict[str, float]:
    command = [sys.executable, __file__, "--vocab", str(arguments.vocab), "--seconds", str(arguments.seconds)]
    command += ["--bert_vocab", str(arguments.bert_vocab)] if arguments.bert_vocab else []
    threads = {"OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment = os.environ | threads | {"CUDA_VISIBLE_DEVICES": "-1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, "--measure", path, folder, str(time.time())],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        sys.exit(f"{path} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def report(found: dict[str, list[dict[str, float]]], size: int, num_tokens: int) -> None:
    """Print the markdown tables."""
    rates = {path: [each["rate"] for each in rounds] for path, rounds in found.items()}
    first = {path: median(each["first"] for each in rounds) for path, rounds in found.items()}
    print(
        f"{size / 1e6:.1f} MB of text, {num_tokens / 1e6:.2f} M tokens; {len(rates['native'])} interleaved rounds, "
        f"one core, Python {platform.python_version()}, numpy {np.__version__}.\n"
    )
    examples = {p: values for p, values in rates.items() if p not in ENCODERS and not p.startswith("BERT")}
    bytes_per_example = TOKENS * size / num_tokens / 1e6
    encoding = [bytes_per_example / rate for rate in rates["sentencepiece"]]  # CPU-seconds an example
    examples["native, first epoch"] = [1 / (1 / a + b) for a, b in zip(rates["native"], encoding, strict=True)]
    baseline = "seqio text" if "seqio text" in examples else "collator"
    print(
        f"| T5 {INPUTS}/{TARGETS} | examples per CPU-second, median | all rounds | times {baseline} | first batch, s |"
    )
    print("|---|---|---|---|---|")
    for path, values in sorted(examples.items(), key=lambda item: -median(item[1])):
        ratio = median(values) / median(examples[baseline])
        everything = ", ".join(f"{v:,.0f}" for v in values)
        print(f"| {path} | {median(values):,.0f} | {everything} | {ratio:.1f} | {first.get(path, float('nan')):.1f} |")
    print("\n| encoding | MB of text per CPU-second, median | all rounds |\n|---|---|---|")
    for path in ENCODERS:
        if path in rates:
            print(f"| {path} | {median(rates[path]):.1f} | {', '.join(f'{v:.1f}' for v in rates[path])} |")
    if not any(path.startswith("BERT") for path in rates):
        return
    print("\n| BERT | samples per CPU-second, median | all rounds | times megatron-core | first batch, s |")
    print("|---|---|---|---|---|")
    for path in (path for path in rates if path.startswith("BERT")):
        base = rates.get(f"{path.partition(',')[0]}, megatron-core", [float("nan")])
        every = ", ".join(f"{v:,.0f}" for v in rates[path])
        ratio = median(rates[path]) / median(base)
        print(f"| {path[5:]} | {median(rates[path]):,.0f} | {every} | {ratio:.1f} | {first[path]:.1f} |")


if __name__ == "__main__":
    main()

"""Examples per CPU-second of three ways to T5 span-corruption batches (512 inputs, 114 targets, batches of 64).

    python benchmarks/data_path.py --corpus train-*.jsonl --vocab sentencepiece.model

* native: our memory-mapped tokens and vectorised corruption, out of `TrainLoader` as torch tensors.
* native, tokenizing included: the same, plus encoding each example's text once (what a single epoch costs in all).
* collator: the same tokens, corrupted row by row in Python and numpy, as collators written for `datasets` do.
* seqio: `t5.data.preprocessors.span_corruption` in a seqio Task over text, tokenized on the fly (if t5 is installed).

Each measurement is a process of its own, pinned to one core where the system allows, and counts its CPU time
(`time.process_time`, all its threads) after a warm-up. Rounds are interleaved (A B C, A B C, ...) because a shared
machine drifts; medians are printed. All text is in the page cache by then.
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
from pathlib import Path
from statistics import median

import numpy as np

BATCH, INPUTS, TARGETS, TOKENS = 64, 512, 114, 568


def native(folder: Path, vocab: Path) -> Iterator[int]:
    from lm_experiments_tools.data.dataset import SpanCorruptionDataset
    from lm_experiments_tools.data.indexed import IndexedDataset
    from lm_experiments_tools.data.loader import TrainLoader
    from lm_experiments_tools.data.vocabulary import Vocabulary

    vocabulary = Vocabulary.load(vocab)
    dataset = SpanCorruptionDataset(
        IndexedDataset(folder / "tokens"),
        INPUTS,
        sentinel_ids=vocabulary.sentinel_ids,
        eos_id=vocabulary.eos_id,
        pad_id=vocabulary.pad_id,
        vocab_size=vocabulary.size,
    )
    for batch in TrainLoader(dataset, BATCH, prefetch=False):
        assert batch["input_ids"].shape == (BATCH, INPUTS) and batch["labels"].shape == (BATCH, TARGETS)
        yield BATCH


def encoding(folder: Path, vocab: Path) -> Iterator[int]:
    """Only sentencepiece; yields examples' worth of tokens."""
    from lm_experiments_tools.data.vocabulary import Vocabulary

    vocabulary = Vocabulary.load(vocab)
    texts = (folder / "text.txt").read_text(encoding="utf-8").splitlines()
    while True:
        for text in texts:
            yield len(vocabulary.encode(text)) / TOKENS


def collator(folder: Path, vocab: Path) -> Iterator[int]:
    """One example at a time: shuffle the cut points, build the mask, sentinels by cumulative sums, filter."""
    import torch

    tokens = np.memmap(folder / "tokens.bin", np.uint16, "r")
    rows = np.random.permutation(tokens.size // TOKENS)
    num_noise, num_spans = 85, 28

    def part_lengths(total: int) -> np.ndarray:
        cuts = (np.arange(total - 1) < num_spans - 1).astype(np.int64)
        np.random.shuffle(cuts)
        return np.bincount(np.cumsum(np.pad(cuts, (1, 0))), minlength=num_spans)

    def with_sentinels(row: np.ndarray, mask: np.ndarray) -> np.ndarray:
        first = mask & ~np.concatenate([[False], mask[:-1]])
        replaced = np.where(first, 32_100 - np.cumsum(first), row)
        return np.concatenate([replaced[~(mask & ~first)], [1]])

    while True:
        for start in range(0, len(rows) - BATCH, BATCH):
            inputs, targets = [], []
            for number in rows[start : start + BATCH].tolist():
                row = np.asarray(tokens[number * TOKENS : (number + 1) * TOKENS], np.int64)
                lengths = np.stack([part_lengths(TOKENS - num_noise), part_lengths(num_noise)], axis=1).reshape(-1)
                mask = np.repeat(np.arange(2 * num_spans) % 2 == 1, lengths)
                inputs.append(with_sentinels(row, mask))
                targets.append(with_sentinels(row, ~mask))
            batch = torch.from_numpy(np.stack(inputs)), torch.from_numpy(np.stack(targets))
            assert batch[0].shape == (BATCH, INPUTS) and batch[1].shape == (BATCH, TARGETS)
            yield BATCH


def seqio(folder: Path, vocab: Path) -> Iterator[int]:
    import seqio as library
    import tensorflow as tf
    from t5.data import preprocessors

    vocabulary = library.SentencePieceVocabulary(str(vocab), extra_ids=100)
    library.TaskRegistry.add(
        "spans",
        source=library.FunctionDataSource(
            lambda split, shuffle_files, seed=None: tf.data.TextLineDataset(str(folder / "text.txt")).map(
                lambda line: {"targets": line}
            ),
            splits=["train"],
        ),
        preprocessors=[
            library.preprocessors.tokenize,
            preprocessors.span_corruption,
            library.preprocessors.append_eos_after_trim,
        ],
        output_features={name: library.Feature(vocabulary, add_eos=True) for name in ("inputs", "targets")},
    )
    task = library.get_mixture_or_task("spans")
    lengths = {"inputs": INPUTS, "targets": TARGETS}
    data = task.get_dataset(lengths, "train", shuffle=True, num_epochs=None, seed=0)
    shapes = {"inputs": [INPUTS], "targets": [TARGETS]}
    for batch in (
        data.map(lambda x: {name: x[name] for name in shapes}).padded_batch(BATCH, shapes).as_numpy_iterator()
    ):
        yield len(batch["inputs"])


PATHS: dict[str, Callable[[Path, Path], Iterator[int]]] = {
    "native": native,
    "encoding": encoding,
    "collator": collator,
    "seqio": seqio,
}


def measure(path: str, folder: Path, vocab: Path, warm_up: float, seconds: float) -> float:
    """Examples per CPU-second of this process, after `warm_up` CPU-seconds of running."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    batches = PATHS[path](folder, vocab)
    next(batches)  # imports and set-up
    start = time.process_time()
    while time.process_time() - start < warm_up:
        next(batches)
    examples, start = 0.0, time.process_time()
    while time.process_time() - start < seconds:
        examples += next(batches)
    return examples / (time.process_time() - start)


def prepare(corpus: list[Path], vocab: Path, folder: Path) -> tuple[int, int]:
    """Write text.txt (a document per line) and the token files; returns bytes of text and number of tokens."""
    from lm_experiments_tools.data.indexed import IndexedDatasetWriter
    from lm_experiments_tools.data.vocabulary import Vocabulary

    vocabulary = Vocabulary.load(vocab)
    writer = IndexedDatasetWriter(folder / "tokens", np.uint16)
    size = num_tokens = 0
    with (folder / "text.txt").open("w", encoding="utf-8") as output:
        for path in corpus:
            for line in path.open(encoding="utf-8"):
                text = " ".join(json.loads(line)["text"].split())
                ids = vocabulary.encode(text)
                if not ids:
                    continue
                output.write(text + "\n")
                writer.add_sequence(ids)
                writer.end_document()
                size, num_tokens = size + len(text.encode()), num_tokens + len(ids)
    writer.finalize()
    return size, num_tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, nargs="+", help=".jsonl files with a field `text`")
    parser.add_argument("--vocab", type=Path, required=True, help="a sentencepiece model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0, help="CPU-seconds of one measurement")
    parser.add_argument("--measure", nargs=2, metavar=("PATH", "FOLDER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        path, folder = arguments.measure
        # seqio fills shuffle and prefetch buffers of several batches first, which would otherwise count as free.
        warm_up = arguments.seconds if path == "seqio" else 0.5
        print(measure(path, Path(folder), arguments.vocab, warm_up, arguments.seconds))
        return
    if not arguments.corpus:
        parser.error("--corpus is needed")
    paths = [path for path in PATHS if path != "seqio" or importlib.util.find_spec("t5")]
    rates: dict[str, list[float]] = {path: [] for path in paths}
    with tempfile.TemporaryDirectory() as folder:
        size, num_tokens = prepare(arguments.corpus, arguments.vocab, Path(folder))
        for _ in range(arguments.rounds):
            for path in paths:
                rates[path].append(run_in_process(path, folder, arguments))
    report(rates, size, num_tokens)


def run_in_process(path: str, folder: str, arguments: argparse.Namespace) -> float:
    command = [sys.executable, __file__, "--vocab", str(arguments.vocab), "--seconds", str(arguments.seconds)]
    root = str(Path(__file__).resolve().parents[1])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "-1", "PYTHONPATH": root}
    done = subprocess.run(
        [*command, "--measure", path, folder], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{path} failed:\n{done.stderr}")
    return float(done.stdout.split()[-1])


def report(rates: dict[str, list[float]], size: int, num_tokens: int) -> None:
    """Print the markdown table; the baseline is seqio, or the collator where seqio is not installed."""
    encode = rates.pop("encoding")
    rates["native, tokenizing included"] = [1 / (1 / a + 1 / b) for a, b in zip(rates["native"], encode, strict=True)]
    baseline = "seqio" if "seqio" in rates else "collator"
    print(
        f"Inputs {INPUTS}, targets {TARGETS}, batches of {BATCH}; {size / 1e6:.1f} MB of text, "
        f"{num_tokens / 1e6:.2f} M tokens; {len(encode)} interleaved rounds, one core, "
        f"Python {platform.python_version()}, numpy {np.__version__}.\n"
    )
    print(f"| path | examples per CPU-second, median | all rounds | times {baseline} |\n|---|---|---|---|")
    for path, values in sorted(rates.items(), key=lambda item: -median(item[1])):
        ratio = median(values) / median(rates[baseline])
        print(f"| {path} | {median(values):,.0f} | {', '.join(f'{v:,.0f}' for v in values)} | {ratio:.2f} |")


if __name__ == "__main__":
    main()

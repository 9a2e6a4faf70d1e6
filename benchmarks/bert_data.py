"""BERT samples per CPU-second: ours and megatron-core's dataset, on the same data file.

    python megatron/preprocess_data.py --input corpus/ --output-prefix corpus --split-sentences \\
        --tokenizer-type BertWordPieceLowerCase --vocab-file vocab.txt
    python benchmarks/bert_data.py --data corpus_text_sentence --vocab-file vocab.txt

* ours: `BertDataset` out of `TrainLoader`, torch batches of 64 (and of 8, where the fixed cost of a batch shows).
* ours, other-document B: the same with BERT's own next sentence prediction.
* megatron-core: `BERTMaskedWordPieceDataset`, one sample after the other, not collated.

All mask 15 % in whole words, 1 to 3 a span, with pairs of sentences and 10 % short samples. Each measurement is a
process of its own, pinned to one core where the system allows, and counts its CPU time after imports, set-up and a
warm-up. Rounds are interleaved (A B C, A B C, ...) because a shared machine drifts; medians are printed.
"""

import argparse
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np

LENGTHS = (128, 512)


def ours(arguments: argparse.Namespace, length: int, folder: str, batch: int = 64, nsp: str = "swap") -> Iterator[int]:
    from lm_experiments_tools.data.indexed import IndexedDataset
    from lm_experiments_tools.data.loader import TrainLoader
    from megatron.bert_dataset import BertDataset
    from megatron.tokenizers import build_tokenizer

    tokenizer = build_tokenizer("BertWordPieceLowerCase", vocab_file=arguments.vocab_file)
    tokens = IndexedDataset(arguments.data)
    dataset = BertDataset(tokens, tokenizer, max_seq_length=length, nsp=nsp, cache_dir=folder)
    for rows in TrainLoader(dataset, batch, prefetch=False):
        assert rows["input_ids"].shape == (batch, length)
        yield batch


def megatron_core(arguments: argparse.Namespace, length: int, folder: str) -> Iterator[int]:
    import torch
    from megatron.core.datasets.bert_dataset import BERTMaskedWordPieceDataset, BERTMaskedWordPieceDatasetConfig
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from megatron.core.datasets.utils import Split

    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/{os.getpid()}", rank=0, world_size=1)
    pieces = Path(arguments.vocab_file).read_text(encoding="utf-8").splitlines()

    class Tokenizer:
        inv_vocab = dict(enumerate(pieces))
        cls, sep, mask, pad = (pieces.index(piece) for piece in ("[CLS]", "[SEP]", "[MASK]", "[PAD]"))
        unique_identifiers = {"class": "vocab.txt"}

    config = BERTMaskedWordPieceDatasetConfig(
        random_seed=1234,
        sequence_length=length,
        blend=([arguments.data], None),
        split="1,0,0",
        path_to_cache=folder,
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
    tokens = IndexedDataset(arguments.data)
    documents = np.arange(len(tokens.document_indices) - 1, dtype=np.int32)
    samples = 100_000
    dataset = BERTMaskedWordPieceDataset(tokens, arguments.data, documents, samples, Split.train, config)
    while True:
        for number in range(len(dataset)):
            assert dataset[number]["text"].shape == (length,)
            yield 1


PATHS: dict[str, Callable[..., Iterator[int]]] = {
    "ours": ours,
    "ours, batches of 8": partial(ours, batch=8),
    "ours, other-document B": partial(ours, nsp="random"),
    "megatron-core": megatron_core,
}


def measure(arguments: argparse.Namespace, path: str, length: int, folder: str) -> float:
    """Samples per CPU-second of this process."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    batches = PATHS[path](arguments, length, folder)
    start = next(batches) and time.process_time()  # after imports and set-up
    while time.process_time() - start < 0.5:
        next(batches)
    samples, start = 0, time.process_time()
    while time.process_time() - start < arguments.seconds:
        samples += next(batches)
    return samples / (time.process_time() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="prefix of a data file of sentences")
    parser.add_argument("--vocab-file", required=True, help="the vocab.txt it was made with")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0, help="CPU-seconds of one measurement")
    parser.add_argument("--measure", nargs=3, metavar=("PATH", "LENGTH", "FOLDER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        path, length, folder = arguments.measure
        print(measure(arguments, path, int(length), folder))
        return
    rates: dict[tuple[str, int], list[float]] = {(path, length): [] for length in LENGTHS for path in PATHS}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(arguments.rounds):
            for path, length in rates:
                rates[path, length].append(run_in_process(arguments, path, length, folder))
    report(rates, arguments)


def run_in_process(arguments: argparse.Namespace, path: str, length: int, folder: str) -> float:
    command = [sys.executable, __file__, "--data", arguments.data, "--vocab-file", arguments.vocab_file]
    command += ["--seconds", str(arguments.seconds), "--measure", path, str(length), folder]
    root = str(Path(__file__).resolve().parents[1])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "-1", "PYTHONPATH": root}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{path} failed:\n{done.stderr}")
    return float(done.stdout.split()[-1])


def report(rates: dict[tuple[str, int], list[float]], arguments: argparse.Namespace) -> None:
    rounds = len(next(iter(rates.values())))
    print(
        f"Data {Path(arguments.data).name}; {rounds} interleaved rounds of {arguments.seconds:g} CPU-seconds, one "
        f"core, Python {platform.python_version()}, numpy {np.__version__}.\n"
    )
    print(
        "| length | path | samples per CPU-second, median | all rounds | times megatron-core |\n|---|---|---|---|---|"
    )
    for (path, length), values in rates.items():
        ratio = median(values) / median(rates["megatron-core", length])
        every = ", ".join(f"{value:,.0f}" for value in values)
        print(f"| {length} | {path} | {median(values):,.0f} | {every} | {ratio:.1f} |")


if __name__ == "__main__":
    main()

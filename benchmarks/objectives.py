"""Cost of each objective of run_t5_pretraining.py: examples per CPU-second, and the padding that is left.

    OMP_NUM_THREADS=1 python benchmarks/objectives.py --vocab t5_32k/sentencepiece.model

Random tokens, batches of 64, out of `TrainLoader` as torch tensors; 512 inputs, 512 targets where an objective has
targets of its own. The objectives take turns in one process, so that what disturbs the machine disturbs all alike; the
clock is process CPU time. Padding is counted in the batches themselves, in micro-batches of `--rows` rows that are
trimmed as the loop trims them, eight to a step, and once more in the random order of `--bucket_rows 1`.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from statistics import median
from types import SimpleNamespace

import numpy as np
import torch

from lm_experiments_tools.config.pretraining import T5PretrainingArgs
from lm_experiments_tools.data.buckets import BucketedDataset
from lm_experiments_tools.data.loader import SampleDataset, TrainLoader
from lm_experiments_tools.data.objectives.registry import ObjectiveContext, objective_dataset
from lm_experiments_tools.data.text.vocabulary import Vocabulary
from lm_experiments_tools.labels import IGNORED_LABEL
from lm_experiments_tools.training.micro_batches import split_batch

TASKS = {
    "span_corruption": {"target_seq_len": 512},
    "prefix_lm": {"target_seq_len": 512},
    "ul2": {"target_seq_len": 512},
    "causal_lm": {},
    "mlm": {},
}
NAMES = {"input_ids", "attention_mask", "labels"}


def datasets(options: argparse.Namespace) -> dict[str, SampleDataset]:
    """The objectives over the same tokens."""
    vocabulary = Vocabulary.load(options.vocab)
    tokens = np.random.default_rng(0).integers(3, vocabulary.num_pieces, options.tokens).astype(np.uint16)
    source = SimpleNamespace(tokens=tokens, fingerprint="random")
    made = {}
    for task, flags in TASKS.items():
        args = T5PretrainingArgs(
            data_path=("random",), task=task, input_seq_len=512, batch_size=options.rows, model_cfg="t5-small", lr=1.0,
            gradient_accumulation_steps=8, **flags,
        )  # fmt: skip
        made[task] = objective_dataset(ObjectiveContext(args, vocabulary, "encoder-decoder", seed=0), source)
    return made


def padding(dataset: SampleDataset, rows: int, num_batches: int, count_labels: bool) -> float:
    """The part of the cells of trimmed micro-batches that holds no token."""
    tokens = cells = 0
    for start in range(0, num_batches * rows, rows):
        batch = {name: torch.from_numpy(v) for name, v in dataset.batch(np.arange(start, start + rows)).items()}
        part = split_batch(batch, rows, NAMES, torch.device("cpu"), has_decoder=True, trim_to=8).micro_batches[0]
        used = [part.inputs["attention_mask"] == 1]
        if count_labels:
            used.append(part.inputs["labels"] != IGNORED_LABEL)
        tokens += sum(int(u.sum()) for u in used)
        cells += sum(u.numel() for u in used)
    return 1 - tokens / cells


def rate(dataset: SampleDataset, seconds: float) -> float:
    """Examples per CPU-second of this process."""
    loader, made = TrainLoader(dataset, 64, prefetch=False), 0
    next(loader)
    started = time.process_time()
    while time.process_time() - started < seconds:
        next(loader)
        made += 64
    return made / (time.process_time() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocab", required=True)
    parser.add_argument("--tokens", type=int, default=20_000_000)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0)
    options = parser.parse_args()
    made = datasets(options)
    rates: dict[str, list[float]] = {task: [] for task in made}
    for _ in range(options.rounds):
        for task, dataset in made.items():
            rates[task].append(rate(dataset, options.seconds))
    versions = f"python {platform.python_version()}, numpy {np.__version__}"
    print(f"{options.rounds} rounds, {versions}, load {os.getloadavg()[0]:.1f}")
    print("\n| task | examples per CPU-second, median | all rounds | padding | padding without buckets |")
    print("|---|---:|---|---:|---:|")
    for task, dataset in made.items():
        plain = dataset.dataset if isinstance(dataset, BucketedDataset) else dataset
        shares = [padding(d, options.rows, 128, task != "mlm") for d in (dataset, plain)]
        rounds = ", ".join(f"{r:,.0f}" for r in rates[task])
        print(f"| {task} | {median(rates[task]):,.0f} | {rounds} | {shares[0]:.1%} | {shares[1]:.1%} |")


if __name__ == "__main__":
    main()

"""Forward and backward of rows that are padded, sorted by length, or packed: tokens per CPU-second of fine-tuning.

    OMP_NUM_THREADS=1 python benchmarks/packing.py

A BERT on sentence polarity and a T5 on SciTLDR, random weights, the fast step in float32, dropout as configured; the
batches are those of run_finetuning.py, real lengths, with as many rows as hold about the same number of tokens. The
ways take turns, and ratios are those within a turn. Tokens are those of inputs and targets that are not padding; time
is process CPU time.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from lm_experiments_tools.config.finetuning import FinetuningArgs
from lm_experiments_tools.data.loader import SampleDataset
from lm_experiments_tools.models.tokenizers import load_tokenizer
from lm_experiments_tools.recipes.finetuning_data import finetuning_data
from modeling_bert import BertConfig, BertForSequenceClassification
from modeling_t5 import T5Config, T5ForConditionalGeneration

ROOT = Path(__file__).resolve().parents[1]
SHARED = Path(os.environ.get("PRETRAINING_DATA", ROOT.parent / "shared" / "data"))
WAYS = {
    "padded, random order": {"bucket_rows": 1},
    "padded, sorted (default)": {},
    "packed": {"packing": True},
}
BERT = {
    "model_type": "encoder", "task": "classification", "tokenizer": str(SHARED / "vocabs/bert-base-uncased"),
    "data_path": (str(SHARED / "classification/sentence_polarity/train.tsv"),),
}  # fmt: skip
T5 = {
    "tokenizer": str(SHARED / "vocabs/t5_32k/sentencepiece.model"),
    "data_path": (str(SHARED / "seq2seq/scitldr/train.json"),),
}


def bert(layers: int, width: int) -> torch.nn.Module:
    sizes = {"hidden_size": width, "intermediate_size": 4 * width, "num_attention_heads": width // 64}
    return BertForSequenceClassification(BertConfig(num_hidden_layers=layers, **sizes))


def t5(layers: int, width: int) -> torch.nn.Module:
    sizes = {"d_model": width, "d_ff": 4 * width, "num_heads": width // 64, "num_layers": layers}
    return T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0))


def dataset_of(flags: dict[str, Any]) -> SampleDataset:
    """Rows of training as run_finetuning.py makes them."""
    args = FinetuningArgs(model_cfg="none", pad_to_multiple_of=8, **flags)
    alone = {"gather": lambda x: [x], "broadcast": lambda x: x, "sum": lambda x: x}
    backend = SimpleNamespace(rank=0, world_size=1, is_main=True, **alone)
    train = finetuning_data(args, backend, load_tokenizer(args)).train
    train.close()
    return train.dataset


def tokens_of(batch: dict[str, np.ndarray]) -> int:
    """Of inputs, and of targets where they are text."""
    targets = "decoder_segment_ids" in batch or "segment_ids" not in batch and batch["labels"].ndim == 2
    return int(batch["attention_mask"].sum() + (batch["labels"] != -100).sum() * targets)


def cells_of(batch: dict[str, np.ndarray]) -> int:
    return batch["input_ids"].size + (batch["labels"].size if tokens_of(batch) > batch["attention_mask"].sum() else 0)


def turn(model: torch.nn.Module, batch: dict[str, np.ndarray]) -> float:
    """CPU-seconds of one forward and backward pass."""
    inputs = {name: torch.from_numpy(values) for name, values in batch.items() if name != "example"}
    model.zero_grad()
    started = time.process_time()
    model(**inputs).loss.backward()
    return time.process_time() - started


def measure(name: str, model: torch.nn.Module, flags: dict[str, Any], rows: int, turns: int, **calls: Any) -> None:
    """Print the rows of a table."""
    model.train().use_fast_step()
    datasets = {way: dataset_of({**flags, **changes, "batch_size": rows}) for way, changes in WAYS.items()}
    batch_of = {way: rows for way in WAYS}
    means = [tokens_of(datasets[way].batch(np.arange(256))) / 256 for way in ("padded, random order", "packed")]
    batch_of["packed"] = max(1, round(rows * means[0] / means[1]))
    rates: dict[str, list[float]] = {way: [] for way in WAYS}
    cells = dict.fromkeys(WAYS, (0, 0))
    for number in range(-1, turns):
        for way, dataset in datasets.items():
            start = (number + 1) * batch_of[way]
            batch = dataset.batch(np.arange(start, start + batch_of[way]))
            seconds = turn(model, batch)
            if number >= 0:
                rates[way].append(tokens_of(batch) / seconds)
                cells[way] = cells[way][0] + tokens_of(batch), cells[way][1] + cells_of(batch)
    for way, found in rates.items():
        ratios = [mine / base for mine, base in zip(found, rates["padded, random order"], strict=True)]
        print(
            f"| {name} | {way}, {batch_of[way]} rows | {1 - cells[way][0] / cells[way][1]:.1%} "
            f"| {statistics.median(found):,.0f} | {max(found):,.0f} | **{statistics.median(ratios):.2f}** "
            f"| {max(found) / max(rates['padded, random order']):.2f} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--only", nargs="+", default=["bert", "t5"], choices=["bert", "t5"])
    options = parser.parse_args()
    torch.manual_seed(0)
    columns = "padding", "tokens per CPU-second, median", "most", "ratio, median", "of the most"
    print(f"| | | {' | '.join(columns)} |\n|---|---{'|---:' * len(columns)}|")
    size = f"{options.layers} x {options.width}"
    for limit in (64, 128, 512) if "bert" in options.only else ():
        flags = {**BERT, "input_seq_len": limit}
        measure(f"BERT {size}, rows of {limit}", bert(options.layers, options.width), flags, 32, options.turns)
    if "t5" in options.only:
        flags = {**T5, "input_seq_len": 512, "target_seq_len": 128}
        measure(f"T5 {size}, rows of 512 + 128", t5(options.layers, options.width), flags, 8, options.turns)


if __name__ == "__main__":
    main()

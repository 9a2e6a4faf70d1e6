"""A BERT step with words scored for masked tokens alone, next to one that scores all. Writes benchmarks/mlm_head.md.

    OMP_NUM_THREADS=1 python benchmarks/mlm_head.py

Forward and backward of one model, the two ways in turn. Times are process CPU time; ratios are medians of the ratios
within a turn.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from pathlib import Path

import torch
from transformers import BertForPreTraining

from lm_experiments_tools.models.build import build_model, load_model_config
from lm_experiments_tools.modules.labelled_head import pick_labelled
from lm_experiments_tools.training.micro_batches import MicroBatch

PROBABILITY = 0.15


def micro_batch(rows: int, length: int, words: int) -> MicroBatch:
    """Rows with the most masked tokens that Megatron's samples have."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1000, words, (rows, length), generator=generator)
    masked = torch.rand(rows, length, generator=generator).argsort(1) < round(PROBABILITY * length)
    inputs = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "labels": torch.where(masked, ids, -100),
        "next_sentence_label": torch.arange(rows) % 2,
    }
    return MicroBatch(inputs, inputs, {"labels": int(masked.sum())})


def step(model: torch.nn.Module, part: MicroBatch) -> tuple[float, float, int]:
    """CPU seconds of forward and backward, the loss, and bytes of logits."""
    model.zero_grad()
    started = time.process_time()
    outputs = model(**part.inputs)
    outputs.loss.backward()
    return time.process_time() - started, outputs.loss.item(), outputs.prediction_logits.nbytes


def measure(model: torch.nn.Module, rows: int, length: int, turns: int) -> str:
    """A line of the table."""
    part = micro_batch(rows, length, model.config.vocab_size)
    ways = part, part.with_valid_labels_only(part.weights["labels"])
    for way in ways:
        step(model, way)
    taken = [[step(model, way) for way in ways] for _ in range(turns)]
    ratios = [whole[0] / picked[0] for whole, picked in taken]
    whole, picked = taken[0]
    medians = [statistics.median(turn[way][0] for turn in taken) for way in (0, 1)]
    return (
        f"| {rows} x {length} | {medians[0]:.2f} s | {medians[1]:.2f} s | **{statistics.median(ratios):.2f}** "
        f"({min(ratios):.2f} to {max(ratios):.2f}) | {whole[2] / 2**20:.0f} MiB | {picked[2] / 2**20:.0f} MiB "
        f"| {abs(whole[1] - picked[1]) / whole[1]:.0e} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--shapes", nargs="+", default=["2x128", "4x512"], help="rows x length")
    args = parser.parse_args()
    config = load_model_config("bert_base_uncased", BertForPreTraining.config_class)
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    model = build_model(BertForPreTraining, config, seed=0).train()
    assert pick_labelled(model, 128) is None
    lines = [measure(model, *map(int, shape.split("x")), args.turns) for shape in args.shapes]
    text = [
        "# Words scored for masked tokens alone",
        "",
        "Forward and backward of BERT-base in fp32, with all tokens scored and with the 15 % that are masked, in turn",
        "([mlm_head.py](mlm_head.py)).",
        "",
        f"    OMP_NUM_THREADS={torch.get_num_threads()} python benchmarks/mlm_head.py --turns {args.turns}",
        "",
        f"torch {torch.__version__}, {platform.machine()}; CPU time, medians of {args.turns} turns.",
        "",
        "| rows x length | all | masked alone | ratio (of each turn) | logits, all | masked alone | loss differs by |",
        "|---|---:|---:|---:|---:|---:|---:|",
        *lines,
    ]  # fmt: skip
    Path(__file__).with_suffix(".md").write_text("\n".join(text) + "\n", encoding="utf-8")
    print("\n".join(text))


if __name__ == "__main__":
    main()

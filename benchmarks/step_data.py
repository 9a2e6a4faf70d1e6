"""Batches for benchmarks/step.py: full rows of words drawn by Zipf's law, or rows as long as texts of a task are."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
from step_loops import Shape
from torch import Tensor

MASKED = 0.15
ROOT = Path(__file__).resolve().parents[1]
SHARED = Path(os.environ.get("PRETRAINING_DATA", ROOT.parent / "shared" / "data"))  # as tests/helpers/real_data.py
TLDR, VOCABULARY = SHARED / "seq2seq/scitldr/train.json", SHARED / "vocabs/t5_32k/sentencepiece.model"
TARGET_STEP, SORTED_ROWS = 16, 2048  # as recipes/finetuning_data.py


def batches_of(shape: Shape, vocabulary_size: int, sorted_by_length: bool) -> Iterator[dict[str, Tensor]]:
    """An endless stream; of real lengths in the order that run_finetuning.py reads them in, or in a random one."""
    generator = torch.Generator().manual_seed(0)
    ranks = torch.arange(3, vocabulary_size, dtype=torch.float64)

    def draw(rows: int, length: int) -> Tensor:
        picked = torch.multinomial(1 / ranks, rows * length, replacement=True, generator=generator)
        return (picked + 3).view(rows, length)

    if shape.real_lengths:
        yield from _batches_of_texts(shape, draw, sorted_by_length)
    make = partial(_t5_batch if shape.is_t5 else _bert_batch, shape, draw, generator)
    while True:
        yield make()


def _t5_batch(shape: Shape, draw: object, generator: torch.Generator) -> dict[str, Tensor]:
    return {"input_ids": draw(shape.rows, shape.inputs), "labels": draw(shape.rows, shape.targets)}


def _bert_batch(shape: Shape, draw: object, generator: torch.Generator) -> dict[str, Tensor]:
    inputs = draw(shape.rows, shape.inputs)
    chosen = torch.rand(inputs.shape, generator=generator).argsort(dim=1)[:, : round(MASKED * shape.inputs)]
    labels = torch.full_like(inputs, -100).scatter(1, chosen, inputs.gather(1, chosen))
    return {
        "input_ids": inputs.scatter(1, chosen, 103),
        "attention_mask": torch.ones_like(inputs),
        "token_type_ids": torch.zeros_like(inputs),
        "labels": labels,
        "next_sentence_label": torch.randint(0, 2, (shape.rows,), generator=generator),
    }


class _Lengths:
    """Lengths int64[2, n] of samples that are read in a random order each epoch."""

    def __init__(self, lengths: np.ndarray) -> None:
        from lm_experiments_tools.data.order import permute

        self.all, self.permute = lengths, permute

    def __len__(self) -> int:
        return self.all.shape[1]

    def lengths(self, samples: np.ndarray) -> np.ndarray:
        epochs, places = np.divmod(samples, len(self))
        return self.all[:, self.permute(places, len(self), 0, epochs)]


def text_lengths(shape: Shape) -> np.ndarray:
    """int64[2, n]: tokens of SciTLDR's sources and targets, cut to the shape; drawn where they are not here."""
    if TLDR.is_file() and VOCABULARY.is_file():
        from lm_experiments_tools.data.text.tokenizer import Tokenizer

        encode = Tokenizer.load(VOCABULARY).encode
        rows = [json.loads(line)["translation"] for line in TLDR.read_text(encoding="utf-8").splitlines()]
        sides = [[len(encode(row[side])) + 1 for row in rows] for side in ("s", "t")]
    else:  # log-normal, of the same medians
        generator = np.random.default_rng(0)
        sides = [generator.lognormal(mean, 0.45, 2000).astype(np.int64) for mean in (5.25, 3.2)]
    return np.minimum(np.array(sides, np.int64), [[shape.inputs], [shape.targets]])


def _batches_of_texts(shape: Shape, draw: object, sorted_by_length: bool) -> Iterator[dict[str, Tensor]]:
    from lm_experiments_tools.data.order import Buckets

    lengths = _Lengths(text_lengths(shape))
    buckets = Buckets(lengths.lengths, len(lengths), shape.rows, 0, TARGET_STEP, SORTED_ROWS)
    number = 0
    while True:
        samples = np.arange(number, number + shape.rows)
        number += shape.rows
        inputs, targets = torch.from_numpy(lengths.lengths(buckets(samples) if sorted_by_length else samples))
        widths = [-(-int(side.max()) // 8) * 8 for side in (inputs, targets)]  # both programs pad to multiples of 8
        masks = [torch.arange(width) < side[:, None] for width, side in zip(widths, (inputs, targets), strict=True)]
        yield {
            "input_ids": draw(shape.rows, widths[0]).masked_fill(~masks[0], 0),
            "attention_mask": masks[0].long(),
            "labels": draw(shape.rows, widths[1]).masked_fill(~masks[1], -100),
        }

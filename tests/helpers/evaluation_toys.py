"""Examples, arguments and what a model generates for them, for tests of evaluation."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from lm_experiments_tools.config.finetuning import FinetuningArgs
from lm_experiments_tools.data.examples.examples import Example

WORDS = ["<pad>", "</s>", "<unk>", "cats", "dogs", "sleep", "run", "yes", "no", "positive", "0.5", "the"]
PAD, END = 0, 1


def args_of(**changes) -> FinetuningArgs:
    return FinetuningArgs(**({"data_path": ("x",), "valid_data_path": "y", "model_cfg": "t5-small"} | changes))


def generated(*texts: str, filler: int = PAD) -> dict[str, torch.Tensor]:
    """Output of T5's `generate`: start token, words, end, padding."""
    rows = [[PAD, *map(WORDS.index, text.split()), END] for text in texts]
    width = max(map(len, rows))
    return {"generation_outputs": torch.tensor([row + [filler] * (width - len(row)) for row in rows])}


def indices(*numbers: int) -> dict[str, torch.Tensor]:
    return {"example": torch.tensor(numbers)}


def lines_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


TEXTS = [
    Example("what do cats do", ("cats sleep", "sleep"), name="q1"),
    Example("what do dogs do", ("dogs run",), name="q2"),
    Example("cats or dogs", ("cats",), name="q3"),
]


def sentences(*labels, pair=None):
    return [Example(f"sentence {n}", pair=pair, label=label, name=str(n)) for n, label in enumerate(labels)]

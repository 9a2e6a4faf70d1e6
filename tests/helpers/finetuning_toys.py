"""Small tokenizers, files and a lone worker for tests of fine-tuning data."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from lm_experiments_tools.config.finetuning import FinetuningArgs
from lm_experiments_tools.recipes.finetuning_data import FinetuningData, finetuning_data

WORDS = [f"w{number}" for number in range(200)]


def word_tokenizer(end: str = "template", pad: bool = True) -> PreTrainedTokenizerFast:
    """A word is a token: w0 is 3, w1 is 4, ...

    Args:
        end: "template": it adds eos (1) itself, as T5's does; "token": it has eos and adds none, as GPT-2's;
            "none": it has no eos.
        pad: has a pad token (0).
    """
    vocab = {"<pad>": 0, "</s>": 1, "<unk>": 2} | {word: 3 + number for number, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if end == "template":
        tokenizer.post_processor = processors.TemplateProcessing("$A </s>", "$A </s> $B </s>", [("</s>", 1)])
    special = {"unk_token": "<unk>"} | ({"pad_token": "<pad>"} if pad else {})
    special |= {} if end == "none" else {"eos_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def lone_backend(rank: int = 0, world_size: int = 1) -> Any:
    """One worker, who hears nobody."""
    alone = {"gather": lambda x: [x], "broadcast": lambda x: x, "sum": lambda x: x}
    return SimpleNamespace(rank=rank, world_size=world_size, shares=1, is_main=rank == 0, **alone)


def read(tokenizer: Any, rank: int = 0, world_size: int = 1, **flags: Any) -> FinetuningData:
    """`finetuning_data` of a run with these flags."""
    args = FinetuningArgs(model_cfg="no.json", **flags)
    return finetuning_data(args, lone_backend(rank, world_size), tokenizer)


def write_json(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def pairs(count: int) -> list[dict[str, str]]:
    """Sources and targets of different lengths, no two alike."""
    return [
        {
            "source": " ".join(WORDS[(number + k) % 200] for k in range(1 + number * 7 % 23)),
            "target": " ".join(WORDS[(number * 3 + k) % 200] for k in range(1 + number * 5 % 11)),
        }
        for number in range(count)
    ]

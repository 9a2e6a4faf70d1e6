"""Task and model of benchmarks/finetuning.py: pairs of texts, full rows of them, a T5 with random weights."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SHARED = Path(os.environ.get("PRETRAINING_DATA", ROOT.parent / "shared" / "data"))  # as tests/helpers/real_data.py
TLDR, VOCABULARY = SHARED / "seq2seq/scitldr/train.json", SHARED / "vocabs/t5_32k/sentencepiece.model"


def python_documentation() -> Iterator[dict[str, str]]:
    """Paragraphs of Python's own documentation, and what each begins with."""
    from pydoc_data.topics import topics

    for text in topics.values():
        words = [paragraph.split() for paragraph in text.split("\n\n")]
        for paragraph in words:
            if len(paragraph) >= 20:
                yield {"source": " ".join(paragraph), "target": " ".join(paragraph[: 5 + len(paragraph) // 10])}


def pairs_of(data_path: str | None) -> list[dict[str, str]]:
    """Sources and targets of any file that run_finetuning.py reads."""
    from lm_experiments_tools.data.examples.examples import TextFields, text_examples
    from lm_experiments_tools.data.examples.rows import BadRows, resolve

    path = data_path or (str(TLDR) if TLDR.is_file() else None)
    if path is None:
        return list(python_documentation())
    examples = text_examples(resolve(path, "train"), TextFields(None, None, ""), BadRows(0), merge=False)
    return [{"source": example.source, "target": example.targets[0]} for example in examples]


def full_rows(pairs: list[dict[str, str]], tokenizer: Any, limits: dict[str, int], count: int) -> Iterator[dict]:
    """`count` rows that are as long as the limits: texts that follow one another, put together."""
    left = cycle(pairs)
    for _ in range(count):
        row = {side: "" for side in limits}
        for side, limit in limits.items():
            while len(tokenizer(row[side])["input_ids"]) <= limit:
                row[side] += " " + next(left)[side]
        yield row


def prepare(options: argparse.Namespace, folder: Path, seed: int) -> None:
    """Write the model with random weights, its tokenizer, full.jsonl (one batch) and real.jsonl."""
    from lm_experiments_tools.data.text.train_vocabulary import train_vocab
    from lm_experiments_tools.data.text.vocabulary import Vocabulary
    from lm_experiments_tools.models.build import build_model, load_model_config
    from lm_experiments_tools.modules.user_classes import get_cls_by_name

    pairs = pairs_of(options.data_path)
    write(folder / "real.jsonl", pairs)
    vocabulary = options.vocab or VOCABULARY
    if not vocabulary.is_file():
        write(folder / "text.jsonl", [{"text": row["source"]} for row in pairs])
        vocabulary = train_vocab([str(folder / "text.jsonl")], 2000, folder / "vocabulary.model").path
    Vocabulary.load(vocabulary).save_tokenizer(folder / "model")
    config = load_model_config(options.model_cfg)
    model_cls = get_cls_by_name("transformers:T5ForConditionalGeneration")
    build_model(model_cls, config, seed=seed).save_pretrained(folder / "model")

    from transformers import AutoTokenizer

    limits = {"source": options.input_seq_len, "target": options.target_seq_len}
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    write(folder / "full.jsonl", full_rows(pairs, tokenizer, limits, options.batch_size))


def write(path: Path, rows: Any) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

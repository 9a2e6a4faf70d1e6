"""SentencePiece vocabularies of made-up text, for tests whose subject is another."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import sentencepiece


def train_vocabulary(model: Path, lines: Iterable[str], size: int, **options: Any) -> Path:
    """Train `model` (a path that ends in .model) with T5's special ids: 0 padding, 1 end, 2 unknown."""
    text = model.with_suffix(".txt")
    text.write_text("\n".join(lines))
    settings = dict(vocab_size=size, pad_id=0, eos_id=1, unk_id=2, bos_id=-1, hard_vocab_limit=False, minloglevel=2)
    files = {"input": str(text), "model_prefix": str(model.with_suffix(""))}
    sentencepiece.SentencePieceTrainer.train(**files, **{**settings, **options})
    return model


def numbered_words_vocabulary(folder: Path, size: int = 120) -> Path:
    """A vocabulary of text such as `word3 number21 token3`."""
    lines = [f"word{i} number{i * 7 % 101} token{i % 13}" for i in range(500)]
    return train_vocabulary(folder / "vocab.model", lines, size)

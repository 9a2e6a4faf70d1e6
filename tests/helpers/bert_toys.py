"""A small BERT's data, vocabulary and configuration, from the text of Python's own help, for tests of its script."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics

import tokenizers

from megatron.tokenizers import build_tokenizer
from tests.helpers.token_toys import write_tokens

TINY = {
    "base": "bert_base_uncased", "vocab_size": 640, "hidden_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "intermediate_size": 64, "max_position_embeddings": 64, "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}  # fmt: skip


def documents() -> list[list[str]]:
    """Sentences of each page, cut at full stops."""
    pages = [" ".join(text.split()) for _, text in sorted(topics.items()) if len(text) > 1000]
    return [[sentence for sentence in page.split(". ") if sentence.strip()] for page in pages]


def write_sentences(prefix: Path, pages: Sequence[Sequence[str]], vocab_file: Path) -> None:
    """PREFIX.bin, .idx and .json as preprocess_data.py leaves them."""
    tokenizer = build_tokenizer("BertWordPieceLowerCase", vocab_file=vocab_file)
    meta = {"vocab_file": str(vocab_file), "vocab_sha256": tokenizer.fingerprint, "vocab_size": tokenizer.size}
    write_tokens(prefix, map(tokenizer.encode_batch, pages), meta=meta)


def make_bert_data(folder: Path) -> Path:
    """vocab.txt, tiny.json, and the data train, valid and other (validation text is no training text)."""
    pages = documents()
    wordpiece = tokenizers.BertWordPieceTokenizer(lowercase=True)
    wordpiece.train_from_iterator((" ".join(page) for page in pages), vocab_size=600, show_progress=False)
    wordpiece.save_model(str(folder))
    for name, part in (("train", pages[:30]), ("valid", pages[30:36]), ("other", pages[36:44])):
        write_sentences(folder / name, part, folder / "vocab.txt")
    (folder / "tiny.json").write_text(json.dumps(TINY))
    return folder

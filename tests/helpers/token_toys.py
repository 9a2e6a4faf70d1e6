"""Made-up texts and token files, for tests of what reads them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from lm_experiments_tools.data.tokens.indexed import IndexedDataset, IndexedDatasetWriter

WORDS = (
    "the a of model token language memory buffer returns value when number is zero lines text and file open".split()
)


def make_texts(count: int, seed: int = 0) -> list[str]:
    """Texts of one to five lines, no two alike."""
    rng = np.random.default_rng(seed)
    return [
        "\n".join(" ".join(rng.choice(WORDS, rng.integers(1, 12))) + f" {i}." for _ in range(rng.integers(1, 6)))
        for i in range(count)
    ]


def write_jsonl(path: Path, texts: Iterable[str]) -> str:
    """A JSON line a text."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def write_tokens(
    prefix: str | os.PathLike,
    documents: Iterable[Iterable[Sequence[int]]],
    dtype: Any = np.uint16,
    meta: dict[str, Any] | None = None,
) -> str:
    """Write a token file of documents, each a list of sequences; returns the prefix."""
    documents = [[np.asarray(sequence, np.int64) for sequence in document] for document in documents]
    sequences = [sequence for document in documents for sequence in document]
    with IndexedDatasetWriter(prefix, dtype) as writer:
        ids = np.concatenate([np.empty(0, np.int64), *sequences])
        writer.add_documents(ids, lengths_of(sequences), lengths_of(documents))
        writer.finalize(meta)
    return os.fspath(prefix)


def lengths_of(items: Sequence[Sequence[Any]]) -> np.ndarray:
    return np.fromiter(map(len, items), np.int64)


def token_data(
    prefix: str | os.PathLike, documents: Iterable[Iterable[Sequence[int]]], **options: Any
) -> IndexedDataset:
    """`write_tokens`, opened."""
    return IndexedDataset(write_tokens(prefix, documents, **options))


def read_documents(prefix: str | os.PathLike) -> list[list[list[int]]]:
    """The inverse of `write_tokens`."""
    dataset = IndexedDataset(prefix)
    sequences = [dataset[index].tolist() for index in range(len(dataset))]
    return [sequences[start:end] for start, end in pairwise(dataset.document_indices.tolist())]


def files(prefix):
    return [Path(f"{prefix}{suffix}").read_bytes() for suffix in (".bin", ".idx", ".json")]

"""Text -> tokens -> training examples.

Names are resolved on first use (PEP 562), so that importing the package costs nothing and needs no optional package:
tokenization workers never load torch, and `lmtools --help` loads neither numpy nor sentencepiece.
"""

from importlib import import_module
from typing import Any

_HOME_OF = {
    "Document": "documents",
    "iter_documents": "documents",
    "IndexedDataset": "indexed",
    "IndexedDatasetWriter": "indexed",
    "Vocabulary": "vocabulary",
    "tokenize_corpus": "tokenize",
    "ensure_tokenized": "tokenize",
    "build_corpus": "corpus",
    "train_vocab": "vocab",
}

__all__ = list(_HOME_OF)


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME_OF])

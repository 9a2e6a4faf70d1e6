"""Build a text corpus from the documentation of this Python installation; no network is used."""

import time
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class CorpusArgs:
    """Corpus."""

    output: str
    """Folder for train.jsonl, valid.jsonl, manifest.json and README.md."""
    max_megabytes: float = 20.0
    """Stop at this much text; a small installation holds less."""
    validation_share: float = 0.03
    """Share of the files of documentation that go to valid.jsonl, each whole."""
    workers: int | None = None
    """Processes. None: one per core. The files are the same for any number."""


def run(args: CorpusArgs) -> None:
    """Build the corpus and say what came out."""
    from lm_experiments_tools.tools.demo_corpus.corpus import build_corpus

    start = time.perf_counter()
    summary = build_corpus(
        args.output,
        max_bytes=int(args.max_megabytes * 1e6),
        validation_share=args.validation_share,
        workers=args.workers,
    )
    print(
        f"{summary.num_train_documents:,} training and {summary.num_valid_documents:,} validation documents, "
        f"{summary.num_train_bytes / 1e6:.1f} + {summary.num_valid_bytes / 1e6:.1f} MB of text in "
        f"{time.perf_counter() - start:.1f} s: {summary.train_path}, {summary.valid_path}"
    )

"""Train a SentencePiece vocabulary with T5's layout (pad 0, eos 1, unk 2, sentinels last) on text."""

import time
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class VocabArgs:
    """Vocabulary."""

    input: tuple[str, ...]
    """Text: .jsonl, .jsonl.gz, .txt files, folders of them, Hugging Face datasets (name:config:split)."""
    size: int
    """Number of ids, the sentinels included."""
    output: str
    """The .model file to write."""
    text_key: str = "text"
    """Key of a .jsonl line that holds the text."""
    extra_ids: int = 100
    """Number of sentinels, <extra_id_0> and so on."""
    sample_megabytes: float = 6.0
    """Text to train on, drawn from all over the input."""
    character_coverage: float = 0.9995
    """Share of the characters that get a piece; the rest becomes <unk>."""


def run(args: VocabArgs) -> None:
    """Train and say what came out."""
    from lm_experiments_tools.data.vocab import train_vocab

    start = time.perf_counter()
    summary = train_vocab(
        args.input,
        args.size,
        args.output,
        text_key=args.text_key,
        extra_ids=args.extra_ids,
        sample_bytes=int(args.sample_megabytes * 1e6),
        character_coverage=args.character_coverage,
    )
    seconds = time.perf_counter() - start
    print(
        f"{summary.size:,} ids from {summary.sample_bytes / 1e6:.1f} MB of text in {seconds:.1f} s "
        f"({summary.sample_bytes / 1e6 / seconds:.1f} MB/s): {summary.path}"
    )

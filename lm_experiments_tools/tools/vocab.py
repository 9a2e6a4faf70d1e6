"""Train a vocabulary on text: SentencePiece with T5's layout (pad 0, eos 1, unk 2, sentinels last), or WordPiece."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lm_experiments_tools.errors import UserError


@dataclass(frozen=True, kw_only=True)
class VocabArgs:
    """The vocabulary to train, and its text."""

    input: tuple[str, ...]
    """Text: .jsonl and .txt files, also compressed, folders of them, Hugging Face datasets (name:config:split)."""
    size: int
    """Number of ids, the sentinels included."""
    output: str
    """The .model file to write, or vocab.txt of a WordPiece vocabulary."""
    type: Literal["sentencepiece", "wordpiece"] = "sentencepiece"
    """sentencepiece for T5, wordpiece for BERT."""
    lowercase: bool = True
    """WordPiece: for an uncased model, lower case and no accents."""
    text_key: str = "text"
    """Key of a .jsonl line that holds the text."""
    extra_ids: int = 100
    """SentencePiece: number of sentinels, <extra_id_0> and so on."""
    sample_megabytes: float = 6.0
    """Text to train on, drawn from all over the input."""
    character_coverage: float = 0.9995
    """SentencePiece: share of the characters in the vocabulary; the rest becomes <unk>."""
    overwrite: bool = False
    """Replace a vocabulary that is there."""

    def __post_init__(self) -> None:
        if self.type == "sentencepiece" and not self.lowercase:
            raise UserError(
                "--lowercase false belongs to --type wordpiece: a SentencePiece vocabulary is always cased."
            )


def run(args: VocabArgs) -> None:
    """Train a vocabulary and print its size. Raises UserError."""
    if Path(args.output).exists() and not args.overwrite:
        raise UserError(
            f"--output {args.output} exists, and models may depend on it: name another, or give --overwrite."
        )
    from lm_experiments_tools.tools.train_vocabulary import train_vocab, train_wordpiece

    start = time.perf_counter()
    sample = {"text_key": args.text_key, "sample_bytes": int(args.sample_megabytes * 1e6)}
    if args.type == "wordpiece":
        summary = train_wordpiece(args.input, args.size, args.output, lowercase=args.lowercase, **sample)
    else:
        summary = train_vocab(
            args.input,
            args.size,
            args.output,
            extra_ids=args.extra_ids,
            character_coverage=args.character_coverage,
            **sample,
        )
    seconds = time.perf_counter() - start
    print(
        f"{summary.size:,} ids from {summary.sample_bytes / 1e6:.1f} MB of text in {seconds:.1f} s "
        f"({summary.sample_bytes / 1e6 / seconds:.1f} MB/s): {summary.path}"
        f"; unknown tokens in it: {summary.unknown:.2%}" + (f"; {summary.rejected}" if summary.rejected.count else "")
    )

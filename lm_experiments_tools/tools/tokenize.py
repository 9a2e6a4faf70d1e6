"""Turn text into a token file (Megatron's .bin and .idx) that the trainers read; a run that was killed goes on."""

import time
from dataclasses import dataclass
from typing import Literal

from lm_experiments_tools.errors import UserError


@dataclass(frozen=True, kw_only=True)
class TokenizeArgs:
    """Tokenization."""

    input: tuple[str, ...]
    """Text: .jsonl, .jsonl.gz, .txt files, folders of them, Hugging Face datasets (name:config:split)."""
    vocab: str
    """SentencePiece .model file."""
    output: str
    """Prefix: PREFIX.bin, PREFIX.idx and PREFIX.json are written."""
    text_key: str = "text"
    """Key of a .jsonl line that holds the text."""
    append_eos: bool = False
    """End each document with the end-of-sequence id (t5 does not, nanoT5 does)."""
    encode_by: Literal["line", "document"] = "line"
    """line: ids do not depend on a document's length, as with Hugging Face; document: as seqio, 25 % faster."""
    max_bad_lines: int = 100
    """Unusable lines to leave out, listed in PREFIX.bad_lines.jsonl, before it is an error."""
    workers: int | None = None
    """Processes. None: one per core."""


def run(args: TokenizeArgs) -> None:
    """Tokenize and say what came out."""
    from lm_experiments_tools.data.tokenize import tokenize_corpus

    if args.output.endswith(("/", ".bin", ".idx", ".json")):
        raise UserError(
            f"--output {args.output} must be a prefix, such as tokens/train: .bin, .idx and .json are added"
        )
    start = time.perf_counter()
    meta = tokenize_corpus(
        args.input,
        args.vocab,
        args.output,
        workers=args.workers,
        append_eos=args.append_eos,
        text_key=args.text_key,
        max_bad_lines=args.max_bad_lines,
        encode_by=args.encode_by,
    )
    seconds = time.perf_counter() - start
    megabytes = meta["num_bytes"] / 1e6
    print(
        f"{meta['num_documents']:,} documents, {megabytes:.1f} MB of text -> {meta['num_tokens']:,} tokens "
        f"({meta['dtype']}), {meta['bad_lines']} bad lines, in {seconds:.1f} s ({megabytes / seconds:.1f} MB/s): "
        f"{args.output}.bin, .idx, .json"
    )

"""Turn text into a token file (Megatron's .bin and .idx) for the trainers; an interrupted run resumes.

A cluster does it in n parts: with `--on slurm` and `--on ray` by datatrove, or by hand as a job array, job i with
--shard i/n, and `lmtools merge` at its end (docs/scale.md).
"""

import time
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from lm_experiments_tools.config.flags import COUNT, check_groups, needs, only
from lm_experiments_tools.errors import UserError


@dataclass(frozen=True, kw_only=True)
class TokenizeArgs:
    """Tokenization."""

    input: tuple[str, ...]
    """Text: .jsonl and .txt files, also compressed, folders of them, Hugging Face datasets (name:config:split)."""
    vocab: str
    """SentencePiece .model file, folder of a Hugging Face tokenizer, tokenizer.json, or bytes (as ByT5)."""
    output: str
    """Prefix: PREFIX.bin, PREFIX.idx and PREFIX.json are written."""
    text_key: str = "text"
    """Key of a .jsonl line that holds the text."""
    append_eos: bool = False
    """End each document with the end-of-sequence id (t5 does not, nanoT5 does)."""
    encode_by: Literal["line", "document"] | None = None
    """line: ids of SentencePiece do not depend on a document's length, as with Hugging Face; document: as seqio, 25 %
    faster. None: line for SentencePiece, unless it knows newlines (Gemma's, Llama's), which line would leave out."""
    max_bad_lines: int | None = None
    """Unusable lines to leave out, listed in PREFIX.bad_lines.jsonl, before it is an error. None: 100, or 0.1 % of the
    lines read so far where that is more."""
    workers: Annotated[int | None, COUNT] = None
    """Processes. None: one per core; with --on, 1 for each part."""
    shard: str | None = None
    """i/n, i from 0: tokenize the i-th of n parts, into PREFIX-0000i-of-0000n. None: all."""
    overwrite: bool = False
    """Replace token files of other text, or of another vocabulary, that are there under the output's name."""
    on: Literal["local", "slurm", "ray"] | None = None
    """Cut the work into --shards parts for datatrove: processes here, a job array of Slurm, or tasks of Ray's cluster
    (RAY_ADDRESS); the parts are merged at the end, to the bytes of one run."""
    shards: Annotated[int | None, COUNT, needs("on")] = None
    """Parts of the text."""
    partition: Annotated[str | None, only("on", "slurm")] = None
    """Partition of Slurm."""
    time: Annotated[str, only("on", "slurm")] = "24:00:00"
    """Time limit of a part in Slurm."""

    def __post_init__(self) -> None:
        check_groups(self, (TokenizeArgs,))
        if self.on and (self.shards is None or self.shard is not None):
            raise UserError(f"--on {self.on} takes --shards N, the number of parts, and makes them all: no --shard.")
        if self.on == "slurm" and self.partition is None:
            raise UserError("--on slurm needs --partition; `sinfo -s` lists those of the cluster.")

    def settings(self) -> dict[str, Any]:
        """Arguments of `tokenize_corpus`, without `workers` and `shard`."""
        paths = {"inputs": self.input, "vocab_path": self.vocab, "output_prefix": self.output}
        names = "append_eos", "text_key", "max_bad_lines", "encode_by", "overwrite"
        return paths | {name: getattr(self, name) for name in names}


def run(args: TokenizeArgs) -> None:
    """Tokenize and print the counts."""
    from lm_experiments_tools.data.tokens.pipeline import parse_shard, shard_prefix
    from lm_experiments_tools.data.tokens.tokenize import tokenize_corpus

    check_output(args.output)
    if args.on:
        from lm_experiments_tools.tools.tokenize_parts import tokenize_parts

        return tokenize_parts(args)
    shard = parse_shard(args.shard)
    start = time.perf_counter()
    meta = tokenize_corpus(**args.settings(), workers=args.workers, shard=shard)
    seconds = time.perf_counter() - start
    megabytes = meta["num_bytes"] / 1e6
    empty = f", {meta['empty_documents']:,} empty texts" if "empty_documents" in meta else ""
    print(
        f"{meta['num_documents']:,} documents, {megabytes:.1f} MB of text -> {meta['num_tokens']:,} tokens "
        f"({meta['dtype']}), {meta['bad_lines']} bad lines{empty}, "
        f"in {seconds:.1f} s ({megabytes / seconds:.1f} MB/s): "
        f"{shard_prefix(args.output, *shard) if shard else args.output}.bin, .idx, .json"
    )


def check_output(output: str) -> None:
    """Refuse a folder and a file for the prefix of token files."""
    if output.endswith(("/", ".bin", ".idx", ".json")):
        raise UserError(f"--output {output} must be a prefix, such as tokens/train: .bin, .idx and .json are added")

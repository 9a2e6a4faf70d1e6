"""Tokenize text into a token file (Megatron's .bin and .idx). An interrupted command resumes.

In a job array each job tokenizes some of the files, and training reads all their token files (docs/scale.md).
"""

import time
from dataclasses import dataclass
from typing import Annotated

from lm_experiments_tools.config.flags import COUNT, check_groups
from lm_experiments_tools.errors import UserError


@dataclass(frozen=True, kw_only=True)
class TokenizeArgs:
    """Which text to tokenize, and how."""

    input: tuple[str, ...]
    """Text: .jsonl and .txt files, also compressed, folders of them, Hugging Face datasets (name:config:split)."""
    vocab: str
    """SentencePiece .model file, folder or Hub name of a Hugging Face tokenizer, tokenizer.json, or bytes (ByT5)."""
    output: str
    """Prefix: PREFIX.bin, PREFIX.idx and PREFIX.json are written."""
    text_key: str = "text"
    """Key of a .jsonl line that holds the text; meta.text: the key text of the object meta."""
    document_per_line: bool = False
    """Each line of a .txt file is a document. Default: documents are between blank lines."""
    append_eos: bool = False
    """End each document with the end-of-sequence id (t5 does not, nanoT5 does)."""
    max_bad_lines: int = 100
    """Unusable lines to leave out, listed in PREFIX.bad_lines.jsonl, before it is an error."""
    workers: Annotated[int | None, COUNT] = None
    """Processes. None: one per core."""
    overwrite: bool = False
    """Replace token files of other text, or of another vocabulary, that are there under the output's name."""

    def __post_init__(self) -> None:
        check_groups(self, (TokenizeArgs,))


def run(args: TokenizeArgs) -> None:
    """Tokenize the text, and print the number of documents and tokens."""
    from lm_experiments_tools.data.tokens.indexed import IndexedDataset
    from lm_experiments_tools.data.tokens.tokenize import open_tokenizer, report_unknown, tokenize_corpus

    check_output(args.output)
    start, vocabulary = time.perf_counter(), open_tokenizer(args.vocab)
    meta = tokenize_corpus(
        args.input, vocabulary, args.output, append_eos=args.append_eos, workers=args.workers,
        text_key=args.text_key, document_per_line=args.document_per_line, max_bad_lines=args.max_bad_lines,
        overwrite=args.overwrite,
    )  # fmt: skip
    seconds = time.perf_counter() - start
    megabytes = meta["num_bytes"] / 1e6
    unknown = report_unknown(IndexedDataset(args.output), vocabulary.unk_id)
    print(
        f"{meta['num_documents']:,} documents, {megabytes:.1f} MB of text -> {meta['num_tokens']:,} tokens "
        f"({meta['dtype']}), {unknown:.2%} of them unknown, {meta['bad_lines']} bad lines, "
        f"{meta['empty_documents']:,} empty texts, in {seconds:.1f} s ({megabytes / seconds:.1f} MB/s): "
        f"{args.output}.bin, .idx, .json"
    )


def check_output(output: str) -> None:
    """Check the prefix of the token files to write. Raises UserError if it names a folder or a file."""
    if output.endswith(("/", ".bin", ".idx", ".json")):
        raise UserError(f"--output {output} must be a prefix, such as tokens/train: .bin, .idx and .json are added")

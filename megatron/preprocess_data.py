"""Tokenize text for BERT and write token files, with the command line of Megatron-LM's preprocess_data.py.

    python megatron/preprocess_data.py --input FILE_OR_FOLDER --output-prefix PREFIX --split-sentences \\
        --tokenizer-type BertWordPieceLowerCase --vocab-file vocab.txt --workers 8

The command reads .json, .jsonl and .ndjson files (one object a line) and .txt files (documents between blank lines).
They may be compressed as .gz, .bz2, .xz or .zst. For each key of --json-keys, the command writes

    PREFIX_text_sentence.bin, .idx   the tokens: one sequence a sentence, one document a line (Megatron's format)
    PREFIX_text_sentence.json        tokenizer, counts, settings
    PREFIX.bad_lines.jsonl           lines that could not be used, if any: file, line, reason

(`document` in place of `sentence` without --split-sentences). The files are the same for any number of workers, and
appear only when they are complete; an interrupted run resumes from its finished shards, in PREFIX.shards-*/. Runs to
one PREFIX wait for each other.
"""

import logging
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

if __name__ == "__main__" and not __package__:
    # Run as a file: Python put this folder first on its path, where our tokenizers.py hides the package `tokenizers`.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from lm_experiments_tools.config.cli import parse, run_main
from lm_experiments_tools.config.flags import COUNT, NOT_NEGATIVE, check_groups
from lm_experiments_tools.data.text.sources import READABLE, Shard, find_files, plan_shards
from lm_experiments_tools.data.tokens.indexed import IndexedDataset
from lm_experiments_tools.data.tokens.tokenize import Tokenization, report_unknown
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.files import locked
from megatron.encoding import EncodingArgs, SentenceEncoder

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class PreprocessArgs(EncodingArgs):
    """Arguments of preprocess_data.py, which tokenizes text for BERT: input, output, and processes."""

    input: str
    """A .json or .jsonl file, one object a line, or a .txt file, documents between blank lines (all also compressed),
    or a folder of them, read recursively in sorted order."""
    document_per_line: bool = False
    """Each line of a .txt file is a document."""
    output_prefix: str
    """PREFIX of PREFIX_KEY_sentence.bin and so on."""
    max_bad_lines: Annotated[int, NOT_NEGATIVE] = 100
    """Lines that cannot be used to leave out, listed in PREFIX.bad_lines.jsonl, before it is an error."""
    workers: Annotated[int, COUNT] = 1
    """Processes that tokenize; the files do not depend on it."""
    log_interval: Annotated[int, COUNT] = 100
    """Documents between two lines of progress, of which there is at most one for each shard of some megabytes."""
    dataset_impl: Literal["mmap"] = "mmap"
    """Format of the token files."""

    def __post_init__(self) -> None:
        check_groups(self, (PreprocessArgs, EncodingArgs))
        if self.tokenizer_type == "HFTokenizer" and self.vocab_file is not None:
            raise UserError("--vocab-file belongs to BertWordPiece...; HFTokenizer takes --tokenizer-name-or-path.")
        if self.tokenizer_type != "HFTokenizer" and self.tokenizer_name_or_path is not None:
            raise UserError("--tokenizer-name-or-path belongs to HFTokenizer.")
        twice = {key for key in self.json_keys if self.json_keys.count(key) > 1 or "/" in key}
        if twice:
            raise UserError(f"--json-keys {twice.pop()!r} cannot name a file: given twice, or with a / in it.")
        if self.output_prefix.endswith(("/", ".bin", ".idx")):
            raise UserError(f"--output-prefix {self.output_prefix} must be a prefix, such as tokens/train.")


def preprocess(args: PreprocessArgs) -> dict[str, dict[str, Any]]:
    """Tokenize text for BERT and write the token files.

    Returns:
        The content of the .json file of each output, by the output's prefix.
    """
    encoder = SentenceEncoder(args)
    shards = _plan(args)
    if not args.split_sentences:
        logger.warning("without --split-sentences BERT has no sentence pairs and reads one sample of a document")
    prefixes = [f"{args.output_prefix}_{output['json_key']}_{output['level']}" for output in encoder.outputs]
    with locked(Path(f"{args.output_prefix}.lock")):
        metas = Tokenization(
            [os.path.abspath(args.input)],
            shards,
            encoder,
            args.output_prefix,
            prefixes,
            args.max_bad_lines,
            args.workers,
            args.log_interval,
        ).run()
        for prefix in prefixes:
            report_unknown(IndexedDataset(prefix), encoder.vocabulary.unk_id)
    if args.split_sentences and any(meta["num_sequences"] < 1.5 * meta["num_documents"] for meta in metas):
        logger.warning(
            "most documents of %s are one sentence to --sentence-splitter %s, and BERT's pairs need two: choose a "
            "splitter of their language, such as sentencex:zh, or newline",
            args.input,
            args.sentence_splitter,
        )
    return dict(zip(prefixes, metas, strict=True))


def _plan(args: PreprocessArgs) -> list[Shard]:
    """The shards to encode."""
    found = find_files([args.input], document_per_line=args.document_per_line)
    if any(kind == "dataset" for _, kind in found):
        raise UserError(f"--input {args.input} has no {READABLE} file: put each document on a line as JSON")
    texts = [name for name, kind in found if kind in ("text", "lines")]
    if texts and len(args.json_keys) > 1:
        raise UserError(f"{texts[0]} is plain text, but --json-keys names {len(args.json_keys)} keys: name one")
    return plan_shards([args.input], document_per_line=args.document_per_line)


def main(argv: Sequence[str] | None = None) -> None:
    args, _ = parse(PreprocessArgs, argv, description=__doc__)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # --workers says how many cores to use
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # cleans up on the way out
    for prefix, meta in preprocess(args).items():
        print(
            f"{prefix}: {meta['num_documents']:,} documents, {meta['num_sequences']:,} sequences, "
            f"{meta['num_tokens']:,} tokens ({meta['dtype']}) of {meta['vocab_size']:,} ids; "
            f"{meta['empty_documents']} empty, {meta['bad_lines']} bad lines"
        )


if __name__ == "__main__":
    run_main(main)

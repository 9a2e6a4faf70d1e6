"""Join token files made with the same vocabulary, such as the shards of `--shard i/n`."""

import time
from dataclasses import dataclass

from lm_experiments_tools.tools.tokenize import check_output


@dataclass(frozen=True, kw_only=True)
class MergeArgs:
    """Which token files to join."""

    input: tuple[str, ...]
    """Token prefixes, in the order in which they are joined; or the common prefix of shards, in any order."""
    output: str
    """Prefix: PREFIX.bin, PREFIX.idx and PREFIX.json are written."""
    overwrite: bool = False
    """Replace token files of other text, or of another vocabulary."""


def run(args: MergeArgs) -> None:
    """Join token files, and print the number of their documents and tokens."""
    from lm_experiments_tools.data.tokens.merge import merge_datasets

    check_output(args.output)
    start = time.perf_counter()
    meta = merge_datasets(args.input, args.output, overwrite=args.overwrite)
    print(
        f"{meta['num_documents']:,} documents, {meta['num_tokens']:,} tokens, in {time.perf_counter() - start:.1f} s: "
        f"{args.output}.bin, .idx"
    )

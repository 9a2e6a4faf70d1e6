"""Tokenizers for BERT: WordPiece from a vocab.txt, or any other `Tokenizer`.

| `tokenizer_type` | input | tokenizer |
|---|---|---|
| `BertWordPieceLowerCase` | `vocab_file`, one subword per line | BERT's uncased tokenizer: lower case, no accents |
| `BertWordPieceCase` | `vocab_file` | BERT's cased tokenizer |
| `HFTokenizer` | `name_or_path`, a folder, a file or a name on the hub | that of `Tokenizer.load` |
"""

import os
from pathlib import Path

from lm_experiments_tools.checkpoint.manifest import verify_model
from lm_experiments_tools.data.text.tokenizer import Tokenizer
from lm_experiments_tools.data.tokens.indexed import IndexedDataset
from lm_experiments_tools.data.tokens.tokenize import check_vocabulary, open_tokenizer, report_unknown
from lm_experiments_tools.errors import UserError

WORDPIECE_TYPES = ("BertWordPieceLowerCase", "BertWordPieceCase")
TOKENIZER_TYPES = ("HFTokenizer", *WORDPIECE_TYPES)


def build_tokenizer(
    tokenizer_type: str, *, vocab_file: str | os.PathLike | None = None, name_or_path: str | os.PathLike | None = None
) -> Tokenizer:
    """Load a tokenizer for BERT's training data.

    Args:
        tokenizer_type: "BertWordPieceLowerCase", "BertWordPieceCase" or "HFTokenizer".
        vocab_file: a vocab.txt, or a folder that contains one, for WordPiece.
        name_or_path: folder, file or hub name of an HFTokenizer.

    Raises:
        UserError: the tokenizer cannot be loaded, or lacks a special token that BERT needs.
    """
    if tokenizer_type in WORDPIECE_TYPES:
        if vocab_file is None:
            raise UserError(f"--tokenizer-type {tokenizer_type} needs --vocab-file, a vocab.txt")
        path = Path(vocab_file)
        verify_model(path)
        path = path / "vocab.txt" if path.is_dir() else path
        if not path.is_file():
            raise UserError(f"the vocabulary {path} does not exist; `lmtools vocab --type wordpiece` trains one")
        return open_tokenizer(path, lowercase=tokenizer_type == "BertWordPieceLowerCase")
    if tokenizer_type != "HFTokenizer":
        raise UserError(f"--tokenizer-type {tokenizer_type} is none of {', '.join(TOKENIZER_TYPES)}, which BERT needs")
    if name_or_path is None:
        raise UserError("--tokenizer-type HFTokenizer needs --tokenizer-name-or-path, a folder or a hub name")
    tokenizer = open_tokenizer(name_or_path, "--tokenizer")
    if missing := [f"{role}_token" for role in ("mask", "pad") if tokenizer.roles.get(role) is None]:
        raise UserError(
            f"the tokenizer {name_or_path} has no {', '.join(missing)}, which BERT needs: add them by "
            f"tokenizer.add_special_tokens({{{missing[0]!r}: '[{missing[0][:-6].upper()}]'}}) and save_pretrained()"
        )
    return tokenizer


def check_tokenizer(data: IndexedDataset, tokenizer: Tokenizer) -> None:
    """Check that a token file was made with `tokenizer` (see `check_vocabulary`), and log its unknown tokens."""
    check_vocabulary(data, tokenizer)
    report_unknown(data, tokenizer.unk_id)

"""Open the vocabulary and token files of a T5 pre-training run, without importing torch."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

from lm_experiments_tools.config.flags import is_given
from lm_experiments_tools.config.phases import phases_of
from lm_experiments_tools.data.text.tokenizer import BYTES, Tokenizer
from lm_experiments_tools.data.tokens.indexed import IndexedDataset, token_prefix
from lm_experiments_tools.data.tokens.tokenize import (
    check_vocabulary,
    ensure_tokenized,
    open_tokenizer,
    report_unknown,
)
from lm_experiments_tools.errors import UserError

if TYPE_CHECKING:
    from lm_experiments_tools.config.bert import BertPretrainingArgs
    from lm_experiments_tools.config.pretraining import T5PretrainingArgs

logger = logging.getLogger(__name__)

CACHE = Path(".cache") / "tokens"  # below the working directory

USUAL_VOCABULARY = "./vocabs/sentencepiece.model"  # the default of --vocab in t5-experiments


def sources_of_phases(args: T5PretrainingArgs) -> list[T5Sources]:
    """Open vocabulary and data of each phase; a run without `--phases` has one. UserError for two vocabularies."""
    sources = [T5Sources(phase) for phase in phases_of(args)]
    for number, found in enumerate(sources, 1):
        if found.vocabulary.fingerprint != sources[0].vocabulary.fingerprint:
            paths = sources[0].vocabulary.path, found.vocabulary.path
            raise UserError(f"phases 1 and {number} have different vocabularies, {paths[0]} and {paths[1]}.")
    return sources


class T5Sources:
    """Vocabulary and token files of a run, each opened once.

    Relative paths refer to `--working_dir`. Create the object before the process changes to that folder.

    Attributes:
        vocabulary: `--vocab`, by default the one that made the first token file; for raw text `USUAL_VOCABULARY`.

    Raises:
        UserError: the vocabulary is missing or invalid, or a token file is incomplete, damaged or made with another
            vocabulary.
    """

    def __init__(self, args: T5PretrainingArgs) -> None:
        folder = args.working_folder()
        self._args, self._folder = args, "" if folder == "." else os.path.abspath(folder)
        paths = [args.valid_data_path] if args.valid_data_path else []
        if not (args.validate_only and paths):
            paths = [*args.data_path, *paths]
        elif args.vocab is None:
            paths = [*args.data_path[:1], *paths]
        self._token_files: dict[str, IndexedDataset] = {}
        for path in paths:
            if (prefix := token_prefix(self._from_anywhere(path))) is not None:
                self._token_files[path] = IndexedDataset(prefix)
        self._opened: dict[str, IndexedDataset] = {}
        vocab = args.vocab or self._recorded()
        self.vocabulary = open_tokenizer(found if os.path.exists(found := self._from_anywhere(vocab)) else vocab)
        for flag, word in (("append_eos", "no_append_eos"), ("document_per_line", "document_per_line")):
            if is_given(args, flag) and len(self._token_files) == len(set(paths)):
                raise UserError(f"--{word} is about raw text, and {', '.join(paths)} is tokenized.")
        for tokens in self._token_files.values():
            check_vocabulary(tokens, self.vocabulary)

    def is_tokenized(self, path: str) -> bool:
        """Return True if a data path names a token file, False for text and datasets."""
        return path in self._token_files

    def tokens(self, path: str) -> IndexedDataset:
        """Open the token file of a data path. Text is tokenized first and cached. Raises UserError."""
        if path not in self._opened:
            self._opened[path] = self._open(path)
            report_unknown(self._opened[path], self.vocabulary.unk_id)
        return self._opened[path]

    def add(self, tokens: IndexedDataset) -> str:
        """Register a token file that is already open, and return the data path under which `tokens` finds it."""
        self._opened[tokens.prefix] = tokens
        return tokens.prefix

    def _open(self, path: str) -> IndexedDataset:
        if not self.is_tokenized(path):
            return tokenized(path, self.vocabulary, self._args, append_eos=self._args.ends_documents())
        tokens = self._token_files[path]
        if self._args.objective().parts_documents and tokens.meta.get("append_eos") is False:
            logger.warning(
                "%s has no EOS between its documents, which --task %s needs: tokenize again with --append_eos",
                tokens.prefix,
                self._args.task,
            )
        return tokens

    def _from_anywhere(self, path: str) -> str:
        """The same file for a process that has entered `--working_dir` and for one that has not."""
        return os.path.join(self._folder, path)

    def _recorded(self) -> Path:
        """The vocabulary that made the token file of the first data path, or of the validation data without one."""
        flag = "data_path" if self._args.data_path else "valid_data_path"
        path = self._args.data_path[0] if self._args.data_path else self._args.valid_data_path
        if not self.is_tokenized(path):
            if not os.path.exists(self._from_anywhere(path)):
                raise UserError(f"--{flag} {path}: there is neither a token prefix (.idx, .bin) nor text.")
            if os.path.isfile(usual := self._from_anywhere(USUAL_VOCABULARY)):
                return Path(usual)
            raise UserError(
                f"--vocab is missing, and {path} records none: give a SentencePiece .model file (`lmtools vocab` "
                "trains one), the folder of a tokenizer, or bytes."
            )
        tokens = self._token_files[path]
        made_with = tokens.meta.get("vocab_file")
        if made_with == BYTES:
            return Path(BYTES)
        if made_with is not None:
            named = Path(made_with)
            for found in (named, Path(tokens.prefix).parent / named.name):
                if found.exists():
                    return found
        raise UserError(f"--vocab is missing, and the vocabulary of {tokens.meta_path} ({made_with}) is not there.")


def tokenized(
    path: str, vocabulary: Tokenizer, args: T5PretrainingArgs | BertPretrainingArgs, *, append_eos: bool
) -> IndexedDataset:
    """Tokenize a text file into a cached token file and open it. UserError beyond `--max_bad_lines`."""
    prefix = ensure_tokenized(
        path, vocabulary, CACHE, append_eos=append_eos, workers=args.data_n_workers, text_key=args.text_key,
        document_per_line=args.document_per_line, max_bad_lines=args.max_bad_lines,
    )  # fmt: skip
    tokens = IndexedDataset(prefix)
    bad_lines = tokens.meta.get("bad_lines", 0)
    if bad_lines > args.max_bad_lines:  # tokenized earlier
        raise UserError(
            f"{path} has {bad_lines} bad lines, listed in {prefix}.bad_lines.jsonl, more than the "
            f"{args.max_bad_lines} that --max_bad_lines allows"
        )
    return tokens

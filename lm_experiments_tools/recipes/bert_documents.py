"""Data of a BERT pre-training run on plain text: `--packing` documents, none or stream."""

from __future__ import annotations

import logging
import os
import tempfile
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from lm_experiments_tools.data.mixture import MixtureDataset
from lm_experiments_tools.data.objectives.document_rows import DocumentRows
from lm_experiments_tools.data.objectives.masked_rows import MaskedRows, MaskingRate
from lm_experiments_tools.data.objectives.mlm import TokenBlocks
from lm_experiments_tools.data.order import stream_key
from lm_experiments_tools.data.tokens.checked import open_checked
from lm_experiments_tools.data.tokens.files import load_vocabulary, token_prefix, warn_unrecorded
from lm_experiments_tools.data.tokens.tokenize import check_vocabulary
from lm_experiments_tools.files import locked
from lm_experiments_tools.recipes.t5_sources import tokenized

if TYPE_CHECKING:
    from lm_experiments_tools.config.bert import BertPretrainingArgs
    from lm_experiments_tools.data.loader import SampleDataset
    from lm_experiments_tools.data.text.vocabulary import Vocabulary
    from lm_experiments_tools.data.tokens.indexed import IndexedDataset
    from megatron.tokenizers import BertDataTokenizer

logger = logging.getLogger(__name__)

CACHE = Path(".cache") / "tokenizers"  # below the working directory
_WELL_FILLED = 0.95  # of the cells of packed rows


class DocumentData:
    """Token files of plain text, and the masked rows that are made of them.

    Args:
        tokenizer: the one that `args` names.
    """

    def __init__(self, args: BertPretrainingArgs, tokenizer: BertDataTokenizer) -> None:
        self.args, self.tokenizer = args, tokenizer

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The tokenizer for text that is not tokenized yet, from its own folder or from a copy in `CACHE`."""
        if self.args.tokenizer is not None and os.path.isdir(self.args.tokenizer):
            return load_vocabulary(self.args.tokenizer)
        folder = CACHE / self.tokenizer.fingerprint[:16]
        with locked(folder.with_suffix(".lock")):
            if not folder.is_dir():
                with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
                    self.tokenizer.save(Path(scratch) / folder.name)
                    os.replace(Path(scratch) / folder.name, folder)
        return load_vocabulary(folder)

    def tokens(self, path: str) -> IndexedDataset:
        """The token file of a data path; text is tokenized first (once, cached).

        Raises:
            UserError: text or tokens that are missing, damaged, or made with another tokenizer.
        """
        prefix = token_prefix(path)
        if prefix is None:
            return tokenized(path, self.vocabulary, self.args, append_eos=False)
        tokens = open_checked(prefix)
        warn_unrecorded(prefix, tokens.meta)
        if tokens.meta.get("vocab_sha256") != self.tokenizer.fingerprint:  # not made by megatron.preprocess_data
            check_vocabulary(prefix, tokens.meta, self.vocabulary)
        return tokens

    def training(self, files: list[IndexedDataset]) -> MaskedRows:
        """Masked rows of the token files of `--data_path`, mixed."""
        args, seed = self.args, self.args.seed
        rows: SampleDataset
        if len(files) == 1:
            rows = self._rows(files[0], seed)
        else:  # a seed for each: equal ones would give members of equal size the same order
            members = [self._rows(tokens, stream_key(seed, f"member {n}")) for n, tokens in enumerate(files)]
            rows = MixtureDataset(members, pad_id=self.tokenizer.pad, **args.mixing())
        return self._masked(rows, MaskingRate(args.mlm_prob, args.mlm_prob_end, args.mlm_prob_samples or 1))

    def validation(self, tokens: IndexedDataset) -> MaskedRows:
        """Masked rows of the token file of `--valid_data_path`."""
        args = self.args
        return self._masked(self._rows(tokens, args.seed), MaskingRate(args.valid_mlm_prob or args.mlm_prob))

    def _rows(self, tokens: IndexedDataset, seed: int) -> DocumentRows | TokenBlocks:
        args, tokenizer = self.args, self.tokenizer
        options = {"pad_id": tokenizer.pad, "vocab_size": tokenizer.vocab_size, "seed": seed}
        if args.packing == "stream":
            return TokenBlocks(tokens, args.input_seq_len, **options)
        rows = DocumentRows(
            tokens,
            args.input_seq_len,
            cls_id=tokenizer.cls,
            sep_id=tokenizer.sep,
            packed=args.packing == "documents",
            min_length=args.min_document_length,
            has_end=bool(tokens.meta.get("append_eos") or tokens.meta.get("append_eod")),
            **options,
        )
        if rows.packed and rows.fill < _WELL_FILLED:
            logger.warning(
                "%s: packed rows are %.0f %% full, because few documents fit next to another one: try another "
                "--input_seq_len than %d",
                tokens.prefix, 100 * rows.fill, args.input_seq_len,
            )  # fmt: skip
        return rows

    def _masked(self, rows: SampleDataset, rate: MaskingRate) -> MaskedRows:
        args, tokenizer = self.args, self.tokenizer
        return MaskedRows(
            rows,
            rate,
            mask_id=tokenizer.mask,
            special_ids=tokenizer.special_ids,
            vocab_size=tokenizer.vocab_size,
            replace=args.mask_replace,
            starts_word=tokenizer.starts_word if args.whole_word else None,
            seed=args.seed,
        )

"""BERT pre-training with masked language modelling and sentence pairs."""

from __future__ import annotations

import glob
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm_experiments_tools.backends.collective import on_all
from lm_experiments_tools.config.bert import SENTENCES
from lm_experiments_tools.data.dataset import Dataset
from lm_experiments_tools.data.loader import TrainLoader, ValidLoader
from lm_experiments_tools.data.objectives.document_rows import DocumentRows
from lm_experiments_tools.data.objectives.mlm import MaskedLM
from lm_experiments_tools.data.objectives.objective import TokenIds
from lm_experiments_tools.data.objectives.token_rows import TokenRows
from lm_experiments_tools.data.tokens.indexed import IndexedDataset, token_prefix
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.labels import IGNORED_LABEL
from lm_experiments_tools.models.build import check_positions
from lm_experiments_tools.models.packed_rows import prepare
from lm_experiments_tools.modules.inspection import forward_names_of
from lm_experiments_tools.recipes.common import (
    PretrainingData,
    distilled_loss,
    labels_alone,
    read_at_random,
    save_tokenizer,
)
from lm_experiments_tools.recipes.recipe import Pretraining
from lm_experiments_tools.recipes.report import unmasked, write_report
from lm_experiments_tools.recipes.t5_sources import tokenized
from lm_experiments_tools.training.losses import bert_loss
from megatron.bert_dataset import BertDataset
from megatron.tokenizers import build_tokenizer, check_tokenizer

if TYPE_CHECKING:
    from torch import nn

    from lm_experiments_tools.backends.backend import Backend
    from lm_experiments_tools.config.bert import BertPretrainingArgs
    from lm_experiments_tools.data.text.tokenizer import Tokenizer
    from lm_experiments_tools.models.from_args import ModelSource
    from lm_experiments_tools.training.phases import Phase

logger = logging.getLogger(__name__)

CACHE = Path(".cache") / "bert_samples"  # below the working directory


class BertPretraining(Pretraining):
    """A run of the script run_bert_pretraining.py."""

    script = "bert"

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of all phases, loaded on first use. Every worker must read this property at the same time."""
        return on_all(self.backend, lambda: bert_tokenizer(self.args))

    @property
    def special_tokens(self) -> dict[str, int | None]:
        tokenizer = self.tokenizer
        own = {role: getattr(tokenizer, f"{role}_id") for role in ("pad", "cls", "sep", "mask")}
        return {**own, "bos": tokenizer.cls_id, "eos": tokenizer.sep_id}

    def check(self, args: BertPretrainingArgs, source: ModelSource) -> None:
        tokenizer = self.tokenizer
        on_all(self.backend, lambda: check_bert_model(args, source, tokenizer))

    def training_tokens(self, phase: Phase) -> list[IndexedDataset]:
        args, tokenizer = phase.args, self.tokenizer
        is_text = args.packing != SENTENCES
        return [open_documents(path, args, tokenizer) if is_text else open_sentences(path) for path in args.data_path]

    def build_data(self, phase: Phase, source: ModelSource) -> PretrainingData:
        return bert_pretraining_data(phase.args, self.backend, self.tokenizer)

    def loop_options(self, args: BertPretrainingArgs, source: ModelSource, model: nn.Module) -> dict[str, Any]:
        backend, transform = self.backend, None
        if args.packing == "documents":
            transform = on_all(backend, lambda: prepare(model))
        loss = bert_loss(args.use_nsp, labels_alone(args, backend, model))
        loss = distilled_loss(args, backend, model, "encoder", loss)
        return {"batch_transform_fn": transform, "batch_metrics_fn": bert_metrics, "loss": loss}

    def metric_names(self, args: BertPretrainingArgs) -> Sequence[str]:
        return ("accuracy_mlm", "accuracy_nsp") if args.use_nsp else ("accuracy_mlm",)

    def commands(self, folder: str) -> list[str]:
        return [f"lmtools generate {folder} 'The {self.tokenizer.piece(self.tokenizer.mask_id)} of the text'"]

    def report(self) -> None:
        write_report(self.trainer, self.tokenizer, unmasked)


def bert_metrics(batch: Mapping[str, Any], outputs: Mapping[str, Any]) -> dict[str, Any]:
    """Count correct predictions of masked tokens and of sentence pairs: name -> (number correct, number of all).

    Args:
        outputs: "prediction_logits" (or "logits" for a model with one head), float[rows, length, vocabulary] or
            [masked tokens, vocabulary]; "seq_relationship_logits", float[rows, 2].
    """
    values: dict[str, Any] = {}
    logits = outputs.get("prediction_logits", outputs.get("logits"))
    if logits is not None:
        labels = batch["labels"]
        labels = labels[labels != IGNORED_LABEL] if logits.dim() == 2 else labels
        values["accuracy_mlm"] = _right_and_all(logits, labels)
    if "seq_relationship_logits" in outputs and "next_sentence_label" in batch:
        values["accuracy_nsp"] = _right_and_all(outputs["seq_relationship_logits"], batch["next_sentence_label"])
    return values


def _right_and_all(logits: Any, labels: Any) -> tuple[Any, Any]:
    return (logits.argmax(-1) == labels).sum(), (labels != IGNORED_LABEL).sum()


def check_bert_model(args: BertPretrainingArgs, model: ModelSource, tokenizer: Tokenizer) -> None:
    """Check that a BERT model fits its training data. Raises UserError.

    Reasons are a missing head for sentence pairs, too few positions or token types, or another padding id than the
    tokenizer's.
    """
    config = model.config
    if model.may_be_decoder and config.is_decoder:
        raise UserError(
            f"--model_cls {args.model_cls} sees only the tokens to its left (is_decoder): add --model_options "
            "is_decoder=false, or train it by run_t5_pretraining.py --task causal_lm."
        )
    if args.use_nsp and "next_sentence_label" not in forward_names_of(model.cls):
        raise UserError(
            f"--model_cls {args.model_cls} takes no next_sentence_label: choose --packing documents for plain text, "
            "--use_nsp 0 for Megatron's samples, or a class such as transformers:BertForPreTraining."
        )
    check_positions(config, args.input_seq_len, f"--input_seq_len {args.input_seq_len}")
    if args.use_nsp and getattr(config, "type_vocab_size", 2) < 2:
        raise UserError("type_vocab_size in the model configuration must be 2 for pairs of sentences (--use_nsp 1)")
    if getattr(config, "pad_token_id", None) not in (None, tokenizer.pad_id):
        raise UserError(
            f"pad_token_id in the model configuration is {config.pad_token_id}, but the tokenizer {tokenizer.path} "
            f"pads with {tokenizer.pad_id}: add --model_options pad_token_id={tokenizer.pad_id}."
        )


# ---- data -----------------------------------------------------------------------------------------------------------
def bert_pretraining_data(args: BertPretrainingArgs, backend: Backend, tokenizer: Tokenizer) -> PretrainingData:
    """Open training and validation data. Every worker must call it. Raises UserError."""
    if args.packing == SENTENCES and backend.is_main and args.without_effect():
        logger.info("%s: accepted, and without effect here", ", ".join(f"--{flag}" for flag in args.without_effect()))
    # Rank 0 goes first: it checks files, and leaves sample mappings for the others to find.
    make = bert_datasets if args.packing == SENTENCES else document_datasets
    tokenizer_dir = save_tokenizer(args, backend, tokenizer.save)  # refused before hours of tokenizing
    opened = on_all(backend, lambda: make(args, tokenizer) if backend.is_main else None)
    train, valid = on_all(backend, lambda: opened or make(args, tokenizer))
    where = (args.rows_on_worker(backend.world_size), backend.rank, backend.world_size)
    return PretrainingData(
        tokenizer,
        tokenizer.size,
        None if train is None else TrainLoader(train, *where),
        None if valid is None else ValidLoader(valid, *where, num_samples=args.valid_samples),
        tokenizer_dir,
        f"{(train or valid).describe()}, vocabulary {tokenizer.size:,}",
    )


def bert_tokenizer(args: BertPretrainingArgs) -> Tokenizer:
    if args.tokenizer is not None:
        return build_tokenizer("HFTokenizer", name_or_path=args.tokenizer)
    kind = "BertWordPieceLowerCase" if args.lower_case else "BertWordPieceCase"
    return build_tokenizer(kind, vocab_file=args.vocab_file)


def open_training(paths: Sequence[str], open_tokens: Callable[[str], IndexedDataset]) -> dict[str, IndexedDataset]:
    """Open the token files of the training data, by path, without read-ahead if they exceed the memory together."""
    found = {path: open_tokens(path) for path in paths}
    read_at_random([*found.values()])
    return found


def bert_datasets(
    args: BertPretrainingArgs,
    tokenizer: Tokenizer,
    open_tokens: Callable[[str], IndexedDataset] | None = None,
) -> tuple[Dataset | None, Dataset | None]:
    """Build the training and validation samples of BERT pre-training from Megatron's files of sentences.

    Training samples are None with `--validate_only`, validation samples without `--valid_data_path`.
    """
    open_tokens = open_tokens or open_sentences
    rows = partial(
        BertDataset,
        tokenizer=tokenizer,
        max_seq_length=args.input_seq_len,
        masked_lm_prob=args.mlm_prob,
        short_seq_prob=args.short_seq_prob,
        binary_head=args.use_nsp,
        nsp=args.nsp,
        mask_label_id=IGNORED_LABEL,
        whole_word=args.whole_word,
        max_ngram=args.max_ngram,
        max_sentence_length=args.max_sentence_length,
        max_unread=args.max_unread,
        cache_dir=CACHE / args.data_name,
    )
    passes = {"num_epochs": args.data_n_epochs, "max_num_samples": args.data_n_samples}

    def train_rows(path: str, seed: int) -> BertDataset:
        return rows(tokens[path], seed=seed, **passes)

    train = valid = None
    if not args.validate_only:
        tokens = open_training(args.data_path, open_tokens)
        train = Dataset.mixed(args.data_path, train_rows, args.seed, args.mixing())
    if args.valid_data_path is not None:
        valid = Dataset(rows(open_tokens(args.valid_data_path), seed=args.seed))
    return train, valid


# ---- plain text -----------------------------------------------------------------------------------------------------
def document_datasets(
    args: BertPretrainingArgs, tokenizer: Tokenizer, open_tokens: Callable[[str], IndexedDataset] | None = None
) -> tuple[Dataset | None, Dataset | None]:
    """Build the training and validation samples of BERT pre-training from plain text; see `bert_datasets`."""
    open_tokens = open_tokens or partial(open_documents, args=args, tokenizer=tokenizer)
    vocabulary = TokenIds(
        tokenizer.size, tokenizer.pad_id, mask_id=tokenizer.mask_id, special_ids=tokenizer.control_ids
    )
    starts_word = tokenizer.starts_word if args.whole_word else None

    def rows(tokens: IndexedDataset, seed: int, probability: float = args.mlm_prob) -> DocumentRows | TokenRows:
        objective = MaskedLM.create(
            vocabulary, args.input_seq_len, model_kind="encoder",
            mlm_probability=probability, replace=args.mask_replace, starts_word=starts_word,
        )  # fmt: skip
        if args.packing == "stream":
            return TokenRows(tokens, objective, seed)
        has_end = bool(tokens.meta.get("append_eos") or tokens.meta.get("append_eod"))
        return DocumentRows(
            tokens, objective, cls_id=tokenizer.cls_id, sep_id=tokenizer.sep_id, has_end=has_end, seed=seed,
            packed=args.packing == "documents", min_length=args.min_document_length,
        )  # fmt: skip

    train = valid = None
    if not args.validate_only:
        tokens = open_training(args.data_path, open_tokens)
        train = Dataset.mixed(args.data_path, lambda path, seed: rows(tokens[path], seed), args.seed, args.mixing())
    if args.valid_data_path is not None:
        tokens_of_validation = open_tokens(args.valid_data_path)
        valid = Dataset(rows(tokens_of_validation, args.seed, args.valid_mlm_prob or args.mlm_prob))
    return train, valid


def open_documents(path: str, args: BertPretrainingArgs, tokenizer: Tokenizer) -> IndexedDataset:
    """Open the token file of a data path. Text is tokenized first and cached. Raises UserError."""
    prefix = token_prefix(path)
    tokens = tokenized(path, tokenizer, args, append_eos=False) if prefix is None else IndexedDataset(prefix)
    check_tokenizer(tokens, tokenizer)
    return tokens


# ---- Megatron's sentences -------------------------------------------------------------------------------------------
def open_sentences(path: str) -> IndexedDataset:
    """Open the token file PREFIX.bin with PREFIX.idx. Raises UserError for text or missing files."""
    if (found := token_prefix(path)) is not None:
        return IndexedDataset(found)
    prefix = path.removesuffix(".bin").removesuffix(".idx")
    longer = [name.removesuffix(".idx") for name in sorted(glob.glob(f"{glob.escape(prefix)}_*.idx"))]
    if longer:
        raise UserError(f"there is no {prefix}.idx, but {' and '.join(longer)}: give the whole prefix")
    found = "is text" if os.path.exists(path) else f"does not exist: there is no {prefix}.idx"
    raise UserError(
        f"the data {path} {found}; give --packing documents for rows of plain text, or the prefix of token files that "
        "`python -m megatron.preprocess_data --input TEXT --output-prefix PREFIX --split-sentences ...` makes from "
        "JSON lines (PREFIX_text_sentence)"
    )

"""From `--data_path` and `--valid_data_path` to the loaders of a T5 pre-training run."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lm_experiments_tools.backends.collective import on_all, on_main
from lm_experiments_tools.data.buckets import BucketedDataset, SortedSamples
from lm_experiments_tools.data.loader import TrainLoader, TrainSource, ValidLoader, ValidSource
from lm_experiments_tools.data.objectives.registry import ObjectiveContext, mixed_dataset, objective_dataset
from lm_experiments_tools.data.text.vocabulary import Vocabulary
from lm_experiments_tools.data.tokens.indexed import IndexedDataset, token_prefix
from lm_experiments_tools.data.tokens.tokenize import ensure_tokenized
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.recipes.objectives import trained_kind
from lm_experiments_tools.training.micro_batches import IGNORED_LABEL

if TYPE_CHECKING:
    from lm_experiments_tools.backends.backend import Backend
    from lm_experiments_tools.config.pretraining import T5PretrainingArgs

logger = logging.getLogger(__name__)

CACHE = Path(".cache") / "tokens"  # below the working directory


@dataclass
class PretrainingData:
    """What a run reads.

    Attributes:
        train: this worker's endless batches; None with `--validate_only`, unless they bring the validation data.
        valid, valid_tokens: this worker's part of the validation examples, and the documents they are cut from; None
            without `--valid_data_path`.
        tokenizer_dir: Hugging Face tokenizer files of the vocabulary; None for a run that saves nothing.
        objective: the objective and the size of the data, for the log.
    """

    vocabulary: Vocabulary
    train: TrainSource | None
    valid: ValidSource | None
    valid_tokens: IndexedDataset | None
    tokenizer_dir: Path | None
    objective: str


def pretraining_metrics(batch: Mapping[str, Any], outputs: Mapping[str, Any]) -> dict[str, Any]:
    """A `batch_metrics_fn`: with `--use_generate_on_valid`, the part of target tokens generated rightly.

    `generation_accuracy` compares position by position, so one token too many makes all that follow wrong.
    """
    if "generation_outputs" not in outputs:
        return {}
    labels, generated = batch["labels"], outputs["generation_outputs"][:, 1:]  # without the start token
    width = min(labels.shape[1], generated.shape[1])
    right = (generated[:, :width] == labels[:, :width]).sum()
    return {"generation_accuracy": (right, (labels != IGNORED_LABEL).sum())}


def pretraining_data(args: T5PretrainingArgs, backend: Backend) -> PretrainingData:
    """Open (and where it is raw text, first tokenize) training and validation data.

    Every worker calls it; text is tokenized once, by the first of each machine, while the others wait.

    Raises:
        UserError: data or vocabulary that is missing, empty, damaged or of another vocabulary.
    """
    vocab_path = vocabulary_path(args)
    vocabulary = Vocabulary.load(vocab_path)
    pipeline = choose_pipeline(args)
    if pipeline == "seqio":
        from lm_experiments_tools.data.seqio.client import check_module, check_possible, seqio_data

        on_all(backend, lambda: check_possible(args))  # before validation text is tokenized
        if ":" in args.task:
            on_all(backend, lambda: check_module(args.task))
    valid: ValidSource | None = None
    valid_tokens = None
    if args.valid_data_path is not None:
        valid_tokens = on_all(backend, lambda: open_tokens(args.valid_data_path, vocab_path, args))
    train: TrainSource | None = None
    if args.validate_only and valid_tokens is not None:
        objective = f"{args.task}, validation only"
    elif pipeline == "seqio":
        train, valid, objective = seqio_data(args, backend, vocabulary, vocab_path)
    elif args.streaming:
        from lm_experiments_tools.data.streaming.stream import streaming_data

        train, objective = streaming_data(args, backend, vocabulary, vocab_path, trained_kind(args))
    else:
        train = on_all(backend, lambda: _train_loader(args, backend, vocabulary, vocab_path))
        objective = train.dataset.describe()
    if valid_tokens is not None and valid is None:
        valid = on_all(backend, lambda: _valid_loader(args, backend, vocabulary, valid_tokens))
    tokenizer_dir = Path(args.model_path) / "tokenizer" if args.model_path else None
    if tokenizer_dir is not None:
        on_main(backend, lambda: vocabulary.save_tokenizer(tokenizer_dir))
    objective = f"{objective}, vocabulary {vocabulary.size:,}"
    return PretrainingData(vocabulary, train, valid, valid_tokens, tokenizer_dir, objective)


def choose_pipeline(args: T5PretrainingArgs) -> Literal["native", "seqio"]:
    """`--data_pipeline`, with auto decided: seqio for raw text and for registered tasks, native for all else."""
    if args.data_pipeline != "auto":
        return args.data_pipeline
    if ":" in args.task:
        return "seqio"
    if args.of_native_pipeline() or len(args.data_path) > 1 or not args.objective().in_seqio:
        return "native"
    path = args.data_path[0]
    if token_prefix(path) is not None or not os.path.exists(path):
        return "native"
    if importlib.util.find_spec("seqio") is None:
        logger.info("seqio is not installed, so the text is tokenized once and read natively (--data_pipeline native)")
        return "native"
    logger.info(
        "reading raw text through seqio (--data_pipeline seqio); tokenized once by `lmtools tokenize --input %s "
        "--vocab %s --output PREFIX` it is read about 50 times faster and resumed at once",
        *(path, args.vocab),
    )
    return "seqio"


def open_tokens(path: str, vocab_path: Path, args: T5PretrainingArgs) -> IndexedDataset:
    """The token file of `path`, tokenized first (once, cached) where it is text."""
    prefix = ensure_tokenized(
        path,
        vocab_path,
        CACHE,
        workers=args.data_n_workers,
        text_key=args.text_key,
        max_bad_lines=args.max_bad_lines,
    )
    tokens = IndexedDataset(prefix)
    bad_lines = tokens.meta.get("bad_lines", 0)
    if str(prefix) != str(path) and bad_lines > args.max_bad_lines:  # tokenized earlier, with more patience
        raise UserError(
            f"{path} has {bad_lines} bad lines, listed in {prefix}.bad_lines.jsonl, more than --max_bad_lines "
            f"{args.max_bad_lines} allows; mend them, or raise the limit"
        )
    return tokens


def _train_loader(args: T5PretrainingArgs, backend: Backend, vocabulary: Vocabulary, vocab_path: Path) -> TrainLoader:
    tokens = [open_tokens(path, vocab_path, args) for path in args.data_path]
    dataset = mixed_dataset(_context(args, vocabulary), tokens, backend.world_size)
    return TrainLoader(dataset, args.rows_per_worker(), backend.rank, backend.world_size)


def _valid_loader(
    args: T5PretrainingArgs, backend: Backend, vocabulary: Vocabulary, tokens: IndexedDataset
) -> ValidLoader:
    dataset = objective_dataset(_context(args, vocabulary), tokens)
    if isinstance(dataset, BucketedDataset):  # --valid_samples of a bucketed order would be of a few lengths only
        dataset = SortedSamples(dataset.dataset, args.valid_samples)
    where = (backend.rank, backend.world_size)
    return ValidLoader(dataset, args.rows_per_worker(), *where, num_samples=args.valid_samples)


def _context(args: T5PretrainingArgs, vocabulary: Vocabulary) -> ObjectiveContext:
    return ObjectiveContext(args, vocabulary, trained_kind(args), args.seed)


def vocabulary_path(args: T5PretrainingArgs) -> Path:
    """`--vocab`, or the file that made the token prefix `--data_path`."""
    if args.vocab is not None:
        return Path(args.vocab)
    if not args.data_path:
        raise UserError(f"--task {args.task} needs --vocab: the SentencePiece .model file of its features")
    data_path = args.data_path[0]
    sidecar = Path(f"{data_path}.json")
    if not any(path.exists() for path in (sidecar, Path(data_path), Path(f"{data_path}.idx"))):
        raise UserError(f"--data_path {data_path}: there is neither a token prefix (.idx, .bin) nor text of this name")
    if not sidecar.is_file():
        raise UserError(
            f"--vocab is missing, and {data_path} is not a token prefix that records one ({sidecar} does not "
            "exist); give a SentencePiece .model file, for example one trained by `lmtools vocab`"
        )
    try:
        recorded = json.loads(sidecar.read_text(encoding="utf-8"))["vocab_file"]
    except (ValueError, LookupError, TypeError) as error:
        raise UserError(f"{sidecar} is damaged ({error}), so the vocabulary is not known; give --vocab") from error
    candidates = [Path(recorded), sidecar.parent / Path(recorded).name] if recorded else []
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    raise UserError(
        f"--vocab is missing, and the vocabulary that {sidecar} names ({recorded}) is not there; give --vocab"
    )

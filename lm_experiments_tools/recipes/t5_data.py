"""The data loaders of a T5 pre-training run: from token files, from text while it is read, or from a task of seqio."""

from __future__ import annotations

import logging
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lm_experiments_tools.backends.collective import on_all
from lm_experiments_tools.data.dataset import Dataset, ParallelDataset
from lm_experiments_tools.data.loader import TrainLoader, ValidLoader
from lm_experiments_tools.data.objectives.objective import Objective
from lm_experiments_tools.data.objectives.token_rows import TokenRows
from lm_experiments_tools.data.order import LongestFirst, MixedSteps
from lm_experiments_tools.data.seqio.client import SeqioExamples, SeqioWorker, ValidationExamples, check_installed
from lm_experiments_tools.data.seqio.job import Job
from lm_experiments_tools.data.streaming.stream import StreamedDataset
from lm_experiments_tools.data.streaming.text import StreamPlan
from lm_experiments_tools.data.tokens.indexed import IndexedDataset, token_prefix
from lm_experiments_tools.data.tokens.tokenize import TextEncoder
from lm_experiments_tools.data.workers import available_cores
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.names import resolve_name
from lm_experiments_tools.recipes.common import PretrainingData, read_at_random, save_tokenizer

if TYPE_CHECKING:
    from lm_experiments_tools.backends.backend import Backend
    from lm_experiments_tools.config.objectives import ModelKind
    from lm_experiments_tools.config.pretraining import T5PretrainingArgs
    from lm_experiments_tools.data.text.tokenizer import Tokenizer
    from lm_experiments_tools.recipes.t5_sources import T5Sources

logger = logging.getLogger(__name__)


def pretraining_data(
    args: T5PretrainingArgs, backend: Backend, sources: T5Sources, model_kind: ModelKind
) -> PretrainingData:
    """Open training and validation data. Raw text is tokenized first, by one worker of each machine.

    Every worker must call this function. Raises UserError.
    """
    vocabulary = sources.vocabulary
    # Both may refuse the settings, which must be known before hours of tokenizing.
    if args.is_registered_task():
        on_all(backend, lambda: check_installed(args.task))
    else:
        objective = on_all(backend, lambda: build_objective(args, vocabulary, model_kind))
    if args.task == "mlm" and backend.is_main:
        logger.warning(
            "--task mlm has no [CLS] and [SEP], and documents of a row attend to each other; for BERT's rows use "
            "run_bert_pretraining.py"
        )
    tokenizer_dir = save_tokenizer(args, backend, vocabulary.save)  # refused before hours of tokenizing
    valid: ValidLoader | None = None
    valid_tokens = None
    if args.valid_data_path is not None:
        valid_tokens = on_all(backend, lambda: sources.tokens(args.valid_data_path))
    train: TrainLoader | None = None
    if args.validate_only and valid_tokens is not None:
        described = f"{args.task}, validation only"
    elif args.is_registered_task():
        train, valid, described = seqio_data(args, backend, vocabulary)
    elif args.streaming:
        train, described = streaming_data(args, backend, vocabulary, objective)
    else:
        train = on_all(backend, lambda: _train_loader(args, objective, backend, sources))
        described = train.dataset.describe()
    if valid_tokens is not None and valid is None:
        valid = on_all(backend, lambda: _valid_loader(args, objective, backend, valid_tokens))
    described = f"{described}, vocabulary {vocabulary.size:,}"
    return PretrainingData(vocabulary, vocabulary.size, train, valid, tokenizer_dir, described)


def build_objective(args: T5PretrainingArgs, vocabulary: Tokenizer, model_kind: ModelKind) -> Objective:
    """Make the objective `--task`, with the flags that it reads as arguments of its class.

    Raises UserError: the objective refuses the settings or the vocabulary.
    """
    facts = args.objective()
    target_length = args.target_seq_len if facts.has_targets else None
    kind = resolve_name(facts.objective_class, Objective, f"--task {args.task}")
    return kind.create(vocabulary, args.input_seq_len, target_length, model_kind, **args.options_of_objective())


# ---- token files ----


def _train_loader(args: T5PretrainingArgs, objective: Objective, backend: Backend, sources: T5Sources) -> TrainLoader:
    tokens = [sources.tokens(path) for path in args.data_path]
    read_at_random(tokens)
    dataset = training_dataset(args, objective, tokens, backend.world_size)
    return TrainLoader(dataset, args.rows_on_worker(backend.world_size), backend.rank, backend.world_size)


def training_dataset(
    args: T5PretrainingArgs, objective: Objective, tokens: Sequence[IndexedDataset], world_size: int
) -> Dataset:
    """Build the dataset of an objective from one or several token files, mixed by `--data_weights`.

    Examples that differ in length are arranged by length within each step.
    """
    dataset = Dataset.mixed(tokens, lambda source, seed: TokenRows(source, objective, seed), args.seed, args.mixing())
    if args.data_n_workers and ":" in args.task:
        dataset = ParallelDataset(dataset, args.data_n_workers)
    if not args.objective().varies_in_length:
        return dataset
    rows = args.mix_rows or args.global_batch_size(world_size)
    return dataset.arranged(MixedSteps(dataset.lengths, len(dataset), rows, args.seed))


def _valid_loader(
    args: T5PretrainingArgs, objective: Objective, backend: Backend, tokens: IndexedDataset
) -> ValidLoader:
    dataset = Dataset(TokenRows(tokens, objective, args.seed))
    if args.objective().varies_in_length:
        num_samples = min(len(dataset), args.valid_samples or len(dataset))
        dataset = dataset.arranged(LongestFirst(dataset.lengths, num_samples))
    rows = args.rows_on_worker(backend.world_size)
    return ValidLoader(dataset, rows, backend.rank, backend.world_size, num_samples=args.valid_samples)


# ---- text while it is read, and seqio ----


def streaming_data(
    args: T5PretrainingArgs, backend: Backend, vocabulary: Tokenizer, objective: Objective
) -> tuple[TrainLoader, str]:
    """Build the data loader of `--streaming` and its description for the log.

    All ranks (training processes) must call this function. It reads and tokenizes the first text.

    Raises UserError: an input is missing, unreadable or empty.
    """

    def start() -> StreamedDataset:
        for path in args.data_path:
            if token_prefix(path) is not None:
                raise UserError(
                    f"--data_path {path} is tokenized already: leave out --streaming, which tokenizes text"
                )
        plan = StreamPlan.make(args.data_path, args.streams, args.seed, args.document_per_line)
        return StreamedDataset.start(
            plan,
            TextEncoder(vocabulary, args.text_key, args.ends_documents()),
            objective,
            max_bad_lines=args.max_bad_lines,
            num_workers=args.data_n_workers,
            rank=backend.rank,
            world_size=backend.world_size,
        )

    dataset = on_all(backend, start)
    plan = dataset.settings.plan
    if backend.is_main and plan.num_streams % backend.world_size:
        logger.warning(
            "the text can be divided into %d streams of equal size, which %d workers do not divide, so several read "
            "the same text: tokenize it before (lmtools tokenize), or give more or smaller files, or --streams",
            plan.num_streams,
            backend.world_size,
        )
    loader = TrainLoader(dataset, args.rows_on_worker(backend.world_size), backend.rank, backend.world_size)
    described = f"{len(plan.shards)} shards in {plan.num_streams} streams"
    return loader, f"{objective.describe()}; from a stream: {', '.join(args.data_path)}, {described}"


def seqio_data(
    args: T5PretrainingArgs, backend: Backend, vocabulary: Tokenizer
) -> tuple[TrainLoader, ValidLoader | None, str]:
    """Build training and validation data of `--task` with seqio. All ranks (training processes) must call it.

    Returns:
        Training batches of this rank, validation data of a registered task (or None), and a description for the log.

    Raises:
        UserError: a package is missing, or the task has no examples.
    """
    hosts = backend.gather(socket.gethostname())
    cores = max(1, available_cores() // hosts.count(hosts[backend.rank]))
    logs = Path(args.model_path, "logs") if args.model_path else Path(".cache", "seqio")
    job = Job(
        task=args.task,
        vocab_path=vocabulary.recorded_as,
        inputs_length=args.input_seq_len,
        targets_length=args.target_seq_len,
        seed=args.seed,
        validation=bool(args.needs_validation() or args.valid_samples),
        valid_samples=args.valid_samples,
        threads=args.data_n_workers or cores,
    )
    worker = on_all(backend, lambda: SeqioWorker(job, logs / f"seqio.rank{backend.rank}.log"))
    where = args.rows_on_worker(backend.world_size), backend.rank, backend.world_size
    train = TrainLoader(SeqioExamples(worker, *where[1:], vocabulary.pad_id), *where)
    valid = None
    if job.validation:
        examples = on_all(backend, lambda: ValidationExamples(worker, vocabulary.pad_id))
        valid = ValidLoader(examples, *where)
    return train, valid, f"{worker.title}, {job.inputs_length} inputs + {job.targets_length} targets"

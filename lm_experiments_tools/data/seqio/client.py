"""The training side of seqio: starts a process that runs TensorFlow, and reads batches from it.

Each training process has a worker process (worker.py) of its own. All of them make the same sequence of rows, which
depends only on the seed. Rank `rank` of `world_size` uses the rows k * world_size + rank for k = 0, 1, ...
"""

from __future__ import annotations

import importlib.util
import logging
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lm_experiments_tools.backends.collective import on_all
from lm_experiments_tools.data.dataset import SampleDataset
from lm_experiments_tools.data.loader import TrainSource, ValidLoader, ValidSource
from lm_experiments_tools.data.objectives.span_corruption import plan_spans, random_spans_lengths
from lm_experiments_tools.data.seqio.worker import PADDING, Job, work
from lm_experiments_tools.data.text.sentencepiece_tokenizer import SentencePieceTokenizer
from lm_experiments_tools.data.text.sources import find_files
from lm_experiments_tools.data.text.tokenizer import Tokenizer
from lm_experiments_tools.data.tokens.indexed import token_prefix
from lm_experiments_tools.data.workers import Worker, WorkerEnded, available_cores
from lm_experiments_tools.errors import RunError, UserError
from lm_experiments_tools.labels import IGNORED_LABEL

if TYPE_CHECKING:
    from lm_experiments_tools.backends.backend import Backend
    from lm_experiments_tools.config.pretraining import T5PretrainingArgs

logger = logging.getLogger(__name__)

_ENVIRONMENT = {  # of the worker: no GPU, and TensorFlow quiet
    "CUDA_VISIBLE_DEVICES": "-1",
    "HIP_VISIBLE_DEVICES": "-1",
    "JAX_PLATFORMS": "cpu",  # seqio imports it
    "TF_CPP_MIN_LOG_LEVEL": "2",
}


def seqio_data(
    args: T5PretrainingArgs, backend: Backend, vocabulary: Tokenizer
) -> tuple[SeqioLoader, ValidSource | None, str]:
    """Build training and validation data of `--task` with seqio. All ranks (training processes) must call it.

    Returns:
        Training batches of this rank, validation data of a registered task (or None), and a description for the log.

    Raises:
        UserError: a package is missing, t5 would make wrong examples with these settings, or the task has no examples.
    """
    check_possible(args, vocabulary)
    lengths = (args.input_seq_len, _targets_length(args, vocabulary))
    hosts = backend.gather(socket.gethostname())
    cores = max(1, available_cores() // hosts.count(hosts[backend.rank]))
    logs = Path(args.model_path, "logs") if args.model_path else Path(".cache", "seqio")
    job = _job(args, vocabulary, lengths[1], logs, args.data_n_workers or cores, is_main=backend.is_main)
    worker = on_all(backend, lambda: SeqioWorker(job, logs / f"seqio.rank{backend.rank}.log"))
    rows = args.rows_on_worker(backend.world_size)
    train = SeqioLoader(worker, lengths, vocabulary.pad_id, rows, backend.rank, backend.world_size)
    valid = None
    if job.validation:
        found = on_all(backend, lambda: worker.ask("validation"))
        examples = ValidationExamples(found, train.fingerprint, lengths, vocabulary.pad_id)
        valid = ValidLoader(examples, rows, backend.rank, backend.world_size)
    return train, valid, f"{worker.title}, {lengths[0]} inputs + {lengths[1]} targets"


def check_possible(args: T5PretrainingArgs, vocabulary: Tokenizer) -> None:
    """Raise UserError for settings that cannot work with seqio, before TensorFlow is started."""
    if ":" not in args.task and not isinstance(vocabulary, SentencePieceTokenizer):
        raise UserError(f"--data_pipeline seqio needs a SentencePiece .model file, not --vocab {vocabulary.path}.")
    for path in args.data_path:
        if token_prefix(path) is not None:
            raise UserError(f"--data_path {path} holds tokens, and seqio reads text: choose --data_pipeline native.")
    for package in ("tensorflow", "seqio", *(["t5"] if ":" not in args.task else [])):
        if importlib.util.find_spec(package) is None:
            raise UserError(
                f"--task {args.task} through seqio needs the package {package}: "
                'pip install "lm_experiments_tools[seqio]" (Python 3.11 or newer)'
            )
    if ":" not in args.task and args.data_path:
        find_files(args.data_path, document_per_line=args.document_per_line)


def _targets_length(args: T5PretrainingArgs, vocabulary: Tokenizer) -> int:
    """Length of the labels; t5 would silently truncate or pad them."""
    if ":" in args.task:
        return args.target_seq_len
    if args.task == "span_corruption":
        settings = (args.input_seq_len, args.noise_density, args.mean_noise_span_length)
        plan_spans(*settings, vocabulary.num_sentinels)
        _, needed, _ = random_spans_lengths(*settings)
    else:
        needed = args.input_seq_len - 1  # a prefix of one token, all others and EOS
        if needed < 2:
            raise UserError(f"--input_seq_len is {args.input_seq_len}, but prefix_lm needs at least 3.")
    if args.target_seq_len < needed:
        raise UserError(f"--target_seq_len {args.target_seq_len} would cut the targets: set it to {needed}.")
    if args.target_seq_len > needed:
        logger.info("targets are %d tokens long, not %d: the rest would be padding", needed, args.target_seq_len)
    return needed


def _job(
    args: T5PretrainingArgs, vocabulary: Tokenizer, targets_length: int, logs: Path, threads: int, *, is_main: bool
) -> Job:
    return Job(
        task=args.task,
        data_path=list(args.data_path),
        text_key=args.text_key,
        document_per_line=args.document_per_line,
        max_bad_lines=args.max_bad_lines,
        rejected_path=str(logs / "bad_lines.jsonl") if is_main else None,
        vocab_path=vocabulary.recorded_as,
        inputs_length=args.input_seq_len,
        targets_length=targets_length,
        noise_density=args.noise_density,
        mean_noise_span_length=args.mean_noise_span_length,
        seed=args.seed,
        validation=":" in args.task and bool(args.needs_validation() or args.valid_samples),
        valid_samples=args.valid_samples,
        threads=threads,
        folder=str(logs),
    )


class SeqioWorker:
    """The process that runs TensorFlow and seqio for one training process.

    Attributes:
        fingerprint: hash of data, task and seed.
        title: description of the task, for the log.

    Raises:
        UserError: the worker refuses the job.
        RunError: the process ended for another reason.
    """

    def __init__(self, job: Job, log_file: Path) -> None:
        self._log_file = log_file
        log_file.parent.mkdir(parents=True, exist_ok=True)
        with open(log_file, "ab") as log:
            self._worker = Worker(work, job, environment=_ENVIRONMENT, log=log)
        self.fingerprint, self.title = self.ask("task")

    def ask(self, request: Any) -> Any:
        """Return the answer of `worker.Server`. Raises the errors of the class."""
        try:
            return self._worker.ask(request)
        except WorkerEnded as end:
            raise RunError(
                f"the seqio worker ended with exit code {end.returncode} (-9: killed, often for lack of memory); "
                f"{self._log_file} says why"
            ) from end

    @property
    def pid(self) -> int:
        """Process id of the worker."""
        return self._worker.process.pid

    def close(self) -> None:
        """End the worker process."""
        self._worker.kill()
        self._worker.close()


def to_batch(rows: np.ndarray, inputs_length: int, pad_id: int) -> dict[str, np.ndarray]:
    """Convert examples that the seqio worker has made to a batch of the model.

    Args:
        rows: int32[n, inputs_length + targets_length], inputs and targets of n examples, padded with `PADDING`.
        pad_id: id that fills up `input_ids`; labels are filled up with -100.

    Returns:
        `input_ids` and `attention_mask` int64[n, inputs_length], `labels` int64[n, targets_length].
    """
    inputs = rows[:, :inputs_length].astype(np.int64)
    mask = inputs != PADDING
    inputs[~mask] = pad_id
    labels = rows[:, inputs_length:].astype(np.int64)
    labels[labels == PADDING] = IGNORED_LABEL
    return {"input_ids": inputs, "attention_mask": mask.astype(np.int64), "labels": labels}


class SeqioLoader(TrainSource):
    """Endless training batches of a seqio task. Seeking to a position makes all earlier batches again."""

    def __init__(
        self,
        worker: SeqioWorker,
        lengths: tuple[int, int],
        pad_id: int,
        rows_per_worker: int,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        super().__init__(rows_per_worker, rank, world_size)
        self.worker, self.fingerprint, self.lengths, self.pad_id = worker, worker.fingerprint, lengths, pad_id

    def _next_batch(self) -> dict[str, np.ndarray]:
        rows = self.worker.ask((self._consumed, self.global_batch, self.rank, self.world_size))
        return to_batch(rows, self.lengths[0], self.pad_id)

    def close(self) -> None:
        """End the TensorFlow process."""
        self.worker.close()


class ValidationExamples(SampleDataset):
    """Validation examples of a seqio task, in the same order in every epoch."""

    def __init__(self, rows: np.ndarray, fingerprint: str, lengths: tuple[int, int], pad_id: int) -> None:
        if not len(rows):
            raise UserError("the validation split of the task has no example: leave the flags of validation out")
        self._rows, self.samples_per_epoch = rows, len(rows)
        self.fingerprint, self._lengths, self._pad_id = fingerprint, lengths, pad_id

    def batch(self, samples: np.ndarray) -> dict[str, np.ndarray]:
        """Return a batch of the examples with the given numbers int64[n], with the keys that `to_batch` returns."""
        return to_batch(self._rows[samples], self._lengths[0], self._pad_id)

    def describe(self) -> str:
        return f"{len(self._rows):,} validation examples"

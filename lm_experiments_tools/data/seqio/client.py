"""The training side of seqio: starts a process that runs TensorFlow, and reads batches from it.

One worker process (worker.py) serves all training processes of a machine, so that text is tokenized once. All machines
make the same sequence of rows, which depends only on the seed. The training process with number `rank` of `world_size`
uses the rows k * world_size + rank for k = 0, 1, ...
"""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
import socket
import subprocess
import tempfile
from contextlib import ExitStack, suppress
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lm_experiments_tools.backends.collective import on_all
from lm_experiments_tools.data.dataset import SampleDataset
from lm_experiments_tools.data.loader import TrainSource, ValidLoader, ValidSource
from lm_experiments_tools.data.objectives.span_corruption import plan_spans, random_spans_lengths
from lm_experiments_tools.data.seqio.job import PADDING, SOCKET, VALIDATION, Job
from lm_experiments_tools.data.seqio.worker import work
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

_LONGEST_SOCKET_NAME = 100  # the system's limit is 108 bytes
_SECONDS_TO_END = 10.0  # of a worker that has hung up
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
    targets_length = _targets_length(args, vocabulary)
    folder = tempfile.gettempdir()
    machine = (socket.gethostname(), os.stat(folder).st_dev, os.stat(folder).st_ino)  # containers share only the first
    machines = backend.gather(machine)
    ranks = [rank for rank, other in enumerate(machines) if other == machine]

    def start() -> WorkerProcess | None:
        if backend.rank != ranks[0]:
            return None
        logs = Path(args.model_path, "logs") if args.model_path else Path(".cache", "seqio")
        job = _job(args, vocabulary, targets_length, logs / f"bad_lines.rank{backend.rank}.jsonl", len(ranks))
        return WorkerProcess(job, logs / f"seqio.rank{backend.rank}.log")

    worker = on_all(backend, start)
    folder, answer = backend.gather((worker.job.folder, worker.answer) if worker else None)[ranks[0]]
    lengths = (args.input_seq_len, targets_length)
    fingerprint, rows = answer["fingerprint"], args.rows_on_worker(backend.world_size)
    train = SeqioLoader(
        folder, fingerprint, lengths, vocabulary.pad_id, rows, backend.rank, backend.world_size, worker=worker
    )
    valid = None
    if answer["validation"] is not None:
        examples = WrittenExamples(Path(folder) / VALIDATION, fingerprint, lengths, vocabulary.pad_id)
        valid = ValidLoader(examples, rows, backend.rank, backend.world_size)
    return train, valid, f"{answer['title']}, {lengths[0]} inputs + {lengths[1]} targets"


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
    args: T5PretrainingArgs, vocabulary: Tokenizer, targets_length: int, rejected_path: Path, clients: int
) -> Job:
    registered = ":" in args.task
    base = tempfile.gettempdir()
    if len(os.path.join(base, "seqio_12345678", SOCKET)) > _LONGEST_SOCKET_NAME:
        base = "/tmp"
    return Job(
        task=args.task,
        data_path=list(args.data_path),
        text_key=args.text_key,
        document_per_line=args.document_per_line,
        max_bad_lines=args.max_bad_lines,
        rejected_path=str(rejected_path),
        vocab_path=vocabulary.recorded_as,
        inputs_length=args.input_seq_len,
        targets_length=targets_length,
        noise_density=args.noise_density,
        mean_noise_span_length=args.mean_noise_span_length,
        seed=args.seed,
        validation=registered and bool(args.needs_validation() or args.valid_samples),
        valid_samples=args.valid_samples,
        threads=args.data_n_workers or available_cores(),
        clients=clients,
        folder=tempfile.mkdtemp(prefix="seqio_", dir=base),
    )


class WorkerProcess:
    """Handle of the process that runs TensorFlow and seqio, held by the training process that started it.

    Args:
        job: the work of the process.
        log_file: file for the output of TensorFlow and of the user's module.

    Attributes:
        answer: the worker's first message: `fingerprint`, `title` and `validation` (number of validation examples, or
            None).

    Raises:
        UserError: the worker refuses the job.
        RunError: the process ended for another reason.
    """

    def __init__(self, job: Job, log_file: Path) -> None:
        self.job, self._log_file = job, log_file
        log_file.parent.mkdir(parents=True, exist_ok=True)
        with open(log_file, "ab") as log:
            self._worker = Worker(work, job, environment=_ENVIRONMENT, log=log)
        with ExitStack() as failed:
            failed.callback(self.close)
            try:
                while isinstance(message := self._worker.receive(), tuple):
                    logger.log(*message)
            except WorkerEnded as end:
                raise self.failure() from end
            failed.pop_all()
        self.answer = message

    def failure(self) -> RunError:
        """Build the error that reports an unexpected end of the worker, with its exit code.

        The method is called when the worker has closed its connections. It waits some seconds for the process to end.
        """
        code = None
        with suppress(subprocess.TimeoutExpired):
            code = self._worker.process.wait(_SECONDS_TO_END)
        if code is None:
            return RunError(f"the seqio worker (process {self.pid}) closed its connection")
        return RunError(
            f"the seqio worker ended with exit code {code} (-9: killed, often for lack of memory); {self._log_file} "
            "says why"
        )

    @property
    def pid(self) -> int:
        """Process id of the worker."""
        return self._worker.process.pid

    def close(self) -> None:
        """End the worker process and remove its temporary folder."""
        self._worker.kill()
        self._worker.close()
        shutil.rmtree(self.job.folder, ignore_errors=True)


def to_batch(rows: np.ndarray, inputs_length: int, pad_id: int) -> dict[str, np.ndarray]:
    """Convert examples that the seqio worker has made to a batch of the model.

    Args:
        rows: int32[n, inputs_length + targets_length], inputs and targets of n examples, padded with `PADDING`.
        inputs_length: tokens per input.
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
    """Endless training batches of a seqio task, which the TensorFlow process makes ahead of time.

    Seeking to a position makes all earlier batches again. All training processes of a machine must seek to the same
    position.

    Args:
        folder: folder of the TensorFlow process, with the socket to connect to.
        fingerprint: hash of data, task and seed.
        lengths: (inputs_length, targets_length), tokens per input and per target.
        rows_per_worker, rank, world_size: see `TrainSource`.
        worker: the TensorFlow process, in the training process that started it; None in others.
    """

    def __init__(
        self,
        folder: str,
        fingerprint: str,
        lengths: tuple[int, int],
        pad_id: int,
        rows_per_worker: int,
        rank: int = 0,
        world_size: int = 1,
        *,
        worker: WorkerProcess | None = None,
    ) -> None:
        super().__init__(rows_per_worker, rank, world_size)
        self.fingerprint, self.lengths, self.pad_id = fingerprint, lengths, pad_id
        self._address, self._worker = os.path.join(folder, SOCKET), worker
        self._connection: Connection | None = None

    def seek(self, consumed_samples: int) -> None:
        super().seek(consumed_samples)
        self._disconnect()

    def _next_batch(self) -> dict[str, np.ndarray]:
        try:
            if self._connection is None:
                self._connection = Client(self._address, "AF_UNIX")
                request = {"start": self._consumed, "rows": self.rows_per_worker, "rank": self.rank}
                self._connection.send({**request, "world_size": self.world_size})
            while isinstance(message := self._connection.recv(), tuple):
                if self._worker is not None:  # one process of the machine logs
                    logger.log(*message)
        except (EOFError, OSError) as error:
            if self._worker is not None:
                raise self._worker.failure() from error
            raise RunError(
                "the seqio worker of this machine has ended; the process that started it says why"
            ) from error
        if isinstance(message, UserError):
            raise message
        return to_batch(message, self.lengths[0], self.pad_id)

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def close(self) -> None:
        """End the TensorFlow process if this training process started it."""
        self._disconnect()
        if self._worker is not None:
            self._worker.close()


class WrittenExamples(SampleDataset):
    """Validation examples that the seqio worker has written to a file.

    Every epoch has the same examples in the same order.
    """

    def __init__(self, path: Path, fingerprint: str, lengths: tuple[int, int], pad_id: int) -> None:
        if not path.stat().st_size:
            raise UserError("the validation split of the task has no example: leave the flags of validation out")
        self._rows = np.memmap(path, np.int32, "r").reshape(-1, sum(lengths))
        self.samples_per_epoch = len(self._rows)
        self.fingerprint, self._lengths, self._pad_id = fingerprint, lengths, pad_id

    def batch(self, samples: np.ndarray) -> dict[str, np.ndarray]:
        """Return a batch of the examples with the given numbers int64[n], with the keys that `to_batch` returns."""
        return to_batch(self._rows[samples], self._lengths[0], self._pad_id)

    def describe(self) -> str:
        return f"{len(self._rows):,} validation examples"

"""The training side of seqio: starts a process that runs TensorFlow, and reads batches from it.

One worker process (worker.py) serves all training processes of a machine, so that text is tokenized once. Each
training process reads rows k * world_size + rank of a global stream, which depends only on the seed.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import queue
import re
import shutil
import signal
import socket
import sys
import tempfile
import threading
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from lm_experiments_tools.backends.collective import on_all
from lm_experiments_tools.data.loader import TrainSource, ValidLoader, ValidSource
from lm_experiments_tools.data.objectives.denoising import plan_spans, random_spans_lengths
from lm_experiments_tools.data.seqio.job import FRAME, PADDING, SOCKET, VALIDATION, Job
from lm_experiments_tools.data.seqio.worker import work
from lm_experiments_tools.data.text.sentencepiece_vocabulary import SentencePieceVocabulary
from lm_experiments_tools.data.text.sources import find_files
from lm_experiments_tools.data.text.vocabulary import Vocabulary
from lm_experiments_tools.data.tokens.files import token_prefix
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
    args: T5PretrainingArgs, backend: Backend, vocabulary: Vocabulary
) -> tuple[SeqioLoader, ValidSource | None, str]:
    """Build training and validation data of `--task` with seqio. All ranks must call it.

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
    fingerprint, rows = answer["fingerprint"], args.rows_per_worker() * backend.shares
    train = SeqioLoader(
        folder, fingerprint, lengths, vocabulary.pad_id, rows, backend.rank, backend.world_size, worker=worker
    )
    valid = None
    if answer["validation"] is not None:
        examples = WrittenExamples(Path(folder) / VALIDATION, fingerprint, lengths, vocabulary.pad_id)
        valid = ValidLoader(examples, rows, backend.rank, backend.world_size)
    return train, valid, f"{answer['title']}, {lengths[0]} inputs + {lengths[1]} targets"


def check_possible(args: T5PretrainingArgs, vocabulary: Vocabulary) -> None:
    """Raise UserError for settings that cannot work, before TensorFlow is started."""
    if ":" not in args.task and not isinstance(vocabulary, SentencePieceVocabulary):
        raise UserError(f"--data_pipeline seqio needs a SentencePiece .model file, not --vocab {vocabulary.path}.")
    for path in args.data_path:
        if token_prefix(path) is not None:
            raise UserError(f"--data_path {path} holds tokens, and seqio reads text: choose --data_pipeline native.")
    for package in ("tensorflow", "seqio", *(["t5"] if ":" not in args.task else [])):
        if importlib.util.find_spec(package) is None:
            raise UserError(
                f"--task {args.task} through seqio needs the package {package}: "
                'pip install "lm_experiments_tools[seqio]"'
            )
    if ":" not in args.task:
        find_files(args.data_path)


def check_module(task: str) -> None:
    """Raise UserError if --task is not module:name, or if the package does not exist."""
    module, _, name = task.partition(":")
    package = module.partition(".")[0]
    if not all(part.isidentifier() for part in module.split(".")) or not re.fullmatch(r"[\w.:#]+", name):
        raise UserError(f"--task {task} names no task: write module:name, the name of letters, digits, '_', '.', ':'.")
    if package in sys.modules or PathFinder.find_spec(package, [os.getcwd()]) or importlib.util.find_spec(package):
        return
    raise UserError(f"--task {task}: the module {module} cannot be imported (No module named {package!r})")


def _targets_length(args: T5PretrainingArgs, vocabulary: Vocabulary) -> int:
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
    args: T5PretrainingArgs, vocabulary: Vocabulary, targets_length: int, rejected_path: Path, clients: int
) -> Job:
    registered = ":" in args.task
    base = tempfile.gettempdir()
    if len(os.path.join(base, "seqio_12345678", SOCKET)) > _LONGEST_SOCKET_NAME:
        base = "/tmp"
    return Job(
        task=args.task,
        data_path=list(args.data_path),
        text_key=args.text_key,
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
    """Parent's handle of the process that runs TensorFlow.

    Args:
        log_file: file for the output of TensorFlow and of the user's module.

    Attributes:
        answer: the worker's first message: `fingerprint`, `title` and `validation` (number of rows, or None).

    Raises:
        UserError: the worker refuses the job.
        RunError: the process ended for another reason.
    """

    def __init__(self, job: Job, log_file: Path) -> None:
        self.job, self._log_file = job, log_file
        log_file.parent.mkdir(parents=True, exist_ok=True)
        with open(log_file, "ab") as log:
            self._worker = Worker(work, job, environment=_ENVIRONMENT, log=log)
        self._code: int | None = None
        self._error: dict[str, Any] | None = None
        self._answers: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._listener = threading.Thread(target=self._listen, name="seqio-worker", daemon=True)
        self._listener.start()
        answer = self._answers.get()
        if answer is None:
            error = self.failure()
            self.close()
            raise error
        self.answer = answer

    def _listen(self) -> None:
        try:
            while True:
                message = self._worker.receive()
                if "log" in message:
                    logger.log(*message["log"])
                elif "ready" in message:
                    self._answers.put(message["ready"])
                else:
                    self._error = message
        except WorkerEnded as end:
            self._code = end.returncode
        self._answers.put(None)

    def failure(self) -> Exception:
        """Wait for the end of the process, and return the reason as an exception."""
        self._listener.join(_SECONDS_TO_END)
        if (code := self._code) is None:
            return RunError(f"the seqio worker (process {self.pid}) closed its connection")
        if self._error is not None:
            return error_of(self._error, f"; {self._log_file} has the traceback")
        if code < 0:
            return RunError(f"the seqio worker was killed by {signal.Signals(-code).name}; see {self._log_file}")
        return RunError(f"the seqio worker ended with exit code {code}; see {self._log_file}")

    @property
    def pid(self) -> int:
        """Process id."""
        return self._worker.process.pid

    def close(self) -> None:
        """End the process and remove its folder."""
        self._worker.kill()
        self._listener.join(_SECONDS_TO_END)  # a process that the worker forked may hold its end of the pipe
        self._worker.close()
        shutil.rmtree(self.job.folder, ignore_errors=True)


def error_of(message: dict[str, Any], where: str = "") -> Exception:
    """Return the worker's error message as an exception."""
    if message["by_user"]:
        return UserError(message["error"])
    return RunError(f"the seqio worker failed: {message['error']}{where}")


def to_batch(rows: np.ndarray, inputs_length: int, pad_id: int) -> dict[str, np.ndarray]:
    """Convert rows of the worker to a batch of the model.

    Args:
        rows: int32[n, inputs_length + targets_length], padded with `PADDING`.

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
    """Training batches that the worker process makes ahead of time.

    `seek` makes all earlier batches again. All training processes of a machine must seek to the same position.

    Args:
        folder: folder of the worker process.
        fingerprint: hash of data, task and seed.
        lengths: (inputs_length, targets_length).
        rows_per_worker, rank, world_size: see `TrainSource`.
        worker: the worker process, in the training process that started it; None in others.
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
        self._stream: BinaryIO | None = None

    def seek(self, consumed_samples: int) -> None:
        super().seek(consumed_samples)
        self._disconnect()

    def _next_batch(self) -> dict[str, np.ndarray]:
        try:
            if self._stream is None:
                self._stream = self._request()
            is_batch, size = FRAME.unpack(self._read(FRAME.size))
            content = self._read(size)
        except OSError as error:
            raise self._failure() from error
        if not is_batch:
            raise self._failure(json.loads(content))
        rows = np.frombuffer(content, np.int32).reshape(self.rows_per_worker, sum(self.lengths))
        return to_batch(rows, self.lengths[0], self.pad_id)

    def _request(self) -> BinaryIO:
        request = {"start": self._consumed, "rows": self.rows_per_worker, "rank": self.rank}
        with socket.socket(socket.AF_UNIX) as channel:
            channel.connect(self._address)
            channel.sendall(json.dumps(request | {"world_size": self.world_size}).encode() + b"\n")
            return channel.makefile("rb")

    def _read(self, size: int) -> bytes:
        content = self._stream.read(size)
        if len(content) < size:
            raise ConnectionResetError("the seqio worker has closed its end")
        return content

    def _failure(self, message: dict[str, Any] | None = None) -> Exception:
        if self._worker is not None:
            return self._worker.failure()
        if message is not None:
            return error_of(message)
        return RunError("the seqio worker of this machine has ended; the process that started it says why")

    def _disconnect(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def close(self) -> None:
        """End the worker process if this process started it."""
        self._disconnect()
        if self._worker is not None:
            self._worker.close()


class WrittenExamples:
    """A `SampleDataset` of examples that the worker wrote to a file. All epochs are equal."""

    def __init__(self, path: Path, fingerprint: str, lengths: tuple[int, int], pad_id: int) -> None:
        if not path.stat().st_size:
            raise UserError("the validation split of the task has no example: leave the flags of validation out")
        self._rows = np.memmap(path, np.int32, "r").reshape(-1, sum(lengths))
        self.fingerprint, self._lengths, self._pad_id = fingerprint, lengths, pad_id

    def __len__(self) -> int:
        return len(self._rows)

    def batch(self, samples: np.ndarray) -> dict[str, np.ndarray]:
        """Return the examples with these numbers int64[n], as `to_batch`."""
        return to_batch(self._rows[samples], self._lengths[0], self._pad_id)

    def describe(self) -> str:
        return f"{len(self):,} validation examples"

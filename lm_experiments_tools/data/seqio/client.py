"""The training side of seqio: starts a process that runs TensorFlow, and reads batches from it.

Each training process has a worker process (worker.py) of its own. All of them make the same sequence of rows, which
depends only on the seed. Rank `rank` of `world_size` uses the rows k * world_size + rank for k = 0, 1, ...
"""

from __future__ import annotations

import importlib.util
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lm_experiments_tools.backends.collective import on_all
from lm_experiments_tools.data.dataset import SampleDataset
from lm_experiments_tools.data.loader import TrainSource, ValidLoader, ValidSource
from lm_experiments_tools.data.seqio.worker import PADDING, Job, work
from lm_experiments_tools.data.text.tokenizer import Tokenizer
from lm_experiments_tools.data.workers import Worker, WorkerEnded, available_cores
from lm_experiments_tools.errors import RunError, UserError
from lm_experiments_tools.labels import IGNORED_LABEL

if TYPE_CHECKING:
    from lm_experiments_tools.backends.backend import Backend
    from lm_experiments_tools.config.pretraining import T5PretrainingArgs

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
        UserError: a package is missing, or the task has no examples.
    """
    check_possible(args)
    lengths = (args.input_seq_len, args.target_seq_len)
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
    rows = args.rows_on_worker(backend.world_size)
    train = SeqioLoader(worker, lengths, vocabulary.pad_id, rows, backend.rank, backend.world_size)
    valid = None
    if job.validation:
        found = on_all(backend, lambda: worker.ask("validation"))
        examples = ValidationExamples(found, train.fingerprint, lengths, vocabulary.pad_id)
        valid = ValidLoader(examples, rows, backend.rank, backend.world_size)
    return train, valid, f"{worker.title}, {lengths[0]} inputs + {lengths[1]} targets"


def check_possible(args: T5PretrainingArgs) -> None:
    """Raise UserError if a package of seqio is missing, before anything else is done."""
    for package in ("tensorflow", "seqio"):
        if importlib.util.find_spec(package) is None:
            raise UserError(
                f"--task {args.task} through seqio needs the package {package}: "
                'pip install "lm_experiments_tools[seqio]" (Python 3.11 or newer)'
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

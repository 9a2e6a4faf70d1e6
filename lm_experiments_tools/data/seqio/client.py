"""The training side of seqio: starts a process that runs TensorFlow, and reads batches from it.

Each training process has a worker process (worker.py) of its own. All of them make the same sequence of rows, which
depends only on the seed. Rank `rank` of `world_size` uses the rows k * world_size + rank for k = 0, 1, ...
"""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path
from typing import Any

import numpy as np

from lm_experiments_tools.data.dataset import SampleDataset
from lm_experiments_tools.data.seqio.job import Job
from lm_experiments_tools.data.seqio.worker import prepare
from lm_experiments_tools.data.workers import Worker, WorkerEnded
from lm_experiments_tools.errors import RunError, UserError
from lm_experiments_tools.labels import IGNORED_LABEL

logger = logging.getLogger(__name__)

_ENVIRONMENT = {  # of the worker: no GPU, and TensorFlow quiet
    "CUDA_VISIBLE_DEVICES": "-1",
    "HIP_VISIBLE_DEVICES": "-1",
    "JAX_PLATFORMS": "cpu",  # seqio imports it
    "TF_CPP_MIN_LOG_LEVEL": "2",
}


def check_installed(task: str) -> None:
    """Raise UserError if a package of seqio is missing."""
    for package in ("tensorflow", "seqio"):
        if importlib.util.find_spec(package) is None:
            raise UserError(
                f"--task {task} through seqio needs the package {package}: "
                'pip install "lm_experiments_tools[seqio]" (Python 3.11 or newer)'
            )


class SeqioWorker:
    """The process that runs TensorFlow and seqio for one training process.

    Raises:
        UserError: the worker refuses the job.
        RunError: the process ended for another reason.
    """

    def __init__(self, job: Job, log_file: Path) -> None:
        self.log_file, self.inputs_length = log_file, job.inputs_length
        log_file.parent.mkdir(parents=True, exist_ok=True)
        with open(log_file, "ab") as log:
            self.worker = Worker(prepare, job, environment=_ENVIRONMENT, log=log)
        self.fingerprint, self.title = self.ask("task")

    def ask(self, request: Any) -> Any:
        """Return the answer of `worker.Server`. Raises the errors of the class."""
        try:
            return self.worker.ask(request)
        except WorkerEnded as end:
            raise RunError(f"the seqio worker {end}; {self.log_file} says why") from end

    def close(self) -> None:
        self.worker.close()


def to_batch(rows: np.ndarray, inputs_length: int, pad_id: int) -> dict[str, np.ndarray]:
    """Convert examples that the seqio worker has made to a batch of the model.

    Args:
        rows: int32[n, inputs_length + targets_length], inputs and targets of n examples, padded with -100 because 0
            may be a real id.
        pad_id: id that replaces the padding of `input_ids`.

    Returns:
        `input_ids` and `attention_mask` int64[n, inputs_length], `labels` int64[n, targets_length].
    """
    inputs = rows[:, :inputs_length].astype(np.int64)
    mask = inputs != IGNORED_LABEL
    inputs[~mask] = pad_id
    labels = rows[:, inputs_length:].astype(np.int64)
    return {"input_ids": inputs, "attention_mask": mask.astype(np.int64), "labels": labels}


class SeqioExamples(SampleDataset):
    """Training examples of a seqio task. Seeking to a position makes all earlier examples again."""

    samples_per_epoch = None

    def __init__(self, worker: SeqioWorker, rank: int, world_size: int, pad_id: int) -> None:
        self.worker, self.fingerprint = worker, worker.fingerprint
        self._rank, self._world_size, self._pad_id = rank, world_size, pad_id
        self._next = 0

    def batch(self, samples: np.ndarray) -> dict[str, np.ndarray]:
        """Return the examples with the given numbers int64[n]: every `world_size`-th from one of this rank on."""
        start, rows = int(samples[0]) - self._rank, len(samples) * self._world_size
        if start not in (0, self._next):
            logger.info("seqio makes %d examples again; %s says how far it is", start, self.worker.log_file)
        self._next = start + rows
        found = self.worker.ask((start, rows, self._rank, self._world_size))
        return to_batch(found, self.worker.inputs_length, self._pad_id)

    def close(self) -> None:
        self.worker.close()


class ValidationExamples(SampleDataset):
    """Validation examples of a seqio task, in the same order in every epoch."""

    def __init__(self, worker: SeqioWorker, pad_id: int) -> None:
        self._rows = worker.ask("validation")
        if not len(self._rows):
            raise UserError("the validation split of the task has no example: leave the flags of validation out")
        self.samples_per_epoch = len(self._rows)
        self.fingerprint, self._inputs_length, self._pad_id = worker.fingerprint, worker.inputs_length, pad_id

    def batch(self, samples: np.ndarray) -> dict[str, np.ndarray]:
        """Return a batch of the examples with the given numbers int64[n], with the keys that `to_batch` returns."""
        return to_batch(self._rows[samples], self._inputs_length, self._pad_id)

    def describe(self) -> str:
        return f"{len(self._rows):,} validation examples"

"""The process that owns TensorFlow: it makes seqio's examples for one training process.

TensorFlow's output and the log go to stdout and stderr. TensorFlow is imported only by tasks.py, which only this
process loads.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np

from lm_experiments_tools.data.seqio.job import Job


class Server:
    """Function object that answers requests for examples.

    | request | answer |
    |---|---|
    | "task" | fingerprint and title of the task |
    | "validation" | all validation examples, int32[n, inputs_length + targets_length], padded with -100 |
    | start, rows, rank, world_size | the rows of this rank in the batch of `rows` examples that begins at `start` |
    """

    def __init__(self, examples: Any, width: int) -> None:
        self._examples, self._width = examples, width
        self._batches: Iterator[np.ndarray] = iter(())
        self._next = (-1, 0)  # first example and size of the next batch

    def __call__(self, request: Any) -> Any:
        if request == "task":
            return self._examples.fingerprint(), self._examples.title
        if request == "validation":
            return np.concatenate([np.empty((0, self._width), np.int32), *self._examples.validation()])
        start, rows, rank, world_size = request
        if self._next != (start, rows):
            self._batches = self._examples.batches(start, rows)
        self._next = start + rows, rows
        return next(self._batches)[rank::world_size]


def prepare(job: Job) -> Server:
    """Load the task of a job, in the worker process."""
    logging.basicConfig(level=logging.INFO)
    # A user's module may import triton, which aborts the process if TensorFlow was imported before.
    with suppress(ImportError, OSError):
        import triton  # noqa: F401
    sys.path.insert(0, os.getcwd())  # where the user's module may lie
    from lm_experiments_tools.data.seqio.tasks import TaskExamples, limit_threads

    limit_threads(job.threads)
    return Server(TaskExamples(job), job.inputs_length + job.targets_length)

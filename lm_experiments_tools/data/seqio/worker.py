"""The process that owns TensorFlow: it makes seqio's examples for one training process.

TensorFlow's output goes to stdout and stderr. TensorFlow is imported only by tasks.py, which only this process loads.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from lm_experiments_tools.data.seqio.job import Job, one_line
from lm_experiments_tools.data.workers import Caller


def import_triton() -> None:
    """Import triton before TensorFlow, if it is installed. Importing it later would abort the process."""
    if not importlib.util.find_spec("triton"):
        return
    try:
        import triton  # noqa: F401
    except (ImportError, OSError) as error:
        print(f"triton is not loaded: {one_line(error)}", file=sys.stderr)


class Server:
    """Function object that answers requests for examples.

    | request | answer |
    |---|---|
    | "task" | fingerprint and title of the task |
    | "validation" | all validation examples, int32[n, inputs_length + targets_length], padded with `PADDING` |
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


def work(caller: Caller) -> None:
    """Run the seqio worker process."""

    def prepare(job: Job) -> Server:
        import_triton()
        from lm_experiments_tools.data.seqio.tasks import TaskExamples, limit_threads

        limit_threads(job.threads)
        return Server(TaskExamples(job, caller.log), job.inputs_length + job.targets_length)

    sys.path.insert(0, os.getcwd())  # where the user's module may lie
    caller.serve(prepare)

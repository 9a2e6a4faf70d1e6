"""The seqio worker without TensorFlow: example g of `--task tasks:numbers` is [g, g + 1] -> [g]."""

import sys
import types

import numpy as np

from lm_experiments_tools.data.seqio import worker as seqio_worker
from lm_experiments_tools.errors import UserError


class TaskExamples:
    title = "numbers"

    def __init__(self, job):
        print("what a library prints")
        self.job = job
        if job.task == "tasks:refused":
            raise UserError("no such task")
        if job.task == "tasks:crashes":
            raise KeyError("boom")

    def fingerprint(self):
        return f"seed {self.job.seed}"

    def rows(self, numbers):
        rows = np.full((len(numbers), self.job.inputs_length + self.job.targets_length), -100, np.int32)
        rows[:, 0], rows[:, 1], rows[:, self.job.inputs_length] = numbers, numbers + 1, numbers
        return rows

    def batches(self, start, rows):
        for first in range(start, sys.maxsize, rows):
            if first > 1000 and self.job.task == "tasks:ends":
                raise UserError("more than 3 bad lines")
            yield self.rows(np.arange(first, first + rows))

    def validation(self):
        yield self.rows(np.arange(4))
        yield self.rows(np.arange(4, self.job.valid_samples or 7))


def prepare(job):
    """The real worker's function, given these examples."""
    tasks = types.ModuleType("lm_experiments_tools.data.seqio.tasks")
    tasks.TaskExamples, tasks.limit_threads = TaskExamples, lambda num_threads: None
    sys.modules[tasks.__name__] = tasks
    return seqio_worker.prepare(job)

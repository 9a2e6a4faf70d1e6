"""The job of the elastic tests: a run whose workers die at steps that were planned.

    restarting_worker.py STEPS FOLDER [FLAG=VALUE ...]

FOLDER/plan.json, where there is one, is a list of events: from "step" on it happens, once, on each of "ranks" (modulo
the number of workers), if there are "size" workers; "kind" is raise, leave or kill. What has happened has left a file.

Each worker adds a line a step to FOLDER/steps.jsonl; rank 0 writes a hash of weights, optimizer, metrics at the end.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch

from lm_experiments_tools.backends import get_backend
from lm_experiments_tools.config.cli import run_main
from lm_experiments_tools.config.training import TrainerArgs
from lm_experiments_tools.tracking.run_directory import setup_logging
from lm_experiments_tools.training.trainer import TrainingLoop
from tests.distributed.elastic_worker import digest
from tests.helpers.toys import RaggedPairs, SeekableBatches, TinyLabeller


class Noted(SeekableBatches):
    """Gives a worker every so many-th row of a step, as TrainLoader does, and remembers the numbers of the last."""

    def __iter__(self):
        while True:
            first, self.consumed = self.consumed, self.consumed + self.rows * self.world_size
            self.given = list(range(first + self.rank, self.consumed, self.world_size))
            yield self.data.batch([self._row(sample) for sample in self.given])


class Diary:
    """A line a step: who computed what, at which start of the job (1, 2, ...)."""

    every = 1

    def __init__(self, folder, backend, loader):
        self.starts, self.backend, self.loader, self.file = folder / "starts", backend, loader, folder / "steps.jsonl"
        self.start = None
        if backend.is_main:
            with self.starts.open("a") as file:
                file.write(f"{backend.world_size}\n")

    def on_step_end(self, loop, info):
        self.start = self.start or self.starts.read_text().count("\n")  # rank 0 has been there: a step is made
        line = {
            "step": info.step, "start": self.start, "rank": self.backend.rank, "size": self.backend.world_size,
            "time": time.time(), "samples": self.loader.given,
        }  # fmt: skip
        with self.file.open("a") as file:
            file.write(json.dumps(line) + "\n")
        time.sleep(float(os.environ.get("PACE", "0")))


class Events:
    """Carries the plan out: workers fail, end without a word or are killed."""

    every = 1

    def __init__(self, folder, backend):
        plan = folder / "plan.json"
        self.plan = json.loads(plan.read_text()) if plan.exists() else []
        self.marks, self.backend = folder / "events", backend
        self.marks.mkdir(exist_ok=True)

    def on_step_end(self, loop, info):
        self.after(info.step)

    def after(self, step):
        """Let happen what is planned; step 0: while the worker is loading."""
        size = self.backend.world_size
        for number, event in enumerate(self.plan):
            ranks = [rank % size for rank in event["ranks"]]
            if step < event["step"] or event.get("size", size) != size or self.backend.rank not in ranks:
                continue
            mark = self.marks / f"{number}.{ranks.index(self.backend.rank)}"
            if not mark.exists():
                mark.write_text(f"{time.time()} rank {self.backend.rank} of {size}")
                happen(event)


def happen(event):
    if event["kind"] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if event["kind"] == "raise":
        raise ZeroDivisionError("a deliberate failure")
    if event["kind"] == "leave":
        os._exit(7)


def main():
    steps, folder, *more = sys.argv[1:]
    args = TrainerArgs(
        batch_size=2, gradient_accumulation_steps=2, iters=int(steps), log_interval=2, save_interval=1,
        model_path=folder, clip_grad_norm=1.0, stall_timeout=300, valid_at_start=False,
        **dict(item.split("=") for item in more),
    )  # fmt: skip
    folder = Path(folder)
    backend = get_backend(args)
    setup_logging(folder, backend.rank)
    model = TinyLabeller()
    loader = Noted(RaggedPairs(24), args.rows_on_worker(backend.world_size), backend.rank, backend.world_size)
    events = Events(folder, backend)
    events.after(0)
    callbacks = [Diary(folder, backend, loader), events]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loop = TrainingLoop(args, backend, model, optimizer, loader, callbacks=callbacks)
    loop.train()
    if backend.is_main:
        (folder / "digest").write_text(digest(loop))
    backend.close()


if __name__ == "__main__":
    run_main(main)

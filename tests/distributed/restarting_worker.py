"""The job of test_elastic_jobs.py: a run whose workers die, or whose hosts change, at steps that were planned.

argv: NUMBER of events, the run directory. Variables: EVENTS, if they are to happen; HOSTS, the file that a discovery
script prints. An event that has happened has left a file in the run directory.
"""

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
from tests.distributed.resume_worker import digest
from tests.helpers.toys import RaggedPairs, SeekableBatches, TinyLabeller

GAP = 2  # steps between two events
# Of this machine, which Horovod takes for five: it must never need the one that has just lost its worker.
NAMES = ("localhost", "127.0.0.1", "127.1", "127.0.1", "LOCALHOST")


class Events:
    """After step GAP * n event n: one worker is killed, fails, ends without a word, or its host is taken away."""

    every = 1

    def __init__(self, number, folder, backend):
        self.number, self.folder, self.backend = number, Path(folder) / "events", backend
        self.folder.mkdir(exist_ok=True)

    def __call__(self, loop, info):
        event = info.step // GAP
        if info.step % GAP or event > self.number or event % self.backend.world_size != self.backend.rank:
            return
        mark = self.folder / str(event)
        if mark.exists():
            return
        mark.write_text(f"{os.getpid()} rank {self.backend.rank} of {self.backend.world_size}")
        if hosts := os.environ.get("HOSTS"):
            taken = os.environ["HOROVOD_HOSTNAME"] if event % 4 == 3 else None
            Path(hosts).write_text("".join(f"{name}:1\n" for name in NAMES if name != taken))
            if taken:
                time.sleep(4)  # the driver asks every second
                return
        kind = event % 3
        if kind == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == 1:
            raise ZeroDivisionError("a deliberate failure")
        os._exit(7)


def main():
    number, folder = int(sys.argv[1]), sys.argv[2]
    args = TrainerArgs(
        batch_size=2, gradient_accumulation_steps=2, iters=GAP * (number + 1), log_interval=GAP, save_interval=1,
        model_path=folder, clip_grad_norm=1.0, stall_timeout=300, valid_at_start=False,
    )  # fmt: skip
    backend = get_backend(args)
    setup_logging(folder, backend.rank)
    model = TinyLabeller()
    loader = SeekableBatches(RaggedPairs(24), 4, backend.rank, backend.world_size)
    hooks = [Events(number, folder, backend)] if os.environ.get("EVENTS") else []
    TrainingLoop(args, backend, model, torch.optim.AdamW(model.parameters(), lr=1e-2), loader, hooks=hooks).train()
    state = backend.model_state()
    if backend.is_main:
        (Path(folder) / "digest").write_text(digest(state))
    backend.close()


if __name__ == "__main__":
    run_main(main)

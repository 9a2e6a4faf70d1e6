"""One job of test_hangs.py and test_failures.py: two workers train with dropout, and something goes wrong on rank 1.

argv: KIND, MOMENT, the run directory. KIND stop, kill, raise, exit, nan, uneven, sigterm, full_disk (on rank 0),
late (also on rank 0, whose first checkpoint is written slowly), or train and train_long for
nothing wrong; MOMENT start, training, evaluation or saving.
"""

import hashlib
import math
import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn

from lm_experiments_tools.backends import get_backend
from lm_experiments_tools.checkpoint.saving import Saver
from lm_experiments_tools.checkpoint.writer import CheckpointWriter
from lm_experiments_tools.config.cli import run_main
from lm_experiments_tools.config.training import TrainerArgs
from lm_experiments_tools.tracking.run_directory import setup_logging
from lm_experiments_tools.training.trainer import TrainingLoop
from tests.helpers.toys import RaggedPairs, SeekableBatches, TinyLabeller

STEPS, AT, STALL = 9, 5, 6
SIGNALS = {"stop": signal.SIGSTOP, "kill": signal.SIGKILL, "sigterm": signal.SIGTERM}


class Trouble:
    """It happens on rank 1 at one moment of the run, in step 5."""

    every = 1

    def __init__(self, kind, moment, folder, rank):
        self.kind, self.moment, self.folder, self.rank, self.step = kind, moment, Path(folder), rank, 0

    def on_step_end(self, loop, info):
        self.step = info.step
        self.at("training")

    def at(self, moment):
        due = {"start": True, "training": self.step == AT}.get(moment, self.step >= AT)
        if self.rank != 1 or self.kind.startswith("train") or moment != self.moment or not due:
            return
        # A worker that torchrun has restarted is left alone.
        if (self.folder / "since").exists():
            return
        self.note()
        if self.kind in SIGNALS:
            os.kill(os.getpid(), SIGNALS[self.kind])
        if self.kind == "raise":
            raise ZeroDivisionError("a deliberate failure")
        if self.kind == "exit":
            sys.exit(0)
        if self.kind == "late":
            time.sleep(STALL + 2)

    def factor(self):
        """0, and NaN where that is the trouble."""
        if self.kind != "nan" or self.rank != 1 or self.step < AT - 1:
            return 0.0
        self.note()
        return math.nan

    def note(self):
        """Write down when it began."""
        since = self.folder / "since"
        since.exists() or since.write_text(str(time.time()))


class Batches(SeekableBatches):
    """Rank 1's come to an end, if that is the trouble."""

    trouble = None

    def __iter__(self):
        for batch in super().__iter__():
            due = self.trouble.step >= AT - 1 and self.rank == 1
            if due and self.trouble.kind == "uneven":
                self.trouble.note()
                return
            yield batch


class Labeller(TinyLabeller):
    """With dropout; in step 5 on rank 1 what it computes is NaN, if that is the trouble."""

    trouble = None

    def forward(self, input_ids, attention_mask, labels):
        noise = nn.functional.dropout(torch.ones(()), 0.3, self.training)
        out = super().forward(input_ids, labels)
        return {"loss": out["loss"] * (noise + self.trouble.factor())}


class Validation:
    """A batch; at its first one of an evaluation trouble may come."""

    def __init__(self, trouble):
        self.trouble = trouble

    def __iter__(self):
        self.trouble.at("evaluation")
        yield RaggedPairs(24).batch([0, 1])


def make_writing_slow():
    """Let the checkpoint of step 2 take longer than a worker may wait in a collective."""
    commit = CheckpointWriter.commit

    def commit_late(self, step, **options):
        time.sleep(STALL + 2 if step == 2 else 0)
        commit(self, step, **options)

    CheckpointWriter.commit = commit_late


def digest(state):
    return hashlib.sha256(b"".join(state[n].cpu().contiguous().numpy().tobytes() for n in sorted(state))).hexdigest()


def no_space(self, *args, **kwargs):
    raise OSError(28, "No space left on device")


def main():
    kind, moment, folder = sys.argv[1:]
    args = TrainerArgs(
        batch_size=2, gradient_accumulation_steps=2, log_interval=2, save_interval=2, valid_interval=3,
        iters=5000 if kind == "train_long" else STEPS,
        keep_checkpoints=None, clip_grad_norm=1.0, model_path=folder, stall_timeout=STALL, max_skipped_updates=2,
        valid_at_start=False,
    )  # fmt: skip
    backend = get_backend(args)
    setup_logging(folder, backend.rank)
    trouble = Trouble(kind, moment, folder, backend.rank)
    trouble.at("start")
    model = Labeller()
    model.trouble = trouble
    if kind == "full_disk" and backend.is_main:
        CheckpointWriter.commit = no_space
    if kind == "late" and backend.is_main:
        make_writing_slow()
    save = Saver.save
    Saver.save = lambda *args, **options: (trouble.at("saving"), save(*args, **options))[1]
    loader = Batches(RaggedPairs(24), 4, backend.rank, backend.world_size)
    loader.trouble = trouble
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(100 + backend.rank)
    TrainingLoop(args, backend, model, optimizer, loader, Validation(trouble), callbacks=[trouble]).train()
    state = backend.state.model_state()
    if backend.is_main:
        (Path(folder) / "digest").write_text(digest(state))
    backend.close()


if __name__ == "__main__":
    run_main(main)

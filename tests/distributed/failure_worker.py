"""One job of test_failures.py: a run of two workers that gets a signal or finds its disk full.

argv: MODE (full_disk, sigterm, sigterm_to_launcher, or train for nothing wrong), the run directory.
"""

import os
import signal
import sys
import time

import psutil
import torch

from lm_experiments_tools.backends import get_backend
from lm_experiments_tools.config.cli import run_main
from lm_experiments_tools.config.training import TrainerArgs
from lm_experiments_tools.tracking.run_directory import setup_logging
from lm_experiments_tools.training.trainer import TrainingLoop
from tests.helpers.toys import RaggedPairs, SeekableBatches, TinyLabeller


class Sigterm:
    """SIGTERM after step 3, on rank 1 alone."""

    every = 3

    def on_step_end(self, loop, info):
        if info.step == 3 and loop.backend.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)


def end_the_job(model, inputs):
    """In the third training pass, ask the launcher on rank 0 to end; that pass and later ones take 2.6 s."""
    if not (model.training and torch.is_grad_enabled()):  # a trial before the first step
        return
    model.passes = getattr(model, "passes", 0) + 1
    if model.passes == 3 and os.environ.get("HOROVOD_RANK") == "0":
        launchers = [p for p in psutil.Process().parents() if any("horovodrun" in word for word in p.cmdline())]
        launchers[-1].send_signal(signal.SIGTERM)
    time.sleep(2.6 if model.passes >= 3 else 0)


def main():
    mode, folder = sys.argv[1:]
    args = TrainerArgs(batch_size=4, iters=5000, log_interval=100, save_interval=2, model_path=folder)
    backend = get_backend(args)
    setup_logging(folder, backend.rank)
    model = TinyLabeller()
    loader = SeekableBatches(RaggedPairs(24), 4, backend.rank, backend.world_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    callbacks = [Sigterm()] if mode == "sigterm" else []
    if mode == "sigterm_to_launcher":
        model.register_forward_pre_hook(end_the_job)
    if mode == "full_disk" and backend.is_main:
        from lm_experiments_tools.checkpoint import writer as checkpoint

        def no_space(self, *args, **kwargs):
            raise OSError(28, "No space left on device")

        checkpoint.CheckpointWriter.commit = no_space
    TrainingLoop(args, backend, model, optimizer, loader, callbacks=callbacks).train()


if __name__ == "__main__":
    run_main(main)

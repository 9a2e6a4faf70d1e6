"""The cost to a run of a checkpoint written in the background, in units of one training step.

    OMP_NUM_THREADS=1 python benchmarks/async_checkpoint.py --optimizer Adafactor
    OMP_NUM_THREADS=1 ACCELERATE_USE_CPU=1 torchrun --nproc_per_node 2 benchmarks/async_checkpoint.py

Trains a T5 and saves every few steps. Of each checkpoint but the first, which fetches the pages of its copies: how
long training is stopped (the copy), and how much longer than the median of the others the steps take beside which it
is written. Wall time is what a run loses, and on a busy machine mostly noise. CPU time of the training thread is what
the work itself costs it; that of the other threads is what the writing needs of a core elsewhere, or of this one.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from lm_experiments_tools.backends import get_backend
from lm_experiments_tools.config.training import TrainerArgs
from lm_experiments_tools.files import human_bytes
from lm_experiments_tools.models.build import build_model, load_model_config
from lm_experiments_tools.optimizers import get_optimizer
from lm_experiments_tools.training.trainer import TrainingLoop
from modeling_t5 import T5ForConditionalGeneration

FIRST = 3  # steps before the first checkpoint


class Rows:
    """An endless loader of the same rows of 512 tokens, with 114 targets."""

    fingerprint = "rows"

    def __init__(self, rows: int, vocabulary: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.batch = {
            "input_ids": torch.randint(2, vocabulary, (rows, 512), generator=generator),
            "labels": torch.randint(2, vocabulary, (rows, 114), generator=generator),
        }

    def seek(self, consumed_samples: int) -> None:
        pass

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        while True:
            yield self.batch


@dataclass(frozen=True)
class Clocks:
    """Readings, or the differences of two."""

    wall: float
    training: float  # CPU of the training thread
    process: float  # CPU of all threads

    @classmethod
    def now(cls) -> Clocks:
        return cls(time.perf_counter(), time.thread_time(), time.process_time())

    def since(self, other: Clocks) -> Clocks:
        return Clocks(self.wall - other.wall, self.training - other.training, self.process - other.process)


class Saves:
    """Saves every `period` steps and notes what each step and each save took, and beside which one was written."""

    every = 1

    def __init__(self, period: int) -> None:
        self.period, self.last = period, Clocks.now()
        self.steps: list[tuple[Clocks, int]] = []  # with the number of the checkpoint that was being written, or -1
        self.stops: list[Clocks] = []
        self._writing = False

    def __call__(self, loop: TrainingLoop, info: object) -> None:
        now = Clocks.now()
        self.steps.append((now.since(self.last), len(self.stops) - 1 if self._writing else -1))
        future = loop.saver._writing
        self._writing = future is not None and not future.done()
        if info.step % self.period == FIRST and info.step < loop.args.iters - self.period // 2:
            begun = Clocks.now()
            loop.save()
            self.stops.append(Clocks.now().since(begun))
            self._writing = True
        self.last = Clocks.now()

    def row(self) -> str:
        """Medians over checkpoints, each divided by the median step: see `HEAD`."""
        alone = [taken for taken, number in self.steps[1:] if number < 0]
        step = {name: statistics.median(getattr(taken, name) for taken in alone) for name in vars(alone[0])}
        others = statistics.median(taken.process - taken.training for taken in alone)
        stops, beside, delays, cpu, elsewhere = [], [], [], [], []
        for number, stop in list(enumerate(self.stops))[1:]:
            slowed = [taken for taken, which in self.steps if which == number]
            stops.append(stop.wall)
            beside.append(len(slowed))
            delays.append(stop.wall + sum(taken.wall - step["wall"] for taken in slowed))
            cpu.append(stop.training + sum(taken.training - step["training"] for taken in slowed))
            elsewhere.append(sum(taken.process - taken.training - others for taken in slowed))
        walls = [f"{statistics.median(values) / step['wall']:.2f}" for values in (stops, delays)]
        spread = f"{min(delays) / step['wall']:.2f} to {max(delays) / step['wall']:.2f}"
        cpus = [f"{statistics.median(values) / step['training']:.2f}" for values in (cpu, elsewhere)]
        steps = f"{step['wall']:.2f} | {step['training']:.2f}"
        return f"{steps} | {walls[0]} | {walls[1]} ({spread}) | {cpus[0]} | {cpus[1]} | {statistics.median(beside):g}"


COLUMNS = ("optimizer", "workers", "threads", "bytes", "step, s", "its CPU, s", "stopped", "delay in all")
COLUMNS += ("CPU of training", "CPU of writing", "steps beside")
HEAD = f"| {' | '.join(COLUMNS)} |\n|---{'|---:' * (len(COLUMNS) - 1)}|"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="t5-v1_1-small")
    parser.add_argument("--optimizer", default="AdamWScale")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--period", type=int, default=8, help="steps between checkpoints")
    parser.add_argument("--checkpoints", type=int, default=5)
    parser.add_argument("--folder", help="where the checkpoints go, for a disk other than that of temporary files")
    options = parser.parse_args()
    iters = FIRST + options.checkpoints * options.period
    backend = get_backend(TrainerArgs(batch_size=options.rows, bf16=True))
    run = backend.broadcast(tempfile.mkdtemp(dir=options.folder))
    args = TrainerArgs(
        batch_size=options.rows, bf16=True, log_interval=10**6, model_path=run, iters=iters, keep_checkpoints=1
    )
    model = build_model(T5ForConditionalGeneration, load_model_config(options.preset), seed=0)
    fixed = {"relative_step": False} if options.optimizer == "Adafactor" else {}
    optimizer = get_optimizer(options.optimizer)(model.parameters(), lr=1e-3, **fixed)
    saves, rows = Saves(options.period), Rows(options.rows, model.config.vocab_size)
    try:
        TrainingLoop(args, backend, model, optimizer, rows, callbacks=[saves]).train()
        if backend.is_main:
            size = sum(file.stat().st_size for file in (Path(run) / "last").resolve().rglob("*"))
            what = f"{options.optimizer} | {backend.world_size} | {torch.get_num_threads()} | {human_bytes(size)}"
            print(f"{HEAD}\n| {what} | {saves.row()} |", flush=True)
    finally:
        if backend.is_main:
            shutil.rmtree(run)
    backend.close()


if __name__ == "__main__":
    main()

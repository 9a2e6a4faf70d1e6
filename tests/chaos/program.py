"""Kill runs at random moments, start them again, and compare them with one that nothing disturbed.

    python -m tests.chaos.program --kills 200 --seed 1 --workers 2 --backends horovod,ddp
    python -m tests.chaos.program --kills 200 --seed 1 --workers 1,2,3,4 --reproducible elastic

A run is killed three to eight times and then left to end. Each of its checkpoints is compared with the uninterrupted
run's of the same step, its logs at the end. All draws of run R follow from (seed, R), so `--run R` repeats it.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from lm_experiments_tools.checkpoint.manifest import verify
from tests.chaos import tiny_run, zygote
from tests.chaos.moments import PHASES, Kill, draw
from tests.helpers import warm


class Fault(Exception):
    """A run that is not what the uninterrupted one is."""


@dataclass
class Tally:
    """Counts by phase."""

    landed: Counter = field(default_factory=Counter)
    missed: Counter = field(default_factory=Counter)
    signals: Counter = field(default_factory=Counter)
    differences: Counter = field(default_factory=Counter)
    compared: int = 0
    forced: int = 0
    runs: int = 0

    def table(self) -> str:
        rows = [f"{'phase':<12} {'landed':>7} {'not reached':>12} {'differences':>12}"]
        rows += [
            f"{phase:<12} {self.landed[phase]:>7} {self.missed[phase]:>12} {self.differences[phase]:>12}"
            for phase in PHASES
        ]
        total = (self.landed.total(), self.missed.total(), self.differences.total())
        return "\n".join([*rows, f"{'all':<12} {total[0]:>7} {total[1]:>12} {total[2]:>12}"])


@dataclass
class Harness:
    """The settings of a session and the uninterrupted runs that it has made, one for each way of starting."""

    folder: Path
    seed: int
    workers: list[int]
    backends: list[str]
    reproducible: str
    phased: bool = False
    streaming: bool = False
    wholes: dict[tuple, Path] = field(default_factory=dict)
    seconds: float = 5.0

    @property
    def elastic(self) -> bool:
        """True if the number of workers is redrawn at each start."""
        return self.reproducible == "elastic"

    @property
    def inputs(self) -> Path:
        if not (inputs := self.folder / "inputs").exists():
            tiny_run.make_inputs(inputs)
        return inputs

    def one_way(self, workers: int) -> bool:
        """True if the backends have the same bits; of one or two workers they always have, as a sum has one order."""
        return self.reproducible != "off" or workers <= 2

    def launch(
        self, run: Path, backend: str, workers: int, kill: Kill | None, random: Random, **options: int
    ) -> zygote.Ended:
        from run_t5_pretraining import main

        how = {"reproducible": self.reproducible, "phased": self.phased, "streaming": self.streaming}
        argv = tiny_run.flags(self.inputs, run, **how, **options)
        number = sum(1 for _ in run.glob("start_*"))
        return zygote.start(main, argv, backend, workers, run / f"start_{number:03d}", kill).wait(random)

    def begin(self, run: Path) -> Path:
        run.mkdir()
        shutil.copy(self.inputs / "text.jsonl", run)
        return run

    def whole(self, backend: str, workers: int) -> Path:
        """The uninterrupted run to compare with, which saves at every step."""
        key = () if self.elastic else (workers,) if self.one_way(workers) else (workers, backend)
        if key not in self.wholes:
            run = self.begin(self.folder / "_".join(["whole", *map(str, key)]))
            ended = self.launch(run, backend, workers, None, Random(0), save_interval=1, keep=tiny_run.ITERS)
            if any(ended.codes.values()):
                raise Fault(f"the uninterrupted run failed, see {run}")
            self.wholes[key], self.seconds = run, ended.seconds
        return self.wholes[key]

    def run(self, number: int, most: int, tally: Tally) -> None:
        """Start, kill and compare until a run of at most `most` kills has ended."""
        random = Random(f"{self.seed} {number}")
        run = self.begin(self.folder / f"run_{number:04d}")
        backend, workers = random.choice(self.backends), random.choice(self.workers)
        kills, kill, seen, launched = min(random.randint(3, 8), most), None, set(), 0
        while True:
            launched += 1
            workers = random.choice(self.workers) if self.elastic else workers
            backend = random.choice(self.backends) if self.one_way(workers) else backend
            whole = self.whole(backend, workers)
            begun, texts = bool(tiny_run.checkpoints(run)), tiny_run.tokenized(run)
            moment = {"begun": begun, "tokenized": texts, "seconds": self.seconds}
            kill = draw(random, workers, **moment) if kills else None
            said = f"run {number} start {launched}, {workers} workers of {backend}: {kill or 'left alone'}"
            ended = self.launch(run, backend, workers, kill, random)
            if kill is not None:
                (tally.landed if ended.landed else tally.missed)[kill.phase] += 1
                tally.signals[kill.sign] += ended.landed
                kills -= ended.landed
            tally.forced += len(ended.forced)
            outcome = f"{ended.seconds:.1f} s, exit {[ended.codes[rank] for rank in sorted(ended.codes)]}"
            print(f"{said}: {outcome}{'' if ended.landed or not kill else ', not reached'}", flush=True)
            try:
                over = self.check(run, whole, ended, seen, tally)
            except Fault as fault:
                tally.differences[kill.phase if kill else "any time"] += 1
                raise Fault(f"{said}: {fault}") from None
            if over:
                tally.runs += 1
                return

    def check(self, run: Path, whole: Path, ended: zygote.Ended, seen: set, tally: Tally) -> bool:
        """Compare what a start left behind; True if the run is over."""
        if ended.hung:
            raise Fault(f"hung: nothing ended it within {zygote.PATIENCE_SECONDS:.0f} s")
        found = tiny_run.checkpoints(run)
        for path in found:
            if (stamp := (path.name, path.stat().st_ino)) in seen:
                continue
            seen.add(stamp)
            other = whole / "model" / "checkpoints" / path.name
            if path.name == "step_000000":  # a signal came before the first step
                verify(path)
                continue
            tally.compared += 1
            if unequal := tiny_run.differing(path, other, elastic=self.elastic):
                raise Fault(f"{path.name} differs from the uninterrupted run's in {', '.join(unequal)}")
        done = bool(found) and found[-1].name == f"step_{tiny_run.ITERS:06d}"
        if any(ended.codes.values()):
            if not ended.landed:
                raise Fault("failed without a kill")
            return False
        if not done:
            raise Fault(f"ended with exit code 0 before its last step (checkpoints: {[p.name for p in found]})")
        if faults := tiny_run.faults_of_logs(run, whole):
            raise Fault("; ".join(faults[:5]))
        return True


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200, help="that have to land")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--run", type=int, help="repeat this run alone")
    parser.add_argument("--workers", default="2", help="numbers to draw from, such as 1,2,3,4")
    parser.add_argument("--backends", default="horovod,ddp", help="to draw from")
    parser.add_argument("--reproducible", choices=("off", "fixed", "elastic"), default="off")
    parser.add_argument("--phases", action="store_true", help="of a run of three phases")
    parser.add_argument("--streaming", action="store_true", help="of a run that tokenizes while it trains")
    parser.add_argument("--minutes", type=float, help="begin no run after this time")
    parser.add_argument("--folder", type=Path, help="where the runs go; removed after success, kept after a fault")
    args = parser.parse_args(argv)
    if args.reproducible != "elastic" and args.run is None and "," in args.workers:
        print("each run keeps its number of workers: redrawn at each start with --reproducible elastic", flush=True)
    return args


def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    folder = args.folder or Path(tempfile.mkdtemp(prefix="chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    begun, tally = time.monotonic(), Tally()
    logging.getLogger("tensorboard").setLevel(logging.ERROR)  # of events after a restart, which is what is tested
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: threads of one worker would sum in another order
    workers, backends = [int(n) for n in args.workers.split(",")], args.backends.split(",")
    warm.preload("run_t5_pretraining", "lm_experiments_tools.recipes.t5_sources")
    harness = Harness(folder, args.seed, workers, backends, args.reproducible, args.phases, args.streaming)
    print(f"{args.kills} kills, seed {args.seed}, in {folder}: 5 s a kill on two idle cores", flush=True)
    faults, number = [], args.run or 0
    while tally.landed.total() < args.kills:
        try:
            harness.run(number, args.kills - tally.landed.total(), tally)
            shutil.rmtree(folder / f"run_{number:04d}")
        except Fault as fault:
            faults.append(number)
            print(
                f"FAULT {fault}\n  {folder / f'run_{number:04d}'} is kept; again: {_again(args, number)}", flush=True
            )
        number += 1
        minutes = (time.monotonic() - begun) / 60
        print(f"{tally.landed.total()} of {args.kills} kills, {number} runs, {minutes:.1f} min", flush=True)
        if args.run is not None or len(faults) >= 5 or (args.minutes and minutes >= args.minutes):
            break
    signals = ", ".join(f"{sign.name} {count}" for sign, count in sorted(tally.signals.items()))
    print(
        f"\n{tally.table()}\n{signals}; {tally.runs} runs ended, {tally.compared} checkpoints and their logs compared"
    )
    print(f"{tally.forced} workers did not end within {zygote.GRACE_SECONDS:.0f} s of another's end and of SIGTERM")
    print(f"{(time.monotonic() - begun) / 60:.1f} min, seed {args.seed}, {len(faults)} faults")
    if not faults:
        shutil.rmtree(folder)
    return int(bool(faults))


def _again(args: argparse.Namespace, number: int) -> str:
    return (
        f"make chaos SEED={args.seed} ARGS='--run {number} --workers {args.workers} --backends {args.backends} "
        f"--reproducible {args.reproducible}{' --phases' if args.phases else ''}'"
    )


if __name__ == "__main__":
    sys.exit(main())

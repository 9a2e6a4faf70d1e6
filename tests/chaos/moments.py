"""Kills at chosen moments of a worker's life: hooks put around the project's functions in a forked child alone.

A moment is the n-th tick of a phase. Ticks come from Python's audit events (each opened or renamed file of a
checkpoint or of a token file) and from functions that are wrapped: joining the group, loading, each training step,
each batch of an evaluation, both ends of a save.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

# phase -> most ticks that a start of the tiny run has; a moment is drawn among them
PHASES = {"tokenizing": 8, "rendezvous": 2, "loading": 6, "training": 6, "evaluating": 8, "saving": 40, "any time": 0}
WEIGHTS = {"tokenizing": 8, "rendezvous": 2, "loading": 3, "training": 3, "evaluating": 3, "saving": 5, "any time": 3}
SIGNALS = (signal.SIGKILL,) * 8 + (signal.SIGTERM, signal.SIGINT)


@dataclass(frozen=True)
class Kill:
    """One kill: of `rank`, at the `tick`-th tick of `phase` and `delay` seconds later, by `sign`.

    Of the phase "any time" the delay counts from the fork, and the harness sends the signal.
    """

    phase: str
    rank: int
    tick: int
    delay: float
    sign: int

    def __str__(self) -> str:
        name, when = signal.Signals(self.sign).name, f"+{1000 * self.delay:.0f} ms" if self.delay else "at once"
        return f"{name} of rank {self.rank}, {self.phase}, tick {self.tick} {when}"


def draw(random: Random, workers: int, *, begun: bool, tokenized: bool, seconds: float) -> Kill:
    """A kill for the next start.

    Args:
        workers: their number at this start.
        begun: there is a checkpoint, so the start loads it.
        tokenized: the token file is there.
        seconds: that a start lasts without a kill, for the phase "any time".
    """
    possible = {p: w for p, w in WEIGHTS.items() if (p != "tokenizing" or not tokenized) and (p != "loading" or begun)}
    phase = random.choices(list(possible), list(possible.values()))[0]
    rank = 0 if phase == "tokenizing" else random.randrange(workers)
    most = 2 if phase == "saving" and rank else PHASES[phase]
    tick = 1 if phase == "any time" else random.randint(1, most)
    delay = random.uniform(0, seconds) if phase == "any time" else random.choice((0.0, random.uniform(0, 0.03)))
    sign = random.choice(SIGNALS)
    return Kill(phase, rank, tick, delay, sign)


class Watch:
    """Counts a phase's ticks in this process and kills it at the chosen one; `note` hears of it just before."""

    def __init__(self, kill: Kill, note: Callable[[], None]) -> None:
        self.kill, self.note, self.ticks = kill, note, 0
        self._turn = threading.Lock()

    def tick(self, phase: str) -> None:
        if phase != self.kill.phase:
            return
        with self._turn:
            self.ticks += 1
            here = self.ticks == self.kill.tick
        if not here:
            return
        if self.kill.delay:
            threading.Thread(target=self._later, daemon=True).start()
        else:
            self._now()

    def _later(self) -> None:
        time.sleep(self.kill.delay)
        self._now()

    def _now(self) -> None:
        self.note()
        os.kill(os.getpid(), self.kill.sign)


def install(watch: Watch, rank: int) -> None:
    """Put the hooks of the watched phase into this process."""
    phase = watch.kill.phase
    if phase in ("tokenizing", "saving", "loading"):
        sys.addaudithook(functools.partial(_audited, watch, rank))
    import torch.distributed

    from lm_experiments_tools.checkpoint.saving import Saver
    from lm_experiments_tools.training.resume import Restorer
    from lm_experiments_tools.training.step import Step
    from lm_experiments_tools.training.trainer import TrainingLoop

    _around(torch.distributed, "init_process_group", watch, "rendezvous", before=True, after=True)
    if "horovod.torch" in sys.modules:
        _around(sys.modules["horovod.torch"], "init", watch, "rendezvous", before=True, after=True)
    _around(Restorer, "_resume", watch, "loading", before=True, after=True)
    _around(TrainingLoop, "train_step", watch, "training", before=True)
    _around(TrainingLoop, "validate", watch, "evaluating", before=True, after=True)
    _around(Saver, "save", watch, "saving", before=True, after=True)
    count = Step.count

    @functools.wraps(count)
    def counted(step: Any, *args: Any) -> Any:
        if not step.backend.model.training:  # each batch of an evaluation begins so
            watch.tick("evaluating")
        return count(step, *args)

    Step.count = counted


def _around(owner: Any, name: str, watch: Watch, phase: str, *, before: bool = False, after: bool = False) -> None:
    function = getattr(owner, name)

    @functools.wraps(function)
    def wrapped(*args: Any, **options: Any) -> Any:
        if before:
            watch.tick(phase)
        result = function(*args, **options)
        if after:
            watch.tick(phase)
        return result

    setattr(owner, name, wrapped)


def _audited(watch: Watch, rank: int, event: str, args: tuple) -> None:
    """Tick at files of tokens and of checkpoints; those that rank 0 alone writes do not count for another rank."""
    if event not in ("open", "os.rename", "os.remove", "os.symlink", "os.mkdir") or rank:
        return
    path = os.fspath(args[0]) if isinstance(args[0], (str, bytes, os.PathLike)) else ""
    path = path.decode(errors="replace") if isinstance(path, bytes) else path
    if "/tokens/" in path:
        watch.tick("tokenizing")
    elif "/checkpoints/" in path:
        reads = event == "open" and isinstance(args[1], str) and args[1].startswith("r")
        watch.tick("loading" if reads and ".tmp-" not in path else "saving")

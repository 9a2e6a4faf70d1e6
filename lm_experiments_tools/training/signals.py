"""The end of a job by SIGTERM, Ctrl-C, a batch system's warning (SIGUSR1, ...), its launcher's death or an error.

At a signal all workers stop at the same step and save one checkpoint together.
"""

from __future__ import annotations

import logging
import os
import platform
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

from lm_experiments_tools.backends.process_groups import end_suspended, lost_worker
from lm_experiments_tools.config import exits
from lm_experiments_tools.config.exits import STOP_SIGNALS
from lm_experiments_tools.errors import LostWorkerError

if TYPE_CHECKING:
    from lm_experiments_tools.backends.backend import Backend
    from lm_experiments_tools.checkpoint.train_state import TrainState

logger = logging.getLogger(__name__)

_LAUNCHED = {"TORCHELASTIC_RUN_ID", "ACCELERATE_MIXED_PRECISION"}  # variables that torchrun, accelerate launch set


class StopSignals:
    """Context that records each of `exits.STOP_SIGNALS`, so that training can stop at the end of a step.

    A second SIGINT interrupts immediately. Under torchrun or accelerate launch, a dead parent process counts as
    SIGTERM. Signals of batch systems that the user's program handles, or nohup ignores, are left alone. `agreed` is
    the number of a signal that any worker received, known to all after `agree`; 0 for none.
    """

    def __init__(self, *, saves: bool = True) -> None:
        self.agreed = 0
        self._reaction = "saving a checkpoint and stopping" if saves else "stopping"
        self._noted = [0] * len(STOP_SIGNALS)
        self._previous: dict[int, Any] = {}
        self._entered = False
        # Without a launcher the parent may be a shell, whose end means nothing.
        self._launcher = os.getppid() if _LAUNCHED & os.environ.keys() else None

    @property
    def pending(self) -> list[int]:
        """How many of each of `STOP_SIGNALS` this worker received, to be summed over workers."""
        if not self._entered:
            return [0] * len(STOP_SIGNALS)
        if self._launcher is not None and os.getppid() != self._launcher:
            logger.warning(
                "the launcher of this worker (process %d) ended without a signal: %s", self._launcher, self._reaction
            )
            self._launcher = None
            self._noted[STOP_SIGNALS.index(signal.SIGTERM)] += 1
        return list(self._noted)

    def agree(self, totals: Sequence[int]) -> None:
        """Record which signals any worker received (the sum of `pending`), so that all stop at the same step."""
        for number, count in zip(STOP_SIGNALS, totals, strict=True):
            if count and not self.agreed:
                self.agreed = int(number)
                logger.warning("%s: %s", signal.Signals(number).name, self._reaction)

    def __enter__(self) -> None:
        self._entered = True
        if threading.current_thread() is threading.main_thread():
            # An interrupt from before this context is added before `_note` adds to the count.
            self._noted[STOP_SIGNALS.index(signal.SIGINT)] += exits.was_interrupted()
            for number in STOP_SIGNALS:
                if number in STOP_SIGNALS[:2] or signal.getsignal(number) is signal.SIG_DFL:
                    self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        # The launcher's SIGTERM may come before this worker has said which one is lost, and must not end it.
        if kind is not None and issubclass(kind, LostWorkerError):
            self._previous.pop(signal.SIGTERM, None)
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()
        self._entered = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        index = STOP_SIGNALS.index(number)
        if number == signal.SIGINT and self._noted[index]:
            raise KeyboardInterrupt
        self._noted[index] += 1


@contextmanager
def failures_located(state: TrainState, backend: Backend) -> Iterator[None]:
    """Context that adds the step at which training failed to every exception, as its attribute `step`.

    LostWorkerError replaces the error of a collective if another worker is lost; suspended ones are killed.
    """
    peers = backend.gather((platform.node(), os.getpid()))
    try:
        yield
    except Exception as error:
        error.step = state.step
        if (lost := lost_worker(error)) is None:
            raise
        end_suspended(peers)
        lost.step = state.step
        raise lost from error

"""Stopping of a job by SIGTERM, Ctrl-C or the death of its launcher.

All workers stop at the same step and save one checkpoint together.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Sequence
from types import FrameType
from typing import Any

from lm_experiments_tools.config import exits

logger = logging.getLogger(__name__)

WATCHED = (signal.SIGTERM, signal.SIGINT)


class StopSignals:
    """Context that records SIGTERM or SIGINT, so that training can stop at the end of a step.

    A second SIGINT interrupts immediately. Under torchrun or accelerate launch, a dead parent process counts as
    SIGTERM.

    Attributes:
        agreed: signal number that any worker received, known to all after `agree`; 0 for none.
    """

    def __init__(self) -> None:
        self.agreed = 0
        self._noted = [0, 0]
        self._previous: dict[int, Any] = {}
        self._entered = False
        self._launcher = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None  # else it may be a shell's

    @property
    def pending(self) -> list[int]:
        """Numbers of SIGTERM and SIGINT that this worker received, to be summed over workers."""
        if not self._entered:
            return [0, 0]
        if self._launcher is not None and os.getppid() != self._launcher:
            logger.warning(
                "the launcher of this worker (process %d) ended without a signal: saving a checkpoint and stopping",
                self._launcher,
            )
            self._launcher = None
            self._noted[WATCHED.index(signal.SIGTERM)] += 1
        return list(self._noted)

    def agree(self, totals: Sequence[int]) -> None:
        """Record which signals any worker received, so that all workers stop at the same step.

        Args:
            totals: sum of `pending` over all workers.
        """
        for number, count in zip(WATCHED, totals, strict=True):
            if count and not self.agreed:
                self.agreed = int(number)
                logger.warning("%s: saving a checkpoint and stopping", signal.Signals(number).name)

    def __enter__(self) -> None:
        self._entered = True
        if threading.current_thread() is threading.main_thread():
            self._noted[WATCHED.index(signal.SIGINT)] += exits.was_interrupted()  # before `_note` adds to it
            for number in WATCHED:
                self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()
        self._entered = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self._noted[1]:
            raise KeyboardInterrupt
        self._noted[WATCHED.index(number)] += 1

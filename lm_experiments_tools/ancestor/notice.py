"""The one sentence that a program written for t5-experiments reads about itself."""

from __future__ import annotations

import logging
import os

logger = logging.getLogger(__name__)

_RANKS = ("HOROVOD_RANK", "RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")


_said: list[str] = []  # names that were used; the first has been warned of


def first_rank() -> bool:
    """True for rank 0 by the launcher's environment, which is there before any worker knows of others."""
    return next((os.environ[variable] for variable in _RANKS if variable in os.environ), "0") == "0"


def notice(name: str, today: str) -> None:
    """Warn, once in a process and on rank 0 alone, that `name` is t5-experiments' and what is said today instead."""
    if not _said and first_rank():
        logger.warning(
            "%s is t5-experiments' name and goes on working; today it is %s (docs/porting.md has all names)",
            name,
            today,
        )
    _said.append(name)

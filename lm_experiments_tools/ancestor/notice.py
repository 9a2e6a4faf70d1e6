"""The deprecation warning for names of t5-experiments, which this package keeps for old programs."""

from __future__ import annotations

import importlib.util
import logging

from lm_experiments_tools.config.launchers import launcher_rank

logger = logging.getLogger(__name__)

HVD_INSTALLED = importlib.util.find_spec("horovod") is not None
ACCELERATE_INSTALLED = importlib.util.find_spec("accelerate") is not None

_said: list[str] = []  # names that were used; the first has been warned of


def notice(name: str, today: str) -> None:
    """Warn once, on rank 0, that a name belongs to t5-experiments and is replaced by `today`."""
    if not _said and launcher_rank() == 0:
        logger.warning(
            "%s is t5-experiments' name and still works; the current name is %s (docs/porting.md has all names)",
            name,
            today,
        )
    _said.append(name)

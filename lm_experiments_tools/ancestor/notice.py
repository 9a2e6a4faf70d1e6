"""The one sentence that a program written for t5-experiments reads about itself."""

from __future__ import annotations

import logging

from lm_experiments_tools.config.launchers import launcher_rank

logger = logging.getLogger(__name__)

_said: list[str] = []  # names that were used; the first has been warned of


def notice(name: str, today: str) -> None:
    """Warn, once in a process and on rank 0 alone, that `name` is t5-experiments' and what is said today instead."""
    if not _said and launcher_rank() == 0:
        logger.warning(
            "%s is t5-experiments' name and goes on working; today it is %s (docs/porting.md has all names)",
            name,
            today,
        )
    _said.append(name)

"""Arguments of the learning-rate range test, which trains on the real model and data without changing the run.

Standard library only.
"""

from dataclasses import dataclass
from typing import Annotated

from lm_experiments_tools.config.flags import HARMLESS, POSITIVE, Ignored, at_least, check_conflict, needs
from lm_experiments_tools.errors import UserError

_OF_NEW_RUN = Ignored(
    lambda args: args.resume_path() is not None, "starts a new run: name the checkpoint by --init_checkpoint"
)
_OF_UPDATES = Ignored(lambda args: args.validate_only, "makes updates, and --validate_only makes none")
_OF_RATES = Ignored(lambda args: args.relative_step, "has no rate to find: --relative_step computes its own")


@dataclass(frozen=True, kw_only=True)
class FinderArgs:
    """The learning-rate range test, which reports good learning rates and exits."""

    find_lr: Annotated[int | None, HARMLESS, at_least(20), _OF_NEW_RUN, _OF_UPDATES, _OF_RATES] = None
    """Raise the learning rate over so many updates from --find_lr_min to --find_lr_max, say where the loss falls
    fastest and where it begins to rise, and exit."""
    find_lr_min: Annotated[float, HARMLESS, POSITIVE, needs("find_lr")] = 1e-6
    """--find_lr: learning rate of the first update."""
    find_lr_max: Annotated[float, HARMLESS, POSITIVE, needs("find_lr")] = 1.0
    """--find_lr: learning rate of the last update, unless the loss has risen far before it."""

    def check(self) -> None:
        for flag in ("profile", "profile_after"):
            check_conflict(self, "find_lr", flag, "a search is not profiled")
        if self.find_lr_min >= self.find_lr_max:
            raise UserError(f"--find_lr_min {self.find_lr_min:g} is not below --find_lr_max {self.find_lr_max:g}.")

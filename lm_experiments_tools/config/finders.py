"""Arguments of the finders, which try settings on the real run and leave it alone. Standard library only."""

from dataclasses import dataclass
from typing import Annotated

from lm_experiments_tools.config.flags import HARMLESS, POSITIVE, Unread, at_least, check_conflict, needs
from lm_experiments_tools.errors import UserError

_OF_RANGE = needs("find_lr", "is an end of the range of --find_lr, which is not given: add --find_lr 100")
_OF_NEW_RUN = Unread(
    lambda args: args.resume_path() is not None,
    "starts where a new run would, not from --resume {resume}: name that checkpoint as --init_checkpoint",
)
_OF_UPDATES = Unread(lambda args: args.validate_only, "tries updates, of which --validate_only makes none")
_OF_RATES = Unread(lambda args: args.relative_step, "has no rate to find: --relative_step computes its own")


@dataclass(frozen=True, kw_only=True)
class FinderArgs:
    """Settings found by trying: the script reports and exits, and the run itself is not begun."""

    find_lr: Annotated[int | None, HARMLESS, at_least(20), _OF_NEW_RUN, _OF_UPDATES, _OF_RATES] = None
    """Raise the learning rate over so many updates from --find_lr_min to --find_lr_max, say where the loss falls
    fastest and where it begins to rise, and exit."""
    find_lr_min: Annotated[float, HARMLESS, POSITIVE, _OF_RANGE] = 1e-6
    """--find_lr: learning rate of the first update."""
    find_lr_max: Annotated[float, HARMLESS, POSITIVE, _OF_RANGE] = 1.0
    """--find_lr: learning rate of the last update, unless the loss has risen far before it."""
    find_micro_batch: Annotated[bool, HARMLESS, _OF_NEW_RUN, _OF_UPDATES] = False
    """Try micro-batches of the same global batch until memory runs out, time those that fit, and exit."""

    def check(self) -> None:
        check_conflict(self, "find_lr", "find_micro_batch", "find the micro-batch first, then the learning rate")
        for finder in ("find_lr", "find_micro_batch"):
            for flag in ("profile", "profile_after"):
                check_conflict(self, finder, flag, "a finder makes no run of which to take a profile")
        if self.find_micro_batch and self.reproducible != "off":
            raise UserError(
                "--find_micro_batch tries other micro-batches, and a run with --reproducible "
                f"{self.reproducible} keeps its own: find one without it, then start the run."
            )
        if self.find_lr_min >= self.find_lr_max:
            raise UserError(f"--find_lr_min {self.find_lr_min:g} is not below --find_lr_max {self.find_lr_max:g}.")

    def finds(self) -> bool:
        """True if a finder is asked for, in the place of the run."""
        return self.find_lr is not None or self.find_micro_batch

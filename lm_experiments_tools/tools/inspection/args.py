"""Flags of `lmtools inspect` beside those of the script whose data is inspected."""

from dataclasses import dataclass

from lm_experiments_tools.config.flags import check_minimum


@dataclass(frozen=True, kw_only=True)
class SampleArgs:
    """Samples."""

    samples: int = 3
    """Samples to show, the first ones of the run; of fine-tuning, of each split. With --packing: rows."""
    world_size: int = 1
    """Workers of the planned run. Steps of an epoch and the rows of a micro-batch depend on it."""

    def check(self) -> None:
        check_minimum(self, 0, "samples")
        check_minimum(self, 1, "world_size")


@dataclass(frozen=True, kw_only=True)
class TokenArgs:
    """Token statistics."""

    frequent: int = 12
    """Most frequent tokens to show."""
    documents: int | None = None
    """Inspect only the first N documents of each --data_path. None: all; 10000 of a Hugging Face dataset and with
    --streaming."""
    check_gigabytes: float = 8.0
    """Compare token files up to this size with their recorded sha256 (1 s a GB). 0: never."""
    output: str | None = None
    """Folder for a histogram of lengths (PNG) of each --data_path. None: none."""

    def check(self) -> None:
        check_minimum(self, 0, "frequent", "check_gigabytes")
        check_minimum(self, 1, "documents")

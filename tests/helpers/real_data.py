"""Where tests find real text and vocabularies, which the repository does not hold."""

from __future__ import annotations

import os
from pathlib import Path

DATA = Path(os.environ.get("PRETRAINING_DATA", Path(__file__).resolve().parents[3] / "shared" / "data"))


def lacking(*paths: Path) -> str | None:
    """Why a test must be skipped: the first of these files of `DATA` that is not there."""
    absent = [path for path in paths if not path.exists()]
    return f"there is no {absent[0]}: PRETRAINING_DATA names the folder" if absent else None

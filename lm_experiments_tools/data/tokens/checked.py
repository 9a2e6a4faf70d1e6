"""Token files that a machine has checked before are opened at once.

Checking reads all of the index, twice: its numbers, and for the fingerprint. That takes minutes for the 90 GB that
BERT's sentences of C4 have. So what was found is kept in `.cache/checked/`, a file for each token file and machine,
with inode, size and time of the last change of the three files, and holds as long as these are the same: for the other
workers of a run, which wait for the first one, and for later starts. Small files are checked each time.
"""

import hashlib
import json
import logging
import os
import platform
from pathlib import Path
from typing import Any

from lm_experiments_tools.data.tokens.files import dataset_paths
from lm_experiments_tools.data.tokens.indexed import IndexedDataset
from lm_experiments_tools.files import locked, write_atomic

logger = logging.getLogger(__name__)

CACHE = Path(".cache") / "checked"  # below the working directory
SMALL = 8 * 2**20  # bytes of an index that is checked in a few milliseconds, so that nothing is kept of it


def open_checked(prefix: str | os.PathLike, meta: dict[str, Any] | None = None) -> IndexedDataset:
    """The token file, with its fingerprint; checked unless this machine has done so since it was last changed.

    Raises:
        UserError: as `IndexedDataset` and its fingerprint.
    """
    index = dataset_paths(prefix)[1]
    if not index.is_file() or index.stat().st_size < SMALL:
        return IndexedDataset(prefix, meta)
    place = f"{platform.node()}:{os.path.realpath(prefix)}"
    record = CACHE / f"{Path(prefix).name}-{hashlib.sha256(place.encode()).hexdigest()[:16]}.json"
    try:
        with locked(record.with_suffix(".lock")):
            return _open(prefix, meta, record)
    except OSError as error:
        logger.warning("%s cannot be kept (%s), so each start checks %s again", record, error.strerror, prefix)
    return IndexedDataset(prefix, meta)


def _open(prefix: str | os.PathLike, meta: dict[str, Any] | None, record: Path) -> IndexedDataset:
    stamps = [_stamp(path) for path in dataset_paths(prefix)]
    known = _read(record)
    if known.get("stamps") == stamps:
        return IndexedDataset(prefix, meta, known["fingerprint"])
    tokens = IndexedDataset(prefix, meta)
    write_atomic(record, json.dumps({"stamps": stamps, "fingerprint": tokens.fingerprint}))
    return tokens


def _stamp(path: Path) -> list[int]:
    """[inode, size, time of the last change in ns], [] for a file that is not there."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return []
    return [status.st_ino, status.st_size, status.st_mtime_ns]


def _read(record: Path) -> dict[str, Any]:
    try:
        known = json.loads(record.read_bytes())
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) and isinstance(known.get("fingerprint"), str) else {}

"""Cache of the checks of large token files, so that each machine reads the index of a token file in full only once.

Checking a large index, such as the 90 GB of BERT's sentences of C4, takes minutes. The result is cached in
`.cache/checked/` with inode, size and time of the files. Small files are checked each time.
"""

import hashlib
import json
import logging
import os
import platform
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lm_experiments_tools.data.tokens.files import dataset_paths
from lm_experiments_tools.data.tokens.indexed import IndexedDataset
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.files import locked, read_json, write_atomic

logger = logging.getLogger(__name__)

CACHE = Path(".cache") / "checked"  # below the working directory
SMALL = 8 * 2**20  # bytes of a file that is checked in a few milliseconds


def open_checked(prefix: str | os.PathLike, meta: dict[str, Any] | None = None) -> IndexedDataset:
    """Open a token file whose index is checked in full only once on each machine.

    Raises as `IndexedDataset`.

    Args:
        prefix: path of the .bin and .idx files without their suffix.
        meta: content of the .json file; None to read it.
    """
    paths = dataset_paths(prefix)
    opened: list[IndexedDataset] = []
    if _is_small(paths[1]):
        return IndexedDataset(prefix, meta)

    def check() -> str:
        opened.append(IndexedDataset(prefix, meta))
        return opened[-1].fingerprint

    fingerprint = found_once(paths[1], paths, check)
    return opened[-1] if opened else IndexedDataset(prefix, meta, fingerprint)


def found_once(path: Path, files: Sequence[Path], find: Callable[[], str]) -> str:
    """Return the result of a slow check of a large file, from a cache if the files have not changed since.

    Args:
        path: the file that the check reads. If it is small, the cache is not used.
        files: files whose change makes the cached result invalid.
        find: function that runs the check and returns its result.
    """
    if _is_small(path):
        return find()
    name = path.with_suffix("")
    identity = f"{platform.node()}:{os.path.realpath(name)}"
    record = CACHE / f"{name.name}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.json"
    try:
        with locked(record.with_suffix(".lock")):
            stamps, known = [_stamp(path) for path in files], {}
            with suppress(UserError):  # missing or damaged
                known = read_json(record)
            if known.get("stamps") != stamps or not isinstance(known.get("fingerprint"), str):
                known = {"stamps": stamps, "fingerprint": find()}
                write_atomic(record, json.dumps(known))
            return known["fingerprint"]
    except OSError as error:
        logger.warning("%s cannot be written (%s), so each start checks %s again", record, error.strerror, name)
    return find()


def _is_small(path: Path) -> bool:
    return not path.is_file() or path.stat().st_size < SMALL


def _stamp(path: Path) -> list[int]:
    """[inode, size, time of the last change in ns], [] for a file that is not there."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return []
    return [status.st_ino, status.st_size, status.st_mtime_ns]

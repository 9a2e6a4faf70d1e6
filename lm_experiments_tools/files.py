"""Atomic file operations, locks, hashes of files, and JSON of metrics."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import math
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from lm_experiments_tools.errors import UserError

logger = logging.getLogger(__name__)

SAMPLED_BYTES = 1 << 16  # of either end of a file, see `hash_of_ends`


def fsync_path(path: Path) -> None:
    """Flush a file or directory to the disk. A rename is durable once its directory is flushed.

    Nothing happens on file systems that cannot flush it (directories of SMB and FUSE).
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF):
            raise
    finally:
        os.close(descriptor)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Context that replaces a file atomically: yields a temporary file and renames it at the end.

    Readers see the old or the new content, also after an error or with several writers.
    """
    temporary = path.with_name(f".{path.name}.tmp{secrets.token_hex(6)}")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    fsync_path(path.parent)


@contextmanager
def naming(path: Path | str) -> Iterator[None]:
    """Context that adds the name of the file that is read or written to an OSError that has none."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None and error.strerror == os.strerror(error.errno):
            error.filename = os.fspath(path)
        raise


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write a file atomically (see `replacing`)."""
    with naming(path), replacing(path) as file:
        file.write(content.encode("utf-8") if isinstance(content, str) else content)


def apply_umask(*files: Path) -> None:
    """Give files the default permissions of new files; safetensors makes files that only their owner can read."""
    if not files:
        return
    probe = files[0].with_name(f".{secrets.token_hex(6)}.tmp")
    try:
        with open(probe, "xb") as file:  # asks umask, mount and the folder's default access list, all threads' alike
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
    finally:
        probe.unlink(missing_ok=True)
    for file in files:
        with suppress(OSError):  # file systems without permissions
            file.chmod(mode)


def json_sha256(value: Any) -> str:
    """Compute the sha256 of a JSON value, which does not depend on the order of keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def hash_of_ends(path: str | os.PathLike) -> str:
    """Compute the sha256 of the first and last 64 KiB of a file, by which changes are noticed quickly."""
    with open(path, "rb") as file:
        content = file.read(SAMPLED_BYTES)
        file.seek(max(os.path.getsize(path) - SAMPLED_BYTES, 0))
        return hashlib.sha256(content + file.read()).hexdigest()


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Context with an exclusive lock on `path`; waits for other holders. The lock ends with its process."""
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        with open(path, "w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                logger.info("waiting for another process, which holds %s", path)
                fcntl.flock(file, fcntl.LOCK_EX)
            except OSError as error:  # file systems without locks
                logger.warning("%s cannot be locked (%s): let no other process write there", path, error.strerror)
            # The holder before us may have removed the file we waited for: then lock the one that has its name now.
            if not _is_named(file.fileno(), path):
                continue
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
            return


def _is_named(descriptor: int, path: Path) -> bool:
    """True if `path` is this open file now; one call, because others may remove it between two."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def user_cache() -> Path | None:
    """Folder for caches of this package; None if the user has no home or cannot write there."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "lm_experiments_tools"
    with suppress(OSError):
        if folder.is_absolute():  # "~" stays where there is no home
            folder.mkdir(parents=True, exist_ok=True)
            return folder if os.access(folder, os.W_OK) else None
    return None


def to_jsonable(value: Any) -> Any:
    """Convert a value to JSON types: numpy and torch scalars and arrays, paths, sets and tuples.

    NaN and infinities become None; other types become their `str`.
    """
    if value is None or type(value) in (bool, int, str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): to_jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_jsonable(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted((to_jsonable(item) for item in value), key=repr)
    if callable(getattr(value, "tolist", None)):  # numpy scalars and arrays, torch tensors on any device
        plain = value.tolist()
        return to_jsonable(plain) if type(plain) is not type(value) else str(value)
    return str(value)


def dump_json(value: Any, *, indent: int | None = 2) -> str:
    """Write a value as JSON text, after its conversion by `to_jsonable`; without `indent` in one line."""
    return json.dumps(to_jsonable(value), indent=indent, allow_nan=False, ensure_ascii=False)


def human_bytes(size: float) -> str:
    """Format a size, e.g. `3.4 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def read_json(path: Path, what: str = "an object") -> dict[str, Any]:
    """Read a file that holds a JSON object, which messages call `what`. Raises UserError."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:  # broken JSON or not UTF-8, or lists in lists in lists
        raise UserError(f"{path} is not valid JSON: {error}.") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} holds a JSON {type(content).__name__}, not {what}.")
    return content

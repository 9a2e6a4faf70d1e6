"""The manifest of a checkpoint directory: what belongs in it, byte for byte, and the check that it is all there."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import stat
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn

from lm_experiments_tools.checkpoint.untrusted import check_untrusted, is_plain_relative_name
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.files import to_jsonable

FORMAT = "lm_experiments_tools checkpoint"
FORMAT_VERSION = 1
MANIFEST = "manifest.json"
REPLACED = ".old-"  # prefix of a step's earlier checkpoint while the new version takes its name
OF_TRAINING = "trainer_state.safetensors"  # in every checkpoint of ours, and in no folder of another tool
KEPT = "kept-"  # prefix of an empty file beside a checkpoint that is not to be pruned

logger = logging.getLogger(__name__)

_STATE_OF_TRAINING = ("optimizer", "trainer_state")  # how the names of files begin that are of no use to a model
_EDITED = "adapter_config.json"  # names the adapter's base, which users write there when that has moved
_NO_HASH = "0" * 64
_CHUNK = 1 << 22
_HASHING_THREADS = 4  # hashlib releases the GIL; more threads than this only fight over the disk

_checked: set[tuple[Any, ...]] = set()  # what `verify_model` has found right: folder, manifest, names, their stamps


class CheckpointDamaged(UserError):
    """A checkpoint is not what was written; the message names the checkpoint, the file and the reason."""

    def __init__(self, checkpoint: Path, reason: str):
        super().__init__(f"checkpoint {checkpoint} is damaged: {reason}")
        self.checkpoint = checkpoint
        self.reason = reason


def step_directory_name(step: int) -> str:
    """`step_000500`: zero-padded so that a listing sorts by step."""
    return f"step_{step:06d}"


def parse_step(name: str) -> int | None:
    """The step of a checkpoint directory's name, or None if the name is not one `step_directory_name` makes."""
    match = re.fullmatch(r"step_(\d{1,18})", name)
    return int(match[1]) if match and step_directory_name(int(match[1])) == name else None


def as_it_stands(path: Path) -> Path:
    """The checkpoint of this name: the earlier one where a kill came between the two renames of a replacement."""
    earlier = path.parent / f"{REPLACED}{path.name}"
    return earlier if not path.exists() and earlier.is_dir() else path


def keep_from_pruning(path: Path) -> None:
    """Mark a checkpoint of a run, if it is one, by an empty file beside it, so that its run never prunes it."""
    if parse_step(path.name) is None or not (path / MANIFEST).is_file():
        return
    try:
        path.with_name(f"{KEPT}{path.name}").touch()
    except OSError as error:
        logger.warning(
            "%s cannot be marked as in use (%s): its run may prune it, so copy it elsewhere", path, error.strerror
        )


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def list_files(directory: Path) -> dict[str, Path]:
    """Every non-directory below `directory`, {posix relative name: path}; symbolic links are listed, not entered.

    Raises OSError where a directory cannot be listed: of a manifest, half a list would be the whole checkpoint.
    """
    found = {}
    for parent, directories, files in os.walk(directory, onerror=_raise, followlinks=False):
        links = [name for name in directories if (Path(parent) / name).is_symlink()]
        for name in [*files, *links]:
            path = Path(parent) / name
            found[path.relative_to(directory).as_posix()] = path
    return dict(sorted(found.items()))


def _raise(error: OSError) -> NoReturn:
    raise error


def build_manifest(directory: Path, step: int, is_best: bool, extra: dict[str, Any]) -> str:
    """The manifest's text for the files now in `directory` (all regular files).

    The manifest guards itself as well: `manifest_sha256` is the hash of its own text with that value zeroed.
    """
    import torch

    files = list_files(directory)
    for name, path in files.items():
        if not stat.S_ISREG(path.lstat().st_mode):
            raise ValueError(f"{name} in {directory} is not a regular file and cannot be part of a checkpoint")
    with ThreadPoolExecutor(_HASHING_THREADS) as pool:
        hashes = list(pool.map(sha256_of, files.values()))
    manifest = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "step": step,
        "is_best": is_best,
        "torch": torch.__version__,
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "files": {
            name: {"size": path.stat().st_size, "sha256": digest}
            for (name, path), digest in zip(files.items(), hashes, strict=True)
        },
        "extra": to_jsonable(extra),
        "manifest_sha256": _NO_HASH,
    }
    text = json.dumps(manifest, indent=1, allow_nan=False) + "\n"
    head, _, tail = text.rpartition(_NO_HASH)
    return f"{head}{hashlib.sha256(text.encode()).hexdigest()}{tail}"


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """Parse and check the manifest itself (not the files it lists). Raises CheckpointDamaged."""
    path = checkpoint / MANIFEST
    if path.is_symlink():
        raise CheckpointDamaged(checkpoint, f"{MANIFEST} is a symbolic link")
    if path.exists() and not path.is_file():  # to read a pipe would never end
        raise CheckpointDamaged(checkpoint, f"{MANIFEST} is not a regular file")
    with _reading(checkpoint, MANIFEST, " (a save that never finished?)"):
        raw = path.read_bytes()
    try:
        manifest = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise CheckpointDamaged(checkpoint, f"{MANIFEST} is not valid JSON ({len(raw)} bytes)") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CheckpointDamaged(checkpoint, f"{MANIFEST} is not a manifest of this project")
    version = manifest.get("format_version")
    if type(version) is not int or version > FORMAT_VERSION or version < 1:
        raise CheckpointDamaged(
            checkpoint, f"{MANIFEST} has format version {version}; this release reads up to {FORMAT_VERSION}"
        )
    digest = manifest.get("manifest_sha256")
    if not isinstance(digest, str) or not re.fullmatch("[0-9a-f]{64}", digest):
        raise CheckpointDamaged(checkpoint, f"{MANIFEST} has no sha256 of itself")
    head, _, tail = raw.rpartition(digest.encode())
    if hashlib.sha256(head + _NO_HASH.encode() + tail).hexdigest() != digest:
        raise CheckpointDamaged(checkpoint, f"{MANIFEST} does not match its own sha256")
    return manifest


def is_listed(file: Path) -> bool:
    """True for a file that the manifest in its folder lists, there or not. Raises CheckpointDamaged."""
    folder = file.parent
    return os.path.lexists(folder / MANIFEST) and file.name in _listed(folder, read_manifest(folder))


def verify(path: Path | str) -> None:
    """Check that a checkpoint directory is exactly what was committed.

    Reads every byte once. A link such as `last` is followed to the directory it names; nothing inside is followed.

    Raises:
        CheckpointDamaged: names the file and the reason: missing, wrong size, wrong sha256, not listed, a symbolic
            link, a name that leaves the directory, an unknown format version, a step that is not the directory's.
    """
    checkpoint = Path(path).resolve()
    if not checkpoint.is_dir():
        raise CheckpointDamaged(checkpoint, "it is not a directory")
    if not any(checkpoint.iterdir()):
        raise CheckpointDamaged(checkpoint, "the directory is empty")
    manifest = read_manifest(checkpoint)
    if manifest.get("step") != parse_step(checkpoint.name.removeprefix(REPLACED)):
        raise _of_another_step(checkpoint, manifest)
    _check_listed(checkpoint, manifest, None)
    unlisted = [name for name in list_files(checkpoint) if name != MANIFEST and name not in manifest["files"]]
    if unlisted:
        raise CheckpointDamaged(checkpoint, f"{unlisted[0]} is not in the manifest ({len(unlisted)} unlisted files)")


def verify_model(folder: Path, names: Sequence[str] | None = None) -> None:
    """Compare a model's folder with its manifest before it is read, then check that its files name no code.

    Users move and thin out checkpoints before they start from their weights, so only `names` have to be there
    (default: all that is listed but the state of training). A process reads the bytes once, however often it asks. A
    folder without a manifest passes; a checkpoint that lost it passes with a warning, as does an adapter_config.json
    that was edited.

    Raises CheckpointDamaged as `verify` does, and UserError as `check_untrusted` does.
    """
    _verify_listed(folder, names)
    check_untrusted(folder)


def _verify_listed(folder: Path, names: Sequence[str] | None) -> None:
    if not os.path.lexists(folder / MANIFEST):
        if (folder / OF_TRAINING).is_file():
            logger.warning("%s has lost its %s: what is read from it cannot be checked", folder, MANIFEST)
        return
    manifest = read_manifest(folder)
    if parse_step(folder.name) not in (None, manifest.get("step")):
        raise _of_another_step(folder, manifest)
    if names is None:
        names = [name for name in _listed(folder, manifest) if not name.startswith(_STATE_OF_TRAINING)]
    stamps = [(folder / name).lstat() for name in names if os.path.lexists(folder / name)]
    key = (str(folder), manifest["manifest_sha256"], *names)
    key += tuple((s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for s in stamps)
    if key not in _checked:
        _check_listed(folder, manifest, [name for name in names if PurePosixPath(name).name != _EDITED])
        for name in names:
            if PurePosixPath(name).name == _EDITED:
                _say_if_edited(folder, manifest, name)
        _checked.add(key)


def _say_if_edited(folder: Path, manifest: dict[str, Any], name: str) -> None:
    try:
        _check_listed(folder, manifest, [name])
    except CheckpointDamaged as damage:
        if not (folder / name).is_file():
            raise
        logger.warning("%s is not as it was saved (%s): read as it is, its base may have moved", folder, damage.reason)


def _of_another_step(checkpoint: Path, manifest: dict[str, Any]) -> CheckpointDamaged:
    return CheckpointDamaged(checkpoint, f"{MANIFEST} is of step {manifest.get('step')}, the directory is not")


def _listed(checkpoint: Path, manifest: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The files that a manifest lists, all names checked before any file is opened."""
    files = manifest.get("files")
    if not isinstance(files, dict) or not all(isinstance(entry, dict) for entry in files.values()):
        raise CheckpointDamaged(checkpoint, f"{MANIFEST} lists no files")
    for name in files:
        if not is_plain_relative_name(name):
            raise CheckpointDamaged(checkpoint, f"{MANIFEST} lists {name!r}, which is not inside the directory")
    return files


def _check_listed(checkpoint: Path, manifest: dict[str, Any], names: Sequence[str] | None) -> None:
    files = _listed(checkpoint, manifest)
    chosen = list(files) if names is None else names
    for name in chosen:
        if name not in files:
            raise CheckpointDamaged(checkpoint, f"{name} is not in the manifest")
        _check_size(checkpoint, name, files[name].get("size"))
    with ThreadPoolExecutor(_HASHING_THREADS) as pool:
        digests = pool.map(lambda name: _digest(checkpoint, name), chosen)
        for name, digest in zip(chosen, digests, strict=True):
            if digest != files[name].get("sha256"):
                raise CheckpointDamaged(checkpoint, f"the content of {name} does not match its sha256")


def _check_size(checkpoint: Path, name: str, size: Any) -> None:
    path = checkpoint / name
    inside = [path, *(parent for parent in path.parents if checkpoint in parent.parents)]
    with _reading(checkpoint, name):
        is_link = any(part.is_symlink() for part in inside)
        status = path.lstat()
    if is_link:
        raise CheckpointDamaged(checkpoint, f"{name} is a symbolic link")
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointDamaged(checkpoint, f"{name} is not a regular file")
    if status.st_size != size:
        raise CheckpointDamaged(checkpoint, f"{name} has {status.st_size} bytes, {size} were written")


def _digest(checkpoint: Path, name: str) -> str:
    with _reading(checkpoint, name):
        return sha256_of(checkpoint / name)


@contextmanager
def _reading(checkpoint: Path, name: str, hint: str = "") -> Iterator[None]:
    """Turn what the system says while the file `name` is read into CheckpointDamaged; `hint` is for a missing one."""
    try:
        yield
    except FileNotFoundError:
        raise CheckpointDamaged(checkpoint, f"{name} is missing{hint}") from None
    except OSError as error:
        raise CheckpointDamaged(checkpoint, f"{name} cannot be read ({error.strerror})") from error

"""The manifest of a checkpoint, which lists size and sha256 of every file, and checks of untrusted folders."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn

from lm_experiments_tools.errors import UserError
from lm_experiments_tools.files import fsync_path, read_json, to_jsonable

FORMAT = "lm_experiments_tools checkpoint"
FORMAT_VERSION = 1
MANIFEST = "manifest.json"
INDEXES = "*.index.json"
REPLACED = ".old-"  # prefix of a step's earlier checkpoint while the new version takes its name
TRAINER_STATE = "trainer_state.safetensors"  # in each of our checkpoints, and in no folder of another tool

logger = logging.getLogger(__name__)

_TRAINING_ONLY = ("optimizer", "trainer_state")  # prefixes of files that a model does not need
_EDITABLE = "adapter_config.json"  # users write the base model's new path there
_NO_HASH = "0" * 64
_CHUNK = 1 << 22
_HASHING_THREADS = 4  # hashlib releases the GIL; more threads only fight over the disk

_verified: set[tuple[Any, ...]] = set()  # what `verify_model` has found valid: folder, manifest, names, stat results


class CheckpointDamaged(UserError):
    """A checkpoint's files differ from those that were saved; the message names checkpoint, file and reason."""

    def __init__(self, checkpoint: Path, reason: str):
        super().__init__(f"checkpoint {checkpoint} is damaged: {reason}")
        self.checkpoint = checkpoint
        self.reason = reason


# ---- names ----------------------------------------------------------------------------------------------------------
def step_directory_name(step: int) -> str:
    """Directory name of a checkpoint, e.g. `step_000500`; zero-padded, so that listings sort by step."""
    return f"step_{step:06d}"


def parse_step(name: str) -> int | None:
    """Read the step from the name of a checkpoint directory, such as `step_000500`; None for any other name."""
    match = re.fullmatch(r"step_(\d{1,18})", name)
    return int(match[1]) if match and step_directory_name(int(match[1])) == name else None


def or_replaced(path: Path) -> Path:
    """Return the folder `path`, or its backup if the process was killed while it replaced this folder."""
    earlier = path.parent / f"{REPLACED}{path.name}"
    return earlier if not path.exists() and earlier.is_dir() else path


def named_checkpoint(path: Path) -> Path:
    """Return the folder of a checkpoint that a path names; `last` and `best` of a run are found by the manifests.

    Their links may be missing (file systems without links) or be old copies (a run copied by `scp -r`).
    """
    root = path.parent / "checkpoints"
    if path.name in ("last", "best") and root.is_dir():
        steps = {parse_step(name.removeprefix(REPLACED)) for name in os.listdir(root)} - {None}
        for step in sorted(steps, reverse=True):
            checkpoint = or_replaced(root / step_directory_name(step))
            with suppress(CheckpointDamaged):
                if path.name == "last" or read_manifest(checkpoint).get("is_best"):
                    return checkpoint
    return or_replaced(path)


def list_files(directory: Path) -> dict[str, Path]:
    """{posix relative name: path} of all files below `directory`. Symbolic links are listed but not followed."""

    def fail(error: OSError) -> NoReturn:
        raise error

    found = {}
    for parent, directories, files in os.walk(directory, onerror=fail, followlinks=False):
        links = [name for name in directories if (Path(parent) / name).is_symlink()]
        for name in [*files, *links]:
            path = Path(parent) / name
            found[path.relative_to(directory).as_posix()] = path
    return dict(sorted(found.items()))


# ---- writing and reading the manifest -------------------------------------------------------------------------------
def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def describe_file(path: Path) -> dict[str, Any]:
    """Return the manifest's entry of a file: its size and its sha256."""
    return {"size": path.stat().st_size, "sha256": sha256_of(path)}


def describe_files(directory: Path, paths: Iterable[Path]) -> dict[str, dict[str, Any]]:
    """Return the manifest's entries of files in `directory`, and flush the files to the disk."""

    def describe(path: Path) -> dict[str, Any]:
        entry = describe_file(path)
        fsync_path(path)
        return entry

    named = {path.relative_to(directory).as_posix(): path for path in paths}
    with ThreadPoolExecutor(_HASHING_THREADS) as pool:
        return dict(zip(named, pool.map(describe, named.values()), strict=True))


def build_manifest(files: dict[str, dict[str, Any]], step: int, is_best: bool, extra: dict[str, Any]) -> str:
    """Build the manifest of a checkpoint as JSON text, from results of `describe_files`.

    The entry `manifest_sha256` is the sha256 of the text itself, computed with zeros in its place.
    """
    import torch

    manifest = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "step": step,
        "is_best": is_best,
        "torch": torch.__version__,
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "files": dict(sorted(files.items())),
        "extra": to_jsonable(extra),
        "manifest_sha256": _NO_HASH,
    }
    text = json.dumps(manifest, indent=1, allow_nan=False) + "\n"
    # With its own hash in the text, no bit of the manifest can change unnoticed.
    head, _, tail = text.rpartition(_NO_HASH)
    return f"{head}{hashlib.sha256(text.encode()).hexdigest()}{tail}"


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """Read and check a checkpoint's manifest, but not the files that it lists. Raises CheckpointDamaged."""
    with _reading(checkpoint, MANIFEST):
        raw = (checkpoint / MANIFEST).read_bytes()
    try:
        manifest = json.loads(raw)
    except ValueError as error:
        raise CheckpointDamaged(checkpoint, f"{MANIFEST} is not valid JSON ({len(raw)} bytes)") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CheckpointDamaged(checkpoint, f"{MANIFEST} is not a manifest of this project")
    if manifest.get("format_version") != FORMAT_VERSION:
        raise CheckpointDamaged(
            checkpoint,
            f"{MANIFEST} has format version {manifest.get('format_version')}; this release reads {FORMAT_VERSION}",
        )
    digest = str(manifest.get("manifest_sha256") or None)
    head, _, tail = raw.rpartition(digest.encode(errors="replace"))
    if hashlib.sha256(head + _NO_HASH.encode() + tail).hexdigest() != digest:
        raise CheckpointDamaged(checkpoint, f"{MANIFEST} does not match its own sha256")
    return manifest


def is_listed(file: Path) -> bool:
    """True if the manifest of a file's folder lists the file, even if it is missing. Raises CheckpointDamaged."""
    return os.path.lexists(file.with_name(MANIFEST)) and file.name in read_manifest(file.parent)["files"]


# ---- comparing files with the manifest ------------------------------------------------------------------------------
def verify(path: Path | str) -> None:
    """Check that a checkpoint directory holds exactly the files that were saved. Reads every byte once.

    `path` may be a link such as `last`; links inside the directory are never followed.

    Raises:
        CheckpointDamaged: a file is missing, changed, not listed or not a regular file; or the manifest is of another
            step or an unknown format version.
    """
    checkpoint = Path(path).resolve()
    if not checkpoint.is_dir():
        raise CheckpointDamaged(checkpoint, "it is not a directory")
    manifest, found = read_manifest(checkpoint), list_files(checkpoint)
    _check_step(checkpoint, manifest, parse_step(checkpoint.name.removeprefix(REPLACED)))
    _check_files(checkpoint, manifest, found, sorted({*manifest["files"], *found} - {MANIFEST}))


def verify_model(folder: Path, names: Sequence[str] | None = None) -> None:
    """Check a model's folder before it is loaded: files match the manifest, and configurations name no code.

    Without a manifest only the configurations are checked. Files may be missing unless they are in `names` (None: all
    but the training state), and adapter_config.json may be edited. Repeated calls do not read the files again. Raises
    CheckpointDamaged, and UserError as `check_untrusted`.
    """
    if os.path.lexists(folder / MANIFEST):
        _verify_listed(folder, names)
    elif (folder / TRAINER_STATE).is_file():
        logger.warning("%s has lost its %s: what is read from it cannot be checked", folder, MANIFEST)
    check_untrusted(folder)


def _verify_listed(folder: Path, names: Sequence[str] | None) -> None:
    manifest, found = read_manifest(folder), list_files(folder)
    if (step := parse_step(folder.name)) is not None:
        _check_step(folder, manifest, step)
    if names is None:
        names = [name for name in manifest["files"] if not name.startswith(_TRAINING_ONLY)]
    stats = [found[name].lstat() for name in names if name in found]
    key = (str(folder), manifest["manifest_sha256"], *names)
    key += tuple((s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for s in stats)
    if key not in _verified:
        _check_files(folder, manifest, found, names, editable=_EDITABLE)
        _verified.add(key)


def _check_step(checkpoint: Path, manifest: dict[str, Any], step: int | None) -> None:
    if manifest.get("step") != step:
        raise CheckpointDamaged(checkpoint, f"{MANIFEST} is of step {manifest.get('step')}, the directory is not")


def _check_files(
    checkpoint: Path, manifest: dict[str, Any], found: dict[str, Path], names: Sequence[str], editable: str = ""
) -> None:
    """Compare the files `names` with the manifest; one called `editable` may have other content, with a warning."""
    listed = manifest["files"]
    for name in names:
        if name not in listed:
            raise CheckpointDamaged(checkpoint, f"{name} is not in the manifest")
        if name not in found:
            raise CheckpointDamaged(checkpoint, f"{ascii(name)[1:-1]} is missing")
        if not stat.S_ISREG(found[name].lstat().st_mode):
            raise CheckpointDamaged(checkpoint, f"{name} is not a regular file")

    def describe(name: str) -> dict[str, Any]:
        with _reading(checkpoint, name):
            return describe_file(found[name])

    with ThreadPoolExecutor(_HASHING_THREADS) as pool:
        for name, description in zip(names, pool.map(describe, names), strict=True):
            if description != listed[name] and found[name].name == editable:
                logger.warning("%s is not as it was saved: %s was edited", checkpoint, name)
            elif description != listed[name]:
                raise CheckpointDamaged(checkpoint, f"the content of {name} does not match its sha256")


@contextmanager
def _reading(checkpoint: Path, name: str) -> Iterator[None]:
    """Turn an error of the system, while the file `name` is read, into CheckpointDamaged."""
    try:
        yield
    except FileNotFoundError:
        raise CheckpointDamaged(checkpoint, f"{name} is missing") from None
    except OSError as error:
        raise CheckpointDamaged(checkpoint, f"{name} cannot be read ({error.strerror})") from error


# ---- untrusted folders ----------------------------------------------------------------------------------------------
def check_untrusted(folder: Path) -> None:
    """Refuse a folder that refers to weights outside of it or to an attention kernel from the Hub. Raises UserError.

    A missing folder passes. Import strings in a configuration are checked later, by `names.resolve_configured`.
    """
    config = read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
    # The configuration may name an index in a subfolder.
    indexes = {*folder.glob(INDEXES), folder / str(config.get("transformers_weights"))}
    for index in indexes:
        if index.match(INDEXES) and index.is_file():
            shards_of(index)
    for key, value in _hub_kernels(config):
        raise UserError(
            f"{folder / 'config.json'}: {key} is {value!r}, a kernel of the Hub, which is code: remove it there, "
            "or name the file by --model_cfg."
        )


def shards_of(index: Path) -> list[str]:
    """Read the files of a model from their index, JSON such as model.safetensors.index.json. Raises UserError."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise UserError(f"{index} is not an index of weight shards: copy the checkpoint again.")
    for name in weight_map.values():
        if not isinstance(name, str) or name.startswith("/") or ".." in PurePosixPath(name).parts:
            raise UserError(f"{index} points to {name!r}, outside its directory: the checkpoint is not to be trusted.")
    return sorted(set(weight_map.values()))


def _hub_kernels(values: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Attention implementations, in a (nested) configuration, that transformers would take from the Hub."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _hub_kernels({f"{key}.{name}": inner for name, inner in value.items()})
        elif isinstance(value, str) and "/" in value and "_implementation" in key:
            yield key, value

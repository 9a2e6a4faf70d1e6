"""Checkpoints: directories that are either whole or not there.

    writer = CheckpointWriter(run / "checkpoints", keep=3, rank=rank)
    directory = writer.begin(step)              # every rank; then a barrier
    with writer.guarded(step):                  # a full disk becomes one sentence, half-written files are removed
        save_model(directory, model, ...)       # rank 0, or all ranks for sharded state
        save_tree(directory / "trainer_state", state)
    writer.commit(step, is_best=True, extra_manifest={"world_size": 8})     # rank 0, after a barrier

A checkpoint is written as `.tmp-step_000500`, hashed into manifest.json, flushed, and renamed to `step_000500` in one
atomic operation. So a directory named `step_*` was complete when it was named, and `verify` tells whether it still is.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from lm_experiments_tools.checkpoint.legacy import read_old_training_state
from lm_experiments_tools.checkpoint.manifest import (
    KEPT,
    MANIFEST,
    REPLACED,
    CheckpointDamaged,
    as_it_stands,
    build_manifest,
    list_files,
    parse_step,
    read_manifest,
    step_directory_name,
    verify,
)
from lm_experiments_tools.checkpoint.tree import as_os_error, load_tree, save_tree
from lm_experiments_tools.checkpoint.weights import LoadReport, load_weights, read_state, read_weights, save_model
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.files import fsync_path, human_bytes, write_atomic

__all__ = [
    "CheckpointDamaged",
    "CheckpointWriteError",
    "CheckpointWriter",
    "LoadReport",
    "behind_link",
    "find_newest_valid",
    "find_resume",
    "load_tree",
    "load_weights",
    "read_manifest",
    "read_old_training_state",
    "read_state",
    "read_weights",
    "save_model",
    "save_tree",
    "verify",
]

logger = logging.getLogger(__name__)

_TEMPORARY = ".tmp-"  # an unfinished save, or a checkpoint on its way out
_SUPERSEDED = "superseded-"  # a later step of a history that the run has gone back behind


class CheckpointWriteError(OSError):
    """A checkpoint could not be written; earlier ones are untouched and no half-written files are left."""


class CheckpointWriter:
    """Writes, links and prunes the checkpoints of one run. Holds no collectives: barriers are the caller's.

    Args:
        root: directory of the checkpoints, shared by all ranks.
        keep: how many of the newest to keep besides the best; None keeps all.
        rank: this process; only rank 0 creates, removes and renames.
        links_in: where the links `last` and `best` live; default `root`.
    """

    def __init__(self, root: Path | str, keep: int | None, rank: int = 0, links_in: Path | str | None = None):
        if keep is not None and keep < 1:
            raise UserError(
                f"the number of checkpoints to keep is {keep}; it must be at least 1 (or unset to keep all)"
            )
        self.root, self.keep, self.rank = Path(root), keep, rank
        self.links_in = Path(links_in) if links_in is not None else self.root
        self._expected_bytes = 0
        self._named: set[Path] = set()  # whose manifests cannot be read, each warned of once

    def begin(self, step: int, expected_bytes: int | None = None) -> Path:
        """The temporary directory of `step`. Rank 0 makes it; the caller puts a barrier after this on several ranks.

        Rank 0 also clears what interrupted saves left and refuses at once when the disk has no room for
        `expected_bytes` (default: the size of the newest checkpoint).

        Raises:
            CheckpointWriteError: no room, or the directory cannot be made.
        """
        temporary = self._temporary(step)
        if self.rank != 0:
            return temporary
        with self.guarded(step):
            self.root.mkdir(parents=True, exist_ok=True)
            self._clear_leftovers()
            self._expected_bytes = self._newest_size() if expected_bytes is None else expected_bytes
            if shutil.disk_usage(self.root).free < self._expected_bytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            temporary.mkdir()
        return temporary

    @contextlib.contextmanager
    def guarded(self, step: int) -> Iterator[None]:
        """Turn a failed write inside the block into CheckpointWriteError, after `abort(step)`."""
        try:
            yield
        except (OSError, SafetensorError) as error:
            raise self._failure(step, as_os_error(error, self._temporary(step))) from error

    def abort(self, step: int) -> None:
        """Drop the unfinished save of `step` (rank 0; nothing on others). For a save that failed on another rank."""
        if self.rank == 0:
            shutil.rmtree(self._temporary(step), ignore_errors=True)

    def commit(self, step: int, *, is_best: bool, extra_manifest: dict[str, Any] | None = None) -> Path:
        """Make the files in `begin(step)`'s directory the checkpoint of `step`; rank 0 only, after a barrier.

        Flushes every file, writes manifest.json last, renames, updates `last` and `best`, and only then prunes. A
        checkpoint of the same step is replaced; checkpoints of later steps (the run went back behind them) are moved
        aside as `superseded-*`, so that the newest step is always the newest state.

        Raises:
            CheckpointWriteError: the disk refused; the earlier checkpoints are as they were.
        """
        if self.rank != 0:
            raise ValueError(f"commit is for rank 0, called on rank {self.rank}")
        temporary, final = self._temporary(step), self.root / step_directory_name(step)
        with self.guarded(step):
            write_atomic(temporary / MANIFEST, build_manifest(temporary, step, is_best, extra_manifest or {}))
            self._flush(temporary)
            self._take_name(temporary, final)
        self._set_later_steps_aside(step)
        best, unread = self._best(self._checkpoints())
        self._update_links(best, unread)
        self._prune(best, unread)
        return final

    def _temporary(self, step: int) -> Path:
        return self.root / f"{_TEMPORARY}{step_directory_name(step)}"

    def _checkpoints(self) -> list[Path]:
        """Committed checkpoints, oldest first."""
        named = [(parse_step(entry.name), entry) for entry in self.root.iterdir()]
        return [entry for step, entry in sorted((s, e) for s, e in named if s is not None)]

    def _clear_leftovers(self) -> None:
        for entry in list(self.root.iterdir()):
            if entry.name.startswith(REPLACED):
                original = entry.with_name(entry.name.removeprefix(REPLACED))
                if not original.exists():  # killed between the two renames: the old version is still the checkpoint
                    os.rename(entry, original)
                    continue
            if entry.name.startswith((_TEMPORARY, REPLACED)):
                _remove(entry)

    def _newest_size(self) -> int:
        with contextlib.suppress(OSError, IndexError):  # one that was damaged and passed over is in no save's way
            return sum(path.lstat().st_size for path in list_files(self._checkpoints()[-1]).values())
        return 0

    @staticmethod
    def _flush(directory: Path) -> None:
        files = list_files(directory).values()
        for path in [*files, *{file.parent for file in files}, directory]:
            fsync_path(path)

    def _take_name(self, temporary: Path, final: Path) -> None:
        replaced = final.with_name(f"{REPLACED}{final.name}")
        if final.exists() or final.is_symlink():
            os.rename(final, replaced)
        os.rename(temporary, final)
        fsync_path(self.root)
        if replaced.exists() or replaced.is_symlink():
            _remove(replaced)

    def _set_later_steps_aside(self, step: int) -> None:
        for checkpoint in self._checkpoints():
            if parse_step(checkpoint.name) > step:
                aside, count = checkpoint.with_name(f"{_SUPERSEDED}{checkpoint.name}"), 0
                while aside.exists():
                    count += 1
                    aside = checkpoint.with_name(f"{_SUPERSEDED}{checkpoint.name}.{count}")
                os.rename(checkpoint, aside)
                logger.warning("%s is of a later step than the one just saved: kept as %s", checkpoint, aside.name)

    def _best(self, checkpoints: list[Path]) -> tuple[Path | None, list[Path]]:
        """The newest checkpoint committed as best, and those that may be a newer one: their manifests are not read.

        The manifests decide, so a kill before the link is no loss.
        """
        unread = []
        for checkpoint in reversed(checkpoints):
            try:
                if read_manifest(checkpoint).get("is_best"):
                    return checkpoint, unread
            except CheckpointDamaged as damage:
                unread.append(checkpoint)
                if checkpoint not in self._named:
                    logger.warning("%s; it may be the best one, so it is kept: remove it if it is not", damage)
                    self._named.add(checkpoint)
        return None, unread

    def _update_links(self, best: Path | None, unread: list[Path]) -> None:
        targets = {"last": self._checkpoints()[-1], "best": best}
        if unread and (self.links_in / "best").exists():
            del targets["best"]
        for name, target in targets.items():
            link, temporary = self.links_in / name, self.links_in / f".{name}.link"
            try:
                if target is None:
                    link.unlink(missing_ok=True)
                    continue
                temporary.unlink(missing_ok=True)
                temporary.symlink_to(os.path.relpath(target, self.links_in), target_is_directory=True)
                os.replace(temporary, link)
            except OSError as error:  # a file system without links: the checkpoint itself is safe
                logger.warning("the link %s was not updated (%s)", link, error)

    def _prune(self, best: Path | None, unread: list[Path]) -> None:
        if self.keep is None:
            return
        checkpoints = self._checkpoints()
        protected = {*checkpoints[-self.keep :], best, *unread}
        protected |= {c for c in checkpoints if c.with_name(f"{KEPT}{c.name}").exists()}  # an adapter's base
        for checkpoint in checkpoints:
            if checkpoint not in protected:
                doomed = checkpoint.with_name(f"{_TEMPORARY}pruned-{checkpoint.name}")
                try:
                    os.rename(checkpoint, doomed)  # a half-removed directory must not look like a checkpoint
                    _remove(doomed)
                except OSError as error:
                    logger.warning("the old checkpoint %s was not removed (%s)", checkpoint, error)

    def _failure(self, step: int, error: OSError) -> CheckpointWriteError:
        temporary = self._temporary(step)
        written = 0
        with contextlib.suppress(OSError):
            written = sum(path.lstat().st_size for path in list_files(temporary).values()) if self.rank == 0 else 0
            self.abort(step)
        needed, free = max(self._expected_bytes, written), _free_bytes(self.root)
        what = "needed" if needed == self._expected_bytes else "written before it failed and removed"
        room = f"{human_bytes(needed)} ({needed} bytes) {what}, " if needed else ""  # unknown of a first one
        room += f"{human_bytes(free)} ({free} bytes) free"
        reason = (os.strerror(error.errno) if error.errno else str(error)).rstrip(".")
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        advice = "free some space there or keep fewer checkpoints" if full else "check the disk and its mount"
        return CheckpointWriteError(
            error.errno or errno.EIO,
            f"the checkpoint of step {step} was not written to {self.root}: {reason} ({room}); earlier checkpoints "
            f"are untouched: {advice}",
        )


def find_resume(resume: str, model_path: Path | str | None) -> Path | None:
    """The checkpoint that a run continues from, or None for a run that begins; reads only.

    Args:
        resume: auto (the newest valid one of the run), never, or a checkpoint's or a run's folder.
        model_path: the run directory, if there is one.

    Raises:
        UserError: there is no such checkpoint, it is damaged, or `never` would mix two runs in one folder.
    """
    if resume not in ("auto", "never"):
        path = as_it_stands(Path(os.path.realpath(resume)))
        if not (path / MANIFEST).exists() and os.path.lexists(path / "last"):
            path = as_it_stands(Path(os.path.realpath(path / "last")))  # a run directory was named
        if not path.exists():
            raise UserError(f"--resume {resume}: no such checkpoint{_newer_than(path)}")
        verify(path)
        own = Path(model_path) / "checkpoints" if model_path else None
        if own is None or not own.is_dir() or path.parent.resolve() == own.resolve():
            return path
        newest = find_newest_valid(own)  # of an earlier start of the same command
        return newest if newest is not None and _step_of(newest) >= _step_of(path) else path
    if not model_path:
        return None
    root = Path(model_path) / "checkpoints"
    if resume == "never" and any(root.glob("step_*")):
        raise UserError(
            f"{model_path} already holds checkpoints and --resume never would mix two runs in it; choose another "
            "--model_path, or remove the folder"
        )
    return find_newest_valid(root)


def _step_of(path: Path) -> int:
    """The step of a checkpoint's folder, which may be renamed; -1 where it has none."""
    step = parse_step(path.name.removeprefix(REPLACED))
    return -1 if step is None else step


def behind_link(path: Path) -> Path:
    """The checkpoint that `last` or `best` leads to now: of a run that goes on they lead to another one soon."""
    return as_it_stands(path.parent / os.readlink(path) if path.is_symlink() else path)


def _newer_than(path: Path) -> str:
    """The end of a sentence about a checkpoint that is not there: the one its run can go on from, if there is one."""
    step, newest = parse_step(path.name), None
    if step is not None and path.parent.is_dir():
        with contextlib.suppress(UserError):
            newest = find_newest_valid(path.parent)
    if newest is None or step > parse_step(newest.name.removeprefix(REPLACED)):
        return "; give its folder, or auto, or never"
    return (
        f": its run has gone on and removed it (--keep_checkpoints); give --resume auto with that --model_path to go "
        f"on from its newest, {newest.name}"
    )


def find_newest_valid(root: Path | str, log: logging.Logger | Callable[[str], None] = logger) -> Path | None:
    """The newest checkpoint under `root` that `verify` accepts; each damaged one before it is named in a warning.

    Reads only; on several ranks let one search and broadcast the answer. None when `root` has no checkpoint at all.

    Raises:
        UserError: there are checkpoints and every one is damaged; lists the reasons. Or `root` is no folder, as where
            it is a link to a disk that is not mounted.
    """
    warn = log.warning if isinstance(log, logging.Logger) else log
    root = Path(root)
    if os.path.lexists(root) and not root.is_dir():
        raise UserError(
            f"{root}, where checkpoints belong, is no folder but a {'link to none' if root.is_symlink() else 'file'}: "
            "put the folder there, or give another --model_path."
        )
    candidates = _candidates(root) if root.is_dir() else []
    reasons = []
    for candidate in candidates:
        try:
            if candidate.is_symlink():
                raise CheckpointDamaged(candidate, "it is a symbolic link")
            _verify_candidate(candidate)
            return candidate
        except CheckpointDamaged as damage:
            warn(f"{damage}; trying the one before it")
            reasons.append(f"{candidate.name}: {damage.reason}")
        except OSError as error:
            warn(f"checkpoint {candidate} cannot be read ({error.strerror}); trying the one before it")
            reasons.append(f"{candidate.name}: cannot be read ({error.strerror})")
    if not reasons:
        return None
    raise UserError(
        f"none of the {len(reasons)} checkpoints in {root} can be used ({'; '.join(reasons)}): restore one from "
        "a copy, or start afresh with another --model_path."
    )


def _candidates(root: Path) -> list[Path]:
    """Everything that claims to be a checkpoint, newest first; a misnamed one is listed so that it is reported."""

    def age(entry: Path) -> tuple[int, bool]:
        digits = re.search(r"\d{1,18}", entry.name)
        return (int(digits[0]) if digits else -1, not entry.name.startswith(REPLACED))

    names = ("step_", f"{REPLACED}step_")
    return sorted((entry for entry in root.iterdir() if entry.name.startswith(names)), key=age, reverse=True)


def _verify_candidate(candidate: Path) -> None:
    if candidate.is_dir() and not candidate.name.startswith(REPLACED) and parse_step(candidate.name) is None:
        raise CheckpointDamaged(candidate, "its name is not step_NNNNNN")
    verify(candidate)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _free_bytes(path: Path) -> int:
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free

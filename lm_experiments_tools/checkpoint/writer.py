"""Checkpoint directories, which are complete or absent.

    writer = CheckpointWriter(run / "checkpoints", keep=3)
    directory = writer.begin(step)
    with writer.guarded(step):                  # removes unfinished files after an error
        save_model(directory, model, ...)
        save_tree(directory / "trainer_state", state)
    writer.commit(step, is_best=True, extra_manifest={"world_size": 8})

Files are written to `.tmp-step_000500`, listed with their hashes in manifest.json, flushed, and renamed atomically to
`step_000500`.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from lm_experiments_tools.checkpoint.manifest import (
    MANIFEST,
    PINNED,
    REPLACED,
    CheckpointDamaged,
    build_manifest,
    describe_files,
    list_files,
    named_checkpoint,
    or_replaced,
    parse_step,
    read_manifest,
    step_directory_name,
    verify,
)
from lm_experiments_tools.checkpoint.tree import as_os_error
from lm_experiments_tools.checkpoint.weights import load_weights, read_state, save_model
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.files import fsync_path, human_bytes, write_atomic

__all__ = ["CheckpointWriteError", "CheckpointWriter", "behind_link", "find_newest_valid", "find_resume"]
__all__ += ["load_weights", "read_state", "save_model"]

logger = logging.getLogger(__name__)

_TEMPORARY = ".tmp-"  # an unfinished save, or a checkpoint that is being removed
_SUPERSEDED = "superseded-"  # a later step of a run that was continued from an earlier one


class CheckpointWriteError(OSError):
    """Error: a checkpoint could not be written. Earlier ones are intact, and unfinished files are removed."""


class CheckpointWriter:
    """Writes, links and prunes the checkpoints of a run, on one worker at a time.

    Args:
        root: directory of the checkpoints.
        keep: number of newest checkpoints to keep in addition to the best; None keeps all.
        links_in: folder of the links `last` and `best`; default `root`.
    """

    def __init__(self, root: Path | str, keep: int | None, links_in: Path | str | None = None):
        if keep is not None and keep < 1:
            raise UserError(f"--keep_checkpoints {keep}: it must be at least 1, or unset to keep all")
        self.root, self.keep = Path(root), keep
        self.links_in = Path(links_in) if links_in is not None else self.root
        self._warned: set[Path] = set()  # checkpoints with unreadable manifests, links that cannot be written

    def begin(self, step: int) -> Path:
        """Create the temporary directory of a checkpoint, after removing unfinished ones.

        Raises:
            CheckpointWriteError: the disk has too little room, judged by the newest checkpoint's size, or cannot be
                written.
        """
        temporary = self._temporary(step)
        with self.guarded(step):
            self.root.mkdir(parents=True, exist_ok=True)
            self._clear_leftovers()
            if shutil.disk_usage(self.root).free < self._newest_size():
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            temporary.mkdir()
        return temporary

    @contextlib.contextmanager
    def guarded(self, step: int, *, removes: bool = True) -> Iterator[None]:
        """Context that raises CheckpointWriteError after an error of the disk.

        Args:
            removes: remove the unfinished checkpoint then; False while other workers write to it.
        """
        try:
            yield
        except (OSError, SafetensorError) as error:
            if removes:
                self.discard(step)
            raise self._failure(step, as_os_error(error, self._temporary(step))) from error

    def discard(self, step: int) -> None:
        """Remove an unfinished checkpoint."""
        shutil.rmtree(self._temporary(step), ignore_errors=True)

    def commit(
        self,
        step: int,
        *,
        is_best: bool,
        extra_manifest: dict[str, Any] | None = None,
        files: dict[str, dict[str, Any]] | None = None,
    ) -> Path:
        """Turn the temporary directory of `begin` into the checkpoint of `step`, then update links and prune.

        A checkpoint of the same step is replaced. Later steps, from before a restart at an earlier one, are renamed to
        `superseded-*`.

        Args:
            files: results of `describe_files` of all workers; None if this process has written all files.

        Raises:
            CheckpointWriteError: the disk cannot be written; earlier checkpoints are intact.
        """
        temporary, final = self._temporary(step), self.root / step_directory_name(step)
        with self.guarded(step):
            if files is None:
                files = describe_files(temporary, list_files(temporary).values())
            write_atomic(temporary / MANIFEST, build_manifest(files, step, is_best, extra_manifest or {}))
            # All is on the disk before the rename: after a power failure, what has a checkpoint's name is complete.
            folders = {(temporary / name).parent for name in files}
            for path in [temporary / MANIFEST, *folders, temporary]:
                fsync_path(path)
            self._take_name(temporary, final)
        self._set_later_steps_aside(step)
        best, unreadable = self._find_best(self._checkpoints())
        # Links move before pruning, so that a kill in between leaves none that leads to a removed folder.
        self._update_links(best, keep_best=bool(unreadable))
        self._prune({best, *unreadable})
        return final

    def _temporary(self, step: int) -> Path:
        return self.root / f"{_TEMPORARY}{step_directory_name(step)}"

    def _checkpoints(self) -> list[Path]:
        """Committed checkpoints, oldest first."""
        named = [(parse_step(entry.name), entry) for entry in self.root.iterdir()]
        return [entry for step, entry in sorted((s, e) for s, e in named if s is not None)]

    def _clear_leftovers(self) -> None:
        for entry in list(self.root.iterdir()):
            original = entry.with_name(entry.name.removeprefix(REPLACED))
            # The process was killed between the two renames of a replacement, so the earlier version gets its name
            # back.
            if original != entry and not original.exists():
                os.rename(entry, original)
            elif entry.name.startswith((_TEMPORARY, REPLACED)):
                _remove(entry)

    def _newest_size(self) -> int:
        with contextlib.suppress(OSError, IndexError):
            return sum(path.lstat().st_size for path in list_files(self._checkpoints()[-1]).values())
        return 0

    def _take_name(self, temporary: Path, final: Path) -> None:
        replaced = final.with_name(f"{REPLACED}{final.name}")
        if os.path.lexists(final):
            os.rename(final, replaced)
        os.rename(temporary, final)
        fsync_path(self.root)
        if os.path.lexists(replaced):
            _remove(replaced)

    def _set_later_steps_aside(self, step: int) -> None:
        for checkpoint in self._checkpoints():
            if parse_step(checkpoint.name) > step:
                _set_aside(checkpoint, "is of a later step than the one just saved")

    def _find_best(self, checkpoints: list[Path]) -> tuple[Path | None, list[Path]]:
        """The newest checkpoint committed as best, and newer ones whose manifests cannot be read.

        The manifests decide, so a kill before the link is updated loses nothing.
        """
        unreadable = []
        for checkpoint in reversed(checkpoints):
            try:
                if read_manifest(checkpoint).get("is_best"):
                    return checkpoint, unreadable
            except CheckpointDamaged as damage:
                unreadable.append(checkpoint)
                if checkpoint not in self._warned:
                    logger.warning("%s; it may be the best one, so it is kept: remove it if it is not", damage)
                    self._warned.add(checkpoint)
        return None, unreadable

    def _update_links(self, best: Path | None, *, keep_best: bool) -> None:
        targets = {"last": self._checkpoints()[-1], "best": best}
        if keep_best and (self.links_in / "best").exists():
            del targets["best"]
        for name, target in targets.items():
            link, temporary = self.links_in / name, self.links_in / f".{name}.link"
            try:
                if link.is_dir() and not link.is_symlink():
                    _set_aside(link, "is a copy of a checkpoint where a link should be")
                if target is None:
                    link.unlink(missing_ok=True)
                    continue
                temporary.unlink(missing_ok=True)
                temporary.symlink_to(os.path.relpath(target, self.links_in), target_is_directory=True)
                os.replace(temporary, link)
            # Some file systems have no links; `named_checkpoint` finds the checkpoint without them.
            except OSError as error:
                if link not in self._warned:
                    logger.warning("the link %s was not updated (%s); %s names the run too", link, error, link.parent)
                    self._warned.add(link)

    def _prune(self, protected: set[Path | None]) -> None:
        if self.keep is None:
            return
        for checkpoint in self._checkpoints()[: -self.keep]:
            if checkpoint in protected or checkpoint.with_name(f"{PINNED}{checkpoint.name}").exists():
                continue
            doomed = checkpoint.with_name(f"{_TEMPORARY}pruned-{checkpoint.name}")
            try:
                # A half-removed directory must not look like a checkpoint, so it is renamed first.
                os.rename(checkpoint, doomed)
                _remove(doomed)
            except OSError as error:
                logger.warning("the old checkpoint %s was not removed (%s)", checkpoint, error)

    def _failure(self, step: int, error: OSError) -> CheckpointWriteError:
        folder = next(path for path in (self.root, *self.root.absolute().parents) if path.exists())
        free = human_bytes(shutil.disk_usage(folder).free)
        reason = (os.strerror(error.errno) if error.errno else str(error)).rstrip(".")
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        advice = "free some space there or keep fewer checkpoints" if full else "check the disk and its mount"
        return CheckpointWriteError(
            error.errno or errno.EIO,
            f"the checkpoint of step {step} was not written to {self.root}: {reason} ({free} free); earlier "
            f"checkpoints are untouched: {advice}",
        )


def find_resume(
    resume: str, model_path: Path | str | None, flag: str = "resume", *, continues: bool = True
) -> Path | None:
    """Find the checkpoint from which a run continues; None for a new run. Writes nothing.

    A job that is started again by the same command continues from its newest checkpoint, whatever `resume` names.

    Args:
        resume: "auto" (newest valid checkpoint of the run), "never", or the folder of a checkpoint or run.
        model_path: run directory, if there is one.
        flag: name of the flag that set `resume`, for messages.
        continues: False to take the named checkpoint in any case, to validate it.

    Raises:
        UserError: there is no such checkpoint, it is damaged, or "never" would mix two runs in one folder.
    """
    root = Path(model_path) / "checkpoints" if model_path else None
    if resume in ("auto", "never"):
        if resume == "never" and root is not None and any(root.glob("step_*")):
            raise UserError(
                f"{model_path} already holds checkpoints and --resume never would mix two runs in it; choose another "
                "--model_path, or remove the folder"
            )
        return None if root is None else find_newest_valid(root)
    path = named_checkpoint(Path(os.path.realpath(resume)))
    # A folder without a manifest is a run directory, which stands for its newest checkpoint.
    if not (path / MANIFEST).exists():
        path = newest if (newest := named_checkpoint(Path(os.path.realpath(path / "last")))).exists() else path
    if not path.exists():
        raise UserError(
            f"--{flag} {resume}: no such checkpoint; name an existing one, or a run (auto: --model_path's)"
        )
    verify(path)
    newest = find_newest_valid(root) if continues and root is not None and root.is_dir() else None
    if newest is None or _step_of(newest) <= _step_of(path):
        return path
    # The run's own earlier checkpoint may be named to go back to it, but only by the first start of this command.
    if path.parent.resolve() == root.resolve() and read_manifest(newest)["extra"].get("resume") != resume:
        return path
    logger.info("--%s %s: this command has saved later checkpoints, and continues from %s", flag, resume, newest)
    return newest


def _step_of(path: Path) -> int:
    """The step of a checkpoint's folder; -1 if it was renamed."""
    step = parse_step(path.name.removeprefix(REPLACED))
    return -1 if step is None else step


def behind_link(path: Path) -> Path:
    """Resolve a link `last` or `best` to the checkpoint that it names now; a running job changes the link."""
    return or_replaced(path.parent / os.readlink(path)) if path.is_symlink() else named_checkpoint(path)


def find_newest_valid(root: Path | str) -> Path | None:
    """Newest checkpoint under `root` that passes `verify`; None if there are no checkpoints. Writes nothing.

    Damaged newer ones are named in warnings.

    Raises:
        UserError: all checkpoints are damaged, or `root` is not a folder.
    """
    root = Path(root)
    if os.path.lexists(root) and not root.is_dir():
        raise UserError(
            f"{root}, where checkpoints belong, is no folder but a {'link to none' if root.is_symlink() else 'file'}: "
            "put the folder there, or give another --model_path."
        )
    reasons = []
    for candidate in _candidates(root) if root.is_dir() else []:
        try:
            _verify_candidate(candidate)
            return candidate
        except (CheckpointDamaged, OSError) as error:
            reason = error.reason if isinstance(error, CheckpointDamaged) else f"cannot be read ({error.strerror})"
            logger.warning("checkpoint %s is damaged: %s; trying the one before it", candidate, reason)
            reasons.append(f"{candidate.name}: {reason}")
    if not reasons:
        return None
    raise UserError(
        f"none of the {len(reasons)} checkpoints in {root} can be used ({'; '.join(reasons)}): restore one from "
        "a copy, or start afresh with another --model_path."
    )


def _candidates(root: Path) -> list[Path]:
    """Everything named like a checkpoint, newest first; a misnamed one is listed so that it is reported."""

    def age(entry: Path) -> tuple[int, bool]:
        digits = re.search(r"\d{1,18}", entry.name)
        return (int(digits[0]) if digits else -1, not entry.name.startswith(REPLACED))

    names = ("step_", f"{REPLACED}step_")
    return sorted((entry for entry in root.iterdir() if entry.name.startswith(names)), key=age, reverse=True)


def _verify_candidate(candidate: Path) -> None:
    if candidate.is_symlink():
        raise CheckpointDamaged(candidate, "it is a symbolic link")
    if candidate.is_dir() and not candidate.name.startswith(REPLACED) and parse_step(candidate.name) is None:
        raise CheckpointDamaged(candidate, "its name is not step_NNNNNN")
    verify(candidate)


def _set_aside(path: Path, reason: str) -> None:
    aside, count = path.with_name(f"{_SUPERSEDED}{path.name}"), 0
    while aside.exists():
        count += 1
        aside = path.with_name(f"{_SUPERSEDED}{path.name}.{count}")
    os.rename(path, aside)
    logger.warning("%s %s: renamed to %s", path, reason, aside.name)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()

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
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from lm_experiments_tools.checkpoint.manifest import (
    MANIFEST,
    REPLACED,
    CheckpointDamaged,
    build_manifest,
    describe_files,
    list_files,
    parse_step,
    read_manifest,
    step_directory_name,
)
from lm_experiments_tools.checkpoint.tree import as_os_error
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.files import fsync_path, human_bytes, write_atomic

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

        The unfinished checkpoint is then removed, unless other workers write to it (`removes` False).
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
            if checkpoint in protected:
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

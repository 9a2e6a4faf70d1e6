"""The checkpoint from which a run continues: named by a flag, or the newest valid one of the run."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from lm_experiments_tools.checkpoint.manifest import (
    MANIFEST,
    REPLACED,
    CheckpointDamaged,
    named_checkpoint,
    or_replaced,
    parse_step,
    read_manifest,
    verify,
)
from lm_experiments_tools.errors import UserError

logger = logging.getLogger(__name__)


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
    newest = find_newest_valid(root) if continues and root is not None and root.is_dir() else None
    is_again = newest is not None and read_manifest(newest)["extra"].get("resume") == resume
    if not path.exists():
        # Pruning may have removed the checkpoint by which this command was started first.
        if is_again:
            logger.info("--%s %s is gone: this command has saved later ones; it goes on from %s", flag, resume, newest)
            return newest
        raise UserError(
            f"--{flag} {resume}: no such checkpoint; name an existing one, or a run (auto: --model_path's)"
        )
    # The newest one has been verified already.
    if newest is None or newest.resolve() != path.resolve():
        verify(path)
    if newest is None or _step_of(newest) <= _step_of(path):
        return path
    # The run's own earlier checkpoint may be named to go back to it, but only by the first start of this command.
    if path.parent.resolve() == root.resolve() and not is_again:
        return path
    logger.info("--%s %s: %s has later checkpoints, and the run continues from %s", flag, resume, model_path, newest)
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
        UserError: all checkpoints are damaged.
    """
    root, reasons = Path(root), []
    for candidate in _candidates(root) if root.is_dir() else []:
        try:
            verify(candidate)
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
    """Folders with names of checkpoints, newest first; of two versions of a step the replaced one last."""
    named = [(parse_step(entry.name.removeprefix(REPLACED)), entry) for entry in root.iterdir()]
    of_steps = [(step, not entry.name.startswith(REPLACED), entry) for step, entry in named if step is not None]
    return [entry for *_, entry in sorted(of_steps, reverse=True)]

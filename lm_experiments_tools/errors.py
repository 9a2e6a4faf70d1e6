"""Exceptions whose message is for users, without a traceback."""

import errno
import os

_REMEDIES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "free some space there or choose another folder"),
    **dict.fromkeys((errno.EACCES, errno.EPERM), "change its permissions or choose another path"),
    errno.EROFS: "that disk takes no writes: choose another folder",
}


class _OneLine(Exception):
    """Base class of errors that a notebook shows as their message, by IPython's protocol."""

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self).__name__}: {self}"]


class UserError(_OneLine, ValueError):
    """An error that the user can fix: a flag, a file, a configuration.

    The message says what was found, where, and what to do. Entry points print it without a traceback and exit with
    code 2.
    """


class RunError(_OneLine, RuntimeError):
    """A run cannot continue although its input is valid, for example because of a full disk or diverged loss.

    Entry points print the message and exit with code 1. Earlier checkpoints are intact.
    """


class LostWorkerError(RunError):
    """Another worker of the job has died or cannot be reached."""


def os_sentence(error: OSError) -> str:
    """Write the error message for an OSError: which file, which reason, and what to do."""
    if error.errno is None:
        return str(error)
    if error.filename is None and error.strerror != os.strerror(error.errno):
        return str(error.strerror)  # a whole sentence already
    file = "the output" if error.filename is None else os.fsdecode(error.filename)
    remedy = f": {_REMEDIES[error.errno]}" if error.errno in _REMEDIES else ""
    return f"{file}: {error.strerror}{remedy}"


def first_line(error: BaseException) -> str:
    """First line of an exception's message, two if it ends with a colon; its type if the message is empty."""
    first, *others = str(error).strip().splitlines() or [type(error).__name__]
    return (f"{first} {others[0].strip()}" if others and first.endswith(":") else first).rstrip(".")

"""The exceptions that are sentences for a user, not tracebacks for a programmer."""

import errno
import os

_REMEDIES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "free some space there or choose another folder"),
    **dict.fromkeys((errno.EACCES, errno.EPERM), "change its permissions or choose another path"),
    errno.EROFS: "that disk takes no writes: choose another folder",
}


class UserError(ValueError):
    """Input the user can mend: a flag, a file, a configuration.

    The message is one sentence that names what is wrong, where, the numbers, and the likely fix. Entry points print it
    without a traceback and exit with code 2; programmers' mistakes stay ordinary exceptions.
    """


class RunError(RuntimeError):
    """A run cannot go on though nothing was asked wrongly: a full disk, a loss that diverged.

    Entry points print its one sentence and exit with code 1; what was saved before is untouched.
    """


class LostWorkerError(RunError):
    """Another worker of the job is gone, or cannot be reached: nobody is left to take leave of."""


def os_sentence(error: OSError) -> str:
    """File, what the system says about it, and what to do; of a library's own words, these alone."""
    if error.errno is None:
        return str(error)
    if error.filename is None and error.strerror != os.strerror(error.errno):
        return str(error.strerror)  # a whole sentence already
    file = "the output" if error.filename is None else os.fsdecode(error.filename)
    remedy = f": {_REMEDIES[error.errno]}" if error.errno in _REMEDIES else ""
    return f"{file}: {error.strerror}{remedy}"


def first_line(error: Exception) -> str:
    """The first line of an exception's message, or its type."""
    text = str(error).strip()
    return text.splitlines()[0].rstrip(".") if text else type(error).__name__

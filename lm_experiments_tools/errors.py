"""The exceptions that are sentences for a user, not tracebacks for a programmer."""


class UserError(ValueError):
    """Input the user can mend: a flag, a file, a configuration.

    The message is one sentence that names what is wrong, where, the numbers, and the likely fix. Entry points print it
    without a traceback and exit with code 2; programmers' mistakes stay ordinary exceptions.
    """


class RunError(RuntimeError):
    """A run cannot go on though nothing was asked wrongly: a full disk, a loss that diverged.

    Entry points print its one sentence and exit with code 1; what was saved before is untouched.
    """

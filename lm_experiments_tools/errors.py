"""The one exception type a user is meant to read."""


class UserError(ValueError):
    """Input the user can mend: a flag, a file, a configuration.

    The message is one sentence that names what is wrong, where, the numbers, and the likely fix. Entry points print it
    without a traceback and exit with code 2; programmers' mistakes stay ordinary exceptions.
    """

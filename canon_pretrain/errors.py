"""The one exception that every command turns into a message and exit code 2.

A leaf of the package: every room may raise it, only the entry points catch it.
"""

import sys
from typing import NoReturn

EXIT_CODE = 2


class UserError(Exception):
    """Bad input: the message names what was given, what was expected and the way out.

    An entry point prints it without a traceback and exits with code 2. A fault of our own is any
    other exception, and keeps its traceback.
    """


def exit_with(error: UserError, *, quiet: bool = False) -> NoReturn:
    """Print `error` to stderr (unless `quiet`: the ranks above 0) and exit with code 2."""
    if not quiet:
        print(f"error: {error}", file=sys.stderr, flush=True)
    raise SystemExit(EXIT_CODE)

"""The one exception that every command turns into a message and exit code 2.

A leaf of the package: every room may raise it, only the entry points catch it.
"""

import difflib
import sys
from collections.abc import Iterable
from typing import NoReturn

EXIT_CODE = 2


class UserError(Exception):
    """Bad input: the message names what was given, what was expected and the way out.

    An entry point prints it without a traceback and exits with code 2. A fault of our own is any
    other exception, and keeps its traceback. With `shared` it is raised on all ranks alike, and
    rank 0 alone tells it.
    """

    def __init__(self, message: str, *, shared: bool = False) -> None:
        super().__init__(message)
        self.shared = shared


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The one of `known` that a person who wrote `name` may have meant; None where none is near."""
    return next(iter(difflib.get_close_matches(name, sorted(known), n=1)), None)


def suggestion(given: str, choices: Iterable[str]) -> str:
    """The end of a message that names the nearest choice; empty where none is near."""
    near = nearest(given, choices)
    return f' Did you mean "{near}"?' if near else ""


def check_choice(name: str, given: str, choices: Iterable[str]) -> None:
    """Raise UserError, with the nearest choice, unless `given` is one of `choices`."""
    if given not in choices:
        raise UserError(
            f'{name} = "{given}" is not known; expected one of {", ".join(choices)}.'
            f"{suggestion(given, choices)}"
        )


def exit_with(error: UserError, *, quiet: bool = False) -> NoReturn:
    """Print `error` to stderr (unless `quiet`: the ranks above 0) and exit with code 2."""
    if not quiet:
        print(f"error: {error}", file=sys.stderr, flush=True)
    raise SystemExit(EXIT_CODE)

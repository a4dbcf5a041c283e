"""The one exception that every command turns into a message and exit code 2."""

import difflib
import sys
from collections.abc import Iterable
from typing import NoReturn

EXIT_CODE = 2


class UserError(Exception):
    """Bad input, with a stable `code` and `fields`; `shared`: every rank raises the same.

    The message names what was given, what was expected and the way out.
    """

    def __init__(self, code: str, message: str, *, shared: bool = False, **fields: object) -> None:
        super().__init__(code, message)
        self.code, self.message, self.shared, self.fields = code, message, shared, fields

    def __str__(self) -> str:
        return self.message


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the one of `known` that is nearest to `name`; None if none is near."""
    return next(iter(difflib.get_close_matches(name, sorted(known), n=1)), None)


def suggestion(given: str, choices: Iterable[str]) -> str:
    """Return the end of a message that names the nearest choice; empty if none is near."""
    near = nearest(given, choices)
    return f' Did you mean "{near}"?' if near else ""


def check_choice(name: str, given: str, choices: Iterable[str]) -> None:
    """Raise UserError, with the nearest choice, unless `given` is one of `choices`."""
    if given not in choices:
        raise UserError(
            "todo.errors",
            f'{name} = "{given}" is not known; expected one of {", ".join(choices)}.'
            f"{suggestion(given, choices)}",
        )


def exit_with(error: UserError, *, quiet: bool = False) -> NoReturn:
    """Print `error` to stderr (unless `quiet`: the ranks above 0) and exit with code 2."""
    if not quiet:
        print(f"error[{error.code}]: {error}", file=sys.stderr, flush=True)
    raise SystemExit(EXIT_CODE)

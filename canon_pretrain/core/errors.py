"""UserError, which every command turns into a message and exit code 2."""

import difflib
import re
import sys
from collections.abc import Iterable
from typing import NoReturn

EXIT_CODE = 2
EPILOG = "Errors print a code and exit with 2; the codes are in canon_pretrain/error_codes.txt."


class UserError(Exception):
    """Bad input, with a stable `code` and `fields`; `shared`: every rank raises the same.

    The message names what was given, what was expected and what to do.
    """

    def __init__(self, code: str, message: str, *, shared: bool = False, **fields: object) -> None:
        super().__init__(code, message)
        self.code, self.message, self.shared, self.fields = code, message, shared, fields

    def __str__(self) -> str:
        return self.message


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the most similar of `known`, or None."""
    return next(iter(difflib.get_close_matches(name, sorted(known), n=1)), None)


def suggestion(given: str, choices: Iterable[str]) -> str:
    """Return ' Did you mean "..."?' with the nearest choice, or ""."""
    near = nearest(given, choices)
    return f' Did you mean "{near}"?' if near else ""


def check_choice(name: str, given: str, choices: Iterable[str]) -> None:
    """Raise UserError, with the nearest choice, unless `given` is one of `choices`."""
    if given not in choices:
        text = f'{name} = "{given}" is not known; expected one of {", ".join(choices)}.'
        text += suggestion(given, choices)
        raise UserError("config.unknown_choice", text, name=name, given=given, choices=[*choices])


_ERROR = re.compile(r"error\[[\w.]+\]: .*")
_EXCEPTION = re.compile(
    r"^(?:\[(?:rank|default)?(\d+)\]:\s*)?([A-Za-z_][\w.]*(?:Error|Exception|Interrupt)(?::.*)?)$",
    re.MULTILINE,
)
_OF_TORCHRUN = "ChildFailedError"


def reason_in(output: str) -> str | None:
    """Return why the ranks that wrote `output` failed; None if it does not say.

    The `error[...]` lines, wherever they stand, else the exception of rank 0, else the first one.
    """
    if errors := dict.fromkeys(_ERROR.findall(output)):
        return "\n".join(errors)
    found = [pair for pair in _EXCEPTION.findall(output) if _OF_TORCHRUN not in pair[1]]
    found.sort(key=lambda pair: pair[0] != "0")
    return found[0][1] if found else None


def exit_with(error: UserError) -> NoReturn:
    """Print `error` to stderr and exit with code 2."""
    print(f"error[{error.code}]: {error}", file=sys.stderr, flush=True)
    raise SystemExit(EXIT_CODE)

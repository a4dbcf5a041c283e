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

    The message names the value, what is expected and the way out.
    """

    def __init__(self, code: str, message: str, *, shared: bool = False, **fields: object) -> None:
        super().__init__(code, message)
        self.code = code
        self.message = message
        self.shared = shared
        self.fields = fields

    def __str__(self) -> str:
        return self.message


def nearest(name: str, choices: Iterable[str]) -> str | None:
    """Return the most similar of `choices`, in any case, or None."""
    by_lower = {choice.lower(): choice for choice in sorted(choices)}
    matches = difflib.get_close_matches(name.lower(), by_lower, n=1)
    return by_lower[matches[0]] if matches else None


def suggestion(value: str, choices: Iterable[str]) -> str:
    """Return ' Did you mean "..."?' with the nearest choice, or ""."""
    choice = nearest(value, choices)
    return f' Did you mean "{choice}"?' if choice else ""


def check_choice(name: str, value: str, choices: Iterable[str]) -> None:
    """Raise UserError, with the nearest choice, unless `value` is one of `choices`."""
    if value not in choices:
        raise UserError(
            "config.unknown_choice",
            f'{name} = "{value}" is not known; expected one of {", ".join(choices)}.'
            f"{suggestion(value, choices)}",
            name=name,
            given=value,
            choices=[*choices],
        )


_ERROR = re.compile(r"error\[[\w.]+\]: .*")
_EXCEPTION = re.compile(
    r"^(?:\[(?:rank|default)?(\d+)\]:\s*)?([A-Za-z_][\w.]*(?:Error|Exception|Interrupt)(?::.*)?)$",
    re.MULTILINE,
)
_OF_TORCHRUN = "ChildFailedError"


def reason_in(output: str) -> str | None:
    """Return why the ranks that wrote `output` failed; None if it does not say.

    The `error[...]` lines, wherever they are, else the exception of rank 0, else the first one.
    """
    error_lines = dict.fromkeys(_ERROR.findall(output))  # ranks may repeat one
    if error_lines:
        return "\n".join(error_lines)
    exceptions = [
        (rank, text) for rank, text in _EXCEPTION.findall(output) if _OF_TORCHRUN not in text
    ]
    if not exceptions:
        return None
    _, text = min(exceptions, key=lambda exception: exception[0] != "0")
    return text


def exit_with(error: UserError) -> NoReturn:
    """Print `error` to stderr and exit with code 2."""
    print(f"error[{error.code}]: {error}", file=sys.stderr, flush=True)
    raise SystemExit(EXIT_CODE)

"""Standard streams that never fail, and the exit codes of all commands."""

import argparse
import atexit
import codecs
import contextlib
import gc
import io
import locale
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, TextIO, TypeVar

from canon_pretrain.core.errors import UserError, exit_with
from canon_pretrain.core.terminal import Rendered, printable

EXIT_INTERRUPTED = 130
STDOUT = 1
STDERR = 2

Number = TypeVar("Number", int, float)


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are UserErrors, with a code; `-` and `_` are one in options.

    Options are not abbreviated: a later version might have another one that begins alike.
    """

    settings = ""
    """An option of which several KEY=VALUE may follow, and a file after them."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **options})

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse `args`, by default those of sys.argv."""
        arguments: list[str] = []
        for argument in map(self._as_declared, sys.argv[1:] if args is None else args):
            # a further KEY=VALUE after `settings KEY=VALUE`: argparse needs the option again
            is_setting = "=" in argument and not argument.startswith("-")
            if is_setting and arguments[-2:-1] == [self.settings]:
                arguments.append(self.settings)
            arguments.append(argument)
        return super().parse_known_args(arguments, namespace)

    def _as_declared(self, argument: str) -> str:
        """Return an argument with its option, if it has one, spelled as it was declared."""
        name, equals, value = argument.partition("=")
        if not name.startswith("--") or name in self._option_string_actions:
            return argument
        for option in self._option_string_actions:
            if option.replace("_", "-") == name.replace("_", "-"):
                return f"{option}{equals}{value}"
        return argument

    def error(self, message: str) -> NoReturn:
        raise usage_error(self.prog, message)


def usage_error(program: str, message: str) -> UserError:
    """Return the error of words that a program does not accept."""
    return UserError("cli.usage", f"{message}. See {program} --help", program=program)


class _DroppingFile(io.FileIO):
    """A file descriptor that drops what cannot be written."""

    failure: OSError | None = None  # of the first failed write

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or 0
        except OSError as error:
            if self.failure is None:
                self.failure = error
                # `| head` closes the pipe when it has read enough
                if self.fileno() == STDOUT and not isinstance(error, BrokenPipeError):
                    note = f"NOTE: stdout cannot be written to ({error})\n"
                    with contextlib.suppress(OSError):
                        os.write(STDERR, note.encode())
            # as if all of it had been written
            return len(memoryview(data).cast("B"))


class _PrintableStream(io.TextIOWrapper):
    """A standard stream that replaces control characters, except those of --print0 and bars."""

    def write(self, text: str) -> int:
        shown_text = text
        if not isinstance(text, Rendered):
            shown_text = printable(text, keep="\n\t\r\0")
        super().write(shown_text)
        return len(text)


def _open(number: int, stream: TextIO) -> _PrintableStream:
    return _PrintableStream(
        io.BufferedWriter(_DroppingFile(number, "w", closefd=False)),
        stream.encoding,
        "backslashreplace",
        line_buffering=number == STDERR or os.isatty(number),
        write_through=bool(getattr(stream, "write_through", False)),
    )


def _resilient(stream: TextIO | None, number: int, python_stream: TextIO | None) -> TextIO:
    """Return Python's own stream, or None for one that was closed, as one that drops; others as is.

    `>&-` closes stdout. /dev/null then takes its number, which the next file would have, so that
    output of other programs does not get into that file.
    """
    if stream is None:
        return open(os.devnull, "w", encoding="utf-8", errors="backslashreplace")
    if stream is not python_stream:
        return stream
    with contextlib.suppress(OSError):
        stream.flush()
    return _open(number, stream)


@contextlib.contextmanager
def resilient_output() -> Iterator[None]:
    """Make sys.stdout and sys.stderr drop what cannot be written, within the block."""
    before = (sys.stdout, sys.stderr)

    # Replace Python's own streams, but not those of a test.
    sys.stdout = _resilient(sys.stdout, STDOUT, sys.__stdout__)
    sys.stderr = _resilient(sys.stderr, STDERR, sys.__stderr__)

    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        sys.stdout, sys.stderr = before


def run_process(main: Callable[[], None]) -> None:
    """Run `main` as the whole process, and exit without freeing modules: 1 to 3 s with torch's."""
    gc.set_threshold(50_000, 20, 100)  # torch's imports allocate a lot and leave no garbage
    code = 0
    try:
        try:
            main()
        except SystemExit as stop:
            if not isinstance(stop.code, int | None):
                raise
            code = stop.code or 0

        # what Python does before it frees modules
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED

    for stream in (sys.stdout, sys.stderr):
        # AttributeError: None, as after `>&-`
        with contextlib.suppress(OSError, ValueError, AttributeError):  # a full disk, closed
            stream.flush()
    os._exit(code)


def number_type(
    kind: Callable[[str], Number], is_valid: Callable[[Number], bool], expected: str
) -> Callable[[str], Number]:
    """Return a parser of the valid numbers of a kind, for argparse."""

    def parse(text: str) -> Number:
        with contextlib.suppress(ValueError):
            number = kind(text)
            if is_valid(number):
                return number
        raise argparse.ArgumentTypeError(f"{text}, expected {expected}")

    return parse


positive = number_type(int, lambda number: number >= 1, "an integer of at least 1")


def available_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0))


def check_encoding() -> None:
    """Raise UserError unless Python's text files are UTF-8, as torch's and a run's are."""
    encoding = locale.getpreferredencoding(False)
    if codecs.lookup(encoding).name != "utf-8":
        raise UserError(
            "cli.encoding",
            f"the locale's encoding is {encoding}, not UTF-8: set PYTHONUTF8=1 or LC_ALL=C.UTF-8",
            given=encoding,
        )


@contextlib.contextmanager
def command(*, prints: bool = False, interrupted: str = "") -> Iterator[None]:
    """Run a command: UserError and OSError become one message and exit code 2.

    `prints`: what cannot be printed is such an error. `interrupted`: printed after Ctrl-C.
    """
    with resilient_output():
        try:
            check_encoding()
            yield
            sys.stdout.flush()
            if prints:
                _check_printed()
        except UserError as error:
            exit_with(error)
        except OSError as error:
            # an OSError without an errno was raised by our own code
            if error.strerror is None:
                raise
            message = error.strerror
            if error.filename:
                message = f"{error.filename}: {message}"
            exit_with(UserError("file.os_error", message, path=error.filename))
        except KeyboardInterrupt:
            if interrupted:
                print(interrupted, file=sys.stderr)
            raise SystemExit(EXIT_INTERRUPTED) from None


def _check_printed() -> None:
    """Raise UserError if stdout is a `_DroppingFile` that has dropped something."""
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    failure = getattr(raw, "failure", None)
    # a broken pipe is no error: `| head` has read enough
    if failure is not None and not isinstance(failure, BrokenPipeError):
        raise UserError("file.os_error", f"stdout: {failure.strerror}")

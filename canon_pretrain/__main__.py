"""The command `canon`, also `python -m canon_pretrain`: every program under one name.

The table of commands is commands.py; only the module of the chosen command is imported.
"""

# nothing else is imported here: Ctrl-C during an import must leave no traceback, see `start`
import os
import signal
import sys


def main(argv: list[str] | None = None) -> None:
    """Run the command of the first arguments; print the table of commands if there are none."""
    from canon_pretrain.commands import COMMANDS, print_commands, run_command, unknown_command
    from canon_pretrain.core.cli import command

    arguments = sys.argv[1:] if argv is None else argv
    if arguments and arguments[0] in COMMANDS:
        run_command(arguments, _catch_interrupts)
        return

    _catch_interrupts()
    with command(prints=True):
        if arguments == ["--version"]:
            from canon_pretrain.run.launches import own_version

            print(f"canon_pretrain {own_version() or 'not installed'}")
        elif arguments and arguments[0] not in ("-h", "--help"):
            raise unknown_command(arguments[0])
        else:
            print_commands()


def start() -> None:
    """Run `main` as the console script; Ctrl-C ends it with code 130, also while it imports."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored
        signal.signal(signal.SIGINT, _leave)
    from canon_pretrain.core.cli import run_process

    run_process(main)


def _leave(number: int, frame: object) -> None:
    """Exit at once: an exception in the middle of an import would print a traceback."""
    os._exit(128 + number)


def _catch_interrupts() -> None:
    """Raise KeyboardInterrupt at Ctrl-C from now on."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


if __name__ == "__main__":
    start()

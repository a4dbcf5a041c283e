"""Runs several `canon` commands in order, in forks of one process that has imported torch.

Importing torch and torchtitan takes 5 to 10 s of CPU for each process. On GPUs, whose contexts do
not survive a fork, every command is a process of its own.
"""

import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, NamedTuple

from canon_pretrain.core.children import ForkedChild, ForkServer, ending, start_child, torchrun
from canon_pretrain.core.cli import available_cores
from canon_pretrain.core.errors import UserError, reason_in
from canon_pretrain.core.terminal import duration

# What the process that forks has imported, besides the trainer.
MODULES = ("canon_pretrain.sample", "eval.run", "eval.run_command", "eval.model.target")
SERVE = f"from canon_pretrain.forks import serve_forks; serve_forks(*{MODULES!r})"
TORCHRUN = "TORCHRUN"  # before a command: the ranks of torchrun
POLL_S = 0.05
SHOWN_LINES = 5

Child = ForkedChild | subprocess.Popen[bytes]


class Stages:
    """A context manager that runs `canon` commands.

    Output is appended to the file `log`, or shown if that is None. With `forks`, commands are forks
    of a process that starts now, with `environ`, and imports torch during the first commands.
    """

    def __init__(self, log: Path | None, environ: dict[str, str], *, forks: bool) -> None:
        self.log = log
        self._environ = environ
        command = (sys.executable, "-c", SERVE)
        self.server = ForkServer(command, environ) if forks else None

    def __enter__(self) -> "Stages":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._close_server()

    def _close_server(self) -> None:
        if self.server is not None:
            self.server.close()
            self.server = None

    def run(self, title: str, *arguments: object) -> str:
        """Run `canon ARGUMENTS`; print a title and how long it took. Return its output."""
        start = time.monotonic()
        print(f"{title} ... ", end="", flush=True)
        output = self.call(*arguments)
        print(duration(time.monotonic() - start))
        return output

    def call(self, *arguments: object) -> str:
        """Run `canon ARGUMENTS` on all cores; return its output. Raises UserError if it fails."""
        threads = f"OMP_NUM_THREADS={available_cores()}"
        return self._call([[threads, *map(str, arguments)]])

    def call_ranks(self, world_size: int, *arguments: object) -> str:
        """Run `canon train ARGUMENTS` on `world_size` ranks, as torchrun does. Raises UserError."""
        train = ["train", *map(str, arguments)]
        if self.server is None:
            return self._call([[f"{TORCHRUN}={world_size}", *train]])

        # Without torchrun, each fork gets the variables that torchrun would set.
        port = _free_port()
        commands = []
        for rank in range(world_size):
            variables = [
                f"WORLD_SIZE={world_size}",
                f"LOCAL_WORLD_SIZE={world_size}",
                "MASTER_ADDR=127.0.0.1",
                f"MASTER_PORT={port}",
                f"RANK={rank}",
                f"LOCAL_RANK={rank}",
            ]
            commands.append([*variables, *train])
        return self._call(commands)

    def _call(self, commands: Sequence[list[str]]) -> str:
        """Run commands at once; if one fails, stop the others. Return what is in the log."""
        # Their output goes to stdout, or is appended to the log.
        output = ""
        if self.log is None:
            sys.stdout.flush()  # before what the commands print
            with open(os.dup(1), "wb") as stdout:
                code = self._run_all(commands, stdout)
        else:
            self.log.parent.mkdir(parents=True, exist_ok=True)
            with self.log.open("ab") as file:
                start = file.tell()  # earlier commands have written what is before
                code = self._run_all(commands, file)
            with self.log.open("rb") as file:
                file.seek(start)
                output = file.read().decode(errors="replace")
        if not code:
            return output

        # The log may be long: its error, else its last lines.
        reason = "see above"
        if self.log is not None:
            last_lines = "\n".join(output.strip().splitlines()[-SHOWN_LINES:])
            reason = f"{reason_in(output) or last_lines} (all of its output: {self.log})"
        arguments = split_command(commands[0]).arguments
        raise UserError(
            "command.failed",
            f"`canon {' '.join(arguments)}` {ending(code)}: {reason}",
            exit_code=code,
        )

    def _run_all(self, commands: Sequence[list[str]], output: BinaryIO) -> int:
        return _wait([self._start(command, output) for command in commands])

    def _start(self, command: list[str], output: BinaryIO) -> Child:
        """Start a command, a list of NAME=VALUE and then arguments of `canon`."""
        if self.server is not None:
            try:
                child = self.server.start(command, output)
            except OSError:  # the server has ended, or did not answer
                self._close_server()
            else:
                assert child is not None  # it never gives up
                return child

        # Without a server, as a process of its own.
        variables, arguments = split_command(command)
        num_ranks = variables.pop(TORCHRUN, None)
        module = ["-m", "canon_pretrain", *arguments]
        if num_ranks is not None:
            module = [*torchrun(int(num_ranks)), "-m", "canon_pretrain.train", *arguments[1:]]
        return start_child(
            [sys.executable, *module],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=self._environ | variables,
        )


class CommandParts(NamedTuple):
    """The variables that are set for a command, and its arguments."""

    variables: dict[str, str]
    arguments: list[str]


def split_command(command: Sequence[str]) -> CommandParts:
    """Divide a command into NAME=VALUE before its arguments, and these."""
    variables: dict[str, str] = {}
    arguments = list(command)
    while arguments and "=" in arguments[0]:
        name, _, value = arguments.pop(0).partition("=")
        variables[name] = value
    return CommandParts(variables, arguments)


def _free_port() -> int:
    """Return a port that is free, below those that the system uses for outgoing connections.

    One of those could be taken between this call and the rank that opens it.
    """
    while True:
        port = random.randrange(10_000, 30_000)
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port


def _wait(children: Sequence[Child]) -> int:
    """Wait for all children; return the exit code of the first that failed, else 0.

    A failure or an interruption of one stops the others.
    """
    failure = 0
    try:
        while None in (codes := [child.poll() for child in children]):
            if not failure and any(codes):
                failure = next(filter(None, codes))
                _terminate(children)
            time.sleep(POLL_S)
    except KeyboardInterrupt:
        _terminate(children)
        while any(child.poll() is None for child in children):
            time.sleep(POLL_S)
        raise

    return failure or next(filter(None, codes), 0)


def _terminate(children: Sequence[Child]) -> None:
    for child in children:
        child.terminate()

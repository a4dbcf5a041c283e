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
from typing import BinaryIO

from canon_pretrain.core.children import ForkedChild, ForkServer, ending, start_child, torchrun
from canon_pretrain.core.cli import available_cores
from canon_pretrain.core.errors import UserError, reason_in
from canon_pretrain.core.terminal import duration

MODULES = ("canon_pretrain.sample", "eval.run", "eval.run_command", "eval.model.target")
"""What the process that forks has imported, besides the trainer."""
SERVE = f"from canon_pretrain.forks import serve_forks; serve_forks(*{MODULES!r})"
TORCHRUN = "TORCHRUN"  # before a command: the ranks of torchrun
POLL_S = 0.05
SHOWN_LINES = 5

Child = ForkedChild | subprocess.Popen[bytes]


class Stages:
    """Runs commands, and is a context manager.

    Their output is appended to the file `log`, or shown if that is None. `forks`: whether they are
    forks of a process that starts now, with `environ`, and imports while others work.
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

    def run(self, title: str, *words: object) -> str:
        """Run `canon WORDS`; print a title and how long it took. Return its output."""
        start = time.monotonic()
        print(f"{title} ... ", end="", flush=True)
        output = self.call(*words)
        print(duration(time.monotonic() - start))
        return output

    def call(self, *words: object) -> str:
        """Run `canon WORDS` on all cores and return its output. Raises UserError if it fails."""
        threads = f"OMP_NUM_THREADS={available_cores()}"
        return self._call([[threads, *map(str, words)]])

    def call_ranks(self, count: int, *words: object) -> str:
        """Run `canon train WORDS` on `count` ranks, as torchrun does. Raises UserError."""
        texts = ["train", *map(str, words)]
        if self.server is None:
            return self._call([[f"{TORCHRUN}={count}", *texts]])

        variables = {
            "WORLD_SIZE": count,
            "LOCAL_WORLD_SIZE": count,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": _free_port(),
        }
        commands = []
        for rank in range(count):
            variables |= {"RANK": rank, "LOCAL_RANK": rank}
            commands.append([*(f"{name}={value}" for name, value in variables.items()), *texts])
        return self._call(commands)

    def _call(self, commands: Sequence[list[str]]) -> str:
        """Run commands at once; if one fails, stop the others. Return what is in the log."""
        if self.log is None:
            sys.stdout.flush()
            with open(os.dup(1), "wb") as shown:
                code = _wait([self._start(words, shown) for words in commands])
            output, where = "", "see above"
        else:
            self.log.parent.mkdir(parents=True, exist_ok=True)
            with self.log.open("ab") as file:
                start = file.tell()
                code = _wait([self._start(words, file) for words in commands])
            with self.log.open("rb") as file:
                file.seek(start)
                output = file.read().decode(errors="replace")
            last_lines = "\n".join(output.strip().splitlines()[-SHOWN_LINES:])
            where = f"{reason_in(output) or last_lines} (all of its output: {self.log})"

        if code:
            _, words = _split(commands[0])
            raise UserError(
                "command.failed",
                f"`canon {' '.join(words)}` {ending(code)}: {where}",
                exit_code=code,
            )
        return output

    def _start(self, words: list[str], output: BinaryIO) -> Child:
        """Start a command, with NAME=VALUE before its words."""
        if self.server is not None:
            try:
                child = self.server.start(words, output)
            except OSError:  # the server has ended, or did not answer
                self._close_server()
            else:
                assert child is not None  # it never gives up
                return child

        variables, words = _split(words)
        module = ["-m", "canon_pretrain", *words]
        if ranks := variables.pop(TORCHRUN, None):
            module = [*torchrun(int(ranks)), "-m", "canon_pretrain.train", *words[1:]]
        return start_child(
            [sys.executable, *module],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=self._environ | variables,
        )


def _split(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return the variables before a command's words, and the words."""
    variables: dict[str, str] = {}
    for number, word in enumerate(words):
        name, is_variable, value = word.partition("=")
        if not is_variable:
            return variables, list(words[number:])
        variables[name] = value
    return variables, []


def _free_port() -> int:
    """Return a port that is free, below those that the system gives to outgoing connections.

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
                failure = next(code for code in codes if code)
                for child in children:
                    child.terminate()
            time.sleep(POLL_S)
    except KeyboardInterrupt:
        for child in children:
            child.terminate()
        while any(child.poll() is None for child in children):
            time.sleep(POLL_S)
        raise

    return failure or next((code for code in codes if code), 0)

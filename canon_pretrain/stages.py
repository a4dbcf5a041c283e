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

from canon_pretrain.core.children import ForkedChild, ForkServer, start_child
from canon_pretrain.core.errors import UserError, reason_in
from canon_pretrain.core.terminal import duration

MODULES = ("canon_pretrain.sample", "eval.run", "eval.run_command", "eval.model.target")
"""What the process that forks has imported, besides the trainer."""
SERVER = (
    sys.executable,
    "-c",
    f"from canon_pretrain.train import serve_forks; serve_forks{MODULES}",
)
POLL_S = 0.05
SHOWN_LINES = 5

Child = ForkedChild | subprocess.Popen[bytes]


class Stages:
    """Runs commands; a context manager. Their output goes to the file `log`, None: is shown."""

    def __init__(self, log: Path | None, environ: dict[str, str], *, forks: bool) -> None:
        """Start the process that forks, with `environ`, which imports while others work."""
        self.log = log
        self._environ = environ
        self.server = ForkServer(SERVER, environ) if forks else None

    def __enter__(self) -> "Stages":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self.server is not None:
            self.server.close()

    def run(self, about: str, *words: object) -> str:
        """Say what `canon WORDS` is about and how long it took; return its output."""
        start = time.monotonic()
        print(f"{about} ... ", end="", flush=True)
        output = self.call(*words)
        print(duration(time.monotonic() - start))
        return output

    def call(self, *words: object) -> str:
        """Run `canon WORDS` and return its output. Raises UserError if it fails."""
        return self._call([[str(word) for word in words]])

    def call_ranks(self, count: int, *words: object) -> str:
        """Run `canon train WORDS` on `count` ranks, as torchrun does. Raises UserError."""
        texts = [str(word) for word in words]
        if self.server is None:
            launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
            return self._call([[*launcher, "-m", "canon_pretrain.train", *texts]])

        port = _free_port()
        shared = [f"WORLD_SIZE={count}", f"LOCAL_WORLD_SIZE={count}", "MASTER_ADDR=127.0.0.1"]
        shared.append(f"MASTER_PORT={port}")
        return self._call(
            [
                [*shared, f"RANK={rank}", f"LOCAL_RANK={rank}", "train", *texts]
                for rank in range(count)
            ]
        )

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
            name = " ".join(word for word in commands[0] if "=" not in word)
            raise UserError(
                "command.failed",
                f"`canon {name}` ended with exit code {code}: {where}",
                exit_code=code,
            )
        return output

    def _start(self, words: list[str], output: BinaryIO) -> Child:
        if self.server is not None:
            with suppress(OSError):  # the server has ended
                if child := self.server.start(words, output):
                    return child
        if words[0] != "-m":
            words = ["-m", "canon_pretrain", *words]
        return start_child(
            [sys.executable, *words],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=self._environ,
        )


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
    """Wait for all children, and return the first exit code that is not 0.

    A failure or an interruption of one stops the others.
    """
    first = 0
    try:
        while running := [child for child in children if child.poll() is None]:
            failed = [child.returncode for child in children if child.returncode]
            if failed and not first:
                first = failed[0]
                for child in running:
                    child.terminate()
            time.sleep(POLL_S)
        return first or next((child.returncode for child in children if child.returncode), 0)
    except KeyboardInterrupt:
        for child in children:
            child.terminate()
        while any(child.poll() is None for child in children):
            time.sleep(POLL_S)
        raise

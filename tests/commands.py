"""The project's commands as processes, forked from a server that has imported torch.

A new interpreter takes 5 to 40 s of CPU until torch and torchtitan are imported, a fork 0.1 s. The
fork then runs the module as `python -m` does: own arguments, folder, environment and streams.
"""

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from multiprocessing.context import ForkServerContext
from pathlib import Path

from tests.support import ROOT

fork_server: ForkServerContext = multiprocessing.get_context("forkserver")
"""One server per test process: for commands here, for the trainer's ranks in ranks.py."""
fork_server.set_forkserver_preload(["tests.ranks_preload", "tests.ranks", "tests.commands"])

_DEFAULTS = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
"""A GPU machine may have fewer GPUs than a test's ranks: the CPU unless `environment` says else."""


class Command:
    """`python -m MODULE WORDS...` in a process of its own, with Popen's methods and attributes.

    Standard output goes to `stdout`, a file that is created, or appended to; standard error to
    `stderr`, or to the same file if it is None. `stdin` is what standard input holds. `interrupts`:
    Ctrl-C has its default effect, even if this process is a background job, which ignores it.
    """

    def __init__(
        self,
        module: str,
        *words: object,
        stdout: Path,
        stderr: Path | None = None,
        cwd: Path = ROOT,
        environment: Mapping[str, str] | None = None,
        stdin: str = "",
        interrupts: bool = False,
    ) -> None:
        variables = os.environ | _DEFAULTS | dict(environment or {})
        arguments = [str(word) for word in words]
        self.args = [module, *arguments]
        self._process = fork_server.Process(
            target=_run,
            args=(module, arguments, variables, cwd, stdout, stderr, stdin, interrupts),
        )
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit code, -9 after a kill -9; None while the process runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; raise subprocess.TimeoutExpired after `timeout` seconds."""
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


def run_command(
    module: str,
    *words: object,
    cwd: Path = ROOT,
    environment: Mapping[str, str] | None = None,
    stdin: str = "",
    timeout: float = 300,
    check: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, as subprocess.run does; "canon" is the module of that command.

    With `check`, a failure fails the test and shows the output. A command that is still running
    after `timeout` seconds is killed, and subprocess.TimeoutExpired raised.
    """
    with tempfile.TemporaryDirectory() as folder:
        stdout, stderr = Path(folder, "stdout"), Path(folder, "stderr")
        command = Command(
            module,
            *words,
            stdout=stdout,
            stderr=stderr,
            cwd=cwd,
            environment=environment,
            stdin=stdin,
        )
        try:
            code = command.wait(timeout)
        except subprocess.TimeoutExpired:
            command.kill()
            command.wait()
            raise
        texts = [path.read_text(errors="replace") for path in (stdout, stderr)]
    done = subprocess.CompletedProcess(command.args, code, *texts)
    assert not check or code == 0, f"{done.args}: exit code {code}\n{done.stdout}\n{done.stderr}"
    return done


def _run(
    module: str,
    arguments: list[str],
    variables: dict[str, str],
    cwd: Path,
    stdout: Path,
    stderr: Path | None,
    stdin: str,
    interrupts: bool,
) -> None:
    """Become the command: streams, environment, folder, arguments; then run the module."""
    _redirect(0, _file_with(stdin))
    _redirect(1, os.open(stdout, os.O_WRONLY | os.O_CREAT | os.O_APPEND))
    _redirect(2, 1 if stderr is None else os.open(stderr, os.O_WRONLY | os.O_CREAT | os.O_APPEND))
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # the server's is closed

    if interrupts:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(cwd)
    if "TZ" in variables:
        time.tzset()

    import torch

    torch.set_num_threads(1)  # OMP_NUM_THREADS was read when the server imported torch

    name = "canon_pretrain" if module == "canon" else module
    sys.argv = ["canon" if module == "canon" else module, *arguments]
    runpy.run_module(name, run_name="__main__", alter_sys=module != "canon")


def _file_with(content: str) -> int:
    """Return a descriptor from which `content` is read."""
    with tempfile.TemporaryFile() as file:
        file.write(content.encode())
        file.seek(0)
        return os.dup(file.fileno())


def _redirect(number: int, target: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(target, number)

"""The project's commands as processes, forked from a server that has imported torch.

A new interpreter takes 5 to 40 s of CPU until torch and torchtitan are imported, a fork 0.1 s. The
fork then runs the module as `python -m` does: own arguments, folder, environment and streams.
"""

import contextlib
import json
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping
from multiprocessing.context import ForkServerContext
from pathlib import Path

from tests.support import HANGS_AFTER_S, ROOT

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
            target=_start,
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
    timeout: float = HANGS_AFTER_S,
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


@contextlib.contextmanager
def canon_program(folder: Path) -> Iterator[Path]:
    """Write a program `canon` into `folder`, for scripts: its commands run in forks, too.

    It passes its words, folder, environment and streams to a server process, and exits as the
    command does. Signals to it do not reach the command.
    """
    address, program = folder / "socket", folder / "canon"
    folder.mkdir()
    program.write_text(_PROGRAM.format(python=sys.executable, address=str(address)))
    program.chmod(0o755)
    server = fork_server.Process(target=_serve, args=(str(address),))
    server.start()
    try:
        deadline = time.monotonic() + HANGS_AFTER_S
        while not address.exists():
            assert server.is_alive() and time.monotonic() < deadline
            time.sleep(0.01)
        yield program
    finally:
        server.kill()
        server.join()


_PROGRAM = """#!{python} -SE
import json, os, socket, sys

connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
connection.connect({address!r})
message = json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]).encode()
socket.send_fds(connection, [message], [0, 1, 2])
sys.exit(int(connection.recv(100) or b"70"))
"""


def _serve(address: str) -> None:
    """Answer each connection in a process of its own."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.bind(address)
        server.listen()
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that answer
        while True:
            connection, _ = server.accept()
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                _answer(connection)
                os._exit(0)
            connection.close()


def _answer(connection: socket.socket) -> None:
    """Run the command of one message, and send its exit code."""
    message, streams, _, _ = socket.recv_fds(connection, 1 << 20, 3)
    words, cwd, variables = json.loads(message)
    pid = os.fork()
    if pid == 0:
        for number, stream in enumerate(streams):
            _redirect(number, stream)
        os._exit(_exit_code("canon", words, variables, Path(cwd)))
    _, status = os.waitpid(pid, 0)
    connection.send(str(os.waitstatus_to_exitcode(status)).encode())


def _exit_code(module: str, words: list[str], variables: dict[str, str], cwd: Path) -> int:
    """Run a module as the interpreter would, and return its exit code."""
    try:
        _run(module, words, variables, cwd)
    except SystemExit as stop:
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def _start(
    module: str,
    words: list[str],
    variables: dict[str, str],
    cwd: Path,
    stdout: Path,
    stderr: Path | None,
    stdin: str,
    interrupts: bool,
) -> None:
    """Open the streams of a command, then run it."""
    _redirect(0, _file_with(stdin))
    _redirect(1, os.open(stdout, os.O_WRONLY | os.O_CREAT | os.O_APPEND))
    _redirect(2, 1 if stderr is None else os.open(stderr, os.O_WRONLY | os.O_CREAT | os.O_APPEND))
    if interrupts:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    _run(module, words, variables, cwd)


def _run(module: str, words: list[str], variables: dict[str, str], cwd: Path) -> None:
    """Become the command: environment, folder and arguments; then run the module."""
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # the server's is closed
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(cwd)

    import torch

    torch.set_num_threads(1)  # OMP_NUM_THREADS was read when the server imported torch

    name = "canon_pretrain" if module == "canon" else module
    sys.argv = [module, *words]
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

"""Child processes: each has a session of its own and ends with this process.

A Ctrl-C in a terminal, or a launcher's signal to a process group, reaches this process only, which
decides what its children do. Python runs signal handlers between two instructions of the main
thread: a wait for a child must return often enough, or raise in the handler.

`ForkServer` forks children from a process that has imported what they need. Importing torch takes
longer than many a small run trains: the server imports it once, and `serve` there forks a child per
request. The child is adopted by the process that asked (PR_SET_CHILD_SUBREAPER), which waits for it
and signals it as its own. Linux only.
"""

import ctypes
import json
import os
import signal
import socket
import subprocess
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

# options of prctl(2)
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
MAX_REQUEST = 1 << 20
TIMEOUT_S = 300.0  # the first answer comes after the imports
POLL_S = 0.2
ADOPTION_POLL_S = 1e-3
_libc = ctypes.CDLL(None)


def end_with(parent: int) -> None:
    """Receive SIGTERM when the process `parent` ends; exit if it has ended."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    # it may have ended before the call, which then has no effect
    if os.getppid() != parent:
        os._exit(1)


def end_with_torchrun() -> None:
    """Receive SIGTERM when torchrun's agent ends, if this process is one of its ranks."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with(os.getppid())


def torchrun(num_ranks: int) -> list[str]:
    """Return arguments of Python that start ranks on this machine; `-m MODULE` follows."""
    return ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]


def start_child(command: Sequence[str], **options: Any) -> "subprocess.Popen[bytes]":
    """Start a process in a new session that receives SIGTERM when this one ends."""
    parent = os.getpid()
    return subprocess.Popen(
        command, start_new_session=True, preexec_fn=lambda: end_with(parent), **options
    )


def ending(code: int) -> str:
    """Say how a process ended, by the exit code of subprocess."""
    if code < 0:
        with suppress(ValueError):  # a real-time signal
            return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def kill_tree(pid: int) -> None:
    """Kill a process and its descendants, which may be in other sessions."""
    # find all of them first: a child of a killed process is no longer its child
    pids = [pid]
    for parent in pids:  # grows while it is read
        with suppress(OSError):
            for thread in Path(f"/proc/{parent}/task").iterdir():
                pids += map(int, (thread / "children").read_text().split())
    for process in pids:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


@contextmanager
def separate_sessions() -> Iterator[None]:
    """Start also the processes of libraries in sessions of their own, within the block.

    torch.compile starts compilers in the process group of a rank: a signal to the group, which asks
    the rank to save and stop, would kill them, and the step with them. A KeyboardInterrupt in the
    block kills those that run, as threads may wait for them.
    """
    original = subprocess.Popen.__init__
    started = weakref.WeakSet[Any]()

    def start_apart(process: Any, *arguments: Any, **options: Any) -> None:
        is_library = "start_new_session" not in options
        original(process, *arguments, **{"start_new_session": True} | options)
        if is_library:
            started.add(process)

    subprocess.Popen.__init__ = start_apart  # type: ignore[assignment]
    try:
        yield
    except KeyboardInterrupt:
        for process in [*started]:
            if process.returncode is None:
                kill_tree(process.pid)
        raise
    finally:
        subprocess.Popen.__init__ = original  # type: ignore[method-assign]


class ForkedChild:
    """A child that a ForkServer has forked, with the part of Popen's interface that is used."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, negative if a signal ended it; None if it runs."""
        if self.returncode is None:
            with suppress(ChildProcessError):  # a signal handler polls within this call
                pid, state = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(state)
        return self.returncode

    def terminate(self) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)


class ForkServer:
    """A process that runs `command`, which calls `serve`; ends with this one or by `close`."""

    def __init__(self, command: Sequence[str], environ: dict[str, str]) -> None:
        _libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(POLL_S)
        # only the server keeps the other end: it is closed when the server ends
        with theirs:
            self._process = subprocess.Popen(
                command,
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=environ,
                start_new_session=True,  # Ctrl-C is for this process
            )

    def start(
        self,
        arguments: Sequence[str],
        output: BinaryIO,
        gives_up: Callable[[], bool] = lambda: False,
    ) -> ForkedChild | None:
        """Run the server's function in a child. Raises OSError if the server ended.

        Returns None if `gives_up()` before the child has started: then close the server, and the
        child does not start.
        """
        socket.send_fds(self._socket, [json.dumps(arguments).encode()], [output.fileno()])

        # poll, so that `gives_up` and signals are noticed
        deadline = time.monotonic() + TIMEOUT_S
        while not gives_up():
            try:
                answer = self._socket.recv(MAX_REQUEST)
            except TimeoutError:
                if time.monotonic() > deadline:
                    raise
                continue
            if not answer:
                raise ConnectionError("the process that forks trainers has ended")
            return ForkedChild(int(answer))
        return None

    def close(self) -> None:
        """End the server; its children continue."""
        self._socket.close()
        self._process.kill()
        self._process.wait()


def serve(function: Callable[[list[str]], None]) -> None:
    """Call `function` in a new process for each request of the ForkServer, until it closes."""
    driver = os.getppid()
    if len(os.listdir("/proc/self/task")) > 1:
        raise RuntimeError("a process with threads must not be forked")
    with socket.socket(fileno=os.dup(0)) as requests:
        while True:
            request, files, *_ = socket.recv_fds(requests, MAX_REQUEST, 1)
            if not request:  # the driver has closed its end
                return
            if _fork_for_driver(driver, output=files[0]):
                break

        requests.sendall(str(os.getpid()).encode())

    # In the child: no input, and both outputs to the file that came with the request.
    null = os.open(os.devnull, os.O_RDONLY)
    for number, file in enumerate((null, files[0], files[0])):
        os.dup2(file, number)
    function(json.loads(request))


def _fork_for_driver(driver: int, output: int) -> bool:
    """Fork a child of `driver`, in a new session; return True in the child, False in the server.

    A process between the two ends at once, so that the driver, a subreaper, adopts the child.
    """
    middle = os.fork()
    if middle:
        os.waitpid(middle, 0)
        os.close(output)
        return False
    middle = os.getpid()
    if os.fork():
        os._exit(0)

    # the child: wait until it is adopted
    while os.getppid() == middle:
        time.sleep(ADOPTION_POLL_S)
    end_with(driver)
    os.setsid()
    return True

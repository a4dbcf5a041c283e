"""`canon`, whose fork server is a fork of its process.

The driver's own server imports torch in a new interpreter, 5 to 40 s of CPU for each start of a
driver. tests/commands.py forks this process from one that has imported torch.
"""

import os
import signal
import subprocess
from types import SimpleNamespace
from typing import Any

import canon_pretrain.train  # noqa: F401
from canon_pretrain.__main__ import main
from canon_pretrain.core import children
from canon_pretrain.core.cli import run_process


class ForkedServer:
    """Popen's methods that ForkServer uses; the command is `python -c CODE`."""

    def __init__(self, command: Any, *, stdin: int, env: dict[str, str], **options: Any) -> None:
        self.pid = os.fork()
        if self.pid:
            return
        null = os.open(os.devnull, os.O_RDWR)
        for number, file in enumerate((stdin, null, null)):
            os.dup2(file, number)
        os.closerange(3, 1024)  # the driver's end of the socket
        os.setsid()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        os.environ.clear()
        os.environ.update(env)
        try:
            exec(command[2])
        finally:
            os._exit(1)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> None:
        os.waitpid(self.pid, 0)


if __name__ == "__main__":
    own = {"Popen": ForkedServer, "DEVNULL": subprocess.DEVNULL}
    children.subprocess = SimpleNamespace(**own)  # type: ignore[assignment]
    run_process(main)

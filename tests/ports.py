"""Ports for servers of the tests."""

import fcntl
import socket
import tempfile
from contextlib import suppress
from pathlib import Path

FIRST, LAST = 10_000, 14_999  # below those of slurm/lib.sh, and of what the system gives to clients
_counter = Path(tempfile.gettempdir()) / "canon_pretrain-tests-port"


def free_port() -> int:
    """Return a free port that no other call returns for long, in any process of this machine.

    A port that the system chose is free again once the socket is closed: before the server of a
    test opens it, a client of another test may have received the same one.
    """
    with _counter.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        port = int(file.read() or FIRST)

        while True:
            port = port + 1 if port < LAST else FIRST
            with suppress(OSError), socket.socket() as probe:
                probe.bind(("127.0.0.1", port))
                break

        file.truncate(0)
        file.write(str(port))
    return port

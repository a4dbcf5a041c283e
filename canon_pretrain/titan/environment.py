"""torchrun's environment variables: checked where they are, made up for a single rank.

Before torchtitan is imported, which reads them.
"""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from canon_pretrain.errors import UserError
from canon_pretrain.run.holder import read_count
from canon_pretrain.titan.device import device_count, has_accelerator

TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@contextmanager
def stand_alone() -> Iterator[None]:
    """Where torchrun did not start this process: its variables for one rank, on a free port.

    They are taken away again: tests and benches start more than one job in a process.
    """
    if any(name in os.environ for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")):
        yield
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    values = ("0", "0", "1", "1", "127.0.0.1", str(port))
    os.environ.update(zip(TORCHRUN, values, strict=True))
    try:
        yield
    finally:
        for name in TORCHRUN:
            del os.environ[name]


def check_launch() -> None:
    """Raise UserError unless torchrun's variables are all there and each rank has a device."""
    missing = [name for name in TORCHRUN if name not in os.environ]
    if missing:
        raise UserError(
            f"{', '.join(missing)} not set, though others of torchrun's variables are: start "
            "with torchrun, or with none of them set for a single rank"
        )
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT"):
        read_count(os.environ, name)
    ranks = read_count(os.environ, "LOCAL_WORLD_SIZE")
    if has_accelerator() and device_count() < ranks:
        raise UserError(
            f"{ranks} ranks on this node, but {device_count()} GPU(s): start at most one rank a "
            "GPU, or set CUDA_VISIBLE_DEVICES= (empty) to train on the CPU"
        )

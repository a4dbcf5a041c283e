"""What a rank's process gets from its environment: torchrun's variables, defaults, its device.

Before torchtitan is imported, which reads the variables.
"""

import contextlib
import os
import resource
import socket
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager

from canon_pretrain.core.cli import available_cores
from canon_pretrain.core.errors import UserError
from canon_pretrain.core.holder import read_count
from canon_pretrain.kernels.hardware import near_cores
from canon_pretrain.titan.device import device_count, has_accelerator

MAX_COMPILE_THREADS = 32
"""Inductor's own limit."""
TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def prepare_process(environ: MutableMapping[str, str] = os.environ) -> None:
    """Set what torch and the system should know of a rank; before torch is imported.

    What the user has set stays.
    """
    if "PYTORCH_CUDA_ALLOC_CONF" not in environ:
        environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    # Inductor takes all cores in each rank
    threads = available_cores() // max(1, read_count(environ, "LOCAL_WORLD_SIZE"))
    threads = min(max(1, threads), MAX_COMPILE_THREADS)
    environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(threads))
    # gloo takes a socket per rank, a usual soft limit is 1,024
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # macOS has a lower one than it says
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


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


def take_device() -> None:
    """Make this rank's GPU the current one, before anything else makes a context on GPU 0.

    The rank then runs on the cores near it (`torchrun --numa-binding node` ends a launch where
    numactl is missing); NUMA_BINDING=0 in the environment leaves it all cores.
    """
    if has_accelerator():
        import torch

        gpu = int(os.environ["LOCAL_RANK"])
        torch.cuda.set_device(gpu)
        if os.environ.get("NUMA_BINDING") != "0":
            run_on(near_cores(gpu))


def run_on(cores: set[int]) -> None:
    """Keep this process on those of `cores` that it may use; on all if there are none."""
    if allowed := cores & os.sched_getaffinity(0):
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(OSError):  # it has ended
                os.sched_setaffinity(int(thread), allowed)

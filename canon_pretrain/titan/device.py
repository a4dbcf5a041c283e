"""Prepare a rank's process and device before torchtitan is imported."""

import contextlib
import os
import platform
import resource
import tempfile
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from canon_pretrain.core.cli import available_cores
from canon_pretrain.core.errors import UserError
from canon_pretrain.core.holder import read_count
from canon_pretrain.machine.device import numa_cores

TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
CACHE_BYTES = 1 << 20  # for which the cache of a compiled job must have room


def has_accelerator() -> bool:
    """Return whether this process can use a CUDA device."""
    import torch

    return torch.cuda.is_available()


def prepare_process() -> None:
    """Set variables and limits that the user has not set; call before importing torch."""
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    # Inductor would start a thread per core (at most 32) in every rank
    ranks = max(1, read_count(os.environ, "LOCAL_WORLD_SIZE"))
    threads = min(max(1, available_cores() // ranks), 32)
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(threads))
    # gloo opens a socket per rank; a common soft limit is 1,024
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # macOS enforces less than it reports
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def check_compiler_cache(num_bytes: int = 0) -> None:
    """Raise UserError unless torch.compile can write `num_bytes` to its cache.

    If 0, only a folder that the user has set is checked: torch creates it when it is imported.
    """
    path = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if path is None and not num_bytes:
        return

    # Write a file: free space does not tell whether there is a quota or a read-only file system.
    try:
        if path is None:
            from torch._inductor.runtime.cache_dir_utils import cache_dir

            path = cache_dir()
        os.makedirs(path, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path) as probe:
            probe.write(bytes(num_bytes))
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as error:
        raise UserError(
            "compile.cache",
            f"torch.compile cannot write to its cache {path or error.filename}: {error.strerror}. "
            "Free space, or set TORCHINDUCTOR_CACHE_DIR to another folder",
            path=path,
        ) from None


def prepare_device() -> None:
    """Make the CPU torch's device if there is no GPU: torchtitan asks for one when imported.

    torch.cpu lacks what torchtitan calls on torch.cuda: it is added here.
    """
    if has_accelerator():
        return
    import torch

    def memory_stats(device: Any = None) -> dict[str, int]:
        # peak resident set size, under the names that torchtitan's monitor reads
        peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        peaks = dict.fromkeys(("active_bytes.all.peak", "reserved_bytes.all.peak"), peak)
        return peaks | {"num_alloc_retries": 0, "num_ooms": 0}

    total_memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    torch._utils._get_available_device_type = lambda: "cpu"
    cpu: Any = torch.cpu
    cpu.current_device = lambda: 0
    cpu.device_count = lambda: 1
    cpu.get_device_name = lambda device=None: platform.processor() or platform.machine()
    cpu.get_device_properties = lambda device=None: SimpleNamespace(total_memory=total_memory)
    cpu.memory_stats = memory_stats
    cpu.reset_peak_memory_stats = lambda device=None: None
    cpu.empty_cache = lambda: None


@contextlib.contextmanager
def single_rank_environment() -> Iterator[None]:
    """Set torchrun's variables for a single rank within the block, unless some are set."""
    if any(name in os.environ for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")):
        yield
        return

    variables = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",  # the store takes a free port, which no other process has to know
    }
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            del os.environ[name]


def check_launch() -> None:
    """Raise UserError unless all of torchrun's variables are set and each rank has a device."""
    import torch

    missing = [name for name in TORCHRUN if name not in os.environ]
    if missing:
        raise UserError(
            "launch.environment",
            f"only some of torchrun's variables are set; missing: {', '.join(missing)}. Start "
            "with torchrun, or unset all of them for a single rank",
            missing=missing,
        )
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT"):
        read_count(os.environ, name)

    ranks = read_count(os.environ, "LOCAL_WORLD_SIZE")
    num_gpus = torch.cuda.device_count()
    if has_accelerator() and num_gpus < ranks:
        raise UserError(
            "launch.gpus",
            f"{ranks} ranks on a node with {num_gpus} GPU(s): start at most one rank per GPU, or "
            "set CUDA_VISIBLE_DEVICES= (empty) to train on the CPU",
            ranks=ranks,
            gpus=num_gpus,
        )


def bind_device() -> None:
    """Set this rank's GPU and cores, before anything creates a context on GPU 0."""
    if not has_accelerator():
        return
    import torch

    gpu = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(gpu)

    # All threads stay on the cores next to the GPU, as far as this process may use them.
    if os.environ.get("NUMA_BINDING") == "0":
        return
    if cores := numa_cores(gpu) & os.sched_getaffinity(0):
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(OSError):  # the thread has ended
                os.sched_setaffinity(int(thread), cores)

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
    threads = available_cores() // max(1, read_count(os.environ, "LOCAL_WORLD_SIZE"))
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(min(max(1, threads), 32)))
    # gloo opens a socket per rank; a common soft limit is 1,024
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # macOS enforces less than it reports
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def check_compiler_cache(num_bytes: int = 0) -> None:
    """Raise UserError unless torch.compile can write to its cache, `num_bytes` for example.

    Without a size only a folder of the user's is checked: torch creates it when it is imported.
    """
    path = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if path is None and not num_bytes:
        return
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
    """Make the CPU torch's device if there is no GPU: torchtitan asks for one when imported."""
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

    # port 0: the store takes a free one when it opens it, which nobody else has to know
    values = ("0", "0", "1", "1", "127.0.0.1", "0")
    os.environ.update(zip(TORCHRUN, values, strict=True))
    try:
        yield
    finally:
        for name in TORCHRUN:
            del os.environ[name]


def check_launch() -> None:
    """Raise UserError unless all of torchrun's variables are set and each rank has a device."""
    import torch

    if missing := [name for name in TORCHRUN if name not in os.environ]:
        raise UserError(
            "launch.environment",
            f"only some of torchrun's variables are set; missing: {', '.join(missing)}. Start "
            "with torchrun, or unset all of them for a single rank",
            missing=missing,
        )
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT"):
        read_count(os.environ, name)
    ranks = read_count(os.environ, "LOCAL_WORLD_SIZE")
    if has_accelerator() and (gpus := torch.cuda.device_count()) < ranks:
        raise UserError(
            "launch.gpus",
            f"{ranks} ranks on a node with {gpus} GPU(s): start at most one rank per GPU, or "
            "set CUDA_VISIBLE_DEVICES= (empty) to train on the CPU",
            ranks=ranks,
            gpus=gpus,
        )


def bind_device() -> None:
    """Set this rank's GPU and cores, before anything creates a context on GPU 0."""
    if not has_accelerator():
        return
    import torch

    gpu = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(gpu)
    if os.environ.get("NUMA_BINDING") == "0":
        return
    if cores := numa_cores(gpu) & os.sched_getaffinity(0):
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(OSError):  # the thread has ended
                os.sched_setaffinity(int(thread), cores)

"""What torchtitan 0.2.2 needs before it is imported on a machine without an accelerator.

torchtitan asks torch for its accelerator at import time and falls back to CUDA. `prepare_device`
makes the CPU answer those questions. Call it before the first import of torchtitan; with an
accelerator it does nothing. Torch is imported by the functions: train.py reports a typo before it
is. (Proven at 2 ranks with gloo, FSDP2 and checkpoints.)
"""

import os
import platform
import resource
import sys
from types import SimpleNamespace
from typing import Any


def has_accelerator() -> bool:
    """Whether a CUDA device can be used in this process."""
    import torch

    return torch.cuda.is_available()


def device_count() -> int:
    """How many CUDA devices this process can use."""
    import torch

    return torch.cuda.device_count()


def prepare_device() -> None:
    """Let the CPU stand in for the accelerator; idempotent.

    Raises RuntimeError when torchtitan was imported first: it keeps the device that it saw then.
    """
    if has_accelerator():
        return
    tools = sys.modules.get("torchtitan.tools.utils")
    if tools is not None and tools.device_type != "cpu":
        raise RuntimeError("prepare_device() must be called before torchtitan is imported")
    import torch

    torch._utils._get_available_device_type = lambda: "cpu"
    cpu: Any = torch.cpu
    cpu.current_device = lambda: 0
    cpu.device_count = lambda: 1
    cpu.get_device_name = lambda device=None: platform.processor() or platform.machine()
    cpu.get_device_properties = lambda device=None: SimpleNamespace(total_memory=_total_memory())
    cpu.memory_stats = lambda device=None: _memory_stats()
    cpu.reset_peak_memory_stats = lambda device=None: None
    cpu.empty_cache = lambda: None


def _total_memory() -> int:
    """Bytes of main memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _memory_stats() -> dict[str, int]:
    """The process's peak resident set under the names that torchtitan's monitor reads."""
    kibibytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peak = kibibytes * 1024
    return {
        "active_bytes.all.peak": peak,
        "reserved_bytes.all.peak": peak,
        "num_alloc_retries": 0,
        "num_ooms": 0,
    }

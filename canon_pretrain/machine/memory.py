"""The memory of this node, in bytes; torch is imported lazily."""

import os
import re
from pathlib import Path

from canon_pretrain.machine.hardware import read_text


def physical_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def available_memory(root: Path = Path("/")) -> int:
    """Return the bytes of available main memory, within every cgroup's limit."""
    # What all processes of this node leave.
    limits = [physical_memory()]
    meminfo = read_text(root / "proc/meminfo")
    available = re.search(r"^MemAvailable:\s*(\d+) kB", meminfo, re.MULTILINE)
    if available is not None:
        limits.append(1024 * int(available[1]))

    # The limits of the process's cgroup and of those above it.
    for line in read_text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:  # version 2
            top = root / "sys/fs/cgroup"
            file = "memory.max"
        elif "memory" in controllers.split(","):  # version 1
            top = root / "sys/fs/cgroup/memory"
            file = "memory.limit_in_bytes"
        else:
            continue
        cgroup = Path(path.lstrip("/"))
        for folder in (cgroup, *cgroup.parents):
            text = read_text(top / folder / file).strip()
            if text.isdigit():  # else "max", or not visible in a container
                limits.append(int(text))
    return min(limits)


def memory_per_process(processes: int) -> int:
    """Return the memory of a GPU; without one, of each of several processes on the CPU."""
    import torch

    if torch.cuda.is_available():
        return int(torch.cuda.get_device_properties(0).total_memory)
    return available_memory() // processes

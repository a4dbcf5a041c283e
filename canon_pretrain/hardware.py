"""The GPUs and the memory of this node, asked by training, evaluation, preflight and benches.

Torch is imported by the functions: what must start fast may import this module.
"""

import glob
import os
import re
import subprocess
from pathlib import Path

from canon_pretrain.errors import UserError

DEVICE_FILES = "/dev/nvidia[0-9]*"
CPU_ON_PURPOSE = ("", "-1")
"""Values of CUDA_VISIBLE_DEVICES that hide all GPUs."""


def find_gpu() -> str | None:
    """Return what shows that this node has an NVIDIA GPU, usable or not; None if nothing does."""
    if files := sorted(glob.glob(DEVICE_FILES)):
        return files[0]
    lines = _nvidia_smi("-L").splitlines()
    return next((f"nvidia-smi: {line}" for line in lines if line.startswith("GPU ")), None)


def check_cuda() -> None:
    """Raise UserError, with torch's reason, if this node has a GPU that torch can't use.

    CUDA_VISIBLE_DEVICES= (empty) or -1 asks for the CPU: nothing is checked then.
    """
    import torch

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if torch.cuda.is_available() or visible is not None and visible.strip() in CPU_ON_PURPOSE:
        return
    if (evidence := find_gpu()) is None:
        return
    reason = "it finds no device"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:  # a build without CUDA asserts
        reason = " ".join(str(error).split())
    raise UserError(
        f"this node has a GPU ({evidence}), but torch {torch.__version__} can't use it: {reason}"
        f"{'' if visible is None else f' (CUDA_VISIBLE_DEVICES={visible})'}. Repair the driver or "
        "install a build of torch for it; to use the CPU, set CUDA_VISIBLE_DEVICES= (empty)"
    )


def _nvidia_smi(*arguments: str) -> str:
    """The output of nvidia-smi; empty if it fails or is not installed."""
    try:
        done = subprocess.run(
            ["nvidia-smi", *arguments], capture_output=True, text=True, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def available_memory(root: Path = Path("/")) -> int:
    """Return how many bytes of main memory new work on this node can take.

    What the kernel calls available, and no more than any cgroup of this process may hold; page
    cache that counts there gives way.
    """
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    if found := re.search(r"^MemAvailable:\s*(\d+) kB", _read(root / "proc/meminfo"), re.MULTILINE):
        limits.append(1024 * int(found[1]))
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        names = controllers.split(",")
        if names != [""] and "memory" not in names:
            continue
        top, file = ("sys/fs/cgroup", "memory.max")
        if "memory" in names:  # version 1
            top, file = ("sys/fs/cgroup/memory", "memory.limit_in_bytes")
        inner = Path(path.lstrip("/"))
        for folder in (inner, *inner.parents):
            text = _read(root / top / folder / file).strip()
            if text.isdigit():  # else it is "max", or not visible from a container
                limits.append(int(text))
    return min(limits)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""

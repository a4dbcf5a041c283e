"""The GPUs, memory and speed of this node, asked by training, evaluation, preflight and benches.

Torch is imported by the functions: what must start fast may import this module.
"""

import glob
import os
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from canon_pretrain.core.errors import UserError

if TYPE_CHECKING:
    import torch

DEVICE_FILES = "/dev/nvidia[0-9]*"
CPU_ON_PURPOSE = ("", "-1")
"""Values of CUDA_VISIBLE_DEVICES that hide all GPUs."""
GPU_FACTS = {
    "driver": "driver_version",
    "sm_mhz": "clocks.sm",
    "max_sm_mhz": "clocks.max.sm",
    "memory_mhz": "clocks.mem",
    "power_w": "power.draw",
    "power_limit_w": "power.limit",
    "celsius": "temperature.gpu",
}
"""Our names for what nvidia-smi is asked."""
THROTTLE_FIELDS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")
"""The second is what drivers before 535 call it."""
THROTTLE_REASONS = {
    0x1: "idle",
    0x2: "application clocks",
    0x4: "software power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
    0x100: "display clocks",
}
"""Bits of nvmlClocksEventReasons."""


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


def matmul_flops(
    device: "torch.device",
    dtype: "torch.dtype",
    *,
    size: int,
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Return the FLOP/s of square products of random numbers, repeated for about `seconds`.

    A GPU that multiplies for a second is as warm, and as far limited in power, as in training; a
    burst is faster.
    """
    import torch

    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    rate = _sustained(lambda: torch.mm(a, b, out=out), seconds, clock)
    return 2 * size**3 * rate


def copy_bandwidth(
    source: "torch.Tensor",
    target: "torch.Tensor",
    *,
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Return the bytes read and written per second by copies, repeated for about `seconds`."""
    return 2 * source.nbytes * _sustained(lambda: target.copy_(source), seconds, clock)


def _sustained(step: Callable[[], Any], seconds: float, clock: Callable[[], float]) -> float:
    """Steps per second; they are queued without a gap."""
    import torch

    def run(count: int) -> float:
        synchronize()
        begin = clock()
        for _ in range(count):
            step()
        synchronize()
        return clock() - begin

    synchronize = torch.cuda.synchronize if torch.cuda.is_available() else (lambda: None)
    fastest = min(run(1) for _ in range(3))
    count = max(1, round(seconds / max(fastest, 1e-6)))
    return count / max(run(count), 1e-9)


def query_gpu(gpu: str) -> dict[str, Any] | None:
    """Return driver, clocks, power, temperature and throttle reasons of a GPU as they are now.

    `gpu` is nvidia-smi's index or UUID. None if nvidia-smi does not answer.
    """
    for field in THROTTLE_FIELDS:
        asked = f"--query-gpu={','.join((*GPU_FACTS.values(), field))}"
        line = _nvidia_smi(f"--id={gpu}", asked, "--format=csv,noheader,nounits").strip()
        driver, *words = (word.strip() for word in line.split(","))
        if len(words) != len(GPU_FACTS):
            continue
        *numbers, bits = words
        found: dict[str, Any] = {"driver": driver}
        found |= zip(tuple(GPU_FACTS)[1:], map(_number, numbers), strict=True)
        reasons = int(bits, 16) if bits.startswith("0x") else 0
        found["throttled_by"] = [text for bit, text in THROTTLE_REASONS.items() if reasons & bit]
        return found
    return None


def _number(word: str) -> float | None:
    """A figure of nvidia-smi's; None for "[N/A]"."""
    try:
        return float(word)
    except ValueError:
        return None


def _nvidia_smi(*arguments: str) -> str:
    """The output of nvidia-smi; empty if it fails or is not installed."""
    try:
        done = subprocess.run(
            ["nvidia-smi", *arguments], capture_output=True, text=True, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def near_cores(gpu: int, root: Path = Path("/")) -> set[int]:
    """Return the cores of the NUMA node that has `gpu`; none if the system names none."""
    import torch

    place: Any = torch.cuda.get_device_properties(gpu)
    name = f"{place.pci_domain_id:04x}:{place.pci_bus_id:02x}:{place.pci_device_id:02x}.0"
    node = _read(root / "sys/bus/pci/devices" / name / "numa_node").strip()
    cores: set[int] = set()
    if node.isdigit():  # -1: not known, as in many virtual machines
        for part in _read(root / f"sys/devices/system/node/node{node}/cpulist").split(","):
            first, _, last = part.strip().partition("-")
            if first.isdigit():
                cores.update(range(int(first), int(last or first) + 1))
    return cores


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

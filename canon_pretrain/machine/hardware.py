"""The GPUs and CPU of this node; torch is imported lazily. Memory: memory.py, speed: timing.py."""

import glob
import os
import re
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from canon_pretrain.core.cli import available_cores
from canon_pretrain.core.errors import UserError

if TYPE_CHECKING:
    import torch

DEVICE_FILES = "/dev/nvidia[0-9]*"
GPU_FACTS = {
    "driver": "driver_version",
    "sm_mhz": "clocks.sm",
    "max_sm_mhz": "clocks.max.sm",
    "memory_mhz": "clocks.mem",
    "power_w": "power.draw",
    "power_limit_w": "power.limit",
    "celsius": "temperature.gpu",
    "throttled_by": "clocks_event_reasons.active",
}
"""Our names for the fields of nvidia-smi (driver 535 or later)."""
THROTTLE_REASONS = (
    *("idle", "application clocks", "software power cap", "hardware slowdown", "sync boost"),
    *("software thermal slowdown", "hardware thermal slowdown", "hardware power brake"),
    "display clocks",
)
"""The bits of nvmlClocksEventReasons, the lowest first."""

PEAK_FLOPS = (
    (r"A100\b(?!.*64GB)|A800\b", 312e12),  # the A100 of 64 GB has more multiprocessors
    (r"(H100|H800)\b.*PCIe", 756e12),
    (r"(H100|H200)\b.*NVL", 835e12),
    (r"(H100|H800|H200|GH200)\b(?!.*HBM2e)", 989e12),
    (r"H20(-3e)?\b", 148e12),
    (r"B200\b", 2250e12),
    (r"GB200\b", 2500e12),
    (r"L40S\b", 362e12),
    (r"MI250X\b", 191.5e12),  # one of its two devices
    (r"(MI300X|MI325X)\b", 1307e12),
    (r"MI355X\b", 2500e12),
)
"""Name of a device (a pattern of its model) -> dense bf16 FLOP/s, from the vendors' data sheets."""


def peak_flops(name: str) -> float | None:
    """Return the peak of dense bf16 products of the device `name`; None if it is not known."""
    if "MIG" in name.split():  # a part of a GPU
        return None
    found = (peak for model, peak in PEAK_FLOPS if re.search(rf"\b(?:{model})", name))
    return next(found, None)


def find_gpu() -> str | None:
    """Return evidence of an NVIDIA GPU, usable or not; None if there is none."""
    lines = [f"nvidia-smi: {line}" for line in _gpu_lines()]
    return next(iter([*sorted(glob.glob(DEVICE_FILES)), *lines]), None)


def _gpu_lines() -> list[str]:
    """Return a line per GPU from nvidia-smi."""
    return [line for line in _nvidia_smi("-L").splitlines() if line.startswith("GPU ")]


def check_cuda() -> None:
    """Raise UserError if torch can't use this node's GPU, unless CUDA_VISIBLE_DEVICES hides it."""
    import torch

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    is_fine = torch.cuda.is_available() or visible is not None and visible.strip() in ("", "-1")
    if is_fine or (evidence := find_gpu()) is None:
        return
    reason = "it finds no device"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:  # a build without CUDA asserts
        reason = " ".join(str(error).split())
    raise UserError(
        "gpu.unusable",
        f"this node has a GPU ({evidence}; CUDA_VISIBLE_DEVICES={visible}), but torch "
        f"{torch.__version__} can't use it: {reason}. Repair the driver or install a build of "
        "torch for it; to use the CPU, set CUDA_VISIBLE_DEVICES= (empty)",
        evidence=evidence,
    )


def to_device(tensor: "torch.Tensor", device: "torch.device | str") -> "torch.Tensor":
    """Return a CPU tensor on `device`, for a GPU copied asynchronously from pinned memory.

    For a copy from pageable memory the host would wait.
    """
    on_gpu = str(device).startswith("cuda")
    return (tensor.pin_memory() if on_gpu else tensor).to(device, non_blocking=True)


def visible_gpus() -> list[str]:
    """Return what CUDA_VISIBLE_DEVICES lists, or else the numbers of what nvidia-smi lists."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name for name in visible.replace(" ", "").split(",") if name not in ("", "-1")]
    return [str(number) for number, _ in enumerate(_gpu_lines())]


def threads_per_process(processes: int) -> int:
    """Return the CPU threads of each of several processes that run at once."""
    return max(1, available_cores() // processes)


def query_gpu(gpu: str) -> dict[str, Any] | None:
    """Return the current GPU_FACTS of `gpu` (nvidia-smi's index or UUID); None if unknown."""
    query = f"--query-gpu={','.join(GPU_FACTS.values())}"
    line = _nvidia_smi(f"--id={gpu}", query, "--format=csv,noheader,nounits").strip()
    words = [word.strip() for word in line.split(",")]
    if len(words) != len(GPU_FACTS):
        return None
    driver, *numbers, bits = words
    reasons = int(bits, 16) if bits.startswith("0x") else 0
    throttled = [text for bit, text in enumerate(THROTTLE_REASONS) if reasons >> bit & 1]
    figures = [None if word.startswith("[") else float(word) for word in numbers]
    return dict(zip(GPU_FACTS, [driver, *figures, throttled], strict=True))


def _nvidia_smi(*arguments: str) -> str:
    """Return the output of nvidia-smi; empty if it fails or is not installed."""
    try:
        options: Any = {"stderr": subprocess.DEVNULL, "text": True, "timeout": 60}
        return subprocess.check_output(["nvidia-smi", *arguments], **options)
    except (OSError, subprocess.SubprocessError):
        return ""


def numa_cores(gpu: int, root: Path = Path("/")) -> set[int]:
    """Return the cores of the NUMA node of `gpu`; empty if unknown."""
    import torch

    place: Any = torch.cuda.get_device_properties(gpu)
    name = f"{place.pci_domain_id:04x}:{place.pci_bus_id:02x}:{place.pci_device_id:02x}.0"
    node = read_text(root / "sys/bus/pci/devices" / name / "numa_node").strip()
    if not node.isdigit():  # -1: unknown, as in many virtual machines
        return set()
    cpulist = read_text(root / f"sys/devices/system/node/node{node}/cpulist")
    ranges = re.findall(r"(\d+)(?:-(\d+))?", cpulist)
    return {core for first, last in ranges for core in range(int(first), int(last or first) + 1)}


def read_text(path: Path) -> str:
    """Return the text of a file of /proc or /sys; empty if it cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""


def cpu_info(field: str) -> str:
    """Return a field of /proc/cpuinfo; empty without it."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((ln.partition(":")[2].strip() for ln in lines if ln.startswith(field)), "")

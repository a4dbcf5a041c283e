"""The GPUs and CPU of this node; no torch. What torch knows of it: device.py."""

import glob
import os
import subprocess
from pathlib import Path
from typing import Any

from canon_pretrain.core.cli import available_cores

DEVICE_FILES = "/dev/nvidia[0-9]*"
GPU_FIELDS = {
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
    "idle",
    "application clocks",
    "software power cap",
    "hardware slowdown",
    "sync boost",
    "software thermal slowdown",
    "hardware thermal slowdown",
    "hardware power brake",
    "display clocks",
)
"""The bits of nvmlClocksEventReasons, the lowest first."""


def find_gpu() -> str | None:
    """Return evidence of an NVIDIA GPU, usable or not; None if there is none."""
    device_files = sorted(glob.glob(DEVICE_FILES))
    if device_files:
        return device_files[0]
    lines = _gpu_lines()
    return f"nvidia-smi: {lines[0]}" if lines else None


def _gpu_lines() -> list[str]:
    """Return a line per GPU from nvidia-smi."""
    return [line for line in _nvidia_smi("-L").splitlines() if line.startswith("GPU ")]


def visible_gpus() -> list[str]:
    """Return the devices in CUDA_VISIBLE_DEVICES; if it is unset, the indices of all GPUs."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name for name in visible.replace(" ", "").split(",") if name not in ("", "-1")]
    return [str(number) for number, _ in enumerate(_gpu_lines())]


def gpu_names() -> list[str]:
    """Return the model of each of `visible_gpus`, as nvidia-smi calls it."""
    gpus = visible_gpus()
    if not gpus:
        return []
    names = _nvidia_smi("--query-gpu=name", "--format=csv,noheader").splitlines()
    # all GPUs of a node are of one model, and CUDA_VISIBLE_DEVICES may hide some
    return [names[0].strip() if names else "GPU"] * len(gpus)


def threads_per_process(processes: int) -> int:
    """Return the CPU threads of each of several processes that run at once."""
    return max(1, available_cores() // processes)


def query_gpu(gpu: str) -> dict[str, Any] | None:
    """Return the current GPU_FIELDS of `gpu` (nvidia-smi's index or UUID); None if unknown."""
    query = f"--query-gpu={','.join(GPU_FIELDS.values())}"
    line = _nvidia_smi(f"--id={gpu}", query, "--format=csv,noheader,nounits").strip()
    values = [value.strip() for value in line.split(",")]
    if len(values) != len(GPU_FIELDS):
        return None

    driver, *texts, mask_text = values
    mask = int(mask_text, 16) if mask_text.startswith("0x") else 0
    reasons = [reason for bit, reason in enumerate(THROTTLE_REASONS) if mask >> bit & 1]
    # [N/A] for what this GPU does not report
    figures = [None if text.startswith("[") else float(text) for text in texts]
    return dict(zip(GPU_FIELDS, [driver, *figures, reasons], strict=True))


def _nvidia_smi(*arguments: str) -> str:
    """Return the output of nvidia-smi; empty if it fails or is not installed."""
    try:
        return subprocess.check_output(
            ["nvidia-smi", *arguments], stderr=subprocess.DEVNULL, text=True, timeout=60
        )
    except (OSError, subprocess.SubprocessError):
        return ""


def read_text(path: Path) -> str:
    """Return the text of a file of /proc or /sys; empty if it cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""


def cpu_info(field: str) -> str:
    """Return a field of the first core in /proc/cpuinfo; empty without it."""
    for line in read_text(Path("/proc/cpuinfo")).splitlines():
        if line.startswith(field):
            return line.partition(":")[2].strip()
    return ""

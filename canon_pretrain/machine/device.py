"""What torch can use of this node, and copies to it; torch is imported lazily."""

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from canon_pretrain.core.errors import UserError
from canon_pretrain.machine import hardware
from canon_pretrain.machine.hardware import read_text

if TYPE_CHECKING:
    import torch


def check_cuda() -> None:
    """Raise UserError if torch can't use this node's GPU, unless CUDA_VISIBLE_DEVICES hides it."""
    import torch

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    is_hidden = visible is not None and visible.strip() in ("", "-1")
    if torch.cuda.is_available() or is_hidden:
        return
    evidence = hardware.find_gpu()
    if evidence is None:
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
    if str(device).startswith("cuda"):
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def numa_cores(gpu: int, root: Path = Path("/")) -> set[int]:
    """Return the cores of the NUMA node of `gpu`; empty if unknown."""
    import torch

    pci: Any = torch.cuda.get_device_properties(gpu)
    address = f"{pci.pci_domain_id:04x}:{pci.pci_bus_id:02x}:{pci.pci_device_id:02x}.0"
    node = read_text(root / "sys/bus/pci/devices" / address / "numa_node").strip()
    if not node.isdigit():  # -1: unknown, as in many virtual machines
        return set()

    # such as 0-31,64-95
    cpulist = read_text(root / f"sys/devices/system/node/node{node}/cpulist")
    cores: set[int] = set()
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", cpulist):
        cores.update(range(int(first), int(last or first) + 1))
    return cores

"""The GPUs for which runs are planned and faked: what a driver reports, and assumed speeds."""

import re
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import NamedTuple

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
    for model, peak in PEAK_FLOPS:
        if re.search(rf"\b(?:{model})", name):
            return peak
    return None


GPUS_PER_NODE = 8


class Range(NamedTuple):
    """Bounds and estimate of an unknown figure, named by their effect on the time of a step."""

    slow: float
    likely: float
    fast: float


@dataclass(frozen=True)
class Speeds:
    """Assumed (not measured) sustained speeds of a GPU in a training step, per second."""

    dense_flops: Range
    """Products of bfloat16 matrices."""
    grouped_flops: Range
    """Products of experts' matrices."""
    float32_flops: Range
    """Products of float32 matrices, without TF32."""
    attention_flops: Range
    """Attention with a head dim of 64; FLOPs of the causal half."""
    memory_bytes: Range
    node_bytes: Range
    """Exchanged by one GPU with those of its node."""
    network_bytes: Range
    """Exchanged by one GPU with those of other nodes."""


@dataclass(frozen=True)
class Gpu:
    """A GPU model: the properties that torch, Inductor and Triton ask for, and its speeds."""

    name: str
    capability: tuple[int, int]
    memory_bytes: int
    multi_processors: int
    l2_bytes: int
    shared_memory_per_block_bytes: int
    shared_memory_per_processor_bytes: int
    speeds: Speeds

    @property
    def peak_flops(self) -> float:
        """Dense bfloat16 FLOP/s, from the vendor's data sheet."""
        peak = peak_flops(self.name)
        assert peak is not None
        return peak

    @property
    def properties(self) -> SimpleNamespace:
        """The answer of `torch.cuda.get_device_properties`."""
        major, minor = self.capability
        return SimpleNamespace(
            name=self.name,
            major=major,
            minor=minor,
            total_memory=self.memory_bytes,
            multi_processor_count=self.multi_processors,
            L2_cache_size=self.l2_bytes,
            # the same for all of GPUS
            warp_size=32,
            max_threads_per_multi_processor=2048,
            regs_per_multiprocessor=65536,
            shared_memory_per_block=48 << 10,
            shared_memory_per_block_optin=self.shared_memory_per_block_bytes,
            shared_memory_per_multiprocessor=self.shared_memory_per_processor_bytes,
            gcnArchName="",
            uuid="00000000",
            pci_domain_id=0,
            pci_bus_id=0,
            pci_device_id=0,
        )


HOPPER = Speeds(
    dense_flops=Range(560e12, 630e12, 700e12),
    grouped_flops=Range(350e12, 450e12, 560e12),
    float32_flops=Range(38e12, 45e12, 52e12),  # 67 are stated
    attention_flops=Range(270e12, 340e12, 410e12),
    memory_bytes=Range(2.5e12, 2.8e12, 3.05e12),  # 3.35 TB/s are stated
    node_bytes=Range(250e9, 320e9, 370e9),
    network_bytes=Range(25e9, 38e9, 46e9),  # 400 Gbit/s per GPU
)
GPUS = {
    "a100": Gpu(
        name="NVIDIA A100-SXM4-80GB",
        capability=(8, 0),
        memory_bytes=85_097_971_712,
        multi_processors=108,
        l2_bytes=40 << 20,
        shared_memory_per_block_bytes=163 << 10,
        shared_memory_per_processor_bytes=164 << 10,
        speeds=Speeds(
            dense_flops=Range(210e12, 240e12, 265e12),
            grouped_flops=Range(120e12, 170e12, 210e12),
            float32_flops=Range(14e12, 16e12, 18e12),  # 19.5 are stated
            attention_flops=Range(120e12, 150e12, 175e12),
            memory_bytes=Range(1.5e12, 1.7e12, 1.85e12),  # 2.04 TB/s are stated
            node_bytes=Range(160e9, 210e9, 240e9),
            network_bytes=Range(12e9, 19e9, 23e9),  # 200 Gbit/s per GPU
        ),
    ),
    "h100": Gpu(
        name="NVIDIA H100 80GB HBM3",
        capability=(9, 0),
        memory_bytes=85_520_809_984,
        multi_processors=132,
        l2_bytes=50 << 20,
        shared_memory_per_block_bytes=227 << 10,
        shared_memory_per_processor_bytes=228 << 10,
        speeds=HOPPER,
    ),
    "h200": Gpu(
        name="NVIDIA H200",
        capability=(9, 0),
        memory_bytes=150_110_011_392,
        multi_processors=132,
        l2_bytes=50 << 20,
        shared_memory_per_block_bytes=227 << 10,
        shared_memory_per_processor_bytes=228 << 10,
        # as an H100, but for 4.8 TB/s
        speeds=replace(HOPPER, memory_bytes=Range(3.6e12, 4.0e12, 4.4e12)),
    ),
}


def gpu_named(name: str) -> Gpu | None:
    """Return the one of GPUS that a driver calls `name`; None for others."""
    return next((gpu for gpu in GPUS.values() if gpu.name == name), None)

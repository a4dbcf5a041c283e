"""The GPUs that can be faked: what a driver reports about each."""

from dataclasses import dataclass
from types import SimpleNamespace


@dataclass(frozen=True)
class FakeGpu:
    """One GPU model, with the properties that torch, Inductor and Triton ask for."""

    name: str
    capability: tuple[int, int]
    memory_bytes: int
    multi_processors: int
    l2_bytes: int
    shared_memory_per_block_bytes: int
    shared_memory_per_processor_bytes: int

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


GPUS = {
    "a100": FakeGpu(
        name="NVIDIA A100-SXM4-80GB",
        capability=(8, 0),
        memory_bytes=85_097_971_712,
        multi_processors=108,
        l2_bytes=40 << 20,
        shared_memory_per_block_bytes=163 << 10,
        shared_memory_per_processor_bytes=164 << 10,
    ),
    "h100": FakeGpu(
        name="NVIDIA H100 80GB HBM3",
        capability=(9, 0),
        memory_bytes=85_520_809_984,
        multi_processors=132,
        l2_bytes=50 << 20,
        shared_memory_per_block_bytes=227 << 10,
        shared_memory_per_processor_bytes=228 << 10,
    ),
    "h200": FakeGpu(
        name="NVIDIA H200",
        capability=(9, 0),
        memory_bytes=150_110_011_392,
        multi_processors=132,
        l2_bytes=50 << 20,
        shared_memory_per_block_bytes=227 << 10,
        shared_memory_per_processor_bytes=228 << 10,
    ),
}

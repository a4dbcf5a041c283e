"""The machine that a bench runs on: its name, and the two speeds that bound what is measured.

Both are measured in the same run, the matmul peak for a second, since a GPU's burst is over its
power limit; a GPU's clocks, power and throttle reasons are recorded meanwhile.
"""

import functools
import gc
import importlib.util
import platform
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from canon_pretrain.bench.timing import clock_name, now, seconds_of
from canon_pretrain.kernels.hardware import check_cuda, matmul_flops, query_gpu
from canon_pretrain.titan.dry_run import GPUS

COPY_BYTES = {"cpu": 1 << 28, "cuda": 1 << 31}
"""Far more than the caches hold."""
MATMUL_SIZE = {"cpu": 2048, "cuda": 8192}
UNCOMPUTED = ("aten::empty", "aten::new_empty", "aten::_local_scalar_dense")


@dataclass
class Machine:
    """One device and what it can do at best; `alone`: it holds one of the compared at a time."""

    device: torch.device
    alone: bool = False
    _matmul: dict[torch.dtype, float] = field(default_factory=dict)
    _gpu: dict[str, Any] | None = None

    @classmethod
    def here(cls) -> "Machine":
        """Return the GPU, or the CPU if there is none. Raises UserError for a broken GPU."""
        check_cuda()
        has_gpu = torch.cuda.is_available()
        return cls(torch.device("cuda", 0) if has_gpu else torch.device("cpu"), alone=has_gpu)

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @functools.cached_property
    def copy_bandwidth(self) -> float:
        """Bytes read and written per second by a large copy, the best of several."""
        source = torch.ones(COPY_BYTES[self.device.type], dtype=torch.uint8, device=self.device)
        target = torch.zeros_like(source)
        return 2 * source.numel() / min(seconds_of(lambda: target.copy_(source)) for _ in range(8))

    def matmul_flops(self, dtype: torch.dtype) -> float:
        """Return FLOP/s of square products of `dtype`, sustained; a GPU is queried meanwhile."""
        if dtype not in self._matmul:
            size = MATMUL_SIZE[self.device.type]
            with ThreadPoolExecutor(1) as pool:
                query = pool.submit(self._query)
                flops = matmul_flops(self.device, dtype, size=size, seconds=1.0, clock=now)
                self._matmul[dtype], self._gpu = flops, query.result()
        return self._matmul[dtype]

    def _query(self) -> dict[str, Any] | None:
        if not self.on_gpu:
            return None
        return query_gpu(f"GPU-{torch.cuda.get_device_properties(self.device).uuid}")

    def free_memory(self) -> None:
        gc.collect()
        torch.cuda.empty_cache()  # does nothing without a GPU

    @property
    def name(self) -> str:
        if self.on_gpu:
            return torch.cuda.get_device_name(self.device)
        info = Path("/proc/cpuinfo")
        lines = info.read_text().splitlines() if info.exists() else []
        models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
        return f"{next(models, platform.machine())}, {torch.get_num_threads()} threads"

    def facts(self) -> dict[str, Any]:
        triton = version("triton") if importlib.util.find_spec("triton") else None
        versions = {"python": platform.python_version(), "torch": torch.__version__}
        return {
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "device": self.name,
            "threads": torch.get_num_threads(),
            "seconds_are": clock_name(),
            "gpu": self._gpu or self._query(),
            "versions": versions | {"triton": triton, "cuda": torch.version.cuda},
        }

    def peaks(self, dtype: torch.dtype) -> dict[str, float | None]:
        """Return bytes and FLOPs per second, measured, and the data sheet's dense bf16 FLOP/s."""
        name = self.name.lower() if self.on_gpu and dtype != torch.float32 else ""
        stated = next((flops for key, (_, flops) in GPUS.items() if key in name), None)
        measured = {"copy_bandwidth": self.copy_bandwidth, "matmul_flops": self.matmul_flops(dtype)}
        return measured | {"stated_flops": stated}

    def count_operators(self, work: Callable[[], Any]) -> int:
        """Count kernels of `work` on a GPU; on a CPU operators but views and allocations."""
        if not self.on_gpu:
            with _Operators() as operators:
                work()
            return operators.count
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            work()
            torch.cuda.synchronize()
        device = torch.autograd.DeviceType.CUDA
        return sum(event.device_type == device for event in profiler.events() or ())


class _Operators(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aliases = [returned.alias_info for returned in func._schema.returns]
        is_view = aliases and all(alias is not None and not alias.is_write for alias in aliases)
        self.count += not func.name().startswith(UNCOMPUTED) and not is_view
        return func(*args, **(kwargs or {}))

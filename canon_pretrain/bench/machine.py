"""The machine that a bench ran on: its name, and the two speeds that bound what is measured.

Bytes move at most at the copy bandwidth and products take at least their FLOPs at the matmul peak,
which is sustained for a second: a GPU's burst is over its power limit. Both are measured in the
same run, since two machines of one name differ, and one machine from hour to hour; of a GPU the
clocks, power and what throttles it are recorded meanwhile.
"""

import contextlib
import functools
import gc
import platform
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from canon_pretrain.bench.timing import clock_name, now, seconds_of
from canon_pretrain.kernels.hardware import check_cuda, matmul_flops, query_gpu
from canon_pretrain.titan.dry_run import GPUS

COPY_BYTES = {"cpu": 1 << 28, "cuda": 1 << 31}
"""Far more than the caches hold."""
MATMUL_SIZE = {"cpu": 2048, "cuda": 8192}
MATMUL_SECONDS = 1.0
ATTEMPTS = 8


@dataclass
class Machine:
    """One device and what it can do at best; a peak is measured when it is first asked for."""

    device: torch.device
    _matmul: dict[torch.dtype, float] = field(default_factory=dict)
    _gpu: dict[str, Any] | None = None

    @classmethod
    def here(cls) -> "Machine":
        """The GPU where there is one, else the CPU. Raises UserError for a GPU that is broken."""
        check_cuda()
        return cls(torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu"))

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @functools.cached_property
    def copy_bandwidth(self) -> float:
        """Bytes read and written a second by a large copy, the best of several."""
        source = torch.ones(COPY_BYTES[self.device.type], dtype=torch.uint8, device=self.device)
        target = torch.zeros_like(source)
        best = min(seconds_of(lambda: target.copy_(source)) for _ in range(ATTEMPTS))
        return 2 * source.numel() / best

    def matmul_flops(self, dtype: torch.dtype) -> float:
        """FLOP/s of square products of `dtype`, sustained; a GPU is queried meanwhile."""
        if dtype not in self._matmul:
            with ThreadPoolExecutor(1) as pool:
                query = pool.submit(self._query)
                self._matmul[dtype] = matmul_flops(
                    self.device,
                    dtype,
                    size=MATMUL_SIZE[self.device.type],
                    seconds=MATMUL_SECONDS,
                    clock=now,
                )
                self._gpu = query.result()
        return self._matmul[dtype]

    def _query(self) -> dict[str, Any] | None:
        if not self.on_gpu:
            return None
        return query_gpu(f"GPU-{torch.cuda.get_device_properties(self.device).uuid}")

    def free_memory(self) -> None:
        """Give back what no object holds any more."""
        gc.collect()
        if self.on_gpu:
            torch.cuda.empty_cache()

    @property
    def stated_flops(self) -> float | None:
        """Dense bf16 FLOP/s of the vendor's data sheet; None where it is not known."""
        name = self.name.lower() if self.on_gpu else ""
        return next((gpu.peak_flops for key, gpu in GPUS.items() if key in name), None)

    @property
    def name(self) -> str:
        """The GPU's name, or the CPU's and how many threads compute."""
        if self.on_gpu:
            return torch.cuda.get_device_name(self.device)
        return f"{_cpu_model()}, {torch.get_num_threads()} threads"

    def facts(self) -> dict[str, Any]:
        """Who and when, for the JSON."""
        return {
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "device": self.name,
            "threads": torch.get_num_threads(),
            "seconds_are": clock_name(),
            "gpu": self._gpu or self._query(),
            "versions": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "triton": _version("triton"),
                "cuda": torch.version.cuda,
            },
        }

    def peaks(self, dtype: torch.dtype) -> dict[str, float | None]:
        """Both speeds, for the JSON; bytes and FLOPs a second."""
        return {
            "copy_bandwidth": self.copy_bandwidth,
            "matmul_flops": self.matmul_flops(dtype),
            "stated_flops": self.stated_flops if dtype != torch.float32 else None,
        }


def heading(result: dict[str, Any]) -> str:
    """The line of a result that says where, with what and when it was measured."""
    versions = result["versions"]
    with_what = ", ".join(f"{name} {found}" for name, found in versions.items() if found)
    line = f"{result['device']}; {with_what}; {result['time']}; {result['seconds_are']} time"
    return line if result["gpu"] is None else f"{line}\n{_describe_gpu(result['gpu'])}"


def _describe_gpu(gpu: dict[str, Any]) -> str:
    """What `query_gpu` found, in words."""
    figures = {
        name: "?" if value is None else f"{value:,.0f}"
        for name, value in gpu.items()
        if name not in ("driver", "throttled_by")
    }
    return (
        f"driver {gpu['driver']}; {figures['sm_mhz']} of {figures['max_sm_mhz']} MHz, memory "
        f"{figures['memory_mhz']} MHz, {figures['power_w']} of {figures['power_limit_w']} W, "
        f"{figures['celsius']} C; throttled by: {', '.join(gpu['throttled_by']) or 'nothing'}"
    )


def peaks_line(peaks: dict[str, float | None]) -> str:
    """Both speeds in words."""
    copy, matmul, stated = (
        peaks[name] for name in ("copy_bandwidth", "matmul_flops", "stated_flops")
    )
    assert copy is not None and matmul is not None
    line = f"measured: copy {copy / 1e9:,.1f} GB/s, matmul sustained {matmul / 1e12:,.3g} TFLOP/s"
    return line + (f" (stated: {stated / 1e12:,.0f})" if stated else "")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu_model() -> str:
    name = platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        models = (x.partition(":")[2].strip() for x in lines if x.startswith("model name"))
        name = next(models, name)
    return name

"""The machine that a bench ran on: its name, and the two speeds that bound what is measured.

Bytes move at most at the copy bandwidth and products take at least their FLOPs at the matmul peak;
both are measured in the same run, since two machines of one name differ, and one machine from hour
to hour.
"""

import contextlib
import functools
import platform
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from canon_pretrain.bench.timing import clock_name, seconds_of
from canon_pretrain.hardware import check_cuda
from canon_pretrain.titan.dry_run import GPUS

COPY_BYTES = {"cpu": 1 << 28, "cuda": 1 << 31}
"""Far more than the caches hold."""
MATMUL_SIZES = {"cpu": (1024, 2048), "cuda": (4096, 8192)}
ATTEMPTS = 7


@dataclass
class Machine:
    """One device and what it can do at best; a peak is measured when it is first asked for."""

    device: torch.device
    _matmul: dict[torch.dtype, float] = field(default_factory=dict)

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
        best = min(seconds_of(lambda: target.copy_(source)) for _ in range(ATTEMPTS + 1))
        return 2 * source.numel() / best

    def matmul_flops(self, dtype: torch.dtype) -> float:
        """FLOP/s of the fastest square product of `dtype`, the best of several."""
        if dtype not in self._matmul:
            self._matmul[dtype] = max(
                self._square(size, dtype) for size in MATMUL_SIZES[self.device.type]
            )
        return self._matmul[dtype]

    def _square(self, size: int, dtype: torch.dtype) -> float:
        a = torch.randn(size, size, device=self.device).to(dtype)
        b = torch.randn(size, size, device=self.device).to(dtype)
        out = torch.empty_like(a)
        torch.mm(a, b, out=out)
        best = min(seconds_of(lambda: torch.mm(a, b, out=out)) for _ in range(ATTEMPTS))
        return 2 * size**3 / best

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
    return f"{result['device']}; {with_what}; {result['time']}; {result['seconds_are']} time"


def peaks_line(peaks: dict[str, float | None]) -> str:
    """Both speeds in words."""
    copy, matmul, stated = (
        peaks[name] for name in ("copy_bandwidth", "matmul_flops", "stated_flops")
    )
    assert copy is not None and matmul is not None
    line = f"measured: copy {copy / 1e9:,.1f} GB/s, matmul {matmul / 1e12:,.3g} TFLOP/s"
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

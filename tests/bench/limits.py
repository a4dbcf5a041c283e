"""Lower bounds of times: the machine's speeds, the bytes of a block, the FLOPs of a step.

The matmul peak is measured for a second, since a short burst exceeds a GPU's power limit.
"""

import functools
import gc
import importlib.util
import platform
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from canon_pretrain.kernels.graphs import is_view
from canon_pretrain.machine.device import check_cuda
from canon_pretrain.machine.gpus import peak_flops
from canon_pretrain.machine.hardware import cpu_info, query_gpu
from canon_pretrain.machine.timing import matmul_flops
from canon_pretrain.model.args import ModelArgs
from canon_pretrain.model.counts import flops_per_token
from tests.bench.timing import clock_name, now, seconds_of

COPY_BYTES = {"cpu": 1 << 28, "cuda": 1 << 31}  # far more than the caches hold
MATMUL_SIZE = {"cpu": 2048, "cuda": 8192}
UNCOMPUTED = ("aten::empty", "aten::new_empty", "aten::_local_scalar_dense")


@dataclass
class Machine:
    """A device and its peak speeds; `exclusive`: one candidate in memory at a time."""

    device: torch.device
    exclusive: bool = False
    _matmul: dict[torch.dtype, float] = field(default_factory=dict)
    _gpu: dict[str, Any] | None = None

    @classmethod
    def here(cls) -> "Machine":
        """Return the GPU, or the CPU if there is none. Raises UserError for an unusable GPU."""
        check_cuda()
        has_gpu = torch.cuda.is_available()
        return cls(torch.device("cuda", 0) if has_gpu else torch.device("cpu"), exclusive=has_gpu)

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @functools.cached_property
    def copy_bandwidth(self) -> float:
        """Bytes read and written per second by a large copy, the best of eight."""
        source = torch.ones(COPY_BYTES[self.device.type], dtype=torch.uint8, device=self.device)
        target = torch.zeros_like(source)
        return 2 * source.numel() / min(seconds_of(lambda: target.copy_(source)) for _ in range(8))

    def matmul_flops(self, dtype: torch.dtype) -> float:
        """Return sustained FLOP/s of square products; query the GPU meanwhile."""
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
        return f"{cpu_info('model name') or platform.machine()}, {torch.get_num_threads()} threads"

    def facts(self) -> dict[str, Any]:
        versions = {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": version("triton") if importlib.util.find_spec("triton") else None,
            "cuda": torch.version.cuda,
        }
        return {
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "device": self.name,
            "threads": torch.get_num_threads(),
            "seconds_are": clock_name(),
            "gpu": self._gpu or self._query(),
            "versions": versions,
        }

    def peaks(self, dtype: torch.dtype) -> dict[str, Any]:
        """Return bytes and FLOPs per second, measured, and the data sheet's dense bf16 FLOP/s."""
        is_stated = self.on_gpu and dtype != torch.float32
        return {
            "copy_bandwidth": self.copy_bandwidth,
            "matmul_flops": self.matmul_flops(dtype),
            "stated_flops": peak_flops(self.name) if is_stated else None,
        }

    def count_operators(self, work: Callable[[], Any]) -> int:
        """Count the kernels of `work` on a GPU; on a CPU operators except views and allocations."""
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
        self.count += not func.name().startswith(UNCOMPUTED) and not is_view(func)
        return func(*args, **(kwargs or {}))


def block_flops_per_token(args: ModelArgs, seq_len: int) -> int:
    """Return the training FLOPs per token of one block."""
    one_layer = flops_per_token(replace(args, num_layers=1), seq_len)
    two_layers = flops_per_token(replace(args, num_layers=2), seq_len)
    return two_layers - one_layer


def min_block_bytes(args: ModelArgs, itemsize: int) -> dict[str, tuple[int, int]]:
    """Return the least bytes per token and layer outside matmuls and attention, by site.

    (forward, backward), with one kernel per site that reads and writes every operand once. A, C:
    norm, Canon, stream. B: Canon, QK-norm, rotation. D: Canon, activation. residual: the last sum.
    Q, K and V are parts of B. O and F are computed with the sum that follows them: only backward
    reads their inputs and writes their gradients, which are no longer those of the stream.
    """
    dim = args.dim
    width = args.ffn_dim
    gated = args.ffn == "gated"

    # B: the channels of q, k and v that are changed, and those of which backward reads the inputs.
    changed = 0
    read_again = 0
    for site, num_channels in zip("QKV", args.qkv_dims, strict=True):
        is_normed = args.qk_norm != "none" and site != "V"
        if is_normed or {"B", site} & {*args.canon_set}:
            changed += num_channels
            read_again += num_channels
        elif args.rope_dim and site != "V":
            changed += num_channels // args.rope_share

    def if_canon(site: str, number: int) -> int:
        return number if site in args.canon_set else 0

    values = {
        "A": (2 * dim, (3 + 3) * dim),  # backward: three matmuls' gradients, h, stream in, out
        "B": (2 * changed, 2 * changed + read_again),
        "C": (4 * dim, (1 + gated + 3) * dim),
        "D": ((3 if gated else 2) * width, (5 if gated else 3) * width),
        "O": (0, if_canon("O", 2 * dim)),
        "residual": (3 * dim, if_canon("F", 3 * dim)),
    }
    return {site: (a * itemsize, b * itemsize) for site, (a, b) in values.items()}


def min_canon_bytes(args: ModelArgs, itemsize: int) -> int:
    """Return the least bytes per token and layer that Canon adds, forward and backward."""
    with_canon = min_block_bytes(args, itemsize)
    without_canon = min_block_bytes(replace(args, canon_set=""), itemsize)
    return sum(map(sum, with_canon.values())) - sum(map(sum, without_canon.values()))

"""How many operators a piece of work is: on a GPU the kernels that ran, on a CPU what computes.

A GPU waits for its host where kernels are small: their number is then what a step costs. Counted,
not timed, so it is the same on every machine.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

UNCOMPUTED = ("aten::empty", "aten::new_empty", "aten::_local_scalar_dense")


def count_operators(work: Callable[[], Any], *, on_gpu: bool) -> int:
    """Kernels of `work` on a GPU; on a CPU its operators that are neither views nor allocations."""
    if not on_gpu:
        with _Operators() as operators:
            work()
        return operators.count
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize()
    return sum(event.device_type == DeviceType.CUDA for event in profiler.events() or ())


class _Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.name().startswith(UNCOMPUTED) and not _is_view(func)
        return func(*args, **(kwargs or {}))


def _is_view(func: Any) -> bool:
    """Whether all that it returns is what it was given, and unchanged."""
    aliases = [returned.alias_info for returned in func._schema.returns]
    return bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)

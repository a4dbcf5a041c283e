"""Count what a program does on a fake GPU, by phase: memory, waits of the host, kernels, traffic.

A `TorchDispatchMode` above FakeTensorMode sees each operator outside compiled graphs; `graphs.py`
reports those. Memory is the sum of live storages, each rounded up as CUDA's allocator does.
"""

import contextlib
import sysconfig
import time
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from canon_pretrain.fake_gpu.record import BETWEEN, Phase
from canon_pretrain.kernels.traffic import launches_nothing, num_bytes_of, operator_work

ALLOCATION_BYTES = 512  # CUDA's caching allocator rounds each block up to a multiple
HERE = Path(__file__).parent
STANDARD_LIBRARY = sysconfig.get_path("stdlib")

# parts of the memory
OTHER = "other"
TEMPORARY = "temporaries of a compiled graph"
COLLECTIVES = ("c10d", "_c10d_functional")
TO_COPY = torch.ops.aten._to_copy.default
COPY = torch.ops.aten.copy_.default
EQUAL = torch.ops.aten.equal.default
FILL = torch.ops.aten.fill_.Tensor
SCALAR = torch.ops.aten._local_scalar_dense.default
REPEAT = torch.ops.aten.repeat_interleave.Tensor
INDEX = (
    torch.ops.aten.index.Tensor,
    torch.ops.aten.index_put.default,
    torch.ops.aten.index_put_.default,
)
DATA_DEPENDENT = (
    "aten::nonzero",
    "aten::masked_select",
    "aten::_unique2",
    "aten::unique_dim",
    "aten::unique_consecutive",
    "aten::bincount",
    "aten::equal",
)
"""Operators that end only when the host knows a result: its size, or whether it is true."""

Answer = Callable[[Tensor, str], Any]
"""(tensor, "item" | "tolist" | "repeat_interleave") -> a plausible value, or None."""


class Tracker(TorchDispatchMode):
    """Record the current phase; `answers` say what the host reads from fake tensors."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.current = 0
        self.parts: Counter[str] = Counter()
        self.phases: list[Phase] = []
        self.answers: list[Answer] = []
        self._is_paused = False
        # of the live storages, by their address in C++
        self._sizes: dict[int, int] = {}
        self._part_of: dict[int, str] = {}
        self._references: dict[int, Any] = {}  # weak, with a callback when it is freed
        self.begin(BETWEEN)

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True

    # -- phases

    @property
    def phase(self) -> Phase:
        return self.phases[-1]

    def begin(self, name: str) -> None:
        """End the current phase and begin another one."""
        if self.phases:
            self.end()
        self._began = time.monotonic()
        self.phases.append(Phase(name, self.current, dict(self.parts)))

    def end(self) -> None:
        """Write down what the current phase leaves."""
        self.phase.end_bytes = self.current
        self.phase.seconds = time.monotonic() - self._began

    @contextlib.contextmanager
    def within(self, name: str) -> Iterator[None]:
        """Make the block a phase, and go on with one of the previous name."""
        previous = self.phase.name
        self.begin(name)
        try:
            yield
        finally:
            self.begin(previous)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Count nothing within the block."""
        before = self._is_paused
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = before

    def wait(self, kind: str) -> None:
        """Record that the host waits for the device, at the caller's line."""
        self.phase.waits[f"{kind} at {calling_line()}"] += 1

    # -- memory

    def label(self, part: str, tensors: Iterable[Tensor]) -> None:
        """Count the storages of `tensors` (DTensors: of this rank) as `part` from now on."""
        for tensor in tensors:
            if isinstance(tensor, DTensor):
                tensor = tensor.to_local()
            key = tensor.untyped_storage()._cdata
            if key in self._sizes:
                self.parts[self._part_of[key]] -= self._sizes[key]
                self.parts[part] += self._sizes[key]
                self._part_of[key] = part

    def observe(self, tensor: Tensor, part: str) -> None:
        """Count the storage of a CUDA tensor as `part`; OTHER does not change what it was."""
        if tensor.device.type != "cuda":
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._sizes:
            self._references[key] = weakref.ref(storage, lambda _: self._freed(key))
            self._part_of[key] = part
            self._sizes[key] = 0
        elif part != OTHER:  # allocated by `empty`, then passed to an operator that says more
            self.label(part, [tensor])
        self.resized(storage, int(storage.nbytes()))

    def resized(self, storage: torch.UntypedStorage, num_bytes: int) -> None:
        """Follow `storage.resize_`, by which FSDP2 frees what it gathered."""
        key = storage._cdata
        if key in self._sizes:
            size = -(-num_bytes // ALLOCATION_BYTES) * ALLOCATION_BYTES  # rounded up
            self._change(self._part_of[key], size - self._sizes[key])
            self._sizes[key] = size

    def count_temporary(self, num_bytes: int) -> None:
        """Count memory that a compiled graph allocates, and frees before it returns."""
        self._change(TEMPORARY, num_bytes)
        self._change(TEMPORARY, -num_bytes)

    def _freed(self, key: int) -> None:
        self._change(self._part_of.pop(key), -self._sizes.pop(key))
        del self._references[key]

    def _change(self, part: str, num_bytes: int) -> None:
        self.current += num_bytes
        self.parts[part] += num_bytes
        if self.current > self.phase.peak_bytes:
            self.phase.peak_bytes = self.current
            self.phase.peak_parts = dict(self.parts)

    # -- operators

    def answer(self, tensor: Tensor, question: str) -> Any:
        """Return a plausible value of a fake tensor on the host: 0.0, False or 1 by default."""
        for answer in self.answers:
            value = answer(tensor, question)
            if value is not None:
                return value
        if question == "repeat_interleave":
            return tensor.numel()

        default: float | bool | int = 1
        if tensor.dtype.is_floating_point:
            default = 0.0
        elif tensor.dtype == torch.bool:
            default = False
        if question == "item":
            return default
        return filled(tensor.shape, default)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._is_paused:
            return func(*args, **kwargs)
        # the operators on a DTensor's local tensors come here by themselves
        if any(issubclass(tensor_type, DTensor) for tensor_type in types):
            return NotImplemented

        # such as flex attention: a graph of operators, which are not counted one by one
        if isinstance(func, torch._ops.HigherOrderOperator):
            output = func(*args, **kwargs)
            if not is_tracing():
                self._observe_all(output, OTHER)
            return output

        check_devices(func, args)
        # a graph that is being made is not run; operators in it are counted by graphs.py
        if is_tracing():
            return func(*args, **kwargs)

        # Operators whose result depends on values, which fake tensors do not have.
        if func is SCALAR:
            if args[0].device.type == "cuda":
                self.wait("item()")
            return self.answer(args[0], "item")
        self._record_waits(func, args, kwargs)
        if func is EQUAL:
            return True
        if func is REPEAT and kwargs.get("output_size") is None:
            kwargs = kwargs | {"output_size": self.answer(args[0], "repeat_interleave")}

        output = func(*args, **kwargs)
        self._record_work(func, args, kwargs, output)
        self._observe_all(output, _part_made_by(func))
        return output

    def _observe_all(self, values: Any, part: str) -> None:
        for value in tree_leaves(values):
            if isinstance(value, Tensor) and not isinstance(value, DTensor):
                with contextlib.suppress(NotImplementedError):  # such as sparse tensors
                    self.observe(value, part)

    def _record_waits(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record what this operator makes the host wait for, if anything."""
        if func in (TO_COPY, COPY):
            self._record_copy(func, args, kwargs)
            return
        if not _has_gpu_tensor(_tensors_in(args)):
            return

        name = func.name()
        if name.split(".")[0] in DATA_DEPENDENT:
            self.wait(name)
        elif func is REPEAT and kwargs.get("output_size") is None:
            self.wait("repeat_interleave without output_size")
        elif func in INDEX:
            indices = [index for index in args[1] if index is not None]
            if any(index.dtype == torch.bool for index in indices):
                self.wait("index by a mask")
            elif any(index.device.type == "cpu" for index in indices):
                self.wait("index by a CPU tensor")

    def _record_copy(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record a copy between host and device for which the host waits."""
        is_async = kwargs.get("non_blocking")
        if func is COPY:  # target, source[, non_blocking]
            target = args[0].device
            source = args[1].device
            is_async = is_async or (len(args) > 2 and args[2])
        else:
            source = args[0].device
            target = torch.device(kwargs.get("device") or source)
        if {source.type, target.type} == {"cpu", "cuda"} and not is_async:
            self.wait(f"blocking copy {source.type} -> {target.type}")

    def _record_work(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        """Add an operator's kernels, or a collective's bytes, to the current phase."""
        if launches_nothing(func):
            return
        tensors = _tensors_in((args, kwargs, output))
        if not _has_gpu_tensor(tensors):
            return

        phase = self.phase
        name = func.name()
        if func.namespace not in COLLECTIVES:
            phase.eager_operators[name] += 1
            phase.eager.add(operator_work(func, args, kwargs, output))
        elif "wait_tensor" not in name:
            phase.collectives[name] += 1
            phase.collective_bytes[name] += max(map(num_bytes_of, tensors))


def _tensors_in(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _has_gpu_tensor(tensors: Iterable[Tensor]) -> bool:
    return any(tensor.device.type == "cuda" for tensor in tensors)


def filled(shape: Iterable[int], value: Any) -> Any:
    """Return nested lists of `shape` that hold `value`."""
    for length in reversed(list(shape)):
        value = [value] * length
    return value


def is_tracing() -> bool:
    """Return whether dynamo or AOT autograd is making a graph: its tensors are never allocated."""
    return torch._guards.TracingContext.try_get() is not None


def _part_made_by(func: Any) -> str:
    """Return the part of the memory to which an operator's results belong, if not labeled."""
    if func.namespace == "fsdp" or "allgather" in func.name():
        return "gathered by FSDP2"
    if "reduce_scatter" in func.name():
        return "gradients"
    return OTHER


def calling_line(frames: Sequence[traceback.FrameSummary] | None = None) -> str:
    """Return `file:line function` of the innermost of `frames` that is a user's or torchtitan's.

    By default these are the callers'.
    """
    if frames is None:
        frames = traceback.extract_stack()[:-1]
    if not frames:
        return ""

    # without such a frame, the innermost one
    relevant = [frame for frame in frames if _is_relevant(frame.filename)]
    innermost = (relevant or frames)[-1]
    parts = Path(innermost.filename).parts[-3:]
    return f"{'/'.join(parts)}:{innermost.lineno} {innermost.name}"


def _is_relevant(filename: str) -> bool:
    """Return whether a file is torchtitan's or no library's, and not in this folder."""
    if "/site-packages/" in filename:
        return "/site-packages/torchtitan/" in filename
    is_standard = filename.startswith((STANDARD_LIBRARY, "<"))
    return not is_standard and Path(filename).parent != HERE


def check_devices(func: Any, args: tuple[Any, ...]) -> None:
    """Raise RuntimeError if a CUDA operator is passed a scalar tensor on the CPU, unless it may be.

    FakeTensorMode lets 0-dimensional CPU tensors take part in everything, CUDA in pointwise
    operators, copies and fill_ only.
    """
    if torch.Tag.pointwise in func.tags or func in (TO_COPY, COPY, FILL) or launches_nothing(func):
        return
    tensors = _tensors_in(args)
    has_cpu_scalar = any(tensor.device.type == "cpu" and tensor.ndim == 0 for tensor in tensors)
    if has_cpu_scalar and _has_gpu_tensor(tensors):
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, "
            f"cuda:0 and cpu! (when checking arguments of {func})"
        )

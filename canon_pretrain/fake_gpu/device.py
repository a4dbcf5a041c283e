"""Make torch.cuda, dynamo, Inductor and Triton answer as on a node of GPUs; for a whole process.

The hooks must have been loaded. Nothing is undone: a process that fakes GPUs does nothing else.
"""

import contextlib
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

# imported as on a CPU: with a GPU they would import what a CPU-only torch does not have
import torch._functorch.config
import torch._inductor.compile_fx
import torch._inductor.lowering
from torch import Tensor

from canon_pretrain.fake_gpu.tracker import Tracker
from canon_pretrain.machine.gpus import Gpu

CUDA = torch.device("cuda", 0)
RNG_STATE_BYTES = 16
# of torch.cuda.memory_stats, those that are not 0
CURRENT_STATS = ("active_bytes.all.current", "reserved_bytes.all.current")
PEAK_STATS = ("active_bytes.all.peak", "allocated_bytes.all.peak", "reserved_bytes.all.peak")


def install(gpu: Gpu, num_devices: int, tracker: Tracker) -> None:
    """Replace what asks for a GPU; waits and memory come from and go to `tracker`."""
    properties = gpu.properties
    # what torch.cuda, dynamo and Inductor ask about the GPUs
    queries: dict[str, Any] = {
        "is_available": lambda: True,
        "is_bf16_supported": lambda *args, **kwargs: True,
        "device_count": lambda: num_devices,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "get_device_properties": lambda device=None: properties,
    }
    _install_streams(tracker)
    _install_queries(gpu, queries)
    _install_memory(gpu, tracker)
    _install_random_state()
    _install_compilers(gpu, queries)
    _install_host_reads(tracker)
    _install_sharding(tracker)


class NoContext(contextlib.AbstractContextManager["NoContext"]):
    """Stands for `torch.cuda.device(...)` and `torch.cuda.stream(...)`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __exit__(self, *details: Any) -> None:
        pass


def _install_streams(tracker: Tracker) -> None:
    """Streams on which nothing runs: only synchronizing with the host is an event."""

    class Idle(NoContext):
        """What a stream and an event have in common: nothing runs, all of it has ended."""

        def query(self) -> bool:
            return True

        def synchronize(self) -> None:
            tracker.wait(f"{type(self).__name__}.synchronize")

    class Stream(Idle):
        device = CUDA
        device_index = 0
        device_type = 1  # CUDA's number in c10
        priority = 0

        @property
        def stream_id(self) -> int:
            return id(self)

        cuda_stream = stream_id

        def wait_stream(self, stream: Any) -> None:
            pass

        def wait_event(self, event: Any) -> None:
            pass

        def record_event(self, event: Any = None) -> Any:
            return event or Event()

    class Event(Idle):
        def record(self, stream: Any = None) -> "Event":
            return self

        def wait(self, stream: Any = None) -> None:
            pass

        def elapsed_time(self, other: Any) -> float:
            return 1.0

    default = Stream()
    _replace(
        torch.cuda,
        Stream=Stream,
        Event=Event,
        StreamContext=NoContext,
        stream=NoContext,
        device=NoContext,
        current_stream=lambda device=None: default,
        default_stream=lambda device=None: default,
        set_stream=lambda stream: None,
        synchronize=lambda device=None: tracker.wait("torch.cuda.synchronize"),
        is_current_stream_capturing=lambda: False,
    )
    _replace(torch, Stream=Stream, Event=Event)


def _install_queries(gpu: Gpu, queries: dict[str, Any]) -> None:
    _replace(
        torch.cuda,
        **queries,
        is_initialized=lambda: True,
        _is_compiled=lambda: True,
        init=lambda: None,
        _lazy_init=lambda: None,
        _lazy_call=lambda call, **options: None,
        get_device_name=lambda device=None: gpu.name,
        get_device_capability=lambda device=None: gpu.capability,
    )
    _replace(torch.version, cuda="13.0")
    _replace(torch.accelerator, current_accelerator=lambda *args, **kwargs: torch.device("cuda"))


def _install_memory(gpu: Gpu, tracker: Tracker) -> None:
    """Memory statistics are the tracker's, which sees what is allocated, resized and freed.

    Its phases begin with a new peak, so that a reset of the peak does nothing.
    """

    def memory_stats(device: Any = None) -> dict[str, int]:
        stats = dict.fromkeys(CURRENT_STATS, tracker.current)
        stats |= dict.fromkeys(PEAK_STATS, tracker.phase.peak_bytes)
        return defaultdict(int, stats)

    _replace(
        torch.cuda,
        memory_stats=memory_stats,
        memory_allocated=lambda device=None: tracker.current,
        max_memory_allocated=lambda device=None: tracker.phase.peak_bytes,
        reset_peak_memory_stats=lambda device=None: None,
        empty_cache=lambda: None,
        mem_get_info=lambda device=None: (gpu.memory_bytes - tracker.current, gpu.memory_bytes),
    )
    # pinning would ask for a CUDA context
    _replace(torch.Tensor, pin_memory=lambda self, *args: self, is_pinned=lambda self, *args: False)

    resize = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, num_bytes: int) -> Any:
        result = resize(storage, num_bytes)
        tracker.resized(storage, int(num_bytes))
        return result

    _replace(torch.UntypedStorage, resize_=resize_)


def _install_random_state() -> None:
    # else AOT autograd would look for the state of a real CUDA generator
    torch._functorch.config.graphsafe_rng_functionalization = False

    def state(device: Any = None) -> Tensor:
        return torch.zeros(RNG_STATE_BYTES, dtype=torch.uint8)

    _replace(
        torch.cuda,
        manual_seed=lambda seed: None,
        manual_seed_all=lambda seed: None,
        get_rng_state=state,
        set_rng_state=lambda *args, **kwargs: None,
        default_generators=(torch.default_generator,),
    )


def _install_compilers(gpu: Gpu, queries: dict[str, Any]) -> None:
    """Inductor, dynamo and Triton compile for the GPU, as far as source code."""
    import torch._inductor.config as inductor
    import torch._subclasses.fake_tensor as fake_tensor
    import triton
    from torch._dynamo.device_interface import CudaInterface
    from triton.backends.compiler import GPUTarget

    inductor.joint_graph_constant_folding = False  # it would compute with real tensors
    inductor.shape_padding = False  # it would time kernels
    inductor.compile_threads = 1

    # FakeTensorMode would create a CUDA context, and treat real tensors as the device's
    fake_tensor.FakeTensorMode.avoid_device_init = property(lambda self: True)  # type: ignore[assignment]
    _replace(fake_tensor, init_gpu_context=lambda device: None)

    # dynamo and Inductor
    major, minor = gpu.capability
    capability = 10 * major + minor
    answers = queries | {
        "is_triton_capable": lambda device=None: True,
        "raise_if_triton_unavailable": lambda device=None: None,
        "synchronize": lambda device=None: None,
        "get_compute_capability": lambda device=None: capability,
    }
    answers = {name: staticmethod(answer) for name, answer in answers.items()}
    _replace(CudaInterface, **answers, device=NoContext)
    for name in ("get_device_properties", "current_device"):
        setattr(CudaInterface.Worker, name, answers[name])

    # Triton's driver, which would need the GPU's library
    triton.runtime.driver._active = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", capability, gpu.properties.warp_size),
        get_current_device=queries["current_device"],
        get_current_stream=lambda device=None: 0,
        get_active_torch_device=lambda: CUDA,
        get_device_interface=lambda: torch.cuda,
    )


def _install_host_reads(tracker: Tracker) -> None:
    """`tolist` and `numpy` of fake tensors; other reads are operators that `tracker` sees."""
    from torch._subclasses.fake_tensor import FakeTensor

    def reader(name: str, original: Any) -> Any:
        def read(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if not isinstance(tensor, FakeTensor):
                return original(tensor, *args, **kwargs)
            if tensor.device.type == "cuda":
                tracker.wait(f"{name}()")
            values = tracker.answer(tensor, "tolist")
            if name == "numpy":
                return np.array(values)
            return values

        return read

    for name in ("tolist", "numpy"):
        read = reader(name, getattr(torch.Tensor, name))
        setattr(torch.Tensor, name, read)
        if name in vars(FakeTensor):
            setattr(FakeTensor, name, read)


def _install_sharding(tracker: Tracker) -> None:
    """Do not count the tensors of global shape by which DTensor learns what an operator returns."""
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    propagate = ShardingPropagator._propagate_tensor_meta_non_cached

    def uncounted(self: Any, schema: Any) -> Any:
        with tracker.paused():
            return propagate(self, schema)

    _replace(ShardingPropagator, _propagate_tensor_meta_non_cached=uncounted)


def _replace(owner: Any, **attributes: Any) -> None:
    for name, value in attributes.items():
        setattr(owner, name, value)

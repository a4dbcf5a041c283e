"""An H100 that exists only for Inductor's code generator: nothing can run on it.

Inductor asks torch.cuda, its device interface and Triton's driver what the GPU is like before it
writes Triton code. They are patched for the whole process, and it remembers some answers: use a
process that does nothing else.
"""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._dynamo.device_interface import CudaInterface
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.tensor import TensorVariable

from canon_pretrain.model.attend import Attend, Mask

GPU = torch.device("cuda", 0)
ATTENTION = "torch.ops.canon_pretrain_bench.attention"
NAME, CAPABILITY = "NVIDIA H100 80GB HBM3", (9, 0)
PROPERTIES = SimpleNamespace(
    name=NAME,
    major=CAPABILITY[0],
    minor=CAPABILITY[1],
    multi_processor_count=132,
    total_memory=80 * 2**30,
    warp_size=32,
    max_threads_per_multi_processor=2048,
    regs_per_multiprocessor=65536,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448,
    shared_memory_per_multiprocessor=233472,
    L2_cache_size=50 * 2**20,
    gcnArchName="",
)


class _Driver:
    """What Triton asks of a GPU's driver; no kernel is compiled or launched."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 10 * CAPABILITY[0] + CAPABILITY[1], PROPERTIES.warp_size)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return GPU


class _Device(contextlib.AbstractContextManager["_Device"]):
    def __init__(self, *_: object) -> None: ...

    def __exit__(self, *_: object) -> None: ...


@contextlib.contextmanager
def fake_gpu() -> Iterator[None]:
    """Let Inductor believe in the GPU, and code that is traced that its tensors are there.

    Tensors are traced on the CPU, since a build of torch without CUDA has no fake ones on a GPU;
    what a traced function reads of their device is the GPU's.
    """
    import triton

    answers: dict[str, Any] = {
        "get_device_properties": lambda device=None: PROPERTIES,
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "set_device": lambda device: None,
        "synchronize": lambda device=None: None,
        "device": _Device,
    }
    for_torch = answers | {"get_device_capability": lambda device=None: CAPABILITY}
    there = {"is_available": lambda: True, "is_bf16_supported": lambda *_, **__: True}
    for_dynamo = {
        name: answer if name == "device" else staticmethod(answer)
        for name, answer in (answers | there).items()
    }

    def device_of(self: Any, tx: Any) -> Any:
        return VariableTracker.build(tx, GPU)

    def is_cuda(self: Any, tx: Any) -> Any:
        return VariableTracker.build(tx, True)

    # a pass over slices of fake tensors copies them to learn a shape: no such copy without CUDA
    scatter = "torch._inductor.fx_passes.reinplace._inplace_generalized_scatter"
    traced = {"method_attr_device": device_of, "method_attr_is_cuda": is_cuda}
    patch: Any = mock.patch.multiple
    with (
        patch(torch.cuda, **for_torch),
        patch(CudaInterface, **for_dynamo),
        patch(TensorVariable, **traced),
        mock.patch(scatter, lambda out, source, views: out),
        mock.patch.object(triton.runtime.driver, "_active", _Driver()),
    ):
        yield


def lower(gm: torch.fx.GraphModule, is_backward: bool) -> tuple[str, list[tuple[str, int]]]:
    """Move a graph of CPU fakes to the GPU; the code that launches its kernels, and their bytes.

    The steps of torch._inductor.compile_fx between AOT autograd and the compilation of kernels.
    """
    from torch._inductor.compile_fx import (
        _recursive_post_grad_passes,
        _recursive_record_original_output_strides,
    )
    from torch._inductor.debug import DebugContext
    from torch._inductor.fx_passes.post_grad import view_to_reshape
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp

    mode = next(node.meta["val"].fake_mode for node in gm.graph.nodes if node.op == "placeholder")
    inputs = []
    for node in gm.graph.nodes:
        if "device" in node.kwargs:
            node.update_kwarg("device", GPU)
        if node.op == "placeholder":
            value = node.meta["val"]
            with mode:
                inputs.append(
                    torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=GPU)
                )
    view_to_reshape(gm)
    with torch.no_grad():
        FakeTensorProp(gm, mode).propagate_dont_convert_inputs(*inputs)
    _recursive_record_original_output_strides(gm)
    with V.set_fake_mode(mode), DebugContext(), V.set_real_inputs(inputs):
        _recursive_post_grad_passes(gm, is_inference=False)
        graph = GraphLowering(
            gm, example_inputs=inputs, shape_env=mode.shape_env, is_backward=is_backward
        )
        with V.set_graph_handler(graph), V.set_extern_kernel_nodes([]):
            graph.run(*inputs)
            code, _ = graph.codegen()
            kernels = [
                (
                    str(getattr(node.node, "python_kernel_name", None) or ""),
                    node.get_read_write_buffers_sizes(),
                )
                for node in graph.scheduler.nodes
            ]
    return code.value, kernels


@torch.library.custom_op("canon_pretrain_bench::attention", mutates_args=())
def _attention(q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor) -> Tensor:
    return torch.empty_like(q_BTHK)


@torch.library.custom_op("canon_pretrain_bench::attention_backward", mutates_args=())
def _attention_backward(
    dy_BTHK: Tensor, q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, y_BTHK: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q_BTHK), torch.empty_like(k_BTGK), torch.empty_like(v_BTGK)


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs, output)


def _attention_gradients(ctx: Any, dy_BTHK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    found: tuple[Tensor, Tensor, Tensor] = _attention_backward(
        dy_BTHK.contiguous(), *ctx.saved_tensors
    )
    return found


_attention.register_fake(lambda q, k, v: q.new_empty(q.shape))
_attention_backward.register_fake(
    lambda dy, q, k, v, y: (q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape))
)
_attention.register_autograd(_attention_gradients, setup_context=_keep)


class OpaqueAttend(Attend):
    """Any of the ways of attention: what stands before and after it is the same for all."""

    def forward(self, q_BTHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, mask: Mask) -> Tensor:
        y_BTHK: Tensor = _attention(q_BTHK.contiguous(), k_BSGK.contiguous(), v_BSGK.contiguous())
        return y_BTHK

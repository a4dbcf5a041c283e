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
NAME = "NVIDIA H100 80GB HBM3"
PROPERTIES = SimpleNamespace(
    name=NAME,
    major=9,
    minor=0,
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


@contextlib.contextmanager
def fake_gpu() -> Iterator[None]:
    """Let Inductor believe in the GPU, and code that is traced that its tensors are there.

    Tensors are traced on the CPU, since a build of torch without CUDA has no fake ones on a GPU;
    what a traced function reads of their device is the GPU's.
    """
    import triton
    from triton.backends.compiler import GPUTarget

    driver = SimpleNamespace(  # what Triton asks; no kernel is compiled or launched
        get_current_target=lambda: GPUTarget("cuda", 90, PROPERTIES.warp_size),
        get_current_device=lambda: 0,
        get_current_stream=lambda device=None: 0,
        get_active_torch_device=lambda: GPU,
    )
    answers: dict[str, Any] = {
        "get_device_properties": lambda device=None: PROPERTIES,
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "set_device": lambda device: None,
        "synchronize": lambda device=None: None,
    }
    there = {"is_available": lambda: True, "is_bf16_supported": lambda *_, **__: True}
    for_dynamo = {name: staticmethod(answer) for name, answer in (answers | there).items()}
    device: Any = contextlib.nullcontext

    def traced(answer: Any) -> Any:
        return lambda variable, tx: VariableTracker.build(tx, answer)

    # a pass over slices of fake tensors copies them to learn a shape: no such copy without CUDA
    scatter = "torch._inductor.fx_passes.reinplace._inplace_generalized_scatter"
    patch: Any = mock.patch.multiple
    with (
        patch(torch.cuda, device=device, get_device_capability=lambda *_: (9, 0), **answers),
        patch(CudaInterface, device=device, **for_dynamo),
        patch(TensorVariable, method_attr_device=traced(GPU), method_attr_is_cuda=traced(True)),
        mock.patch(scatter, lambda out, source, views: out),
        mock.patch.object(triton.runtime.driver, "_active", driver),
    ):
        yield


def lower(gm: torch.fx.GraphModule, is_backward: bool) -> tuple[str, list[tuple[str, int]]]:
    """Move a graph of CPU fakes to the GPU; the code that launches its kernels, and their bytes.

    The steps of torch._inductor.compile_fx between AOT autograd and the compilation of kernels.
    """
    from torch._inductor import compile_fx
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
            like = node.meta["val"]
            stride, dtype = like.stride(), like.dtype
            with mode:
                inputs.append(torch.empty_strided(like.shape, stride, dtype=dtype, device=GPU))
    view_to_reshape(gm)
    with torch.no_grad():
        FakeTensorProp(gm, mode).propagate_dont_convert_inputs(*inputs)
    compile_fx._recursive_record_original_output_strides(gm)
    with V.set_fake_mode(mode), DebugContext(), V.set_real_inputs(inputs):
        compile_fx._recursive_post_grad_passes(gm, is_inference=False)
        graph = GraphLowering(
            gm, example_inputs=inputs, shape_env=mode.shape_env, is_backward=is_backward
        )
        with V.set_graph_handler(graph), V.set_extern_kernel_nodes([]):
            graph.run(*inputs)
            code, _ = graph.codegen()
            nodes = graph.scheduler.nodes
            names = [str(getattr(node.node, "python_kernel_name", None) or "") for node in nodes]
            sizes = [node.get_read_write_buffers_sizes() for node in nodes]
    return code.value, list(zip(names, sizes, strict=True))


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

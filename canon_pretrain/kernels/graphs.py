"""Graphs of torch.compile: views and results, and the code that Inductor generates, never run."""

import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

TRITON_LAUNCH = re.compile(r"^\s+triton_\w+\.run\(", re.MULTILINE)


def is_view(overload: torch._ops.OpOverload) -> bool:
    """Return whether an operator only returns views of its arguments."""
    aliases = [returned.alias_info for returned in overload._schema.returns]
    if not aliases:
        return False
    return all(alias is not None and not alias.is_write for alias in aliases)


def base_of(node: fx.Node) -> fx.Node:
    """Return the node that allocates the storage of `node`, which may be a view."""
    while node.op == "call_function" and node.args:
        source = node.args[0]
        if not isinstance(source, fx.Node):
            break
        # an element of the list of views that an operator like split returns
        is_element = node.target is operator.getitem and _is_view_node(source)
        if not is_element and not _is_view_node(node):
            break
        node = source
    return node


def _is_view_node(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and is_view(node.target)


def results_of(graph: fx.GraphModule) -> Sequence[Any]:
    """Return what a graph returns: nodes, and values such as None."""
    (results,) = graph.graph.output_node().args
    assert isinstance(results, (list, tuple))
    return results


@dataclass(frozen=True)
class Kernel:
    """A node of Inductor's schedule: what it calls ("" for generated code), and its traffic."""

    name: str
    num_bytes: int


@dataclass(frozen=True)
class Generated:
    """The code of a graph, the nodes of its schedule, and the scheduler's view of it."""

    code: str
    kernels: list[Kernel]
    lowering: Any

    @property
    def num_launches(self) -> int:
        """Launches of generated Triton kernels, without products and operators."""
        return len(TRITON_LAUNCH.findall(self.code))


def generate_code(
    graph: fx.GraphModule,
    inputs: Sequence[Any],
    mode: Any,
    *,
    is_backward: bool,
    is_inference: bool = False,
) -> Generated:
    """Generate the code of `graph`: compile_fx's steps between AOT autograd and Triton.

    `inputs`: values of its placeholders, tensors of the FakeTensorMode `mode`. Changes `graph`.
    """
    from torch._inductor import compile_fx
    from torch._inductor.debug import DebugContext
    from torch._inductor.fx_passes.post_grad import view_to_reshape
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp

    # Shapes and strides of all values.
    view_to_reshape(graph)
    with torch.no_grad():
        FakeTensorProp(graph, mode).propagate_dont_convert_inputs(*inputs)
    compile_fx._recursive_record_original_output_strides(graph)

    with V.set_fake_mode(mode), DebugContext(), V.set_real_inputs(inputs):
        # Passes on the graph, then schedule and code, as `compile_fx._InProcessFxCompile` does.
        compile_fx._recursive_post_grad_passes(graph, is_inference=is_inference)
        lowering = GraphLowering(
            graph,
            example_inputs=inputs,
            shape_env=mode.shape_env,
            is_backward=is_backward,
            is_inference=is_inference,
        )
        with V.set_graph_handler(lowering), V.set_extern_kernel_nodes([]):
            lowering.run(*inputs)
            code, _ = lowering.codegen()
            kernels = []
            for node in lowering.scheduler.nodes:
                name = getattr(node.node, "python_kernel_name", None)
                kernels.append(Kernel(str(name or ""), node.get_read_write_buffers_sizes()))
    return Generated(code.value, kernels, lowering)


def temporary_bytes(generated: Generated) -> int:
    """Return Inductor's estimate of a graph's peak, without the inputs that it may free."""
    from torch._inductor import memory
    from torch._inductor.virtualized import V
    from torch.utils._ordered_set import OrderedSet

    lowering = generated.lowering
    nodes = lowering.scheduler.nodes
    with V.set_graph_handler(lowering):
        freeable = memory.get_freeable_input_buf(nodes, OrderedSet(lowering.graph_inputs))
        outputs = OrderedSet(lowering.get_output_names())
        peak, _ = memory.estimate_peak_memory(nodes, freeable, outputs)
    freed = sum(buffer.mpi_buffer.size_free for buffer in freeable.values())
    return max(0, peak - freed)

"""Compile graphs for a fake GPU as far as Inductor's Triton source, and "run" them by allocating.

`install` replaces Inductor's inner compiler. Each graph is lowered once for equal blocks; its
kernels, bytes and peak memory are added to the tracker's phase every time that it runs.
"""

import copy
import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor

from canon_pretrain.fake_gpu.tracker import Tracker
from canon_pretrain.kernels.graphs import base_of, generate_code, results_of, temporary_bytes
from canon_pretrain.kernels.traffic import count_products, is_recurrence, recurrence_work
from canon_pretrain.kernels.work import Work

PRODUCTS = ("extern_kernels.", "torch.ops.aten._scaled_dot")
"""What matrix products and attention are called in generated code."""


@dataclass(frozen=True)
class Lowered:
    """What a graph costs each time that it runs."""

    work: Work
    temporary_bytes: int
    """Peak of the memory that the graph allocates beyond what it is passed."""


@dataclass(frozen=True)
class Output:
    """How to make one tensor that a graph returns without running it."""

    value: Tensor
    """A fake tensor with the shape of the result."""
    base: fx.Node
    """The node whose storage the result shares: what keeps memory is the storage."""
    input_index: int | None
    """Which input that is, if it is one."""


class GraphCompiler:
    """Inductor's inner compiler for fake GPUs."""

    def __init__(self, tracker: Tracker) -> None:
        self.tracker = tracker
        self._lowered: dict[str, Lowered] = {}

    def install(self) -> None:
        """Replace Inductor's inner compiler, and record graph breaks and recompiles."""
        from torch._inductor import compile_fx

        original = compile_fx.compile_fx

        def compile_graph(
            graph: Any, inputs: Any, inner_compile: Any = None, *args: Any, **options: Any
        ) -> Any:
            # compile_fx calls itself with an inner compiler that is wrapped in the options: taking
            # ours there instead would lose them in the backward graph
            if inner_compile in (None, compile_fx.compile_fx_inner):
                inner_compile = self.compile
            return original(graph, inputs, inner_compile, *args, **options)

        compile_fx.compile_fx = compile_graph  # type: ignore[assignment]
        self._watch_dynamo()

    def _watch_dynamo(self) -> None:
        """Add dynamo's messages about breaks and recompiles to the phase in which they appear."""
        from torch._logging._internal import log_registry

        torch._logging.set_logs(recompiles=True, graph_breaks=True)
        tracker = self.tracker

        class Handler(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                message = record.getMessage()
                if record.name.endswith("__recompiles"):
                    tracker.phase.recompiles.append(message)
                elif record.name.endswith("__graph_breaks"):
                    tracker.phase.graph_breaks.append(message)

        for name in log_registry.artifact_log_qnames:
            if name.endswith(("__recompiles", "__graph_breaks")):
                logger = logging.getLogger(name)
                logger.handlers = [Handler()]
                logger.propagate = False

    def compile(
        self,
        graph: fx.GraphModule,
        inputs: Sequence[Any],
        *,
        is_backward: bool = False,
        is_inference: bool = False,
        **options: Any,
    ) -> Callable[[list[Any]], list[Any]]:
        """Lower `graph` and return a function that allocates its results."""
        key = _digest(graph)
        if key not in self._lowered:
            with self.tracker.paused():  # passes run the graph on fake tensors to learn shapes
                self._lowered[key] = lower(copy.deepcopy(graph), is_backward, is_inference)

        direction = "backward" if is_backward else "forward"
        self.tracker.phase.graphs.append(f"{direction} {key[:8]}")
        return _runner(
            self._lowered[key],
            _describe_outputs(graph),
            part="gradients" if is_backward else "activations",
            tracker=self.tracker,
        )


def _digest(graph: fx.GraphModule) -> str:
    """Return a key that is equal for graphs with equal code, shapes and dtypes."""
    values = [node.meta.get("val") for node in _placeholders(graph)]
    shapes = [(value.shape, value.dtype) for value in values if isinstance(value, Tensor)]
    return hashlib.sha256(f"{graph.code}{shapes}".encode()).hexdigest()


def lower(graph: fx.GraphModule, is_backward: bool, is_inference: bool) -> Lowered:
    """Generate the code of `graph`, and return what it costs."""
    inputs = [node.meta["val"] for node in _placeholders(graph)]
    # a graph without inputs, such as that of a block mask, has fake results only
    values = [node.meta.get("val") for node in graph.graph.nodes]
    mode = next(value.fake_mode for value in values if isinstance(value, FakeTensor))

    # Count before the code is generated, which changes the graph.
    work = Work(flops=count_products(graph))
    work.add(recurrence_work(graph))

    # Launches and bytes of the generated code; the recurrences are counted above.
    generated = generate_code(
        graph, inputs, mode, is_backward=is_backward, is_inference=is_inference
    )
    kernels = [kernel for kernel in generated.kernels if not is_recurrence(kernel.name)]
    work.launches += generated.num_launches + sum(bool(kernel.name) for kernel in kernels)
    for kernel in kernels:
        if kernel.name.startswith(PRODUCTS):
            work.product_bytes += kernel.num_bytes
        else:
            work.bytes_moved += kernel.num_bytes
    return Lowered(work, temporary_bytes(generated))


def _placeholders(graph: fx.GraphModule) -> list[fx.Node]:
    return [node for node in graph.graph.nodes if node.op == "placeholder"]


def _describe_outputs(graph: fx.GraphModule) -> list[Any]:
    """Return an `Output` for each tensor that a graph returns; other values as they are."""
    input_indices = {node: index for index, node in enumerate(_placeholders(graph))}
    outputs: list[Any] = []
    for node in results_of(graph):
        value = node.meta["val"] if isinstance(node, fx.Node) else node
        if not isinstance(value, Tensor):
            outputs.append(value)
            continue
        # a result may be a view; where its base has no value, it stands for itself
        base = base_of(node)
        if not isinstance(base.meta.get("val"), Tensor):
            base = node
        outputs.append(Output(value, base, input_indices.get(base)))
    return outputs


def _runner(
    lowered: Lowered, outputs: Sequence[Any], part: str, tracker: Tracker
) -> Callable[[list[Any]], list[Any]]:
    """Return a function with the signature of a compiled graph that allocates what it returns."""

    def run(arguments: list[Any]) -> list[Any]:
        inputs = list(arguments)
        arguments.clear()  # from here on only this function keeps them
        tracker.phase.compiled.add(lowered.work)
        tracker.count_temporary(lowered.temporary_bytes)

        # a storage that several results share is allocated once
        storages: dict[fx.Node, Tensor] = {}

        results = []
        for output in outputs:
            if not isinstance(output, Output):
                results.append(output)
                continue
            if output.input_index is not None:
                storage = inputs[output.input_index]
            elif output.base in storages:
                storage = storages[output.base]
            else:
                storage = storages[output.base] = _allocate(output.base.meta["val"])
                tracker.observe(storage, part)
            results.append(_view_of(storage, output))
        return results

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _allocate(like: Tensor) -> Tensor:
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)


def _view_of(base: Tensor, output: Output) -> Tensor:
    """Return `output` as a view of the storage of `base`, unless it has another dtype."""
    value = output.value
    if value.shape == base.shape and value.stride() == base.stride():
        return base
    if value.dtype != base.dtype:
        return _allocate(value)
    # the base may begin elsewhere in its storage than it did when the graph was made
    made_at = output.base.meta["val"].storage_offset()
    offset = value.storage_offset() - made_at + base.storage_offset()
    return torch.as_strided(base, value.shape, value.stride(), offset)

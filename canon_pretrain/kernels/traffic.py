"""Cost of a compiled graph: products, bytes and launches, counted or estimated without a GPU."""

import operator
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from canon_pretrain.kernels.graphs import base_of, is_view, results_of
from canon_pretrain.kernels.work import Work

GROUPED = torch.ops.aten._grouped_mm
CONSTANTS = frozenset(
    {
        "arange",
        "empty",
        "full",
        "full_like",
        "iota",
        "lift_fresh_copy",
        "new_empty",
        "new_full",
        "new_zeros",
        "ones",
        "ones_like",
        "scalar_tensor",
        "zeros",
        "zeros_like",
    }
)
"""Operators whose results a kernel makes itself."""
STORED = frozenset(
    {"amax", "amin", "cat", "cumsum", "max", "mean", "min", "prod", "sum", "var_mean"}
)
"""Operators whose results are written to memory before others read them."""
MAX_INLINED_READS = 4
"""A value that several others use is stored, not computed again, if it reads more tensors."""
NO_KERNEL = ("aten::empty", "aten::new_empty", "aten::_unsafe_view", "prim::", "profiler::")
OVERWRITING = ("aten::copy_", "aten::_foreach_copy_", "aten::zero_", "aten::fill_")
GATHER_COPY_IN = "fsdp::all_gather_copy_in"
RECURRENCES = ("canon_pretrain_kernels_delta_", "canon_pretrain_kernels_gla_")
"""Operators that are written in torch: parts of their names."""
SMALL_BYTES = 4096
"""Kernels that share a tensor of this size only are not fused for it."""


# -- products


def count_flops(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
) -> tuple[str, int]:
    """Return the kind of product that an operator is, and its FLOPs; ("", 0) for others."""
    name = func.name()
    if func._overloadpacket is GROUPED:
        # rows of experts [S, K] times [E, K, N]; for a weight's gradient [K, S] times [S, N]
        left, right = args[:2]
        return "grouped", 2 * left.numel() * right.shape[-1]
    if "grouped_linear" in name:  # model/moe.py: the loop over experts, without bfloat16
        x_SD, weight_EFD = args[-3:-1]
        num_products = 2 if "backward" in name else 1
        flops = 2 * num_products * x_SD.numel() * weight_EFD.shape[1]
        return _dtype_name(x_SD), flops

    # Other products have a formula in torch's FLOP counter.
    count = flop_registry.get(func._overloadpacket)
    if count is None:
        return "", 0
    if name.endswith(".dtype"):  # of mm and bmm: the dtype of the result is no shape
        args = args[:2]
    flops = int(count(*args, **kwargs, out_val=output))
    if "attention" in name:
        return "attention", flops
    return _dtype_name(_tensors(args)[0]), flops


def _tensors(values: Any) -> list[Tensor]:
    """Return a tensor, or those in a list or tuple; none for other values."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def count_products(graph: fx.GraphModule) -> Counter[str]:
    """Return the FLOPs of the products in a graph by kind."""
    flops: Counter[str] = Counter()
    for node in graph.graph.nodes:
        if not _is_operator(node):
            continue
        args, kwargs = _argument_values(node)
        output = node.meta.get("val")
        kind, count = count_flops(node.target, args, kwargs, output)
        if kind:
            flops[kind] += count
    return flops


def _argument_values(node: fx.Node) -> Any:
    """Return the (args, kwargs) of a node, with fake tensors in place of nodes."""
    return fx.map_arg((node.args, node.kwargs), lambda argument: argument.meta["val"])


def _is_operator(node: fx.Node) -> bool:
    return node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload)


# -- operators that run uncompiled


def launches_nothing(func: Any) -> bool:
    """Return whether an operator only allocates or returns views."""
    name: str = func.name()
    return name.startswith(NO_KERNEL) or is_view(func)


def operator_work(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Work:
    """Return the work of an operator, as one kernel."""
    num_bytes = _moved_bytes(func, args, kwargs, output)
    kind, flops = count_flops(func, args, kwargs, output)
    if kind:
        return Work(launches=1, product_bytes=num_bytes, flops=Counter({kind: flops}))
    return Work(launches=1, bytes_moved=num_bytes)


def num_bytes_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.itemsize


def _moved_bytes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> int:
    """Return the bytes that an operator reads and writes."""
    name = func.name()
    if name == GATHER_COPY_IN:  # it returns the buffers that the ranks fill
        return 2 * _total_bytes(args[0])

    # The arguments: those that are written are read too, unless the operator overwrites them.
    overwrites = name.split(".")[0] in OVERWRITING
    total = 0
    for position, argument in enumerate(func._schema.arguments):
        if position < len(args):
            value = args[position]
        else:
            value = kwargs.get(argument.name)
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        is_read = not (is_written and (overwrites or argument.kwarg_only))
        total += (is_read + is_written) * _total_bytes(value)

    # The results, except arguments that are returned.
    results = output if isinstance(output, (tuple, list)) else (output,)
    for returned, value in zip(func._schema.returns, results, strict=False):
        if returned.alias_info is None:
            total += _total_bytes(value)
    return total


def _total_bytes(values: Any) -> int:
    return sum(map(num_bytes_of, _tensors(values)))


class _EagerWork(TorchDispatchMode):
    """Adds up the work of the operators that run under it."""

    def __init__(self) -> None:
        super().__init__()
        self.work = Work()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        if not launches_nothing(func):
            self.work.add(operator_work(func, args, kwargs, output))
        return output


def recurrence_work(graph: fx.GraphModule) -> Work:
    """Return the work inside our recurrences' operators, which loop over chunks uncompiled.

    They run on the fake tensors of `graph`.
    """
    eager_work = _EagerWork()
    for node in graph.graph.nodes:
        if not _is_recurrence(node):
            continue
        args, kwargs = _argument_values(node)
        body = OPDEFS[node.target._schema.name]._init_fn
        first_input = node.all_input_nodes[0].meta["val"]
        with first_input.fake_mode, eager_work:
            body(*args, **kwargs)
    return eager_work.work


def is_recurrence(operator_name: str) -> bool:
    """Return whether this is one of our operators that are written in torch."""
    return any(name in operator_name for name in RECURRENCES)


def _is_recurrence(node: fx.Node) -> bool:
    return _is_operator(node) and is_recurrence(str(node.target))


# -- an estimate of the generated code


class Read(NamedTuple):
    """A value in memory and the permutations through which a kernel reads it."""

    source: fx.Node
    order: tuple[tuple[int, ...], ...]


@dataclass(eq=False)
class _Kernel:
    """Stored values that one kernel computes."""

    depth: int
    """Calls in a row that must come before it."""
    nodes: set[fx.Node]
    reads: dict[Read, float]
    """Bytes by what it reads."""

    def joins(self, other: "_Kernel") -> bool:
        """Return whether Inductor would fuse the kernel `other`, which is later, with this one."""
        if other.depth != self.depth:
            return False
        for read, num_bytes in other.reads.items():
            reads_result = read.source in self.nodes and not read.order
            reads_same = read in self.reads and num_bytes > SMALL_BYTES
            if reads_result or reads_same:
                return True
        return False

    def merge(self, other: "_Kernel") -> None:
        self.nodes |= other.nodes
        for read, num_bytes in other.reads.items():
            _count_once(self.reads, read, num_bytes)


def _count_once(reads: dict[Any, float], source: Any, num_bytes: float) -> None:
    """Add a read of `source`; of several reads, the largest counts."""
    reads[source] = max(num_bytes, reads.get(source, 0))


def estimate_work(graph: fx.GraphModule, constant_shapes: Collection[torch.Size]) -> Work:
    """Estimate what the code that Inductor would generate for `graph` launches and moves.

    Attention is left out. Pointwise operators are inlined into what reads them. A value is stored
    if a product, an opaque operator or the caller needs it, or if STORED names its operator. Stored
    values share a kernel if they read one tensor in the same order, or one reads the other as it
    is, and if as many calls come before them. Values with `constant_shapes` (those of parameters,
    and of their gradients) move no bytes: few next to those of the tokens.
    """
    schedule = _Schedule(graph, constant_shapes)
    kernels = schedule.kernels()

    # A kernel reads each tensor once, in whatever orders.
    read_from_memory = schedule.needed.copy()
    num_bytes = 0.0
    for kernel in kernels:
        by_source: dict[fx.Node, float] = {}
        for read, size in kernel.reads.items():
            if read.source not in kernel.nodes:
                _count_once(by_source, read.source, size)
        num_bytes += sum(by_source.values())
        read_from_memory |= by_source.keys()

    # What is read is written first if generated code computes it: not inputs and results of calls.
    written = read_from_memory & schedule.reads.keys()
    num_bytes += sum(map(schedule.bytes_of, written))

    work = Work(launches=len(kernels), bytes_moved=num_bytes, flops=count_products(graph))

    # Calls: products, whose bytes count apart since compute hides them, and operators that are one
    # kernel each. Attention and recurrences have closed forms.
    for call in schedule.calls:
        if _is_product(call):
            work.launches += 1
            work.product_bytes += schedule.bytes_of_call(call)
        elif not (_is_opaque(call) or _is_recurrence(call)):
            work.launches += 1
            work.bytes_moved += schedule.bytes_of_call(call)
    work.add(recurrence_work(graph))
    return work


class _Schedule:
    """Which values of a graph are stored, what computing each one reads, and when."""

    def __init__(self, graph: fx.GraphModule, constant_shapes: Collection[torch.Size]) -> None:
        nodes = list(graph.graph.nodes)
        self.constant_shapes = {tuple(shape) for shape in constant_shapes}
        self.calls = [node for node in nodes if _is_call(node)]
        """Products and opaque operators: kernels that are not generated."""
        self.needed: set[fx.Node] = set()
        """What calls and the caller read."""
        self.reads: dict[fx.Node, dict[Read, float]] = {}
        """Of each pointwise operator and reduction: bytes by what it reads from memory."""
        self.stored: list[fx.Node] = []
        self._ready: dict[fx.Node, int] = {}
        """After how many calls in a row a stored value exists."""

        for node in self.calls:
            self.needed.update(map(base_of, node.all_input_nodes))
        for result in results_of(graph):
            if isinstance(result, fx.Node):
                self.needed.add(base_of(result))

        for node in nodes:
            self._visit(node)

    def _visit(self, node: fx.Node) -> None:
        """Add a node whose inputs have been visited."""
        if _is_call(node):
            sources = map(base_of, node.all_input_nodes)
            self._ready[node] = 1 + self._depth(sources)
        elif node.target is operator.getitem:
            self._ready[node] = self._depth(node.all_input_nodes[:1])
        elif _is_generated(node):
            reads = self._reads_of(node)
            self.reads[node] = reads
            num_large = sum(num_bytes > SMALL_BYTES for num_bytes in reads.values())
            is_reused = len(node.users) > 1 and num_large > MAX_INLINED_READS
            is_needed = node in self.needed or _name(node) in STORED
            if is_needed or is_reused:
                self.stored.append(node)
                self._ready[node] = self._depth(read.source for read in reads)

    def _depth(self, sources: Iterable[fx.Node]) -> int:
        """Return how many calls in a row come before all `sources` exist."""
        return max((self._ready.get(source, 0) for source in sources), default=0)

    def _reads_of(self, node: fx.Node) -> dict[Read, float]:
        """Return what computing a node reads from memory, through the nodes inlined into it."""
        reads: dict[Read, float] = {}
        for used in node.all_input_nodes:
            source = base_of(used)
            order = _order_of(used)
            is_inlined = source in self.reads and source not in self._ready
            if is_inlined:
                for read, num_bytes in self.reads[source].items():
                    inlined = Read(read.source, order + read.order)
                    _count_once(reads, inlined, num_bytes)
            elif not _is_constant(source):
                num_bytes = min(self.bytes_of(used), self.bytes_of(source))
                _count_once(reads, Read(source, order), num_bytes)
        return reads

    def kernels(self) -> list[_Kernel]:
        """Return the stored values in groups that share a kernel."""
        kernels: list[_Kernel] = []
        for node in self.stored:
            new = _Kernel(
                depth=self._ready[node],
                nodes={node},
                reads=dict(self.reads[node]),
            )
            for kernel in [kernel for kernel in kernels if kernel.joins(new)]:
                new.merge(kernel)
                kernels.remove(kernel)
            kernels.append(new)
        return kernels

    def bytes_of(self, node: fx.Node) -> float:
        value = node.meta.get("val")
        if not isinstance(value, Tensor):
            return 0
        shape = tuple(value.shape)
        if not self.constant_shapes.isdisjoint((shape, shape[::-1])):
            return 0
        return num_bytes_of(value)

    def bytes_of_call(self, node: fx.Node) -> float:
        """Return what a product or another operator reads and writes."""
        results: Iterable[fx.Node] = (node,)
        if isinstance(node.meta["val"], (tuple, list)):
            results = node.users
        return sum(map(self.bytes_of, (*node.all_input_nodes, *results)))


def _name(node: fx.Node) -> str:
    """Return an operator's name without namespace and overload."""
    return str(node.target._schema.name).split("::")[1]  # type: ignore[union-attr]


def _is_product(node: fx.Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    packet = node.target._overloadpacket
    if packet is GROUPED or packet in flop_registry:
        return True
    return "grouped_linear" in node.target.name()


def _is_opaque(node: fx.Node) -> bool:
    """Return whether a node stands for attention, which is counted in closed form."""
    return "opaque" in str(node.target)


def _is_call(node: fx.Node) -> bool:
    """Return whether no code is generated for a node: it is called."""
    if not _is_operator(node):
        return False
    return _is_product(node) or node.target.namespace not in ("aten", "prims")  # type: ignore[union-attr]


def _is_constant(node: fx.Node) -> bool:
    return _is_operator(node) and _name(node) in CONSTANTS


def _is_generated(node: fx.Node) -> bool:
    """Return whether a node is computed by generated code."""
    if not _is_operator(node) or _is_call(node) or _is_constant(node):
        return False
    return not is_view(node.target)  # type: ignore[arg-type]


def _order_of(node: fx.Node) -> tuple[tuple[int, ...], ...]:
    """Return the permutations between a view and its base that change the order in memory.

    Moving a dimension of length 1 changes nothing. AOT autograd writes transposes as permutations.
    """
    order: list[tuple[int, ...]] = []
    base = base_of(node)
    while node is not base:
        if _is_operator(node) and _name(node) == "permute":
            dims: Any = node.args[1]
            sizes = node.meta["val"].shape
            moved = [dim for dim, size in zip(dims, sizes, strict=True) if size > 1]
            if moved != sorted(moved):
                order.insert(0, tuple(moved))
        node = node.all_input_nodes[0]
    return tuple(order)

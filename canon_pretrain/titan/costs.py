"""What a block and the head keep for backward, and what a block's graphs cost, without a GPU.

A block runs on CPU tensors without data (FakeTensorMode): not compiled, autograd's saved tensors
are summed; compiled, dynamo and AOT autograd make its graphs, and the partitioner's choice of what
the forward graph keeps is summed. No code is generated: traffic and launches are estimated.
`tests/fake_gpu` compares the dry run, which is made of these counts, with the trainer on fake GPUs.

Shapes: B batch, T tokens, H heads, G key-value heads, K head dim, N = taps - 1 + T.
"""

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from canon_pretrain.kernels.backends import compile_options
from canon_pretrain.kernels.graphs import base_of, results_of
from canon_pretrain.kernels.recurrence_work import triton_kept_bytes
from canon_pretrain.kernels.recurrences import values_of
from canon_pretrain.kernels.traffic import estimate_work
from canon_pretrain.kernels.work import Work
from canon_pretrain.model.args import ModelArgs, without_positions
from canon_pretrain.model.attend import Attend, Mask
from canon_pretrain.model.attention import Rope
from canon_pretrain.model.cache import Context, window_segments
from canon_pretrain.model.transformer import Head, HeadLoss, TransformerBlock, make_norm
from canon_pretrain.titan.job_config import CanonJobConfig

CHUNK_TOKENS = 64
"""Recurrences pad to chunks of this length."""
GPU = torch.device("cuda", 0)


# -- not compiled


def count_saved(forward: Callable[[], Tensor], modules: nn.Module) -> int:
    """Return the bytes of storages that `forward` saves for backward, without the modules' own."""
    tensors = (*modules.parameters(), *modules.buffers())
    constants = {tensor.untyped_storage()._cdata for tensor in tensors}
    saved: dict[int, Tensor] = {}  # hold the tensors, so that no address is reused

    def pack(tensor: Tensor) -> Tensor:
        # views of one storage count once
        address = tensor.untyped_storage()._cdata
        if address not in constants:
            saved.setdefault(address, tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward()
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


def block_bytes(args: ModelArgs, micro_batch: int, dtype: torch.dtype) -> int:
    """Return the bytes that a block that is not compiled keeps, with its input."""
    # On a GPU, flex attention computes masks and ALiBi and saves what plain attention does. Learned
    # biases, which it saves too, are an input of the opaque one.
    plain = args
    attend: type[Attend] = Attend
    row_sum_bytes = 0
    if args.bias_extent:
        attend = OpaqueAttend
        row_sum_bytes = 4 * args.num_heads * micro_batch * args.max_seq_len  # float32
    else:
        plain = dataclasses.replace(plain, window=0)
        if not args.rope_dim:
            plain = without_positions(plain)
    shape = (micro_batch, args.max_seq_len)
    with FakeTensorMode():
        with default_dtype(dtype):
            block = _make_block(plain, attend)
        h_BTD = torch.empty(*shape, args.dim, dtype=dtype, requires_grad=True)
        segments_BN = None
        if args.document_mask and args.reach:
            ids_BT = torch.zeros(shape, dtype=torch.int32)
            segments_BN = window_segments(ids_BT, args.max_seq_len, args.reach)
        saved_bytes = count_saved(lambda: block(h_BTD, Context(segments_BN=segments_BN)), block)
        return saved_bytes + row_sum_bytes


def head_bytes(args: ModelArgs, micro_batch: int, dtype: torch.dtype, loss: HeadLoss) -> int:
    """Return the bytes that the last norm, the head and the loss keep."""
    shape = (micro_batch, args.max_seq_len)
    with FakeTensorMode():
        with default_dtype(dtype):
            norm = make_norm(args)
            output = Head(args.dim, args.vocab_size)
        h_BTD = torch.empty(*shape, args.dim, dtype=dtype, requires_grad=True)
        labels_BT = torch.zeros(shape, dtype=torch.int64)
        modules = nn.ModuleList([norm, output])
        return count_saved(lambda: output(norm(h_BTD), labels_BT, loss)[1], modules)


def _make_block(
    args: ModelArgs, attend: type[Attend] = Attend, **backends: str
) -> TransformerBlock:
    is_attention = args.mixer == "attention"
    rope = Rope(args) if is_attention and args.rope_dim else None
    attention = attend(args) if is_attention else None
    return TransformerBlock(args, rope, attention, **backends)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(previous)


# -- compiled


@dataclass(frozen=True)
class BlockCosts:
    """What a compiled block costs per token; launches: for sequences of `max_seq_len`."""

    kept_bytes: float
    """Of what its forward graph keeps, with its input."""
    forward: Work
    """Estimated, without attention: see `kernels.traffic.estimate_work`."""
    backward: Work


def planned_backend(job: CanonJobConfig) -> str:
    """Return the backend of Canon that a job takes on a GPU, unless its check fails."""
    requested = job.model.canon_backend
    if requested == "auto":
        return auto_backend(job.model_args)
    layers = job.model_args.kinds.values()
    has_kernels = any(layer.canon_set or layer.has_conv_kernel for layer in layers)
    return "triton" if has_kernels and requested == "triton" else "compiled"


def auto_backend(args: ModelArgs) -> str:
    """Return the backend of Canon that `auto` takes on a GPU, unless its check fails.

    `triton` also for a native conv1d. `compiled` if all layers with Canon have it where Inductor
    fuses more than kernels of ours do:

    At A or C of norm_place = "output", where our kernel for norm and Canon does not apply: Inductor
    fuses the filter with the sum before it (of the 1.3B model by `compiled_block_costs`: 219 KB
    per token and layer with Canon-A, 227 with AC, 256 with ABCD; with ours 236, 260, 289).

    At Q or K next to a QK-norm of all heads: Inductor fuses norm, filter and rotation, in fewer
    bytes than with a kernel of ours between them (kernels/CODEGEN.md, released_1b with FKOV). With
    A, C or D too, kernels of ours save more.
    """
    layers = args.kinds.values()
    if any(layer.has_conv_kernel for layer in layers):
        return "triton"
    with_canon = [layer for layer in layers if layer.canon_set]
    if all(_has_canon_without_norm(layer) or _is_fused_with_qk_norm(layer) for layer in with_canon):
        return "compiled"  # or there is no Canon
    return "triton"


def _has_canon_without_norm(layer: ModelArgs) -> bool:
    return layer.norm_place == "output" and bool({*layer.canon_set} & {*"AC"})


def _is_fused_with_qk_norm(layer: ModelArgs) -> bool:
    sites = {*layer.canon_set}
    return layer.qk_norm == "full" and bool(sites & {*"QK"}) and not sites & {*"ACD"}


def compiled_block_costs(
    args: ModelArgs, dtype: torch.dtype, canon_backend: str, mixer_backend: str = "chunked"
) -> BlockCosts:
    """Return what a block compiled for a GPU costs per token.

    `canon_backend`: "triton" or "compiled"; `mixer_backend`: "triton" or "chunked". Takes about
    four seconds, and resets dynamo: call it before a model is compiled in this process.
    """
    # a block knows neither its number nor a vocabulary: boards count one for all depths and tasks
    args = dataclasses.replace(
        args,
        max_seq_len=_traced_tokens(args),
        num_layers=1,
        vocab_size=ModelArgs().vocab_size,
        eos_id=0,
    )
    return _traced_costs(args, dtype, canon_backend, mixer_backend)


def _traced_tokens(args: ModelArgs) -> int:
    """Return a length near the model's that no parameter has.

    Parameters are known by their shapes, and activations are matrices of tokens by channels.
    """
    with torch.device("meta"):
        block = _make_block(args)
    lengths = {length for parameter in block.parameters() for length in parameter.shape}
    num_tokens = args.max_seq_len
    while num_tokens in lengths:
        num_tokens += CHUNK_TOKENS
    return num_tokens


@functools.lru_cache(maxsize=64)
def _traced_costs(
    args: ModelArgs, dtype: torch.dtype, canon_backend: str, mixer_backend: str
) -> BlockCosts:
    num_tokens = args.max_seq_len
    kept: list[int] = []  # bytes, by graph
    forward = Work()
    backward = Work()
    constant_shapes: set[torch.Size] = set()

    def count(graph: fx.GraphModule, _: Any, *, is_backward: bool = False, **options: Any) -> Any:
        """Take the place of Inductor's code generator: count, and return empty results."""
        # of the whole sequence, so per token
        work = estimate_work(graph, constant_shapes).for_tokens(1 / num_tokens)
        if is_backward:
            backward.add(work)
        else:
            forward.add(work)
            kept.append(kept_bytes(graph, constant_shapes))
        return empty_results(graph)

    with seen_on_gpu():
        trace_block(
            args,
            dtype,
            canon_backend,
            count,
            mixer_backend=mixer_backend,
            constant_shapes=constant_shapes,
        )

    # A fused attention kernel also keeps the logarithm of the sum of each row, in float32.
    total_kept = sum(kept) / num_tokens
    if args.mixer == "attention":
        total_kept += 4 * args.num_heads
    # A recurrence's keep more than their inputs, which the graph has kept.
    if mixer_backend == "triton" and args.recurrent is not None:
        total_kept += args.num_heads * triton_kept_bytes(args.mixer, args.key_dim, dtype.itemsize)
    return BlockCosts(total_kept, forward, backward)


def trace_block(
    args: ModelArgs,
    dtype: torch.dtype,
    canon_backend: str,
    compile_graph: Callable[..., Any],
    *,
    mixer_backend: str = "chunked",
    micro_batch: int = 1,
    device: str = "cpu",
    constant_shapes: set[torch.Size] | None = None,
) -> None:
    """Compile a block as in training, forward and backward, on tensors without data.

    `compile_graph` takes the place of Inductor's code generator. Attention is an opaque operator,
    and so is a recurrence, unless it is in the chunked form. The shapes of parameters and tables
    are added to `constant_shapes` before the first graph is compiled. Resets dynamo.
    """

    def backend(graph: fx.GraphModule, inputs: list[Tensor]) -> Any:
        from torch._inductor.compile_fx import compile_fx

        # the options of a GPU, although the tensors are on a CPU
        options = compile_options("cuda", canon_backend)
        return compile_fx(graph, inputs, inner_compile=compile_graph, config_patches=options)

    if canon_backend == "triton":  # a traced function can't import
        import_module("canon_pretrain.kernels.triton.fused")
    with torch.device("meta"):
        block = _make_block(
            args, OpaqueAttend, canon_backend=canon_backend, mixer_backend="chunked"
        ).to(dtype)
    if mixer_backend != "chunked" and args.recurrent is not None:
        mixer: Any = block.attention
        mixer.recurrence = functools.partial(opaque_recurrence, args.mixer)

    torch._dynamo.reset()
    with warnings.catch_warnings(), FakeTensorMode(allow_non_fake_inputs=True):
        warnings.simplefilter("ignore", DeprecationWarning)  # dynamo's own use of torch
        block.to_empty(device=device)
        if constant_shapes is not None:
            tensors = (*block.parameters(), *block.buffers())
            constant_shapes |= {tensor.shape for tensor in tensors}

        # Inputs of a block: activations, and the document of each token and of the Canon taps
        # before them.
        h_BTD = torch.empty(
            (micro_batch, args.max_seq_len, args.dim),
            dtype=dtype,
            device=device,
            requires_grad=True,
        )
        segments_BN = None
        if args.document_mask and args.reach:
            num_near = args.reach + args.max_seq_len
            segments_BN = torch.empty(micro_batch, num_near, dtype=torch.int32, device=device)

        # Forward, then backward, which compiles the second graph.
        compiled = torch.compile(block, backend=backend, fullgraph=True)
        results = compiled(h_BTD, Context(segments_BN=segments_BN))
        # blocks with experts also return their loads, and a loss
        differentiable = [tensor for tensor in tree_leaves(results) if tensor.requires_grad]
        gradients = [torch.empty_like(tensor) for tensor in differentiable]
        torch.autograd.backward(differentiable, gradients)
    torch._dynamo.reset()


def kept_bytes(graph: fx.GraphModule, constant_shapes: Collection[torch.Size]) -> int:
    """Return the bytes of what a forward graph returns besides its result, without constants.

    The block's input counts: it is the previous block's result. Views of one storage count once.
    `constant_shapes`: of parameters and tables, which are inputs as well.
    """
    bytes_by_base: dict[fx.Node, int] = {}
    for node in results_of(graph)[1:]:
        if not isinstance(node, fx.Node) or not isinstance(node.meta["val"], Tensor):
            continue

        # Views keep the storage of their base.
        base = base_of(node)
        value = base.meta["val"]
        is_constant = base.op == "placeholder" and value.shape in constant_shapes
        if isinstance(value, Tensor) and not is_constant:
            bytes_by_base[base] = value.untyped_storage().nbytes()
    return sum(bytes_by_base.values())


def empty_results(graph: fx.GraphModule) -> Callable[[list[Any]], list[Any]]:
    """Return a function with the signature of a compiled graph that allocates on the CPU."""
    # the shapes are known from tracing: with fake tensors, nothing is computed
    values = []
    for result in results_of(graph):
        values.append(result.meta["val"] if isinstance(result, fx.Node) else result)

    def allocate(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)

    def run(inputs: list[Any]) -> list[Any]:
        inputs.clear()  # a boxed call: the callee frees the inputs
        return list(map(allocate, values))

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


@contextlib.contextmanager
def seen_on_gpu() -> Iterator[None]:
    """Let dynamo answer that tensors are on a GPU: the model takes the same branches as there."""
    from torch._dynamo.variables.base import VariableTracker
    from torch._dynamo.variables.tensor import TensorVariable

    def constant(value: Any) -> Any:
        return lambda variable, tx: VariableTracker.build(tx, value)

    with mock.patch.multiple(
        TensorVariable, method_attr_device=constant(GPU), method_attr_is_cuda=constant(True)
    ):
        yield


# `inputs`: q_BTHK, k_BTGK, v_BTGK and, if they are learned, biases_BTHE
@torch.library.custom_op("canon_pretrain_opaque::attention", mutates_args=())
def _attention(inputs: list[Tensor]) -> Tensor:
    return torch.empty_like(inputs[0])


@torch.library.custom_op("canon_pretrain_opaque::attention_backward", mutates_args=())
def _attention_backward(dy_BTHK: Tensor, inputs: list[Tensor], y_BTHK: Tensor) -> list[Tensor]:
    return [torch.empty_like(tensor) for tensor in inputs]


def _save_for_backward(ctx: Any, inputs: tuple[list[Tensor]], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[0], output)


def _attention_gradients(ctx: Any, dy_BTHK: Tensor) -> list[Tensor]:
    *inputs, y_BTHK = ctx.saved_tensors
    return _attention_backward(dy_BTHK.contiguous(), inputs, y_BTHK)


_attention.register_fake(lambda inputs: inputs[0].new_empty(inputs[0].shape))
_attention_backward.register_fake(
    lambda dy, inputs, y: [tensor.new_empty(tensor.shape) for tensor in inputs]
)
_attention.register_autograd(_attention_gradients, setup_context=_save_for_backward)


class OpaqueAttend(Attend):
    """Attention as one opaque operator: the code before and after it is always the same."""

    def forward(
        self,
        q_BTHK: Tensor,
        k_BSGK: Tensor,
        v_BSGK: Tensor,
        mask: Mask,
        biases_BTHE: Tensor | None = None,
    ) -> Tensor:
        inputs = [q_BTHK, k_BSGK, v_BSGK]
        if biases_BTHE is not None:
            inputs.append(biases_BTHE)
        return _attention([tensor.contiguous() for tensor in inputs])


# `heads`: the inputs of a recurrence in the order of its form, without the state
@torch.library.custom_op("canon_pretrain_opaque::recurrence", mutates_args=())
def _recurrence(heads: list[Tensor], starts: Tensor | None, mixer: str) -> Tensor:
    return torch.empty_like(values_of(mixer, heads))


@torch.library.custom_op("canon_pretrain_opaque::recurrence_backward", mutates_args=())
def _recurrence_backward(dy: Tensor, heads: list[Tensor], starts: Tensor | None) -> list[Tensor]:
    return [torch.empty_like(head) for head in heads]


def _save_recurrence(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    heads, starts, _ = inputs
    ctx.save_for_backward(starts, *heads)


def _recurrence_gradients(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    starts, *heads = ctx.saved_tensors
    return _recurrence_backward(dy.contiguous(), heads, starts), None, None


_recurrence.register_fake(
    lambda heads, starts, mixer: torch.empty_like(values_of(mixer, heads)).contiguous()
)
_recurrence_backward.register_fake(
    lambda dy, heads, starts: [head.new_empty(head.shape) for head in heads]
)
_recurrence.register_autograd(_recurrence_gradients, setup_context=_save_recurrence)


def opaque_recurrence(
    mixer: str, *heads: Tensor, state: None, starts_BT: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Return a recurrence's output by one opaque operator, without the last state."""
    return _recurrence([*heads], starts_BT, mixer), None

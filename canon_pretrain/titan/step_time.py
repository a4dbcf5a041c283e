"""The time of a training step on a GPU, computed from what it multiplies, moves and exchanges.

Nothing is measured: the counts are those of the block's graphs (costs.py), of the head and of
FSDP2 in closed form; the speeds are assumed (kernels/gpus.py), with a range that the result keeps.
`tests/fake_gpu` compares the counts with those of the trainer on fake GPUs.
"""

from collections import Counter
from dataclasses import dataclass

import torch
from torchtitan.config import TORCH_DTYPE_MAP

from canon_pretrain.kernels.gpus import Gpu, Range
from canon_pretrain.kernels.work import Work
from canon_pretrain.model.args import ModelArgs
from canon_pretrain.model.counts import num_parameters, routed_parameters
from canon_pretrain.titan.costs import compiled_block_costs
from canon_pretrain.titan.job_config import CanonJobConfig, micro_batch_size, shard_degree

GPUS_PER_NODE = 8
TRAFFIC_FACTOR = 1.15
"""Counted traffic of a block's kernels over the estimate from its graphs: 1.0 to 1.37 in twelve
models on fake GPUs; Inductor fuses less than `estimate_work` assumes."""
APART_FACTOR = 2.4
"""The same, and of launches, of blocks with experts on other ranks, which are compiled in part."""
OPTIMIZER_BYTES = 40
"""Per parameter and step: norm and clipping of the gradient, AdamW with float32 moments."""
EAGER_LAUNCHES = (70, 8)
"""Launches that are not compiled: of a step, and of each block and micro-batch (FSDP2)."""
LAUNCH_S = Range(3e-6, 2e-6, 1e-6)
"""On the device, between two kernels."""
HOST_LAUNCH_S = Range(10e-6, 6e-6, 4e-6)
"""On the host, to launch a kernel."""
HOST_BLOCK_S = Range(800e-6, 400e-6, 200e-6)
"""On the host, for a block and micro-batch: guards, autograd, FSDP2's hooks."""
HOST_STEP_S = Range(12e-3, 7e-3, 4e-3)
"""On the host, for a step: the batch, the optimizer, the schedule, what is logged."""
EXPOSED = Range(0.3, 0.15, 0.05)
"""Share of the exchanges that does not overlap with products."""


@dataclass(frozen=True)
class Layout:
    """How a step is split over GPUs and micro-batches."""

    world_size: int
    num_shards: int
    """Ranks over which the weights are split; the others hold replicas."""
    tokens: int
    """Of a micro-batch on one rank."""
    num_micro_batches: int = 1
    num_gathers: int = 1
    """How often a micro-batch gathers the weights."""
    expert_degree: int = 1
    """Ranks over which experts are split."""
    dtype: torch.dtype = torch.bfloat16
    loss_chunk_tokens: int = 4096


@dataclass(frozen=True)
class StepCounts:
    """What one rank does in a training step."""

    work: Work
    exchanged_bytes: float = 0
    """Weights and gradients, and rows sent to experts, received by this rank."""
    world_size: int = 1
    num_blocks: int = 0
    """Blocks times micro-batches."""


def count_step(job: CanonJobConfig, world_size: int) -> StepCounts:
    """Count a step of `job` on one of `world_size` GPUs, as compiled with Canon's Triton kernels.

    Takes about four seconds for a block of a new shape, and resets dynamo. Recurrences are in the
    chunked form.
    """
    training = job.training
    tokens = micro_batch_size(job, world_size) * training.seq_len
    layout = Layout(
        world_size=world_size,
        num_shards=shard_degree(job, world_size),
        tokens=tokens,
        num_micro_batches=training.global_batch_size * training.seq_len // (tokens * world_size),
        num_gathers=1 if job.parallelism.fsdp_reshard_after_forward == "never" else 2,
        expert_degree=job.parallelism.expert_parallel_degree,
        dtype=TORCH_DTYPE_MAP[training.mixed_precision_param],
        loss_chunk_tokens=job.loss.chunk_tokens or tokens,
    )
    backend = "triton" if job.model.canon_backend in ("auto", "triton") else "compiled"
    costs = compiled_block_costs(job.model_args, layout.dtype, backend)
    passes = [costs.forward, costs.backward]
    recomputes = job.activation_checkpoint.mode == "full"
    if recomputes:
        passes.append(costs.forward)

    block = Work()
    for one_pass in passes:
        block.add(one_pass.for_tokens(tokens))
    block.bytes_moved *= TRAFFIC_FACTOR
    if layout.expert_degree > 1:
        block.bytes_moved *= APART_FACTOR
        block.launches *= APART_FACTOR
    return count_model(job.model_args, layout, block, recomputes=recomputes)


def count_model(
    args: ModelArgs, layout: Layout, block: Work, *, recomputes: bool = False
) -> StepCounts:
    """Count a step of a model whose blocks cost `block` per micro-batch, without attention.

    `recomputes`: attention runs forward twice.
    """
    block = block.repeated(1)
    if args.mixer == "attention":
        # two products forward, five backward, of the whole square
        num_products = 9 if recomputes else 7
        area = args.qkv_dims[0] * args.max_seq_len * layout.tokens
        block.add(Work(launches=3, flops=Counter({"attention": 2 * num_products * area})))

    micro_batch = block.repeated(args.num_layers)
    micro_batch.add(_head_work(args, layout))
    micro_batch.add(_sharding_work(args, layout))
    work = micro_batch.repeated(layout.num_micro_batches)
    work.launches += EAGER_LAUNCHES[0]
    work.bytes_moved += OPTIMIZER_BYTES * num_parameters(args) / layout.num_shards
    return StepCounts(
        work=work,
        exchanged_bytes=layout.num_micro_batches * _exchanged_bytes(args, layout),
        world_size=layout.world_size,
        num_blocks=args.num_layers * layout.num_micro_batches,
    )


def _head_work(args: ModelArgs, layout: Layout) -> Work:
    """Return the work of embedding, last norm, head and loss, forward and backward.

    Logits are read or written 4.5 times, the weight's float32 gradient three times per chunk; the
    rest is not compiled and takes 100 bytes per channel.
    """
    tokens, itemsize = layout.tokens, layout.dtype.itemsize
    num_chunks = -(-tokens // layout.loss_chunk_tokens)
    token_bytes = 4.5 * itemsize * args.vocab_size + 100 * args.dim
    gradient_bytes = 12 * num_chunks * args.vocab_size * args.dim
    kind = str(layout.dtype).removeprefix("torch.")
    return Work(
        launches=8 * num_chunks,
        bytes_moved=tokens * token_bytes + gradient_bytes,
        product_bytes=3 * tokens * itemsize * (args.vocab_size + args.dim),
        flops=Counter({kind: 6 * tokens * args.vocab_size * args.dim}),
    )


def _sharding_work(args: ModelArgs, layout: Layout) -> Work:
    """Return what FSDP2 copies in a micro-batch: gathered weights out, gradients in."""
    work = Work(launches=EAGER_LAUNCHES[1] * args.num_layers)
    if layout.world_size > 1:
        itemsize = layout.dtype.itemsize
        gather_bytes = 2 * itemsize * layout.num_gathers
        gradient_bytes = itemsize + 4
        work.bytes_moved = (gather_bytes + gradient_bytes) * num_parameters(args)
    return work


def _exchanged_bytes(args: ModelArgs, layout: Layout) -> float:
    """Return the bytes that a rank receives in a micro-batch: weights, gradients, experts' rows."""
    parameters, itemsize = num_parameters(args), layout.dtype.itemsize
    shards, degree = layout.num_shards, layout.expert_degree
    experts = routed_parameters(args) if degree > 1 else 0
    parameter_bytes = itemsize * layout.num_gathers + 4
    received = parameter_bytes * (parameters - experts) * (shards - 1) / shards
    # a rank's own experts are sharded over the ranks with the same ones
    received += parameter_bytes * experts / degree * (1 - degree / shards)
    if shards < layout.world_size:  # replicas add up their float32 shards: twice, in a ring
        received += 2 * 4 * parameters / shards
    if degree > 1:
        # to the experts and back, forward and backward
        row_bytes = 4 * args.experts_per_token * args.dim * itemsize
        received += args.num_layers * layout.tokens * row_bytes * (degree - 1) / degree
    return received


def step_seconds(counts: StepCounts, gpu: Gpu) -> Range:
    """Return the seconds of a step: slow, likely and fast.

    The device works through its kernels one after the other; the host launches them meanwhile, and
    exchanges overlap with both but for EXPOSED. The step takes as long as the slowest of the three.
    """
    return Range(*(_step_seconds(counts, gpu, bar) for bar in range(3)))


def _step_seconds(counts: StepCounts, gpu: Gpu, bar: int) -> float:
    speeds, work = gpu.speeds, counts.work
    by_kind = {
        "float32": speeds.float32_flops[bar],
        "grouped": speeds.grouped_flops[bar],
        "attention": 2 * speeds.attention_flops[bar],  # counted: the whole square
    }
    dense_flops = speeds.dense_flops[bar]
    products_s = sum(flops / by_kind.get(kind, dense_flops) for kind, flops in work.flops.items())
    products_s = max(products_s, work.product_bytes / speeds.memory_bytes[bar])
    device_s = products_s + work.bytes_moved / speeds.memory_bytes[bar]
    device_s += work.launches * LAUNCH_S[bar]

    host_s = HOST_STEP_S[bar] + counts.num_blocks * HOST_BLOCK_S[bar]
    host_s += work.launches * HOST_LAUNCH_S[bar]

    within_node = counts.world_size <= GPUS_PER_NODE
    link_bytes = speeds.node_bytes[bar] if within_node else speeds.network_bytes[bar]
    exchange_s = counts.exchanged_bytes / link_bytes
    return max(device_s, host_s, exchange_s) + EXPOSED[bar] * exchange_s

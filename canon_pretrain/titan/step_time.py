"""The time of a training step on a GPU, computed from what it multiplies, moves and exchanges.

Nothing is measured: the counts are those of the block's graphs (costs.py), of the head and of
FSDP2 in closed form; the speeds are assumed (machine/gpus.py), with a range that the result keeps.
`tests/fake_gpu` compares the counts with those of the trainer on fake GPUs.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torchtitan.config import TORCH_DTYPE_MAP

from canon_pretrain.kernels.recurrence_work import triton_work
from canon_pretrain.kernels.work import Work
from canon_pretrain.machine.gpus import GPUS_PER_NODE, Gpu, Range
from canon_pretrain.model.args import ModelArgs
from canon_pretrain.model.counts import num_parameters, routed_parameters
from canon_pretrain.titan.costs import compiled_block_costs, planned_backend
from canon_pretrain.titan.job_config import CanonJobConfig, micro_batch_size, shard_degree
from canon_pretrain.titan.muon import update_costs
from canon_pretrain.titan.optimizers import MUON, muon_shapes
from canon_pretrain.titan.spec import on_meta

FLOAT32_BYTES = 4
TRAFFIC_FACTOR = 1.15
"""Counted traffic of a block's kernels over the estimate from its graphs: 1.0 to 1.37 in twelve
models on fake GPUs; Inductor fuses less than `estimate_work` assumes."""
APART_FACTOR = 2.7
"""Traffic and launches of a block with experts on other ranks, which is compiled in part, over
those of a whole one: counted for one model on fake GPUs."""
# float32: the norm reads the gradient (4), clipping reads and writes it (8), AdamW reads weight,
# gradient and moments (16) and writes weight and moments (12)
OPTIMIZER_BYTES = 40
"""Per parameter and step: norm and clipping of the gradient, AdamW with float32 moments."""
LOGIT_PASSES = 4.5
"""How often the loss reads or writes the logits: counted on fake GPUs, as the next two."""
HEAD_CHANNEL_BYTES = 100
"""Per token and channel: the embedding and the last norm, which are not compiled."""
HEAD_LAUNCHES = 8
"""Of a chunk of the loss."""
STEP_LAUNCHES = 70
"""Launches of a step that are not compiled, without those of blocks."""
MUON_LAUNCHES = 6
"""Of a parameter that Muon updates, on each rank: momentum, direction, decay, update. With three
products per iteration on the owner."""
BLOCK_LAUNCHES = 8
"""Launches of FSDP2 for a block and micro-batch."""
# Range: slow, likely, fast
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
    recomputes: bool = False
    """Blocks run forward twice (full activation checkpointing)."""


@dataclass(frozen=True)
class StepCounts:
    """What one rank does in a training step."""

    work: Work
    node_bytes: float = 0
    """Received from GPUs of the same node."""
    network_bytes: float = 0
    """Received in groups of more GPUs than a node has."""
    num_blocks: int = 0
    """Blocks times micro-batches."""


def count_step(job: CanonJobConfig, world_size: int, mixer_backend: str = "chunked") -> StepCounts:
    """Count a step of `job` on one of `world_size` GPUs, compiled.

    `mixer_backend`: of recurrences, "triton" or "chunked". Takes about four seconds for a block of
    a new shape, and resets dynamo.
    """
    training = job.training
    tokens = micro_batch_size(job, world_size) * training.seq_len  # of a micro-batch
    num_gathers = 2  # for each pass, unless the weights stay gathered
    if job.parallelism.fsdp_reshard_after_forward == "never":
        num_gathers = 1
    layout = Layout(
        world_size=world_size,
        num_shards=shard_degree(job, world_size),
        tokens=tokens,
        num_micro_batches=job.tokens_per_step // (tokens * world_size),
        num_gathers=num_gathers,
        expert_degree=job.parallelism.expert_parallel_degree,
        dtype=TORCH_DTYPE_MAP[training.mixed_precision_param],
        loss_chunk_tokens=job.loss.chunk_tokens or tokens,
        recomputes=job.activation_checkpoint.mode == "full",
    )

    # Both passes of a block; full checkpointing runs the forward pass again.
    blocks = []
    for layer in job.model_args.kinds.values():
        costs = compiled_block_costs(layer, layout.dtype, planned_backend(job), mixer_backend)
        block = costs.forward.for_tokens(tokens)
        block.add(costs.backward.for_tokens(tokens))
        if layout.recomputes:
            block.add(costs.forward.for_tokens(tokens))
        block.bytes_moved *= TRAFFIC_FACTOR
        if layout.expert_degree > 1:
            block.bytes_moved *= APART_FACTOR
            block.launches *= APART_FACTOR
        if mixer_backend == "triton":
            block.add(_recurrence_work(layer, layout))
        blocks.append(block)
    counts = count_model(job.model_args, layout, *blocks)

    # AdamW's update is counted for all parameters; Muon's matrices are orthogonalized as well.
    if job.optimizer.name == MUON:
        shapes = muon_shapes(job.optimizer, on_meta(job.model_args))
        counts = add_muon(counts, shapes, layout.num_shards, job.optimizer.muon_ns_steps)
    return counts


def add_muon(
    counts: StepCounts, shapes: Sequence[torch.Size], num_shards: int, num_steps: int
) -> StepCounts:
    """Return the counts of a step in which Muon updates matrices of these shapes."""
    costs = update_costs(shapes, num_shards, num_steps)
    work = counts.work.repeated(1)
    work.flops["bfloat16"] += round(costs.flops)
    num_matrices = sum(math.prod(shape[:-2]) for shape in shapes)
    work.launches += MUON_LAUNCHES * len(shapes)
    work.launches += (3 * num_steps + 3) * num_matrices / num_shards
    if num_shards > GPUS_PER_NODE:
        return replace(counts, work=work, network_bytes=counts.network_bytes + costs.received_bytes)
    return replace(counts, work=work, node_bytes=counts.node_bytes + costs.received_bytes)


def count_model(args: ModelArgs, layout: Layout, *blocks: Work) -> StepCounts:
    """Count a step of a model.

    `blocks`: what a block of each kind costs per micro-batch, without attention.
    """
    # A micro-batch: blocks, attention, the head, and what FSDP2 copies.
    micro_batch = Work()
    for (layer, count), block in zip(args.layer_counts, blocks, strict=True):
        micro_batch.add(block.repeated(count))
        attention = _attention_work(layer, layout)
        micro_batch.add(attention.repeated(count))
    micro_batch.add(_head_work(args, layout))
    micro_batch.add(_sharding_work(args, layout))

    # A step: its micro-batches, and the optimizer on this rank's shard.
    work = micro_batch.repeated(layout.num_micro_batches)
    work.launches += STEP_LAUNCHES
    work.bytes_moved += OPTIMIZER_BYTES * num_parameters(args) / layout.num_shards

    node_bytes, network_bytes = _received_bytes(args, layout)
    return StepCounts(
        work=work,
        node_bytes=node_bytes * layout.num_micro_batches,
        network_bytes=network_bytes * layout.num_micro_batches,
        num_blocks=args.num_layers * layout.num_micro_batches,
    )


def _attention_work(args: ModelArgs, layout: Layout) -> Work:
    """Return the work of attention in a block: two products forward, five backward."""
    if args.mixer != "attention":
        return Work()
    num_forward = 2 if layout.recomputes else 1
    # of the whole square of tokens, without the half that causality leaves out
    num_keys = min(args.max_seq_len, args.window or args.max_seq_len)

    # Backward computes the scores again, then the gradients of values, weights, q and k.
    product_flops = 2 * args.qkv_dims[0] * num_keys * layout.tokens
    num_products = 2 * num_forward + 5
    # Learned biases are read by each of them, and their gradient is written by one.
    num_biases = args.num_heads * args.bias_extent * layout.tokens
    # fused kernels are for half precision
    kind = "float32" if layout.dtype == torch.float32 else "attention"
    return Work(
        launches=num_forward + 3,  # backward: the row sums, then the gradients in two kernels
        bytes_moved=(num_forward + 3) * num_biases * layout.dtype.itemsize,
        flops=Counter({kind: num_products * product_flops}),
    )


def _recurrence_work(args: ModelArgs, layout: Layout) -> Work:
    """Return the work of our Triton kernels for a block's recurrence, forward and backward."""
    if args.recurrent is None:
        return Work()
    passes = ["forward", "backward"]
    if layout.recomputes:
        passes.append("forward")

    total = Work()
    for name in passes:
        token_work = triton_work(
            args.mixer, name, args.num_heads, args.key_dim, args.value_dim, layout.dtype.itemsize
        )
        total.add(token_work.for_tokens(layout.tokens))
    return total


def _head_work(args: ModelArgs, layout: Layout) -> Work:
    """Return the work of embedding, last norm, head and loss, forward and backward."""
    tokens = layout.tokens
    itemsize = layout.dtype.itemsize
    num_chunks = -(-tokens // layout.loss_chunk_tokens)
    logit_bytes = LOGIT_PASSES * itemsize * args.vocab_size
    channel_bytes = HEAD_CHANNEL_BYTES * args.dim

    # each chunk adds to the weight's float32 gradient: two reads and a write
    head_parameters = args.vocab_size * args.dim
    gradient_bytes = 3 * FLOAT32_BYTES * num_chunks * head_parameters

    # Three products, of which each has 2 FLOPs per token and parameter: logits, and the gradients
    # of h and of the weight. Each reads or writes logits and h.
    kind = str(layout.dtype).removeprefix("torch.")
    return Work(
        launches=HEAD_LAUNCHES * num_chunks,
        bytes_moved=tokens * (logit_bytes + channel_bytes) + gradient_bytes,
        product_bytes=3 * tokens * itemsize * (args.vocab_size + args.dim),
        flops=Counter({kind: 6 * tokens * head_parameters}),
    )


def _sharding_work(args: ModelArgs, layout: Layout) -> Work:
    """Return what FSDP2 copies in a micro-batch: gathered weights out, gradients in."""
    itemsize = layout.dtype.itemsize
    gather_bytes = 2 * itemsize * layout.num_gathers  # a read and a write
    # read in the dtype of the products, written in float32
    gradient_bytes = itemsize + FLOAT32_BYTES
    num_gathered = sum(_gathered_parameters(args, layout))
    return Work(
        launches=BLOCK_LAUNCHES * args.num_layers,
        bytes_moved=(gather_bytes + gradient_bytes) * num_gathered,
    )


class GatheredParameters(NamedTuple):
    """The parameters that a rank gathers in a pass."""

    dense: int
    experts: float
    """Of the experts that are not split over all ranks."""


def _gathered_parameters(args: ModelArgs, layout: Layout) -> GatheredParameters:
    total = num_parameters(args)
    if layout.expert_degree == 1:
        return GatheredParameters(total, 0)
    experts = routed_parameters(args)
    return GatheredParameters(
        dense=total - experts,
        experts=experts / layout.expert_degree,
    )


def _received_bytes(args: ModelArgs, layout: Layout) -> tuple[float, float]:
    """Return the bytes that a rank receives in a micro-batch: in its node, and beyond it.

    A ring of n ranks receives (n - 1) / n of what it gathers or scatters, twice of what it adds up.
    """
    received = {False: 0.0, True: 0.0}  # by whether the ring leaves the node

    def receive(num_bytes: float, num_ranks: int, span: int = 0) -> None:
        """Add a ring's share; `span`: of neighboring ranks, if they are more than the ring's."""
        leaves_node = max(num_ranks, span) > GPUS_PER_NODE
        received[leaves_node] += num_bytes * (num_ranks - 1) / num_ranks

    # Weights are gathered, and their float32 gradients scattered; those of an expert over the
    # ranks that have it.
    itemsize = layout.dtype.itemsize
    num_shards = layout.num_shards
    gathered = _gathered_parameters(args, layout)
    parameter_bytes = itemsize * layout.num_gathers + FLOAT32_BYTES
    receive(parameter_bytes * gathered.dense, num_shards)
    receive(parameter_bytes * gathered.experts, num_shards // layout.expert_degree)

    # Replicas add up their float32 shards, in rings over all nodes.
    shard_bytes = FLOAT32_BYTES * num_parameters(args) / num_shards
    num_replicas = layout.world_size // num_shards
    receive(2 * shard_bytes, num_replicas, span=layout.world_size)

    # Rows go to the experts and back, in each pass.
    num_passes = 3 if layout.recomputes else 2
    row_bytes = args.experts_per_token * args.dim * itemsize
    num_moe_layers = args.num_expert_layers
    pass_bytes = 2 * num_moe_layers * layout.tokens * row_bytes
    receive(num_passes * pass_bytes, layout.expert_degree)
    return received[False], received[True]


def step_seconds(counts: StepCounts, gpu: Gpu) -> Range:
    """Return the seconds of a step: slow, likely and fast.

    The device runs its kernels one after the other while the host launches the next ones: the
    slower of the two counts. Exchanges overlap with them, but for the share EXPOSED.
    """
    cases = range(len(Range._fields))
    return Range(*(_step_seconds(counts, gpu, case) for case in cases))


def _step_seconds(counts: StepCounts, gpu: Gpu, case: int) -> float:
    """Return the seconds in one case, an index of Range."""
    speeds = gpu.speeds
    work = counts.work

    # On the device: products, which may wait for memory, then everything else that moves bytes.
    flops_per_s = {
        "bfloat16": speeds.dense_flops[case],
        "float16": speeds.dense_flops[case],
        "float32": speeds.float32_flops[case],
        "grouped": speeds.grouped_flops[case],
        "attention": 2 * speeds.attention_flops[case],  # counted: the whole square
    }
    memory_bytes_per_s = speeds.memory_bytes[case]

    products_s = sum(flops / flops_per_s[kind] for kind, flops in work.flops.items())
    products_s = max(products_s, work.product_bytes / memory_bytes_per_s)
    device_s = products_s + work.bytes_moved / memory_bytes_per_s
    device_s += work.launches * LAUNCH_S[case]

    # On the host.
    host_s = HOST_STEP_S[case] + counts.num_blocks * HOST_BLOCK_S[case]
    host_s += work.launches * HOST_LAUNCH_S[case]

    # Between GPUs.
    exchange_s = counts.node_bytes / speeds.node_bytes[case]
    exchange_s += counts.network_bytes / speeds.network_bytes[case]

    # The slower of host and device, plus what does not overlap; no faster than the exchanges alone.
    busy_s = max(device_s, host_s)
    return max(busy_s + EXPOSED[case] * exchange_s, exchange_s)

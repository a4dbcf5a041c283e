"""Estimate a run's parameters, memory, disk and time, on any machine.

    canon train --config FILE.toml --dry-run [--gpu h100] [--world 8] [--mfu 0.4]

Activations are counted without a GPU: see costs.py. `canon doctor --fake h100 --world N CONFIG`
runs the trainer itself on fake GPUs, and takes a minute.
"""

import contextlib
import functools
import json
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from rich.markup import escape
from rich.table import Table
from torch import nn
from torchtitan.config import TORCH_DTYPE_MAP

from canon_pretrain.core.cli import available_cores
from canon_pretrain.core.errors import UserError, check_choice
from canon_pretrain.core.terminal import Console, duration, size
from canon_pretrain.data.mixture import Mixture
from canon_pretrain.data.shards import ShardError, dtype_for
from canon_pretrain.machine.gpus import GPUS, GPUS_PER_NODE, Gpu, Range, gpu_named, peak_flops
from canon_pretrain.machine.memory import memory_per_process
from canon_pretrain.model.args import ModelArgs
from canon_pretrain.model.attend import Attend
from canon_pretrain.model.counts import (
    active_parameters,
    flops_formula,
    flops_per_token,
    layer_parameters,
    num_parameters,
    state_bytes,
)
from canon_pretrain.run.config import valid_world_sizes
from canon_pretrain.run.sections import Loss
from canon_pretrain.titan.backend_choice import planned_recurrence, recurrence_slowdown
from canon_pretrain.titan.costs import (
    block_bytes,
    compiled_block_costs,
    head_bytes,
    planned_backend,
)
from canon_pretrain.titan.data import open_shards, open_task
from canon_pretrain.titan.device import has_accelerator
from canon_pretrain.titan.job_config import CanonJobConfig, micro_batch_size, shard_degree
from canon_pretrain.titan.muon import update_costs
from canon_pretrain.titan.optimizers import MUON, Group, muon_shapes, num_moments, parameter_groups
from canon_pretrain.titan.parallelize import all_experts
from canon_pretrain.titan.spec import head_loss, on_meta
from canon_pretrain.titan.step_time import count_step, step_seconds
from canon_pretrain.titan.tasks import TaskWindows

GIB = 2**30
DAY_S = 86_400
DEFAULT_MFU = 0.4
MIN_PARAMETERS_FOR_MFU = 50_000_000
"""Below this size kernel launches dominate, and no MFU is assumed."""
CPU_FRACTION = 0.9
"""Of the bytes that a block keeps uncompiled, what it keeps compiled for a CPU: 0.71 to 0.89 of
seven models, 1.11 of GLA."""
# measured: the flavor quickstart on 2 ranks of one core each, 9,000 tokens/s at 6.4 MFLOP per token
CPU_FLOPS_PER_RANK = 3e10
ADVICE = "training.local_batch_size (it changes no result), use more"
SUMMARIZED_KEYS = """num_layers num_heads dim ffn_dim vocab_size max_seq_len norm_eps position
    canon_set qk_norm mixer mixer_conv expand_k expand_v state_dim ffn num_experts
    experts_per_token pattern layers""".split()
SHOWN_WINDOWS = 16
MUON_PART = "Muon's update"
"""What the update of Muon's matrices allocates."""


@dataclass(frozen=True)
class Device:
    """What one rank runs on, and the assumption behind its speed."""

    name: str
    memory_gib: float
    flops_per_s: float
    assumed: str
    is_gpu: bool = True
    gpu: Gpu | None = None
    """Whose speeds a step's time is computed with; None: `flops_per_s` is assumed."""


def reference(gpu: str, mfu: float | None = None) -> Device:
    """Return one of GPUS; `mfu`: assume this MFU instead of computing a step's time."""
    model = GPUS[gpu]
    assumed_mfu = mfu or DEFAULT_MFU
    return Device(
        name=gpu.upper(),
        memory_gib=model.memory_bytes / GIB,
        flops_per_s=assumed_mfu * model.peak_flops,
        assumed=f"{assumed_mfu:.0%} MFU",
        gpu=model if mfu is None else None,
    )


def this_machine(ranks: int, mfu: float | None = None) -> Device:
    """Return this machine's GPU, or a rank's share of the CPU if it has none."""
    if not has_accelerator():
        return Device(
            name="CPU core",
            memory_gib=memory_per_process(ranks) / GIB,
            flops_per_s=CPU_FLOPS_PER_RANK,
            assumed="30 GFLOP/s per core",
            is_gpu=False,
        )

    # An unknown GPU is assumed to be an A100.
    name = torch.cuda.get_device_name()
    assumed_mfu = mfu or DEFAULT_MFU
    owner = "its"
    peak = peak_flops(name)
    if peak is None:
        peak = GPUS["a100"].peak_flops
        owner = "an A100's"
    return Device(
        name=name,
        memory_gib=torch.cuda.get_device_properties(0).total_memory / GIB,
        flops_per_s=assumed_mfu * peak,
        assumed=f"{assumed_mfu:.0%} MFU of {owner} {peak / 1e12:,.0f} TFLOP/s",
        gpu=gpu_named(name) if mfu is None else None,
    )


# -- memory


def count_memory(
    job: CanonJobConfig, model: nn.Module, world_size: int, *, is_gpu: bool = True
) -> dict[str, int]:
    """Return the bytes on one rank by part, at the peak.

    That is in the loss of the last micro-batch or in the first block of its backward pass, when all
    blocks' activations are kept, or at the end of it, when all gradients are there. `model`, the
    job's, may be on the meta device.
    """
    args = job.model_args
    training = job.training
    dtype = TORCH_DTYPE_MAP[training.dtype]
    param_dtype = TORCH_DTYPE_MAP[training.mixed_precision_param]
    micro_batch = micro_batch_size(job, world_size)
    tokens = micro_batch * args.max_seq_len

    # This rank's shard of weights, gradients and moments.
    num_shards = shard_degree(job, world_size)
    parameters = count_parameters(model)
    weight_bytes = -(-parameters.total // num_shards) * dtype.itemsize
    gradient_bytes = -(-parameters.trained // num_shards) * dtype.itemsize
    moment_values = -(-num_moments(parameter_groups(job.optimizer, model)) // num_shards)
    states = {"weights": weight_bytes, "optimizer (moments)": moment_values * dtype.itemsize}

    # FSDP2 gathers the embedding, the head and two blocks at a time, or keeps all blocks.
    # Experts stay split over `degree` ranks.
    degree = job.parallelism.expert_parallel_degree
    end_parameters = parameters.total
    gathered_blocks = []
    for block in model.get_submodule("layers").children():
        block_parameters = count_parameters(block).total
        end_parameters -= block_parameters
        experts = sum(count_parameters(module).total for module in all_experts(block))
        gathered_blocks.append(block_parameters - experts + experts // degree)
    largest_block = max(gathered_blocks)
    if job.parallelism.fsdp_reshard_after_forward != "never":
        gathered_blocks = sorted(gathered_blocks)[-2:]
    gathered_bytes = (end_parameters + sum(gathered_blocks)) * param_dtype.itemsize

    # The loss's peak: the logits of a chunk, their float32 copy and log-softmax. Chunks are equal.
    max_chunk_tokens = job.loss.chunk_tokens or tokens
    num_chunks = -(-tokens // max_chunk_tokens)
    chunk_tokens = -(-tokens // num_chunks)
    # float32 logits are their own copy
    logit_bytes = 8 if param_dtype == torch.float32 else param_dtype.itemsize + 8
    chunk_bytes = chunk_tokens * args.vocab_size * logit_bytes
    saved_head = head_bytes(args, micro_batch, param_dtype, head_loss(job.loss))

    # What the backward graph of a block allocates: for attention, less than the loss needs.
    activations = _activation_bytes(job, micro_batch, param_dtype, is_gpu=is_gpu)
    temporary = 0
    if is_gpu and job.compile.enable:
        for layer in args.kinds.values():
            if layer.recurrent is not None:
                # per token, the values of all heads
                num_channels = layer.num_heads * layer.value_dim
                token_bytes = layer.recurrent.temporary_bytes * num_channels
                temporary = max(temporary, tokens * token_bytes)

    # The three times that may be the peak; earlier micro-batches have left gradients.
    accumulates = training.global_batch_size > micro_batch * world_size
    in_loss = states | {
        "gradients": gradient_bytes if accumulates else 0,
        "gathered by FSDP2": gathered_bytes,
        "activations": activations,
        "loss": max(saved_head, chunk_bytes),
    }
    before_backward = in_loss | {
        "activations": activations + temporary,
        "loss": saved_head,
    }
    after_backward = states | {
        "gradients": gradient_bytes,
        # the last block's gradient is float32 and of all ranks' rows
        "gathered by FSDP2": gathered_bytes + 4 * largest_block,
        "activations": activations // args.num_layers,
        "loss": 0,
    }
    shapes = muon_shapes(job.optimizer, model)
    if not shapes:
        return max(in_loss, before_backward, after_backward, key=_total)

    # With Muon there is a fourth: its update, when the activations are gone.
    costs = update_costs(shapes, num_shards, job.optimizer.muon_ns_steps)
    peaks = [parts | {MUON_PART: 0} for parts in (in_loss, before_backward, after_backward)]
    in_update = dict.fromkeys(peaks[0], 0) | states
    in_update |= {"gradients": gradient_bytes, MUON_PART: round(costs.peak_bytes)}
    return max(*peaks, in_update, key=_total)


def _total(parts: dict[str, int]) -> int:
    return sum(parts.values())


def _activation_bytes(
    job: CanonJobConfig, micro_batch: int, dtype: torch.dtype, *, is_gpu: bool
) -> int:
    """Return the bytes that all blocks keep for backward."""
    args = job.model_args
    tokens = micro_batch * args.max_seq_len
    kept = []
    # fla's kernels are not counted: they keep their inputs too
    recurrence = "chunked" if planned_recurrence(job) == "chunked" else "triton"
    for layer, count in args.layer_counts:
        # blocks with experts on other ranks are compiled in part, and keep 6 % more than a whole
        # one
        if job.compile.enable and is_gpu:
            costs = compiled_block_costs(layer, dtype, planned_backend(job), recurrence)
            per_block = round(costs.kept_bytes * tokens)
        else:
            per_block = block_bytes(layer, micro_batch, dtype)
            if job.compile.enable:
                per_block = round(CPU_FRACTION * per_block)
        if layer.bias_extent and not _has_flex(job, layer, is_gpu=is_gpu):
            # SDPA keeps the bias of each score, flex attention computes it again
            per_block += tokens * layer.num_heads * args.max_seq_len * dtype.itemsize
        kept += [per_block] * count

    # Full checkpointing keeps each block's input, and all of the block that is being recomputed.
    # The norm of the embeddings keeps these.
    input_bytes = tokens * args.dim * dtype.itemsize
    embed_bytes = input_bytes if args.embed_norm else 0
    if job.activation_checkpoint.mode == "full":
        return embed_bytes + args.num_layers * input_bytes + max(kept)
    return embed_bytes + sum(kept)


def _has_flex(job: CanonJobConfig, layer: ModelArgs, *, is_gpu: bool) -> bool:
    """Return whether a layer's attention is flex attention in training."""
    attend = Attend(layer, job.model.attention_backend)
    device = "cuda" if is_gpu else "cpu"
    return attend.implementation(device, masked=layer.document_mask) == "flex"


class ParameterCounts(NamedTuple):
    total: int
    trained: int


def count_parameters(model: nn.Module) -> ParameterCounts:
    parameters = list(model.parameters())
    return ParameterCounts(
        total=sum(p.numel() for p in parameters),
        trained=sum(p.numel() for p in parameters if p.requires_grad),
    )


def check_memory(job: CanonJobConfig, device: Device, world_size: int) -> None:
    """Raise UserError, with the estimate's parts, if it exceeds the memory."""
    args = job.model_args
    memory_bytes = device.memory_gib * GIB
    # Offloaded states, and selective checkpointing, keep less than can be counted here.
    if job.training.enable_cpu_offload or job.activation_checkpoint.mode == "selective":
        return

    # Counting takes seconds: skip it if a bound several times too high fits, of float32 values.
    tokens = micro_batch_size(job, world_size) * job.training.seq_len
    # bounds, not counts: 64 values per channel in a block, 8 per logit, 6 per parameter
    layer_values = 64 * (args.dim + args.ffn_dim)
    for layer in args.kinds.values():
        if layer.bias_extent:  # the learned biases of distances, and of scores
            layer_values += 4 * layer.num_heads * (layer.bias_extent + args.max_seq_len)
    token_values = args.num_layers * layer_values + 8 * args.vocab_size
    num_values = 6 * num_parameters(args) + tokens * token_values
    # float32 values have 4 bytes
    if 4 * num_values < memory_bytes:
        return

    parts = count_memory(job, on_meta(args), world_size, is_gpu=device.is_gpu)
    total = sum(parts.values())
    if total > memory_bytes:
        parts_gib = [f"{name} {part / GIB:.1f}" for name, part in parts.items()]
        parts_text = ", ".join(parts_gib)
        raise UserError(
            "memory.too_small",
            f"each of {world_size} rank(s) needs at least {total / GIB:.1f} GiB ({parts_text}), "
            f"but has {device.memory_gib:.1f} GiB ({device.name}). Lower {ADVICE} ranks, set "
            "--activation_checkpoint.mode full, or train anyway with --force",
            parts=parts,
        )


# -- data


@dataclass(frozen=True)
class Draws:
    """What a whole run draws from one source, on average over data seeds: tokens, or documents."""

    source: str
    drawn: int
    available: int
    unit: str = "tokens"

    @property
    def epochs(self) -> float:
        return self.drawn / self.available

    def text(self) -> str:
        precision = ",.1f" if self.epochs >= 10 else ".2g"
        draws = f"{self.drawn:,} {self.unit} drawn of {self.available:,}"
        return f"{self.epochs:{precision}} of {self.source} ({draws})"


def count_draws(job: CanonJobConfig, data: Mixture) -> list[Draws]:
    """Return the draws of training.steps steps from each source of `data`."""
    if job.data.order == "documents":  # a window each, of one folder
        documents = job.training.steps * job.training.global_batch_size
        available = data.sources[0].num_documents
        return [Draws(data.names[0], documents, available, unit="documents")]

    tokens = job.training.steps * job.tokens_per_step
    return [
        Draws(
            source=name,
            drawn=round(share * tokens),
            available=source.num_tokens,
        )
        for name, share, source in zip(data.names, data.shares, data.sources, strict=True)
    ]


# -- plans


class Plan:
    """Resources of `job` on `world_size` ranks. Raises UserError for a bad world size."""

    def __init__(self, job: CanonJobConfig, device: Device, world_size: int) -> None:
        training = job.training
        self.job = job
        self.device = device
        self.world_size = world_size
        self.tokens = training.steps * job.tokens_per_step

        # The data on disk. Without any yet, the run needs as much as it draws.
        stored_tokens = self.tokens
        self.data_fingerprint = ""
        self.data_vocab_size: int | None = None  # unknown
        self.epochs = ["no data yet"]
        self.windows = open_task(job)
        if self.windows is not None:
            stored_tokens = 0
            self.data_fingerprint = self.windows.fingerprint
            self.epochs = []  # a task has no end
        with contextlib.suppress(ShardError):  # no data yet; data that do not fit raise UserError
            if job.data.folders:
                with open_shards(job) as data:
                    stored_tokens = data.num_tokens
                    self.data_fingerprint = data.fingerprint
                    self.data_vocab_size = data.vocab_size
                    self.epochs = [draws.text() for draws in count_draws(job, data)]

        args = job.model_args  # open_shards() has set vocab_size
        self.data_bytes = (
            stored_tokens * dtype_for(self.data_vocab_size or args.vocab_size).itemsize
        )
        self.flops_per_token = flops_per_token(args, training.seq_len)
        self.micro_batch = micro_batch_size(job, world_size)

        # Checkpoints: the weights, and the moments of those that are trained.
        model = on_meta(args)
        self.groups = parameter_groups(job.optimizer, model)
        self.parameters, self.trained = count_parameters(model)
        itemsize = TORCH_DTYPE_MAP[training.dtype].itemsize
        num_values = self.parameters + num_moments(self.groups)
        self.checkpoint_bytes = num_values * itemsize
        num_saves = -(-training.steps // job.checkpoint.interval)
        self.checkpoints_kept = min(job.checkpoint.keep_latest_k or num_saves, num_saves)

    @functools.cached_property
    def step_seconds(self) -> Range:
        """Seconds of a step: slow, likely and fast, if the planned kernels pass their checks.

        Computing them takes seconds.
        """
        if self.gpu is None:
            flops_per_s = self.world_size * self.device.flops_per_s
            seconds = self.job.tokens_per_step * self.flops_per_token / flops_per_s
            return Range(seconds, seconds, seconds)
        return self._step_seconds(self.recurrence)

    @property
    def chunked_seconds(self) -> float:
        """The likely seconds of the whole run with recurrences in the chunked form."""
        assert self.gpu is not None, "only a computed time depends on the form"
        return self._step_seconds("chunked").likely * self.job.training.steps

    def _step_seconds(self, recurrence: str) -> Range:
        """Return `step_seconds` with recurrences by this backend."""
        assert self.gpu is not None
        if recurrence == "fla":  # its kernels are not counted: a computed share of the chunked time
            share = recurrence_slowdown(self.job.model_args, "fla", over="chunked")
            return Range(*(share * seconds for seconds in self._step_seconds("chunked")))
        counts = count_step(self.job, self.world_size, recurrence or "chunked")
        return step_seconds(counts, self.gpu)

    @property
    def recurrence(self) -> str:
        """The planned backend of recurrences; "" for a model that has none."""
        has_recurrence = any(layer.recurrent for layer in self.job.model_args.kinds.values())
        return planned_recurrence(self.job) if has_recurrence else ""

    @property
    def gpu(self) -> Gpu | None:
        """Whose speeds the time is computed with; None: it is assumed, as for uncompiled blocks."""
        mode = self.job.activation_checkpoint.mode
        if not self.job.compile.enable or mode not in ("none", "full"):
            return None
        return self.device.gpu

    @property
    def seconds(self) -> float:
        """The likely seconds of the whole run."""
        return self.step_seconds.likely * self.job.training.steps

    @property
    def mfu(self) -> float | None:
        """The computed MFU; None if the time is not computed."""
        if self.gpu is None:
            return None
        flops_per_s = self.tokens * self.flops_per_token / self.seconds
        return flops_per_s / self.world_size / self.gpu.peak_flops

    @functools.cached_property
    def memory(self) -> dict[str, int]:
        """The result of `count_memory`, which takes seconds."""
        model = on_meta(self.job.model_args)
        return count_memory(self.job, model, self.world_size, is_gpu=self.device.is_gpu)

    @property
    def fits(self) -> bool:
        return sum(self.memory.values()) <= self.device.memory_gib * GIB


def make_plans(
    job: CanonJobConfig, gpu: str | None, world: int | None, mfu: float | None, ranks: int
) -> dict[str, Plan]:
    """Return plans by title: this machine and, if requested or needed, the reference GPU.

    `gpu`, `world` and `mfu` are the options of --dry-run; `ranks` is the world size of this launch.
    """
    wants_reference = gpu is not None or world is not None
    gpu = (gpu or "h100").lower()
    check_choice("--gpu", gpu, GPUS)
    mfu_is_valid = mfu is None or 0 < mfu <= 1
    world_is_valid = world is None or world >= 1
    if not mfu_is_valid or not world_is_valid:
        raise UserError(
            "option.invalid",
            f"--mfu {mfu} --world {world}: expected a fraction up to 1, and at least 1 rank",
        )

    # A single rank plans for all devices of this machine, as far as the global batch divides.
    sizes = world_sizes(job)
    if ranks == 1:
        devices = torch.cuda.device_count() if has_accelerator() else available_cores()
        ranks = _largest_size(sizes, devices)
    here = Plan(job, this_machine(ranks, mfu), ranks)
    plans = {"this machine": here}

    if wants_reference or here.seconds > DAY_S or not here.fits:
        world = world or _largest_size(sizes, GPUS_PER_NODE)
        plans["reference"] = Plan(job, reference(gpu, mfu), world)
    return plans


def _largest_size(sizes: list[int], limit: int) -> int:
    """Return the largest of `sizes` up to `limit`, or the first one if all are larger."""
    return max((size for size in sizes if size <= limit), default=sizes[0])


def world_sizes(job: CanonJobConfig) -> list[int]:
    """Return the valid world sizes of `job`. Raises UserError if there are none."""
    # ranks come in whole replicas, each of whole groups that share the experts
    layout = job.parallelism
    step = layout.data_parallel_replicate_degree * layout.expert_parallel_degree
    sizes = valid_world_sizes(job.training.global_batch_size, step)
    if not sizes:
        micro_batch_size(job, step)  # raises, and names the keys
    return sizes


def startup_notes(
    job: CanonJobConfig, data: Mixture | TaskWindows, device: Device, world_size: int
) -> Iterator[str]:
    """Yield the epochs over the data, and warnings about idle GPUs and runs of over a week."""
    if isinstance(data, Mixture):
        epochs = [draws.text() for draws in count_draws(job, data)]
        yield f"epochs over the data: {'; '.join(epochs)}"

    ranks = int(os.environ["LOCAL_WORLD_SIZE"])
    num_gpus = torch.cuda.device_count()
    if has_accelerator() and ranks < num_gpus:
        yield f"this run uses {ranks} of the {num_gpus} GPUs of this node (--nproc-per-node)"

    tokens = job.last_step * job.tokens_per_step
    flops = tokens * flops_per_token(job.model_args, job.training.seq_len)
    days = flops / (world_size * device.flops_per_s) / DAY_S
    if days > 7:
        yield (
            f"this run takes about {days:,.0f} days, assuming {device.assumed}; "
            "--dry-run computes the time"
        )


# -- what is printed


def print_plans(job: CanonJobConfig, plans: dict[str, Plan], console: Console) -> None:
    """Print the summary of a job, the memory of each plan by part, and how both were counted."""
    # What the job is, and how long it takes.
    console.print(f"[bold]{job.job.description}[/bold]  (dry run)")
    summary = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    summary.add_column(style="cyan")
    for title, text in _summary(job, plans).items():
        summary.add_row(title, text)
    console.print(summary)
    groups = next(iter(plans.values())).groups
    if len(groups) > 1 or job.optimizer.groups:
        console.print(_group_table(groups, job.optimizer.muon_momentum))

    # A column per plan, a row per part.
    memory = Table("part", title="memory per rank, GiB", title_justify="left")
    columns = []
    available = []
    for title, plan in plans.items():
        memory.add_column(title, justify="right")
        total = sum(plan.memory.values())
        columns.append(plan.memory | {"sum": total})
        available.append(f"{plan.device.memory_gib:.1f}")
    for part in columns[0]:
        cells = [f"{column[part] / GIB:.2f}" for column in columns]
        memory.add_row(part, *cells)
    memory.add_row("available", *available)
    console.print(memory)

    # What the figures are worth.
    console.print(
        "counted, not measured: without fragmentation, NCCL's buffers, and what kernels allocate"
    )
    if any(plan.gpu for plan in plans.values()):
        console.print(
            "time: computed from products, bytes, launches and exchanges with assumed speeds "
            "(machine/gpus.py); --mfu 0.4 assumes an MFU instead"
        )
    too_small = [title for title, plan in plans.items() if not plan.fits]
    if too_small:
        console.print(
            f"[bold]exceeds the memory[/bold] ({', '.join(too_small)}): lower {ADVICE} GPUs, "
            "or --activation_checkpoint.mode full"
        )


def _summary(job: CanonJobConfig, plans: dict[str, Plan]) -> dict[str, str]:
    """Return the lines above the table of memory, by title: the job, then the pace of each plan."""
    args = job.model_args
    plan = next(iter(plans.values()))  # what does not depend on the device is equal in all
    steps = job.training.steps

    parameters = f"{plan.parameters:,}"
    if plan.trained != plan.parameters:
        parameters = f"{parameters}, {plan.trained:,} trained"
    num_active = active_parameters(args)
    if num_active != num_parameters(args):
        parameters = f"{parameters}, {num_active:,} active per token"

    lines = {
        **_model_lines(job),
        "parameters": f"{parameters}, {_parameters_per_layer(args):.3f} D^2 per layer",
        "FLOPs per token": f"{_abbreviate(plan.flops_per_token)} by {flops_formula(args)}",
        "decoding holds": _decoding_state(args),
        "steps": f"{steps:,} of {job.tokens_per_step:,} tokens: {_abbreviate(plan.tokens)} tokens",
        "valid world sizes": ", ".join(map(str, world_sizes(job))),
    }
    for title, device_plan in plans.items():
        lines[title] = _pace(job, device_plan)
    lines |= _data_lines(job, plan)

    itemsize = dtype_for(args.vocab_size).itemsize
    no_data = f"no data yet; {itemsize} bytes per token drawn"
    lines["data fingerprint"] = plan.data_fingerprint or no_data
    # an old checkpoint is deleted only once the new one is complete
    total_bytes = (plan.checkpoints_kept + 1) * plan.checkpoint_bytes
    lines["disk for checkpoints"] = (
        f"{plan.checkpoints_kept} + 1 being written, "
        f"{size(plan.checkpoint_bytes)} each: {size(total_bytes)}"
    )
    return lines


def _group_table(groups: list[Group], momentum: float) -> Table:
    """Return a row for each group of parameters that are updated alike; `momentum`: of Muon."""
    table = Table("group", "optimizer", title="the optimizer's groups", title_justify="left")
    for title in ("parameters", "learning rate", "weight decay", "betas"):
        table.add_column(title, justify="right")
    for group in groups:
        betas = (momentum,) if group.optimizer == MUON else group.betas
        table.add_row(
            escape(group.title) or "others",
            group.optimizer,
            f"{group.num_values:,}",
            f"{group.lr:g}",
            f"{group.weight_decay:g}",
            ", ".join(f"{beta:g}" for beta in betas),
        )
    return table


def _model_lines(job: CanonJobConfig) -> dict[str, str]:
    """Return the line of the model, and one of each kind of layer if layers differ."""
    args = job.model_args
    settings = _changed_settings(job.loss)
    if not args.pattern:
        texts = [
            f"{args.num_layers} layers",
            f"{args.num_heads} heads",
            f"hidden {args.dim}",
            *_layer_texts(args),
            *settings,
        ]
        return {"model": f"{job.model.flavor}: {', '.join(texts)}"}

    counts = Counter(args.layer_names)
    layer_counts = [f"{count} {name}" for name, count in counts.items()]
    pattern = ", ".join(layer_counts)
    texts = [
        f"{job.model.flavor}: {args.num_layers} layers ({pattern})",
        f"hidden {args.dim}",
        *settings,
    ]
    lines = {"model": ", ".join(texts)}
    for name, layer in args.kinds.items():
        parameters = layer_parameters(layer) / args.dim**2
        texts = [f"{layer.num_heads} heads", *_layer_texts(layer), f"{parameters:.3f} D^2"]
        lines[f"layer {name}"] = ", ".join(texts)
    return lines


def _parameters_per_layer(args: ModelArgs) -> float:
    """Return the parameters of a layer over D^2, a mean over the layers."""
    total = sum(map(layer_parameters, args.layer_args))
    return total / args.num_layers / args.dim**2


def _feed_forward(args: ModelArgs) -> str:
    match args.ffn:
        case "none":
            return "no feed-forward"
        case "moe":
            return (
                f"{args.num_experts} experts, {args.experts_per_token} per token, "
                f"of F {args.ffn_dim}"
            )
        case "standard":
            return f"standard F {args.ffn_dim}"
    return f"F {args.ffn_dim}"


def _layer_texts(args: ModelArgs) -> list[str]:
    """Return a layer's feed-forward, mixer, position and Canon set, and what is no default."""
    canon = f"Canon-{args.canon_set}" if args.canon_set else "no Canon"
    if args.mixer == "attention":
        variant = [args.position, canon, f"QK-norm {args.qk_norm}"]
    elif args.is_own_mixer:
        variant = [args.mixer, canon]
    else:
        states = f"states {args.key_dim} x {args.value_dim}"
        conv = "conv1d" if args.mixer_conv else "no conv1d"
        variant = [args.mixer, states, conv, canon]
    return [_feed_forward(args), *variant, *_changed_settings(args)]


def _changed_settings(section: ModelArgs | Loss) -> list[str]:
    """Return the fields that differ from their defaults, except those with texts of their own."""
    texts = []
    for name, value in vars(section).items():
        if name not in SUMMARIZED_KEYS and value != getattr(type(section), name):
            texts.append(f"{name} = {json.dumps(value)}")
    return texts


def _decoding_state(args: ModelArgs) -> str:
    per_token, per_sequence = state_bytes(args, torch.bfloat16.itemsize)
    texts = []
    if per_sequence:
        texts.append(f"{size(per_sequence)} per sequence")
    if per_token:
        texts.append(f"{size(per_token)} per token in bfloat16")
    return " and ".join(texts)


def _data_lines(job: CanonJobConfig, plan: Plan) -> dict[str, str]:
    """Return the lines about the data, by title: of a task, or of shards."""
    if plan.windows is not None:
        task = plan.windows.task
        settings = [f"{key} = {json.dumps(value)}" for key, value in task.settings.items()]
        # ignored labels are negative
        sample = plan.windows.windows(job.data.data_seed, 0, SHOWN_WINDOWS)
        # the first column has no token before it to predict it
        label_share = np.mean(sample[:, 1:] >= 0)
        return {
            "task": f"{task.name}: {', '.join(settings)}",
            "labels": f"{label_share:.1%} of tokens; ids below {task.vocab_size}",
        }

    folders = ", ".join(job.data.folders) or "data.path unset"
    lines = {
        "disk for data": f"{size(plan.data_bytes)} ({folders})",
        "epochs over the data": "; ".join(plan.epochs),
    }
    vocab_size = job.model_args.vocab_size
    if plan.data_vocab_size not in (None, vocab_size):
        lines["vocabulary"] = f"{vocab_size:,}, {plan.data_vocab_size:,} of them in the data"
    return lines


def _pace(job: CanonJobConfig, plan: Plan) -> str:
    """Return the ranks of a plan and the estimated time."""
    device = plan.device
    ranks = f"{plan.world_size} x {device.name}"
    replicas = job.parallelism.data_parallel_replicate_degree
    if replicas > 1:
        ranks = f"{ranks} ({replicas} replicas)"
    micro_batch = f"{plan.micro_batch} x {job.training.seq_len} tokens"
    ranks = f"{ranks}, {micro_batch} per rank at once"
    if device.is_gpu and plan.gpu is None and plan.parameters < MIN_PARAMETERS_FOR_MFU:
        return f"{ranks}: no time estimate, the model is too small to fill a GPU"

    time = duration(plan.seconds)
    if device.is_gpu:
        gpu_hours = plan.seconds / 3600 * plan.world_size
        time = f"{time} ({gpu_hours:,.1f} GPU-hours)"
    tokens_per_s = plan.tokens / plan.seconds
    time = f"{time}, {tokens_per_s:,.0f} tokens/s"
    if plan.gpu is None:
        return f"{ranks}: {time}, assuming {device.assumed}"

    slow, likely, fast = map(_milliseconds, plan.step_seconds)
    step_time = f"{likely} per step ({fast} to {slow})"
    text = f"{ranks}: {time}, {step_time}, MFU {plan.mfu:.0%}, computed"
    if plan.recurrence not in ("", "chunked"):
        text = f"{text} with {plan.recurrence}; by chunks {duration(plan.chunked_seconds)}"
    return text


def _milliseconds(seconds: float) -> str:
    digits = 0 if seconds >= 0.1 else 1
    return f"{1000 * seconds:,.{digits}f} ms"


def _abbreviate(value: float) -> str:
    if value >= 1e9:
        return f"{value / 1e9:,.2f} billion"
    return f"{value / 1e6:,.2f} million"

"""Estimate a run's parameters, memory, disk and time, on any machine.

    canon train --config FILE.toml --dry-run [--gpu h100] [--world 8] [--mfu 0.4]

Activations are counted without a GPU: see costs.py. `canon doctor --fake h100 --world N CONFIG`
runs the trainer itself on fake GPUs, and takes a minute.
"""

import contextlib
import functools
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from rich.table import Table
from torch import nn
from torchtitan.config import TORCH_DTYPE_MAP

from canon_pretrain.core.cli import available_cores
from canon_pretrain.core.errors import UserError, check_choice
from canon_pretrain.core.terminal import Console, duration, size
from canon_pretrain.data.mixture import Mixture
from canon_pretrain.data.shards import ShardError, dtype_for
from canon_pretrain.machine.gpus import GPUS, Gpu, Range, gpu_named, peak_flops
from canon_pretrain.machine.memory import memory_per_process
from canon_pretrain.model.args import ModelArgs
from canon_pretrain.model.counts import (
    active_parameters,
    flops_formula,
    flops_per_token,
    layer_parameters,
    num_parameters,
    state_bytes,
)
from canon_pretrain.model.transformer import Transformer
from canon_pretrain.run.config import valid_world_sizes
from canon_pretrain.run.sections import Loss
from canon_pretrain.titan.costs import (
    block_bytes,
    compiled_block_costs,
    head_bytes,
    planned_backend,
)
from canon_pretrain.titan.data import open_shards, open_task
from canon_pretrain.titan.device import has_accelerator
from canon_pretrain.titan.job_config import CanonJobConfig, micro_batch_size, shard_degree
from canon_pretrain.titan.parallelize import CHUNKED_SLOWDOWN, all_experts
from canon_pretrain.titan.spec import head_loss
from canon_pretrain.titan.step_time import StepCounts, count_step, step_seconds
from canon_pretrain.titan.tasks import TaskWindows

GIB = 2**30
DAY_S = 86_400
DEFAULT_MFU = 0.4
MIN_PARAMETERS_FOR_MFU = 50_000_000
"""Below this size kernel launches dominate, and no MFU is assumed."""
TEMPORARY_BYTES = {"gla": 66, "mamba2": 28, "gated_deltanet": 37}
"""Per token and channel of the values, in the backward graph of a chunked recurrence: counted by
the trainer on fake GPUs at 1.3B, 63 to 69, 24 to 31 and 36 to 38."""
CPU_FRACTION = 0.9
"""Of the bytes that a block keeps uncompiled, what it keeps compiled for a CPU: 0.71 to 0.89 of
seven models, 1.11 of GLA."""
# measured: the flavor quickstart on 2 ranks of one core each, 9,000 tokens/s at 6.4 MFLOP per token
CPU_FLOPS_PER_RANK = 3e10
ADVICE = "training.local_batch_size (it changes no result), use more"
SUMMARIZED_KEYS = """num_layers num_heads dim ffn_dim vocab_size max_seq_len norm_eps position
    canon_set qk_norm mixer mixer_conv expand_k expand_v state_dim ffn num_experts
    experts_per_token""".split()
SHOWN_WINDOWS = 16


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
    known = GPUS[gpu]
    assumed = DEFAULT_MFU if mfu is None else mfu
    return Device(
        name=gpu.upper(),
        memory_gib=known.memory_bytes / GIB,
        flops_per_s=assumed * known.peak_flops,
        assumed=f"{assumed:.0%} MFU",
        gpu=known if mfu is None else None,
    )


def this_machine(ranks: int, mfu: float | None = None) -> Device:
    """Return this machine's GPU, or a rank's share of the CPU if it has none."""
    if not has_accelerator():
        memory = memory_per_process(ranks) / GIB
        return Device("CPU core", memory, CPU_FLOPS_PER_RANK, "30 GFLOP/s per core", is_gpu=False)
    name = torch.cuda.get_device_name()
    assumed = DEFAULT_MFU if mfu is None else mfu
    peak, whose = peak_flops(name), "its"
    if peak is None:
        peak, whose = GPUS["a100"].peak_flops, "an A100's"
    return Device(
        name=name,
        memory_gib=torch.cuda.get_device_properties(0).total_memory / GIB,
        flops_per_s=assumed * peak,
        assumed=f"{assumed:.0%} MFU of {whose} {peak / 1e12:,.0f} TFLOP/s",
        gpu=gpu_named(name) if mfu is None else None,
    )


def count_memory(
    job: CanonJobConfig, model: nn.Module, world_size: int, *, is_gpu: bool = True
) -> dict[str, int]:
    """Return the bytes on one rank by part, at the peak.

    That is in the loss of the last micro-batch or in the first block of its backward pass, when all
    blocks' activations are kept, or at the end of it, when all gradients are there. `model`, the
    job's, may be on the meta device.
    """
    args, training, loss = job.model_args, job.training, job.loss
    dtype = TORCH_DTYPE_MAP[training.dtype]
    param_dtype = TORCH_DTYPE_MAP[training.mixed_precision_param]
    num_shards = shard_degree(job, world_size)
    micro_batch = micro_batch_size(job, world_size)
    parameters, trained = count_parameters(model)
    shard, trained_shard = (
        -(-count // num_shards) * dtype.itemsize for count in (parameters, trained)
    )
    states = {"weights": shard, "optimizer (two moments)": 2 * trained_shard}

    # expert weights are split over `degree` ranks
    degree = job.parallelism.expert_parallel_degree
    block = model.get_submodule("layers.0")
    experts = sum(p.numel() for module in all_experts(block) for p in module.parameters())
    block_parameters = count_parameters(block)[0] - (experts - experts // degree)
    end_parameters = parameters - args.num_layers * count_parameters(block)[0]
    keeps_all = job.parallelism.fsdp_reshard_after_forward == "never"
    # else two blocks, the embedding and the head are gathered at a time
    gathered_blocks = args.num_layers if keeps_all else min(2, args.num_layers)
    gathered = (end_parameters + gathered_blocks * block_parameters) * param_dtype.itemsize

    tokens = micro_batch * args.max_seq_len
    activations = _activation_bytes(job, micro_batch, param_dtype, is_gpu=is_gpu)
    # the loss's peak: a chunk's logits, their float32 copy and log-softmax
    chunk_tokens = -(-tokens // -(-tokens // (loss.chunk_tokens or tokens)))
    logit_bytes = 8 if param_dtype == torch.float32 else param_dtype.itemsize + 8
    logits = chunk_tokens * args.vocab_size * logit_bytes
    saved_head = head_bytes(args, micro_batch, param_dtype, head_loss(loss))
    temporary = 0  # less than the loss needs
    if args.mixer in TEMPORARY_BYTES:
        temporary = TEMPORARY_BYTES[args.mixer] * tokens * args.num_heads * args.value_dim
    accumulates = training.global_batch_size > micro_batch * world_size

    in_loss = states | {
        "gradients": trained_shard if accumulates else 0,
        "gathered by FSDP2": gathered,
        "activations": activations,
        "loss": max(saved_head, logits),
    }
    before_backward = in_loss | {
        "activations": activations + (temporary if is_gpu and job.compile.enable else 0),
        "loss": saved_head,
    }
    after_backward = states | {
        "gradients": trained_shard,
        # the last block's gradient is float32 and of all ranks' rows
        "gathered by FSDP2": gathered + 4 * block_parameters,
        "activations": activations // args.num_layers,
        "loss": 0,
    }
    moments = (in_loss, before_backward, after_backward)
    return max(moments, key=lambda parts: sum(parts.values()))


def _activation_bytes(
    job: CanonJobConfig, micro_batch: int, dtype: torch.dtype, *, is_gpu: bool
) -> int:
    """Return the bytes that all blocks keep for backward."""
    args = job.model_args
    tokens = micro_batch * args.max_seq_len
    # blocks with experts on other ranks are compiled in part, and keep 6 % more than a whole one
    compiled = job.compile.enable
    if compiled and is_gpu:
        costs = compiled_block_costs(args, dtype, planned_backend(job))
        block = round(costs.kept_bytes * tokens)
    else:
        block = block_bytes(args, micro_batch, dtype)
        if compiled:
            block = round(CPU_FRACTION * block)
    if job.activation_checkpoint.mode == "full":
        return args.num_layers * tokens * args.dim * dtype.itemsize + block
    return args.num_layers * block


def count_parameters(model: nn.Module) -> tuple[int, int]:
    """Return the numbers of all and of trained parameters."""
    parameters = [*model.parameters()]
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    return sum(p.numel() for p in parameters), sum(p.numel() for p in trained)


def check_memory(job: CanonJobConfig, device: Device, world_size: int) -> None:
    """Raise UserError, with the estimate's parts, if it exceeds the memory."""
    room, args = device.memory_gib * GIB, job.model_args
    # counting takes seconds: skip it if a bound several times too high fits
    tokens = micro_batch_size(job, world_size) * job.training.seq_len
    values = tokens * (64 * args.num_layers * (args.dim + args.ffn_dim) + 8 * args.vocab_size)
    if job.training.enable_cpu_offload or 4 * (6 * num_parameters(args) + values) < room:
        return
    if job.activation_checkpoint.mode == "selective":  # which keeps less than can be counted here
        return
    parts = count_memory(job, on_meta(args), world_size, is_gpu=device.is_gpu)
    if (total := sum(parts.values())) > room:
        each = ", ".join(f"{name} {num_bytes / GIB:.1f}" for name, num_bytes in parts.items())
        raise UserError(
            "memory.too_small",
            f"each of {world_size} rank(s) needs at least {total / GIB:.1f} GiB ({each}), but "
            f"has {device.memory_gib:.1f} GiB ({device.name}). Lower {ADVICE} ranks, set "
            "--activation_checkpoint.mode full, or train anyway with --force",
            parts=parts,
        )


def on_meta(args: ModelArgs) -> Transformer:
    with torch.device("meta"):
        return Transformer(args)


@dataclass(frozen=True)
class Draws:
    """The tokens that a whole run draws from one source, on average over data seeds."""

    source: str
    drawn: int
    available: int

    @property
    def epochs(self) -> float:
        return self.drawn / self.available

    def text(self) -> str:
        epochs = f"{self.epochs:,.1f}" if self.epochs >= 10 else f"{self.epochs:.2g}"
        return f"{epochs} of {self.source} ({self.drawn:,} tokens drawn of {self.available:,})"


def count_draws(job: CanonJobConfig, data: Mixture) -> list[Draws]:
    """Return the draws of training.steps steps from each source of `data`."""
    training = job.training
    tokens = training.steps * training.global_batch_size * training.seq_len
    return [
        Draws(name, round(share * tokens), source.num_tokens)
        for name, share, source in zip(data.names, data.shares, data.sources, strict=True)
    ]


class Plan:
    """Resources of `job` on `world_size` ranks. Raises UserError for a bad world size."""

    def __init__(self, job: CanonJobConfig, device: Device, world_size: int) -> None:
        training = job.training
        self.job, self.device, self.world_size = job, device, world_size
        self.tokens = training.steps * training.global_batch_size * training.seq_len
        drawn, self.data_fingerprint = self.tokens, ""
        self.epochs = ["no data yet"]
        self.data_vocab_size: int | None = None  # unknown
        self.windows = open_task(job)
        if self.windows is not None:
            drawn, self.data_fingerprint = 0, self.windows.fingerprint
            self.epochs = []  # a task has no end
        with contextlib.suppress(ShardError):  # no data yet; data that do not fit raise UserError
            if job.data.folders:
                with open_shards(job) as data:
                    drawn, self.data_fingerprint = data.num_tokens, data.fingerprint
                    self.epochs = [draws.text() for draws in count_draws(job, data)]
                    self.data_vocab_size = data.vocab_size
        args = job.model_args  # open_shards() has set vocab_size
        model = on_meta(args)
        self.parameters, self.trained = count_parameters(model)
        self.micro_batch = micro_batch_size(job, world_size)
        itemsize = TORCH_DTYPE_MAP[training.dtype].itemsize
        self.checkpoint_bytes = (self.parameters + 2 * self.trained) * itemsize
        saves = -(-training.steps // job.checkpoint.interval)
        self.checkpoints_kept = min(job.checkpoint.keep_latest_k or saves, saves)
        self.data_bytes = drawn * dtype_for(self.data_vocab_size or args.vocab_size).itemsize
        self.flops_per_token = flops_per_token(args, training.seq_len)

    @functools.cached_property
    def step_seconds(self) -> Range:
        """Seconds of a step: slow, likely and fast; a recurrence runs in fla if it may.

        Computing them takes seconds.
        """
        if self.gpu is None:
            flops_per_s = self.world_size * self.device.flops_per_s
            seconds = self.tokens / self.job.training.steps * self.flops_per_token / flops_per_s
            return Range(seconds, seconds, seconds)
        return step_seconds(self._counts, self.gpu, speedup=self.fla_speedup)

    @property
    def chunked_seconds(self) -> float:
        """The likely seconds of the whole run with recurrences in the chunked form."""
        if self.gpu is None:
            return self.seconds
        return step_seconds(self._counts, self.gpu).likely * self.job.training.steps

    @functools.cached_property
    def _counts(self) -> StepCounts:
        return count_step(self.job, self.world_size)

    @property
    def gpu(self) -> Gpu | None:
        """Whose speeds the time is computed with; None: it is assumed, as for uncompiled blocks."""
        job = self.job
        is_counted = job.compile.enable and job.activation_checkpoint.mode in ("none", "full")
        return self.device.gpu if is_counted else None

    @property
    def fla_speedup(self) -> float:
        """Estimated speed of fla over the chunked form, 1 for a model that does not use fla."""
        if self.job.model.mixer_backend == "chunked":
            return 1.0
        return CHUNKED_SLOWDOWN.get(self.job.model_args.mixer, 1.0)

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
    """Return plans by title: this machine and, if requested or needed, the reference GPU."""
    asked = gpu is not None or world is not None
    gpu = (gpu or "h100").lower()
    check_choice("--gpu", gpu, GPUS)
    if mfu is not None and not 0 < mfu <= 1 or world is not None and world < 1:
        raise UserError(
            "option.invalid",
            f"--mfu {mfu} --world {world}: expected a fraction up to 1, and at least 1 rank",
        )
    sizes = world_sizes(job)
    devices = torch.cuda.device_count() if has_accelerator() else available_cores()
    if ranks == 1:
        ranks = max((n for n in sizes if n <= devices), default=sizes[0])
    plans = {"this machine": (here := Plan(job, this_machine(ranks, mfu), ranks))}
    if asked or here.seconds > DAY_S or not here.fits:
        world = world or max((n for n in sizes if n <= 8), default=sizes[0])
        plans["reference"] = Plan(job, reference(gpu, mfu), world)
    return plans


def world_sizes(job: CanonJobConfig) -> list[int]:
    """Return the valid world sizes of `job`. Raises UserError if there are none."""
    layout = job.parallelism
    step = layout.data_parallel_replicate_degree * layout.expert_parallel_degree
    sizes = valid_world_sizes(job.training.global_batch_size, step)
    if not sizes:
        micro_batch_size(job, step)
    return sizes


def startup_notes(
    job: CanonJobConfig, data: Mixture | TaskWindows, device: Device, world_size: int
) -> Iterator[str]:
    """Yield the epochs over the data, and warnings about idle GPUs and runs of over a week."""
    if isinstance(data, Mixture):
        epochs = [draws.text() for draws in count_draws(job, data)]
        yield f"epochs over the data: {'; '.join(epochs)}"
    ranks, devices = int(os.environ["LOCAL_WORLD_SIZE"]), torch.cuda.device_count()
    if has_accelerator() and ranks < devices:
        yield f"this run uses {ranks} of the {devices} GPUs of this node (--nproc-per-node)"
    training = job.training
    tokens = job.last_step * training.global_batch_size * training.seq_len
    flops = tokens * flops_per_token(job.model_args, training.seq_len)
    if (days := flops / (world_size * device.flops_per_s) / DAY_S) > 7:
        yield (
            f"this run takes about {days:,.0f} days, assuming {device.assumed}; "
            "--dry-run computes the time"
        )


def print_plans(job: CanonJobConfig, plans: dict[str, Plan], console: Console) -> None:
    console.print(f"[bold]{job.job.description}[/bold]  (dry run)")
    facts = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    facts.add_column(style="cyan")
    for name, value in _facts(job, plans).items():
        facts.add_row(name, value)
    console.print(facts)
    memory = Table("part", title="memory per rank, GiB", title_justify="left")
    for title in plans:
        memory.add_column(title, justify="right")
    columns = [plan.memory | {"sum": sum(plan.memory.values())} for plan in plans.values()]
    for name in columns[0]:
        memory.add_row(name, *(f"{column[name] / GIB:.2f}" for column in columns))
    memory.add_row("available", *(f"{plan.device.memory_gib:.1f}" for plan in plans.values()))
    console.print(memory)
    console.print(
        "counted, not measured: without fragmentation, NCCL's buffers, and what kernels allocate"
    )
    if any(plan.gpu for plan in plans.values()):
        console.print(
            "time: computed from products, bytes, launches and exchanges with assumed speeds "
            "(kernels/gpus.py); --mfu 0.4 assumes an MFU instead"
        )
    if too_small := ", ".join(title for title, each in plans.items() if not each.fits):
        console.print(
            f"[bold]exceeds the memory[/bold] ({too_small}): lower {ADVICE} GPUs, "
            "or --activation_checkpoint.mode full"
        )


def _facts(job: CanonJobConfig, plans: dict[str, Plan]) -> dict[str, str]:
    """Return what the plans of a job have in common, and the pace of each, by title."""
    args = job.model_args
    plan = next(iter(plans.values()))
    steps = job.training.steps
    trained = f", {plan.trained:,} trained" if plan.trained != plan.parameters else ""
    num_active = active_parameters(args)
    active = f", {num_active:,} active per token" if num_active != num_parameters(args) else ""
    num_saved = plan.checkpoints_kept + 1
    itemsize = dtype_for(args.vocab_size).itemsize
    return {
        "model": f"{job.model.flavor}: {args.num_layers} layers, {args.num_heads} heads, "
        f"hidden {args.dim}, {_feed_forward(args)}, {', '.join(_variant(job))}",
        "parameters": f"{plan.parameters:,}{trained}{active}, "
        f"{layer_parameters(args) / args.dim**2:.3f} D^2 per layer",
        "FLOPs per token": f"{_abbreviate(plan.flops_per_token)} by {flops_formula(args)}",
        "decoding holds": _decoding_state(args),
        "steps": f"{steps:,} of {plan.tokens // steps:,} tokens: {_abbreviate(plan.tokens)} tokens",
        "valid world sizes": ", ".join(map(str, world_sizes(job))),
        **{title: _pace(job, each) for title, each in plans.items()},
        **_data_facts(job, plan),
        "data fingerprint": plan.data_fingerprint
        or f"no data yet; {itemsize} bytes per token drawn",
        "disk for checkpoints": f"{plan.checkpoints_kept} + 1 being written, "
        f"{size(plan.checkpoint_bytes)} each: {size(num_saved * plan.checkpoint_bytes)}",
    }


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


def _variant(job: CanonJobConfig) -> list[str]:
    """Return the mixer, position and Canon set, and each other setting that is no default."""
    args = job.model_args
    if args.mixer == "attention":
        variant = [args.position]
    else:
        conv = "conv1d" if args.mixer_conv else "no conv1d"
        variant = [args.mixer, f"states {args.key_dim} x {args.value_dim}", conv]
    variant.append(f"Canon-{args.canon_set}" if args.canon_set else "no Canon")
    if args.mixer == "attention":
        variant.append(f"QK-norm {args.qk_norm}")

    defaults = vars(ModelArgs()) | vars(Loss())
    for name, value in (vars(args) | vars(job.loss)).items():
        if name not in SUMMARIZED_KEYS and value != defaults[name]:
            variant.append(f"{name} = {json.dumps(value)}")
    return variant


def _decoding_state(args: ModelArgs) -> str:
    per_token, per_sequence = state_bytes(args, 2)
    state = []
    if per_sequence:
        state.append(f"{size(per_sequence)} per sequence")
    if per_token:
        state.append(f"{size(per_token)} per token in bfloat16")
    return " and ".join(state)


def _data_facts(job: CanonJobConfig, plan: Plan) -> dict[str, str]:
    if plan.windows is not None:
        task = plan.windows.task
        settings = [f"{key} = {json.dumps(value)}" for key, value in task.settings.items()]
        sample = plan.windows.windows(job.data.data_seed, 0, SHOWN_WINDOWS)
        share = np.mean(sample[:, 1:] >= 0)
        return {
            "task": f"{task.name}: {', '.join(settings)}",
            "labels": f"{share:.1%} of tokens; ids below {task.vocab_size}",
        }
    where = ", ".join(job.data.folders) or "data.path unset"
    facts = {
        "disk for data": f"{size(plan.data_bytes)} ({where})",
        "epochs over the data": "; ".join(plan.epochs),
    }
    vocab_size = job.model_args.vocab_size
    if plan.data_vocab_size not in (None, vocab_size):
        facts["vocabulary"] = f"{vocab_size:,}, {plan.data_vocab_size:,} of them in the data"
    return facts


def _pace(job: CanonJobConfig, plan: Plan) -> str:
    """Return the ranks of a plan and the estimated time."""
    device, replicas = plan.device, job.parallelism.data_parallel_replicate_degree
    in_replicas = f" ({replicas} replicas)" if replicas > 1 else ""
    ranks = (
        f"{plan.world_size} x {device.name}{in_replicas}, "
        f"{plan.micro_batch} x {job.training.seq_len} tokens per rank at once"
    )
    if device.is_gpu and plan.gpu is None and plan.parameters < MIN_PARAMETERS_FOR_MFU:
        return f"{ranks}: no time estimate, the model is too small to fill a GPU"

    gpu_hours = f" ({plan.seconds / 3600 * plan.world_size:,.1f} GPU-hours)"
    time = (
        f"{duration(plan.seconds)}{gpu_hours if device.is_gpu else ''}, "
        f"{plan.tokens / plan.seconds:,.0f} tokens/s"
    )
    if plan.gpu is None:
        return f"{ranks}: {time}, assuming {device.assumed}"

    slow, likely, fast = plan.step_seconds
    without_fla = f" with fla; without it {duration(plan.chunked_seconds)}"
    return (
        f"{ranks}: {time}, "
        f"{milliseconds(likely)} per step ({milliseconds(fast)} to {milliseconds(slow)}), "
        f"MFU {plan.mfu:.0%}, computed{without_fla if plan.fla_speedup > 1 else ''}"
    )


def milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:,.{0 if seconds >= 0.1 else 1}f} ms"


def _abbreviate(value: float) -> str:
    unit, word = (1e9, "billion") if value >= 1e9 else (1e6, "million")
    return f"{value / unit:,.2f} {word}"

"""Estimate a run's parameters, memory, disk and time, on any machine.

    python -m canon_pretrain.train --config FILE.toml --dry_run [--gpu h100] [--world 8] [--mfu 0.4]

Activations are counted: a block runs under FakeTensorMode, and the bytes of all tensors that
autograd saves for backward are summed.
"""

import contextlib
import dataclasses
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from rich.table import Table
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.tools import utils

from canon_pretrain.core.cli import available_cores
from canon_pretrain.core.errors import UserError, check_choice
from canon_pretrain.core.terminal import Console, duration, size
from canon_pretrain.data.mixture import Mixture
from canon_pretrain.data.shards import ShardError, dtype_for
from canon_pretrain.kernels.hardware import available_memory
from canon_pretrain.model.args import ModelArgs
from canon_pretrain.model.attend import Attend
from canon_pretrain.model.attention import Rope
from canon_pretrain.model.cache import window_segments
from canon_pretrain.model.counts import (
    active_parameters,
    flops_formula,
    flops_per_token,
    layer_parameters,
    num_parameters,
    state_bytes,
)
from canon_pretrain.model.transformer import Head, Transformer, TransformerBlock, make_norm
from canon_pretrain.run.config import Loss, valid_world_sizes
from canon_pretrain.titan.data import open_shards, open_task
from canon_pretrain.titan.device import has_accelerator
from canon_pretrain.titan.job_config import CanonJobConfig, micro_batch_size, shard_degree
from canon_pretrain.titan.parallelize import all_experts
from canon_pretrain.titan.spec import head_loss
from canon_pretrain.titan.tasks import TaskWindows

GIB = 2**30
DAY_S = 86_400
DEFAULT_MFU = 0.4
MIN_PARAMETERS_FOR_MFU = 50_000_000
"""Below this size kernel launches dominate, and no MFU is assumed."""
COMPILED_FRACTIONS = {
    "attention": (0.64, 1.0),
    "gla": (0.41, 0.5),
    "mamba2": (0.37, 0.45),
    "gated_deltanet": (0.26, 0.32),
}
"""Least and most fraction of the counted activations that blocks keep, compiled for a GPU.

Recurrences save their inputs only: counted at 1.3B (kernels/NOTES.md); the most is a fifth more.
"""
CPU_FRACTIONS = 0.6, 1.2
"""The same of recurrences compiled for a CPU: counted 0.61 to 1.15."""
# measured: the flavor quickstart on 2 ranks of one core each, 9,000 tokens/s at 6.4 MFLOP per token
CPU_FLOPS_PER_RANK = 3e10
ADVICE = "training.local_batch_size (it changes no result), use more"
SUMMARIZED_KEYS = """num_layers num_heads dim ffn_dim vocab_size max_seq_len norm_eps position
    canon_set qk_norm mixer mixer_conv expand_k expand_v state_dim ffn num_experts
    experts_per_token""".split()
SHOWN_WINDOWS = 16
GPUS = {"a100": (79.2, 312e12), "h100": (79.6, 989e12), "h200": (139.8, 989e12)}
"""Usable memory in GiB and dense bf16 FLOP/s, from the vendor's data sheets."""


@dataclass(frozen=True)
class Device:
    """What one rank runs on, and the assumption behind its speed."""

    name: str
    memory_gib: float
    flops_per_s: float
    assumed: str
    is_gpu: bool = True


def reference(gpu: str, mfu: float = DEFAULT_MFU) -> Device:
    return Device(gpu.upper(), GPUS[gpu][0], mfu * GPUS[gpu][1], f"{mfu:.0%} MFU")


def this_machine(ranks: int, mfu: float = DEFAULT_MFU) -> Device:
    """Return this machine's GPU, or a rank's share of the CPU if it has none."""
    if not has_accelerator():
        memory = available_memory() / ranks / GIB
        return Device("CPU core", memory, CPU_FLOPS_PER_RANK, "30 GFLOP/s per core", is_gpu=False)
    name = torch.cuda.get_device_name()
    memory = torch.cuda.get_device_properties(0).total_memory / GIB
    peak = utils.get_peak_flops(name)
    whose = "an A100's" if peak == GPUS["a100"][1] and "A100" not in name else "its"
    return Device(name, memory, mfu * peak, f"{mfu:.0%} MFU of {whose} {peak / 1e12:,.0f} TFLOP/s")


def compiled_fractions(mixer: str, is_gpu: bool) -> tuple[float, float]:
    return COMPILED_FRACTIONS[mixer] if is_gpu or mixer == "attention" else CPU_FRACTIONS


def count_memory(
    job: CanonJobConfig,
    model: nn.Module,
    world_size: int,
    *,
    recompute: bool = False,
    is_gpu: bool = True,
) -> dict[str, int]:
    """Return the bytes on one GPU by part; `model`, the job's, may be on the meta device.

    Activations are an upper bound; with `recompute`, all blocks' inputs and one's activations.
    """
    args, training, loss = job.model_args, job.training, job.loss
    dtype = TORCH_DTYPE_MAP[training.dtype]
    param_dtype = TORCH_DTYPE_MAP[training.mixed_precision_param]
    num_shards, micro_batch = shard_degree(job, world_size), micro_batch_size(job, world_size)
    parameters, trained = count_parameters(model)
    # a rank gathers one in `degree` experts
    degree, block = job.parallelism.expert_parallel_degree, model.get_submodule("layers.0")
    elsewhere = sum(p.numel() for each in all_experts(block) for p in each.parameters())
    elsewhere -= elsewhere // degree
    gathered_block = count_parameters(block)[0] - elsewhere
    # two blocks, embedding and head are gathered at a time; one block's gradient is float32
    keeps_all = job.parallelism.fsdp_reshard_after_forward == "never"
    gathered = parameters - args.num_layers * elsewhere
    gathered -= 0 if keeps_all else (args.num_layers - 2) * gathered_block
    weights, shard = (-(-count // num_shards) * dtype.itemsize for count in (parameters, trained))
    saved_block, saved_head = saved_bytes(args, micro_batch, param_dtype, loss)
    tokens = micro_batch * args.max_seq_len
    if job.compile.enable:
        saved_block = round(compiled_fractions(args.mixer, is_gpu)[1] * saved_block)
    activations = args.num_layers * saved_block
    if recompute:
        activations = args.num_layers * tokens * args.dim * param_dtype.itemsize + saved_block
    # the loss's peak: a chunk's logits, their float32 copy and log-softmax
    chunk = -(-tokens // -(-tokens // (loss.chunk_tokens or tokens)))
    each = 4 if param_dtype == torch.float32 else param_dtype.itemsize + 4
    logits = chunk * args.vocab_size * (each + 4)
    return {
        "weights": weights,
        "gradients": shard,
        "optimizer (two moments)": 2 * shard,
        "gathered by FSDP2": gathered * param_dtype.itemsize + 4 * gathered_block,
        "activations": activations,
        "logits and loss": saved_head + logits,
    }


def saved_bytes(
    args: ModelArgs, micro_batch: int, dtype: torch.dtype, loss: Loss
) -> tuple[int, int]:
    """Return the bytes that autograd saves for backward: one block; norm, head and loss."""
    shape = (micro_batch, args.max_seq_len)
    # on a GPU, flex attention computes masks and ALiBi and saves what plain attention does
    plain = args if args.rope_dim else dataclasses.replace(args, position="nope")
    with FakeTensorMode():
        with utils.set_default_dtype(dtype):
            rope = Rope(plain) if plain.rope_dim else None
            attend = Attend(plain) if plain.mixer == "attention" else None
            block = TransformerBlock(plain, rope, attend)
            norm, output = make_norm(args), Head(args.dim, args.vocab_size)
        modules = nn.ModuleList([block, norm, output])
        h_BTD = torch.empty(*shape, args.dim, dtype=dtype, requires_grad=True)
        labels_BT = torch.zeros(shape, dtype=torch.int64)
        segments_BN = None
        if args.document_mask and args.reach:
            segments_BN = window_segments(labels_BT.int(), args.max_seq_len, args.reach)
        return (
            count_saved(lambda: block(h_BTD, None, segments_BN), modules),
            count_saved(lambda: output(norm(h_BTD), labels_BT, head_loss(loss))[1], modules),
        )


def count_parameters(model: nn.Module) -> tuple[int, int]:
    own = [*model.parameters()]
    return sum(p.numel() for p in own), sum(p.numel() for p in own if p.requires_grad)


def count_saved(forward: Callable[[], Tensor], modules: nn.Module) -> int:
    """Return the bytes of storages that `forward` saves for backward, without the modules' own."""
    own = {t.untyped_storage()._cdata for t in (*modules.parameters(), *modules.buffers())}
    kept: dict[int, Tensor] = {}  # hold the tensors, so that no address is reused

    def pack(tensor: Tensor) -> Tensor:
        address = tensor.untyped_storage()._cdata
        if address not in own:
            kept.setdefault(address, tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward()
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def check_memory(job: CanonJobConfig, device: Device, world_size: int) -> None:
    """Raise UserError, with the estimate's parts, if even the lower bound exceeds the memory."""
    room, args = device.memory_gib * GIB, job.model_args
    # counting takes a second: skip it if a bound several times too high fits
    tokens = micro_batch_size(job, world_size) * job.training.seq_len
    values = tokens * (64 * args.num_layers * (args.dim + args.ffn_dim) + 8 * args.vocab_size)
    if job.training.enable_cpu_offload or 4 * (6 * num_parameters(args) + values) < room:
        return
    mode = job.activation_checkpoint.mode
    where = {"recompute": mode != "none", "is_gpu": device.is_gpu}
    parts = count_memory(job, on_meta(args), world_size, **where)
    if job.compile.enable and mode == "none":
        least, most = compiled_fractions(args.mixer, device.is_gpu)
        parts["activations"] = round(least / most * parts["activations"])
    if (total := sum(parts.values())) > room:
        each = ", ".join(f"{name} {num_bytes / GIB:.1f}" for name, num_bytes in parts.items())
        text = f"each of {world_size} rank(s) needs at least {total / GIB:.1f} GiB ({each}), but "
        text += f"has {device.memory_gib:.1f} GiB ({device.name}). Lower {ADVICE} ranks, set "
        text += "--activation_checkpoint.mode full, or train anyway with --force"
        raise UserError("memory.too_small", text, parts=parts)


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
        self.device, self.world_size = device, world_size
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
        recompute = job.activation_checkpoint.mode == "full"
        where = {"recompute": recompute, "is_gpu": device.is_gpu}
        self.memory = count_memory(job, model, world_size, **where)
        self.fits = sum(self.memory.values()) <= device.memory_gib * GIB
        itemsize = TORCH_DTYPE_MAP[training.dtype].itemsize
        self.checkpoint_bytes = (self.parameters + 2 * self.trained) * itemsize
        saves = -(-training.steps // job.checkpoint.interval)
        self.checkpoints_kept = min(job.checkpoint.keep_latest_k or saves, saves)
        self.data_bytes = drawn * dtype_for(self.data_vocab_size or args.vocab_size).itemsize
        self.flops_per_token = flops_per_token(args, training.seq_len)
        self.seconds = self.tokens * self.flops_per_token / (world_size * device.flops_per_s)


def make_plans(
    job: CanonJobConfig, gpu: str | None, world: int | None, mfu: float | None, ranks: int
) -> dict[str, Plan]:
    """Return plans by title: this machine and, if requested or needed, the reference GPU."""
    asked, mfu = gpu is not None or world is not None, DEFAULT_MFU if mfu is None else mfu
    gpu = (gpu or "h100").lower()
    check_choice("--gpu", gpu, GPUS)
    if not 0 < mfu <= 1 or world is not None and world < 1:
        text = f"--mfu {mfu} --world {world}: expected a fraction up to 1, and at least 1 rank"
        raise UserError("option.invalid", text)
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
        yield f"this run takes about {days:,.0f} days, assuming {device.assumed} (see --dry_run)"


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
    console.print("activations are an upper bound: fused kernels and torch.compile save fewer")
    if too_small := ", ".join(title for title, each in plans.items() if not each.fits):
        console.print(
            f"[bold]exceeds the memory[/bold] ({too_small}): lower {ADVICE} GPUs, "
            "or --activation_checkpoint.mode full"
        )


def _facts(job: CanonJobConfig, plans: dict[str, Plan]) -> dict[str, str]:
    args, training, plan = job.model_args, job.training, next(iter(plans.values()))
    trained = f", {plan.trained:,} trained" if plan.trained != plan.parameters else ""
    if (active := active_parameters(args)) != num_parameters(args):
        trained += f", {active:,} active per token"
    kept, each = plan.checkpoints_kept, plan.checkpoint_bytes
    itemsize = dtype_for(args.vocab_size).itemsize
    where = ", ".join(job.data.folders) or "data.path unset"
    data = {
        "disk for data": f"{size(plan.data_bytes)} ({where})",
        "epochs over the data": "; ".join(plan.epochs),
    }
    if plan.data_vocab_size not in (None, args.vocab_size):
        data["vocabulary"] = f"{args.vocab_size:,}, {plan.data_vocab_size:,} of them in the data"
    if (windows := plan.windows) is not None:
        own = [f"{key} = {json.dumps(value)}" for key, value in windows.task.settings.items()]
        found = windows.windows(job.data.data_seed, 0, SHOWN_WINDOWS)
        share = np.mean(found[:, 1:] >= 0)
        data = {"task": f"{windows.task.name}: {', '.join(own)}"}
        data["labels"] = f"{share:.1%} of tokens; ids below {windows.task.vocab_size}"
    settings, defaults = vars(args) | vars(job.loss), vars(ModelArgs()) | vars(Loss())
    is_attention, sizes = args.mixer == "attention", f"hidden {args.dim}"
    experts = f"{args.num_experts} experts, {args.experts_per_token} per token, of "
    kind = {"moe": experts, "standard": "standard "}.get(args.ffn, "")
    sizes += ", no feed-forward" if args.ffn == "none" else f", {kind}F {args.ffn_dim}"
    variant = [args.position]
    if not is_attention:
        conv = "conv1d" if args.mixer_conv else "no conv1d"
        variant = [args.mixer, f"states {args.key_dim} x {args.value_dim}", conv]
    variant += [f"Canon-{args.canon_set}" if args.canon_set else "no Canon"]
    variant += [f"QK-norm {args.qk_norm}"] if is_attention else []
    for name, value in settings.items():
        if name not in SUMMARIZED_KEYS and value != defaults[name]:
            variant.append(f"{name} = {json.dumps(value)}")
    per_token, per_row = state_bytes(args, 2)
    held = [f"{size(per_row)} per sequence"] if per_row else []
    held += [f"{size(per_token)} per token in bfloat16"] if per_token else []
    return {
        "model": f"{job.model.flavor}: {args.num_layers} layers, {args.num_heads} heads, {sizes}, "
        f"{', '.join(variant)}",
        "parameters": f"{plan.parameters:,}{trained}, "
        f"{layer_parameters(args) / args.dim**2:.3f} D^2 per layer",
        "FLOPs per token": f"{_abbreviate(plan.flops_per_token)} by {flops_formula(args)}",
        "decoding holds": " and ".join(held),
        "steps": f"{training.steps:,} of {plan.tokens // training.steps:,} tokens: "
        f"{_abbreviate(plan.tokens)} tokens",
        "valid world sizes": ", ".join(map(str, world_sizes(job))),
        **{title: _pace(job, each) for title, each in plans.items()},
        **data,
        "data fingerprint": plan.data_fingerprint
        or f"no data yet; {itemsize} bytes per token drawn",
        "disk for checkpoints": f"{kept} + 1 being written, {size(each)} each: "
        f"{size((kept + 1) * each)}",
    }


def _pace(job: CanonJobConfig, plan: Plan) -> str:
    """Return the ranks of a plan and the estimated time."""
    device, replicas = plan.device, job.parallelism.data_parallel_replicate_degree
    text = f"{plan.world_size} x {device.name}{f' ({replicas} replicas)' if replicas > 1 else ''}, "
    text += f"{plan.micro_batch} x {job.training.seq_len} tokens per rank at once: "
    if device.is_gpu and plan.parameters < MIN_PARAMETERS_FOR_MFU:
        return text + "no time estimate, the model is too small to fill a GPU"
    text += duration(plan.seconds)
    if device.is_gpu:
        text += f" ({plan.seconds / 3600 * plan.world_size:,.1f} GPU-hours)"
    return f"{text}, {plan.tokens / plan.seconds:,.0f} tokens/s, assuming {device.assumed}"


def _abbreviate(value: float) -> str:
    unit, word = (1e9, "billion") if value >= 1e9 else (1e6, "million")
    return f"{value / unit:,.2f} {word}"

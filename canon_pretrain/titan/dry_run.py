"""The plan of a run before a GPU is booked: parameters, memory, disk and time, on any laptop.

    python -m canon_pretrain.train --config FILE.toml --dry_run [--gpu h100] [--world 8] [--mfu 0.4]

Nothing is trained and nothing written. It shows what this machine would do and, beside it, a
reference GPU: the one that is asked for, or 8 H100 for a run that is too much for this machine.
titan/memory.py counts what a GPU must hold.
"""

import contextlib
import json
import logging
from dataclasses import dataclass

import torch
from rich.table import Table
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.tools import utils

from canon_pretrain.core.cli import available_cores
from canon_pretrain.core.errors import UserError
from canon_pretrain.core.terminal import Console
from canon_pretrain.core.text import duration
from canon_pretrain.core.text import size as text_of_size
from canon_pretrain.data.shards import ShardError, dtype_for
from canon_pretrain.kernels.hardware import available_memory
from canon_pretrain.model.args import FLOPS_FORMULA, ModelArgs, flops_per_token, num_parameters
from canon_pretrain.model.transformer import Transformer
from canon_pretrain.run.config import Loss, valid_world_sizes
from canon_pretrain.titan.data import open_shards
from canon_pretrain.titan.device import device_count, has_accelerator
from canon_pretrain.titan.job_config import CanonJobConfig, micro_batch_size, shard_degree
from canon_pretrain.titan.memory import count_parameters, memory_by_part

GIB = 2**30
DAY_S = 86_400
WEEK_S = 7 * DAY_S
DEFAULT_MFU = 0.4
FILLS_A_GPU = 50_000_000
"""Parameters below which no MFU is assumed: a GPU waits for so small a model's kernels."""
LEAST_KEPT = 0.64
"""The share of the counted activations that compiled blocks keep at least: 0.65 without Canon, 0.70
to 0.78 with Canon-ABCD (kernels/NOTES.md, of 101,512 and 110,984 bytes per token)."""
# measured with the quickstart's model on 2 ranks of one core each: 9,000 tokens/s at 6.4 MFLOP
CPU_FLOPS_PER_RANK = 3e10

SHOWN_IF_SET = (
    *("num_kv_heads", "ffn", "ffn_activation", "norm", "bias", "partial_rope_dim"),
    *("canon_kernel", "canon_residual"),
    *("canon_activation", "canon_trainable", "tie_embeddings", "document_mask"),
    *("z_loss", "squared_loss"),
)


@dataclass(frozen=True)
class Gpu:
    """Usable memory in GiB and dense bf16 FLOP/s, from the vendor's data sheets."""

    memory_gib: float
    peak_flops: float


GPUS = {
    "a100": Gpu(79.2, 312e12),
    "h100": Gpu(79.6, 989e12),
    "h200": Gpu(139.8, 989e12),
}


@dataclass(frozen=True)
class Device:
    """What one rank would run on, and by which assumption it is so fast."""

    name: str
    memory_gib: float
    flops_per_s: float
    assumed: str
    is_gpu: bool = True


@dataclass(frozen=True)
class Plan:
    """What a job would take on `world_size` ranks."""

    device: Device
    world_size: int
    num_shards: int
    """Ranks that share one copy of the weights; the rest are its replicas."""
    parameters: int
    trained: int
    flops_per_token: int
    tokens: int
    tokens_per_step: int
    steps: int
    micro_batch: int
    world_sizes: list[int]
    memory: dict[str, int]
    checkpoint_bytes: int
    checkpoints_kept: int
    data_bytes: int
    data_fingerprint: str | None

    @property
    def seconds(self) -> float:
        """Expected wall time."""
        flops = self.tokens * self.flops_per_token
        return flops / (self.world_size * self.device.flops_per_s)

    @property
    def fits(self) -> bool:
        """Whether a rank has the memory, as it is counted."""
        return sum(self.memory.values()) <= self.device.memory_gib * GIB


def make_plans(
    job: CanonJobConfig, gpu: str | None, world: int | None, mfu: float | None, ranks: int
) -> dict[str, Plan]:
    """Return the plan for this machine and, if asked for or needed, the reference GPU; by title.

    `gpu`, `world` and `mfu` are the command line's; `ranks` those that were started.
    """
    asked, mfu = gpu is not None or world is not None, DEFAULT_MFU if mfu is None else mfu
    gpu = (gpu or "h100").lower()
    if gpu not in GPUS:
        raise UserError(f"--gpu {gpu}: expected one of {', '.join(GPUS)}")
    if not 0 < mfu <= 1:
        raise UserError(f"--mfu {mfu}: expected a fraction above 0 and up to 1, such as 0.4")
    if world is not None and world < 1:
        raise UserError(f"--world {world}: expected at least 1")
    places = device_count() if has_accelerator() else available_cores()
    ranks = ranks if ranks > 1 else most_ranks(job, places)
    plans = {"this machine": make_plan(job, this_machine(ranks, mfu), ranks)}
    if asked or plans["this machine"].seconds > DAY_S or not plans["this machine"].fits:
        world = most_ranks(job, 8) if world is None else world
        plans["reference"] = make_plan(job, reference(gpu, mfu), world)
    return plans


def reference(gpu: str, mfu: float = DEFAULT_MFU) -> Device:
    """Return one of GPUS."""
    known = GPUS[gpu]
    return Device(gpu.upper(), known.memory_gib, mfu * known.peak_flops, f"{mfu:.0%} MFU")


def this_machine(ranks: int, mfu: float = DEFAULT_MFU) -> Device:
    """Return this machine's GPU, or a rank's share of the CPU if it has none."""
    if not has_accelerator():
        memory = available_memory() / ranks / GIB
        return Device("CPU core", memory, CPU_FLOPS_PER_RANK, "30 GFLOP/s per core", is_gpu=False)
    name = torch.cuda.get_device_name()
    memory = torch.cuda.get_device_properties(0).total_memory / GIB
    logging.disable(logging.WARNING)  # it reports a guess, as `assumed` does
    try:
        peak = utils.get_peak_flops(name)
    finally:
        logging.disable(logging.NOTSET)
    is_guess = peak == GPUS["a100"].peak_flops and "A100" not in name
    whose = f"{'an A100' if is_guess else 'its'} {peak / 1e12:,.0f} TFLOP/s"
    return Device(name, memory, mfu * peak, f"{mfu:.0%} MFU of {whose}")


def make_plan(job: CanonJobConfig, device: Device, world_size: int) -> Plan:
    """Return the plan of `job` on one kind of device. Raises UserError for a bad world size."""
    training = job.training
    tokens_per_step = training.global_batch_size * training.seq_len
    drawn, fingerprint = tokens_per_step * training.steps, None
    with contextlib.suppress(ShardError):  # what is there, and this job would refuse, is an error
        if job.data.folders:
            with open_shards(job) as data:
                drawn, fingerprint = data.num_tokens, data.fingerprint
    args = job.model_args  # with the vocabulary of the data
    micro_batch, num_shards = micro_batch_size(job, world_size), shard_degree(job, world_size)
    with torch.device("meta"):
        model = Transformer(args)
    parameters, trained = count_parameters(model)
    assert parameters == num_parameters(args), "the closed form and the built model differ"
    saves = -(-training.steps // job.checkpoint.interval)
    keep = min(job.checkpoint.keep_latest_k or saves, saves)
    return Plan(
        device=device,
        world_size=world_size,
        num_shards=num_shards,
        parameters=parameters,
        trained=trained,
        flops_per_token=flops_per_token(args, training.seq_len),
        tokens=tokens_per_step * training.steps,
        tokens_per_step=tokens_per_step,
        steps=training.steps,
        micro_batch=micro_batch,
        world_sizes=_world_sizes(job),
        memory=count_memory(
            job, model, world_size, recompute=job.activation_checkpoint.mode == "full"
        ),
        checkpoint_bytes=(parameters + 2 * trained) * TORCH_DTYPE_MAP[training.dtype].itemsize,
        checkpoints_kept=keep,
        data_bytes=drawn * dtype_for(args.vocab_size).itemsize,
        data_fingerprint=fingerprint,
    )


def count_memory(
    job: CanonJobConfig, model: Transformer, world_size: int, *, recompute: bool
) -> dict[str, int]:
    """Return a rank's bytes by part; with `recompute`, activations of full checkpointing."""
    training = job.training
    return memory_by_part(
        job.model_args,
        model,
        num_shards=shard_degree(job, world_size),
        micro_batch=micro_batch_size(job, world_size),
        dtype=TORCH_DTYPE_MAP[training.dtype],
        param_dtype=TORCH_DTYPE_MAP[training.mixed_precision_param],
        loss=job.loss,
        recompute=recompute,
        keep_gathered=job.parallelism.fsdp_reshard_after_forward == "never",
    )


def check_memory(job: CanonJobConfig, device: Device, world_size: int) -> None:
    """Raise UserError, with the parts of the estimate, if a rank of `job` can't fit on `device`.

    The least that it may need is compared: of compiled blocks the LEAST_KEPT share, and what full
    activation checkpointing keeps in the modes between none and full. With CPU offload nothing is.
    """
    room, training = device.memory_gib * GIB, job.training
    if training.enable_cpu_offload or _is_small(job, world_size, room):
        return
    with torch.device("meta"):
        model = Transformer(job.model_args)
    mode = job.activation_checkpoint.mode
    parts = count_memory(job, model, world_size, recompute=mode != "none")
    if job.compile.enable and mode == "none":
        parts["activations"] = round(LEAST_KEPT * parts["activations"])
    if (total := sum(parts.values())) <= room:
        return
    listed = ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts.items())
    raise UserError(
        f"this job can't fit: each of its {world_size} rank(s) needs at least {total / GIB:.1f} "
        f"GiB ({listed}), and a {device.name} here has {device.memory_gib:.1f} GiB for one. Lower "
        "training.local_batch_size (it changes no result), use more ranks, each with memory of "
        "its own, or --activation_checkpoint.mode full; --dry_run shows the whole plan, --force "
        "starts all the same"
    )


def _is_small(job: CanonJobConfig, world_size: int, room: float) -> bool:
    """Return whether a bound several times too high fits: most runs need not be counted."""
    args = job.model_args
    tokens = micro_batch_size(job, world_size) * job.training.seq_len
    values = tokens * (64 * args.num_layers * (args.dim + args.ffn_dim) + 8 * args.vocab_size)
    return 4 * (6 * num_parameters(args) + values) < room


def print_plans(job: CanonJobConfig, plans: dict[str, Plan], console: Console) -> None:
    """Print the plans as tables that can be checked."""
    args, plan = job.model_args, next(iter(plans.values()))
    console.print(f"[bold]{job.job.description}[/bold]  (dry run: nothing is trained or written)")
    facts = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    facts.add_column(style="cyan")
    facts.add_column()
    width = dtype_for(args.vocab_size).itemsize
    there = plan.data_fingerprint or f"not there yet; {width} bytes a token drawn, none twice"
    where = ", ".join(job.data.folders) or "data.path unset"
    rows = {
        "model": f"{job.model.flavor}: {args.num_layers} layers, {args.num_heads} heads, hidden "
        f"{args.dim}, F {args.ffn_dim}, {_variant(job)}",
        "parameters": f"{plan.parameters:,}"
        + (f", {plan.trained:,} of them trained" if plan.trained != plan.parameters else ""),
        "FLOPs per token": f"{_short(plan.flops_per_token)} by {FLOPS_FORMULA}",
        "steps": f"{plan.steps:,} of {plan.tokens_per_step:,} tokens: {_short(plan.tokens)} tokens",
        "valid world sizes": ", ".join(map(str, plan.world_sizes)),
        **{title: _pace(job, each) for title, each in plans.items()},
        "disk for data": f"{text_of_size(plan.data_bytes)} ({where})",
        "data fingerprint": there,
        "disk for checkpoints": f"{plan.checkpoints_kept} + 1 in writing, of "
        f"{text_of_size(plan.checkpoint_bytes)}: "
        f"{text_of_size((plan.checkpoints_kept + 1) * plan.checkpoint_bytes)}",
    }
    for name, value in rows.items():
        facts.add_row(name, value)
    console.print(facts)
    memory = Table(title="memory per rank, GiB", title_justify="left")
    memory.add_column("part")
    for title in plans:
        memory.add_column(title, justify="right")
    for name in plan.memory:
        memory.add_row(name, *(f"{each.memory[name] / GIB:.2f}" for each in plans.values()))
    memory.add_section()
    memory.add_row("sum", *(f"{sum(x.memory.values()) / GIB:.2f}" for x in plans.values()))
    memory.add_row("there is", *(f"{each.device.memory_gib:.1f}" for each in plans.values()))
    console.print(memory)
    console.print(
        "activations are an upper bound: a GPU's fused kernels and torch.compile keep fewer"
    )
    if job.activation_checkpoint.mode in ("selective", "memory_budget"):
        console.print(f"activation_checkpoint.mode = {job.activation_checkpoint.mode}: not counted")
    if too_small := [title for title, each in plans.items() if not each.fits]:
        console.print(
            f"[bold]does not fit as counted[/bold] ({', '.join(too_small)}): lower "
            "training.local_batch_size (it changes no result), use more GPUs, or "
            "--activation_checkpoint.mode full"
        )


def _pace(job: CanonJobConfig, plan: Plan) -> str:
    """Return the ranks of a plan and, by the stated assumption, their time."""
    device, batch = plan.device, f"{plan.micro_batch} x {job.training.seq_len} tokens at once"
    replicas = plan.world_size // plan.num_shards
    sharding = f" ({replicas} replicas of {plan.num_shards})" if replicas > 1 else ""
    start = f"{plan.world_size} x {device.name}{sharding}, {batch} on each: "
    if device.is_gpu and plan.parameters < FILLS_A_GPU:
        return start + "no time is estimated, the model is too small to fill a GPU"
    hours = ""
    if device.is_gpu:
        hours = f" ({plan.seconds / 3600 * plan.world_size:,.1f} GPU-hours)"
    speed = f"{plan.tokens / plan.seconds:,.0f} tokens/s"
    return f"{start}{duration(plan.seconds)}{hours}, {speed}, assuming {device.assumed}"


def _variant(job: CanonJobConfig) -> str:
    """Return what the model is beside its sizes, and the objective, in the words of the TOML."""
    args = job.model_args
    words = [args.position, f"Canon-{args.canon_set}" if args.canon_set else "no Canon"]
    words.append(f"QK-norm {args.qk_norm}")
    settings = {**vars(args), **vars(job.loss)}
    defaults = {**vars(ModelArgs()), **vars(Loss())}
    words += [
        f"{name} = {json.dumps(settings[name])}"
        for name in SHOWN_IF_SET
        if settings[name] != defaults[name]
    ]
    return ", ".join(words)


def _short(value: float) -> str:
    """Return a number in billions or millions, as the field counts tokens and FLOPs."""
    for unit, word in ((1e9, "billion"), (1e6, "million")):
        if value >= unit:
            return f"{value / unit:,.2f} {word}"
    return f"{value:,.0f}"


def describe_duration(job: CanonJobConfig, device: Device, world_size: int) -> str | None:
    """Return a sentence for a run that would take over a week on `device`, None for others."""
    training = job.training
    tokens = job.last_step * training.global_batch_size * training.seq_len
    flops = tokens * flops_per_token(job.model_args, training.seq_len)
    seconds = flops / (world_size * device.flops_per_s)
    if seconds <= WEEK_S:
        return None
    return (
        f"this run takes about {seconds / DAY_S:,.0f} days in all on {world_size} rank(s), "
        f"assuming {device.assumed}; --dry_run shows what it needs"
    )


def most_ranks(job: CanonJobConfig, places: int) -> int:
    """Return the largest valid world size up to `places`; the smallest if none is."""
    sizes = _world_sizes(job)
    return max((n for n in sizes if n <= places), default=sizes[0])


def _world_sizes(job: CanonJobConfig) -> list[int]:
    """Return the numbers of ranks that can train `job`. Raises UserError if there are none."""
    replicas = job.parallelism.data_parallel_replicate_degree
    sizes = valid_world_sizes(job.training.global_batch_size, replicas)
    if not sizes:
        micro_batch_size(job, replicas)
    return sizes

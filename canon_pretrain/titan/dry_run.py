"""The plan of a run before a GPU is booked: parameters, memory, disk and time, on any laptop.

    python -m canon_pretrain.train --config FILE.toml --dry_run [--gpu h100] [--world 8] [--mfu 0.4]

Nothing is trained and nothing written. titan/memory.py says what a GPU must hold.
"""

import contextlib
import json
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table
from torchtitan.config import TORCH_DTYPE_MAP

from canon_pretrain.config import Loss
from canon_pretrain.data.shards import ShardError, dtype_for
from canon_pretrain.errors import UserError
from canon_pretrain.model.args import (
    FLOPS_FORMULA,
    ModelArgs,
    flops_per_token,
    num_parameters,
)
from canon_pretrain.model.transformer import Transformer
from canon_pretrain.titan.data import open_shards
from canon_pretrain.titan.job_config import CanonJobConfig, micro_batch_size, valid_world_sizes
from canon_pretrain.titan.memory import count_parameters, memory_by_part

GIB = 2**30
WEEK_S = 7 * 86_400
DEFAULT_MFU = 0.4
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
class Plan:
    """What a job would take on `world_size` GPUs; bytes are per GPU unless they say otherwise."""

    gpu: str
    world_size: int
    mfu: float
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
        """Expected wall time at `mfu`."""
        flops = self.tokens * self.flops_per_token
        return flops / (self.world_size * GPUS[self.gpu].peak_flops * self.mfu)


def make_plan(job: CanonJobConfig, gpu: str, world_size: int, mfu: float) -> Plan:
    """The plan of `job`. Raises UserError for an unknown GPU or a world size that cannot be."""
    if gpu not in GPUS:
        raise UserError(f"--gpu {gpu}: expected one of {', '.join(GPUS)}")
    if not 0 < mfu <= 1:
        raise UserError(f"--mfu {mfu}: expected a fraction above 0 and up to 1, such as 0.4")
    if world_size < 1:
        raise UserError(f"--world {world_size}: expected at least 1")
    training = job.training
    tokens_per_step = training.global_batch_size * training.seq_len
    data_bytes, fingerprint = _data(job, tokens_per_step * training.steps)
    args = job.model_args  # once the data have told their vocabulary
    micro_batch = micro_batch_size(job, world_size)
    with torch.device("meta"):
        model = Transformer(args)
    parameters, trained = count_parameters(model)
    assert parameters == num_parameters(args), "the closed form and the built model differ"
    saves = -(-training.steps // job.checkpoint.interval)
    keep = min(job.checkpoint.keep_latest_k or saves, saves)
    return Plan(
        gpu=gpu,
        world_size=world_size,
        mfu=mfu,
        parameters=parameters,
        trained=trained,
        flops_per_token=flops_per_token(args, training.seq_len),
        tokens=tokens_per_step * training.steps,
        tokens_per_step=tokens_per_step,
        steps=training.steps,
        micro_batch=micro_batch,
        world_sizes=valid_world_sizes(training.global_batch_size),
        memory=memory_by_part(
            args,
            model,
            world_size=world_size,
            micro_batch=micro_batch,
            dtype=TORCH_DTYPE_MAP[training.dtype],
            param_dtype=TORCH_DTYPE_MAP[training.mixed_precision_param],
            loss=job.loss,
            recompute=job.activation_checkpoint.mode == "full",
            keep_gathered=job.parallelism.fsdp_reshard_after_forward == "never",
        ),
        checkpoint_bytes=(parameters + 2 * trained) * TORCH_DTYPE_MAP[training.dtype].itemsize,
        checkpoints_kept=keep,
        data_bytes=data_bytes,
        data_fingerprint=fingerprint,
    )


def _data(job: CanonJobConfig, tokens: int) -> tuple[int, str | None]:
    """Bytes of the training data and its fingerprint; as many as `tokens` take without it.

    Raises UserError where the data is there, and a run of this job would refuse it.
    """
    with contextlib.suppress(ShardError):
        if job.data.folders:
            with open_shards(job) as data:
                return data.num_tokens * dtype_for(data.vocab_size).itemsize, data.fingerprint
    return tokens * dtype_for(job.model_args.vocab_size).itemsize, None


def print_plan(job: CanonJobConfig, plan: Plan, console: Console) -> None:
    """The plan as tables a person can check."""
    gpu = GPUS[plan.gpu]
    args = job.model_args
    console.print(f"[bold]{job.job.description}[/bold]  (dry run: nothing is trained or written)")
    facts = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    facts.add_column(style="cyan")
    facts.add_column()
    hours = plan.seconds / 3600
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
        "this plan": f"{plan.world_size} x {plan.gpu.upper()}, {plan.micro_batch} sequence(s) of "
        f"{job.training.seq_len} at once on each",
        f"time at {plan.mfu:.0%} MFU": f"{_duration(plan.seconds)}, {hours * plan.world_size:,.1f} "
        f"GPU-hours, {plan.tokens / plan.seconds:,.0f} tokens/s (MFU is an assumption)",
        "disk for data": f"{plan.data_bytes / 1e9:,.1f} GB ({where})",
        "data fingerprint": there,
        "disk for checkpoints": f"{plan.checkpoints_kept} + 1 in writing, of "
        f"{plan.checkpoint_bytes / 1e9:.2f} GB: "
        f"{(plan.checkpoints_kept + 1) * plan.checkpoint_bytes / 1e9:,.1f} GB",
    }
    for name, value in rows.items():
        facts.add_row(name, value)
    console.print(facts)
    total = sum(plan.memory.values())
    memory = Table(title="memory on one GPU", title_justify="left")
    memory.add_column("part")
    memory.add_column("GiB", justify="right")
    for name, size in plan.memory.items():
        memory.add_row(name, f"{size / GIB:.2f}")
    memory.add_section()
    memory.add_row("sum", f"{total / GIB:.2f}")
    memory.add_row(f"{plan.gpu.upper()} has", f"{gpu.memory_gib:.1f}")
    console.print(memory)
    console.print(
        "activations are an upper bound: a GPU's fused kernels and torch.compile keep fewer"
    )
    if job.activation_checkpoint.mode in ("selective", "memory_budget"):
        console.print(f"activation_checkpoint.mode = {job.activation_checkpoint.mode}: not counted")
    if total > gpu.memory_gib * GIB:
        console.print(
            "[bold]does not fit as counted[/bold]: lower training.local_batch_size (it changes no "
            "result), use more GPUs, or --activation_checkpoint.mode full"
        )


def _variant(job: CanonJobConfig) -> str:
    """What the model is beside its sizes, and what is minimised, in the words of the TOML."""
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
    """A number in billions or millions, as the field counts tokens and FLOPs."""
    for unit, word in ((1e9, "billion"), (1e6, "million")):
        if value >= unit:
            return f"{value / unit:,.2f} {word}"
    return f"{value:,.0f}"


def _duration(seconds: float) -> str:
    """Days, or hours or minutes where those say more."""
    for unit, name in ((86_400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= unit:
            return f"{seconds / unit:.2f} {name}"
    return f"{seconds:.0f} seconds"


def describe_duration(job: CanonJobConfig, world_size: int, device_name: str | None) -> str | None:
    """A sentence for a run that would take over a week on this machine; None for a shorter one.

    `device_name` is the GPU's, None for a CPU. A GPU that is not in GPUS is taken for an A100.
    """
    if device_name is None:
        flops_per_s, assumed = world_size * CPU_FLOPS_PER_RANK, "30 GFLOP/s a CPU rank"
    else:
        name = next((name for name in GPUS if name.upper() in device_name.upper()), "a100")
        flops_per_s = world_size * GPUS[name].peak_flops * DEFAULT_MFU
        assumed = f"{DEFAULT_MFU:.0%} MFU of an {name.upper()}"
    training = job.training
    tokens = job.last_step * training.global_batch_size * training.seq_len
    seconds = tokens * flops_per_token(job.model_args, training.seq_len) / flops_per_s
    if seconds <= WEEK_S:
        return None
    return (
        f"this run takes about {seconds / 86_400:,.0f} days in all on {world_size} rank(s), at "
        f"{assumed}; --dry_run shows what it needs"
    )


def default_world_size(job: CanonJobConfig) -> int:
    """One node of 8, or the largest smaller number that divides the global batch."""
    return max(n for n in valid_world_sizes(job.training.global_batch_size) if n <= 8)

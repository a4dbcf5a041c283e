"""Canon's price in a training step: each set and backend beside the same model without Canon.

`--unit block` is forward and backward of one compiled block. `--unit model` is on a CPU the whole
step (titan/bare_step.py: forward, loss, backward, clipping, fused AdamW, blocks compiled as the
trainer does, FSDP2 at one rank), and on a GPU the model's forward and backward, of which MFU is a
share; what FSDP2 and AdamW take on top is measured apart, of the model without Canon.

On a CPU the two models of a comparison take turns. A GPU holds one at a time, with all of its
memory, as in a run: each is built, measured and freed, the one without Canon first and last.
"""

import argparse
import bisect
import dataclasses
import statistics
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from canon_pretrain.bench import tables, variants
from canon_pretrain.bench.limits import block_flops_per_token, least_extra
from canon_pretrain.bench.machine import Machine
from canon_pretrain.bench.timing import (
    STEP,
    Step,
    Subject,
    block_of,
    compare_subjects,
    seconds_of,
    steps_for,
)
from canon_pretrain.bench.variants import NONE, Variant, Workload
from canon_pretrain.core.errors import UserError
from canon_pretrain.core.terminal import Console
from canon_pretrain.kernels.backends import OPTIONAL
from canon_pretrain.model.args import FLOPS_FORMULA, ModelArgs, flops_per_token
from canon_pretrain.model.attend import BACKENDS as ATTENTION
from canon_pretrain.model.attend import Attend
from canon_pretrain.model.transformer import Transformer
from canon_pretrain.titan.bare_step import BareStep, job_of, one_rank
from canon_pretrain.titan.dry_run import GIB, count_memory

UNITS = ("block", "model")
ROOM = 0.92
"""The share of a GPU's memory that is planned with; fragments and workspaces take the rest."""
MICRO_BATCH = 6
"""Of the 1.3B runs (train_configs/base/1b3.toml), in sequences of 4,096 tokens."""


@dataclasses.dataclass(frozen=True)
class Setting(Workload):
    """What all variants of one run have in common."""

    unit: str
    attention: str
    alone: bool
    """One model in memory at a time."""
    pairs: int
    block_s: float

    @property
    def tokens_per_step(self) -> int:
        return self.micro_batch * self.num_tokens


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `step`."""
    add = parser.add_argument
    variants.add_model_arguments(parser, gpu=(0, 4096), cpu=(2, 1024))
    add("--unit", choices=UNITS, help="(default: model on a GPU, block on a CPU)")
    add("--attention", default="auto", choices=ATTENTION, help="(default: %(default)s)")
    variants.add_variant_arguments(parser)
    variants.add_timing_arguments(parser, pairs=15, block_s=0.5)


def measure(
    arguments: argparse.Namespace, machine: Machine, say: Callable[[str], None]
) -> dict[str, Any]:
    """Return the figures as JSON can hold them; seconds, bytes, FLOPs. Raises UserError."""
    setting = _setting(arguments, machine)
    backends, missing = variants.available(arguments.backends, machine.device, setting.dtype)
    chosen = variants.variants(arguments.sets, arguments.backends, backends)
    peaks = machine.peaks(setting.dtype)
    whole = None

    def make(variant: Variant) -> Subject | str:
        say(f"{variant.name} ...")
        return _subject(setting, variant, machine)

    with one_rank() if setting.unit == "model" else nullcontext(), variants.many_compilations():
        found = compare_subjects(
            partial(make, NONE),
            {variant.name: partial(make, variant) for variant in chosen},
            pairs=setting.pairs,
            alone=setting.alone,
            free=machine.free_memory,
        )
        if isinstance(found, str):
            raise UserError(f"{found}: give a smaller --micro-batch, or fewer --layers")
        if setting.alone and setting.unit == "model":
            whole = measure_whole(setting, machine)
    if not found.parts:
        raise UserError("no variant could be measured: give a smaller --micro-batch")
    rows = []
    for variant in chosen:
        if variant.name not in found.parts:
            continue
        beside = found.parts[variant.name][STEP]
        args = variants.with_canon(setting.args, variant.canon_set)
        layers = args.num_layers if setting.unit == "model" else 1
        least = least_extra(args, setting.dtype.itemsize) * layers * setting.tokens_per_step
        rows.append(
            {
                "variant": variant.name,
                **dataclasses.asdict(variant),
                **found.facts[variant.name],
                **dataclasses.asdict(beside),
                **speed(setting, variant, beside.other_s, peaks),
                "least": least / machine.copy_bandwidth / beside.base_s,
            }
        )
    base_s = statistics.median(row["base_s"] for row in rows)
    base = {"variant": NONE.name, **found.base_facts, "s": base_s, "drift": found.drift}
    return {
        **setting.facts(),
        "unit": setting.unit,
        "timed": "forward and backward" if setting.alone or setting.unit == "block" else "step",
        "attention": Attend(setting.args, setting.attention).describe(machine.device.type),
        "flops_formula": FLOPS_FORMULA,
        "peaks": peaks,
        "unavailable": missing | found.failed,
        "base": {**base, **speed(setting, NONE, base_s, peaks)},
        "whole": whole,
        "rows": rows,
    }


def _setting(arguments: argparse.Namespace, machine: Machine) -> Setting:
    """Return the options as what they mean on this machine."""
    work = variants.workload(arguments, machine)
    if not work.micro_batch:
        room = torch.cuda.mem_get_info()[0]
        size = fitting_micro_batch(work.args, work.num_tokens, work.dtype, room)
        work = dataclasses.replace(work, micro_batch=size)
    return Setting(
        **vars(work),
        unit=arguments.unit or ("model" if machine.on_gpu else "block"),
        attention=arguments.attention,
        alone=machine.on_gpu,
        pairs=arguments.pairs,
        block_s=arguments.block_seconds,
    )


def fitting_micro_batch(args: ModelArgs, num_tokens: int, dtype: torch.dtype, room: float) -> int:
    """Return the most sequences that fit in `room` bytes with Canon ABCD, from 1 to MICRO_BATCH.

    States by titan/dry_run.py. A compiled block keeps about 8 D + 3 F values per token: the inputs
    of its norms, q, k, v, attention and its output, the feed-forward's input, gate, up and product.
    """
    args = dataclasses.replace(args, canon_set="ABCD", max_seq_len=num_tokens)
    saved = dtype.itemsize * (8 * args.dim + 3 * args.ffn_dim)
    saved += round(tables.SAVED_BYTES.must) * sum(args.canon_channels.values())
    with torch.device("meta"):
        model = Transformer(args)

    def overflows(size: int) -> bool:
        job = job_of(args, num_tokens=num_tokens, micro_batch=size, dtype=dtype)
        parts = count_memory(job, model, 1)
        parts["activations"] = args.num_layers * saved * size * num_tokens
        return sum(parts.values()) > ROOM * room

    return max(1, bisect.bisect_left(range(1, MICRO_BATCH + 1), True, key=overflows))


def _subject(setting: Setting, variant: Variant, machine: Machine) -> Subject | str:
    """Return `variant` after its first step, most of which is compilation; or why it failed."""
    if machine.on_gpu:
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if machine.on_gpu else 0
    try:
        step = build(setting, variant, machine.device)
        compile_s = seconds_of(step)
    except torch.OutOfMemoryError:
        return f"a micro-batch of {setting.micro_batch} does not fit in this GPU's memory"
    except Exception as why:
        if variant.backend not in OPTIONAL:
            raise
        return variants.failure(why)
    peak = torch.cuda.max_memory_allocated() - before if machine.on_gpu else None
    block = block_of(step, steps_for(step, setting.block_s))
    return Subject(block, {"compile_s": compile_s, "peak_bytes": peak})


def build(setting: Setting, variant: Variant, device: torch.device) -> Step:
    """Return a step of `variant`, whose first call compiles it."""
    if setting.unit == "model":
        return _whole_step(setting, variant, device, plain=setting.alone)
    block, compiled = variants.compiled_block(setting, variant, setting.attention)
    shape = (setting.micro_batch, setting.num_tokens, setting.args.dim)
    h_BTD = torch.randn(shape, device=device).to(setting.dtype).requires_grad_()
    grad_BTD = torch.randn_like(h_BTD)

    def step() -> None:
        block.zero_grad()
        h_BTD.grad = None
        compiled(h_BTD).backward(grad_BTD)

    return step


def _whole_step(
    setting: Setting, variant: Variant, device: torch.device, *, plain: bool
) -> BareStep:
    job = job_of(
        variants.with_canon(setting.args, variant.canon_set),
        num_tokens=setting.num_tokens,
        micro_batch=setting.micro_batch,
        dtype=setting.dtype,
        canon_backend=variant.backend,
        attention_backend=setting.attention,
    )
    return BareStep(job, device, plain=plain)


def measure_whole(setting: Setting, machine: Machine) -> dict[str, float]:
    """Return seconds of the step without Canon: forward and backward under FSDP2, the update."""
    machine.free_memory()
    step = _whole_step(setting, NONE, machine.device, plain=False)
    step()
    found = {}
    for name, part in (("forward_backward_s", step.forward_backward), ("update_s", step.update)):
        block = block_of(part, steps_for(part, setting.block_s))
        found[name] = statistics.median(block()[STEP] for _ in range(setting.pairs))
    return found


def speed(
    setting: Setting, variant: Variant, seconds: float, peaks: Mapping[str, float | None]
) -> dict[str, float | None]:
    """Return tokens per second, and the share of both peaks that their FLOPs are."""
    per_second = setting.tokens_per_step / seconds
    count = block_flops_per_token if setting.unit == "block" else flops_per_token
    args = variants.with_canon(setting.args, variant.canon_set)
    flops = count(args, setting.num_tokens) * per_second
    measured, stated = peaks["matmul_flops"], peaks["stated_flops"]
    return {
        "tokens_per_second": per_second,
        "mfu_of_measured": flops / measured if measured else None,
        "mfu_of_stated": flops / stated if stated else None,
    }


def print_result(result: dict[str, Any], console: Console) -> None:
    """Print the table, and below it what bounds the figures."""
    base, rows, unit = result["base"], result["rows"], result["unit"]
    args = ModelArgs(**result["args"])
    tables.print_lines(
        console,
        f"{result['timed']} of the {unit} of {result['model']}, {result['micro_batch']} x "
        f"{result['num_tokens']:,} tokens, {result['dtype']}; attention by {result['attention']}",
    )
    targets = {}
    if result["gpu"] and unit == "model" and args.dim == 2048:
        targets = tables.STEP
    elif (unit, result["dtype"], args.dim, args.ffn_dim) == ("block", "float32", 512, 1368):
        targets = tables.CPU_BLOCK
    columns = ("Canon", "backend", "ms", "tokens/s", "of matmul", "MFU", "over none", "spread")
    table = tables.make_table(*columns, "least", "target")
    table.add_row("none", "", *_speed_cells(base, base["s"]))
    for row in rows:
        table.add_row(
            row["canon_set"],
            row["backend"],
            *_speed_cells(row, row["other_s"]),
            *tables.extra_cells(row),
            f"{row['least']:+.1%}",
            tables.verdict(targets, row["canon_set"], row["ratio"] - 1),
        )
    console.print(table)
    how = f"medians of {rows[0]['pairs']} pairs of neighboring blocks"
    if base["drift"] is not None:
        how = (
            f"medians of {rows[0]['pairs']} blocks of each model by itself, beside none's before "
            f"and after ({base['drift'] - 1:+.1%})"
        )
    products_s = base["mfu_of_measured"] * base["s"]
    lines = [
        f"{how}; spread: 10th to 90th percentile",
        tables.peaks_line(result["peaks"]),
        f"limits: the products alone take {tables.ms(products_s)} ms of none's "
        f"{tables.ms(base['s'])} at the measured matmul peak ({result['flops_formula']}); "
        "least: Canon's own bytes, one kernel per site, at the copy bandwidth",
    ]
    if result["whole"] is not None:
        fsdp_s = result["whole"]["forward_backward_s"] - base["s"]
        lines.append(
            f"apart, without Canon: FSDP2 at one rank {1000 * fsdp_s:+.2f} ms on forward and "
            f"backward; clipping and AdamW of all parameters "
            f"{tables.ms(result['whole']['update_s'])} ms"
        )
    if base["peak_bytes"] is not None:
        peaks = [f"{row['variant']} {row['peak_bytes'] / GIB:.1f}" for row in (base, *rows)]
        lines.append(f"peak memory of each by itself in GiB: {', '.join(peaks)}")
    is_1b3 = unit == "model" and (args.num_layers, args.dim, args.position) == (24, 2048, "nope")
    if is_1b3 and "H200" in result["device"]:
        best = min(rows, key=lambda row: (row["canon_set"] != "ABCD", row["ratio"]))
        share = best["mfu_of_stated"]
        lines.append(f"MFU of {best['variant']}: {share:.1%}; target {tables.MFU.verdict(share)}")
    tables.print_lines(console, *lines)


def _speed_cells(row: Mapping[str, Any], seconds: float) -> list[str]:
    stated = row["mfu_of_stated"]
    return [
        tables.ms(seconds),
        f"{row['tokens_per_second']:,.0f}",
        f"{row['mfu_of_measured']:.1%}",
        "" if stated is None else f"{stated:.1%}",
    ]

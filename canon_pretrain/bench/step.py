"""Canon's price in a training step: each set and backend beside the same model without Canon.

`--unit block` is forward and backward of one compiled block. `--unit model` is on a CPU the whole
step (titan/bare_step.py), and on a GPU the model's forward and backward, of which MFU is a share;
what FSDP2 and AdamW take on top is measured apart, of the model without Canon.

On a CPU the two models of a comparison take turns. A GPU holds one at a time, with all of its
memory, as in a run: each is built, measured and freed, the one without Canon first and last.
"""

import argparse
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
from canon_pretrain.model.attend import Attend
from canon_pretrain.titan.bare_step import BareStep, job_of, one_rank
from canon_pretrain.titan.dry_run import GIB

UNITS = ("block", "model")


@dataclasses.dataclass(frozen=True)
class Setting(Workload):
    """What all variants of one run have in common."""

    unit: str
    alone: bool
    """One model in memory at a time."""
    pairs: int
    block_s: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    variants.add_model_arguments(parser, gpu=(3, 4096), cpu=(2, 1024))
    add("--unit", choices=UNITS, help="(default: model on a GPU, block on a CPU)")
    variants.add_variant_arguments(parser)
    variants.add_timing_arguments(parser, pairs=15, block_s=0.5)


def measure(
    arguments: argparse.Namespace, machine: Machine, say: Callable[[str], None]
) -> dict[str, Any]:
    """Return the figures as JSON can hold them; seconds, bytes, FLOPs. Raises UserError."""
    setting = Setting(
        **vars(variants.workload(arguments, machine)),
        unit=arguments.unit or ("model" if machine.on_gpu else "block"),
        alone=machine.on_gpu,
        pairs=arguments.pairs,
        block_s=arguments.block_seconds,
    )
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
        if isinstance(found, str) or not found.parts:
            why = found if isinstance(found, str) else "no variant could be measured"
            raise UserError(f"{why}: give a smaller --micro-batch, or fewer --layers")
        if setting.alone and setting.unit == "model":
            whole = measure_whole(setting, machine)
    rows = []
    for variant in chosen:
        if variant.name not in found.parts:
            continue
        beside = found.parts[variant.name][STEP]
        args = variants.with_canon(setting.args, variant.canon_set)
        layers = args.num_layers if setting.unit == "model" else 1
        tokens = setting.micro_batch * setting.num_tokens
        least = least_extra(args, setting.dtype.itemsize) * layers * tokens
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
    base = {"variant": "no Canon", "canon_set": "", "backend": "", **found.base_facts}
    base |= {"s": base_s, "drift": found.drift, **speed(setting, NONE, base_s, peaks)}
    return {
        **setting.facts(),
        "unit": setting.unit,
        "timed": "forward and backward" if setting.alone or setting.unit == "block" else "step",
        "attention": Attend(setting.args, "auto").describe(machine.device.type),
        "flops_formula": FLOPS_FORMULA,
        "peaks": peaks,
        "unavailable": missing | found.failed,
        "base": base,
        "whole": whole,
        "rows": rows,
    }


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
    block, compiled = variants.compiled_block(setting, variant)
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
    per_second = setting.micro_batch * setting.num_tokens / seconds
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
    base, rows, unit = result["base"], result["rows"], result["unit"]
    args = ModelArgs(**result["args"])
    targets = {}
    if result["gpu"] and unit == "model" and args.dim == 2048:
        targets = tables.STEP
    elif (unit, result["dtype"], args.dim, args.ffn_dim) == ("block", "float32", 512, 1368):
        targets = tables.CPU_BLOCK

    def percent(value: float | None, form: str = ".1%") -> str:
        return "" if value is None else format(value, form)

    columns: tables.Columns = {
        "Canon": lambda row: row["canon_set"] or "none",
        "backend": lambda row: row["backend"],
        "ms": lambda row: tables.ms(row.get("other_s", base["s"])),
        "tokens/s": lambda row: f"{row['tokens_per_second']:,.0f}",
        "of matmul": lambda row: percent(row["mfu_of_measured"]),
        "MFU": lambda row: percent(row["mfu_of_stated"]),
        "over none": tables.extra,
        "spread": tables.spread,
        "least": lambda row: percent(row.get("least"), "+.1%"),
        "target": lambda row: tables.verdict(targets, row["canon_set"], row.get("ratio", 1) - 1),
    }
    tables.print_table(console, [base, *rows], columns)
    how = f"medians of {rows[0]['pairs']} pairs of neighboring blocks"
    if base["drift"] is not None:
        how = (
            f"medians of {rows[0]['pairs']} blocks of each model by itself, beside none's before "
            f"and after ({base['drift'] - 1:+.1%})"
        )
    products_s = base["mfu_of_measured"] * base["s"]
    lines = [
        f"{result['timed']} of the {unit}: {tables.work_line(result)}; attention by "
        f"{result['attention']}; {how}; spread: 10th to 90th percentile",
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

"""The cost of Canon in a training step and in memory: each set and backend against no Canon.

`step --unit model` times the whole step (titan/spec.py) on a CPU, forward and backward on a GPU.
`memory` counts the storages that a compiled block saves for backward, without parameters.
"""

import argparse
import statistics
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from canon_pretrain.core.terminal import Console
from canon_pretrain.model.args import CANON_SITES, ModelArgs
from canon_pretrain.model.attend import Attend
from canon_pretrain.model.counts import flops_formula, flops_per_token
from canon_pretrain.titan.costs import count_saved
from canon_pretrain.titan.dry_run import GIB
from canon_pretrain.titan.spec import BareStep, job_of, one_rank
from tests.bench import tables, variants
from tests.bench.limits import Machine, block_flops_per_token, min_canon_bytes
from tests.bench.timing import BASE, STEP, Candidate, block_steps, make_block, seconds_of
from tests.bench.variants import NONE, Log, Result, Variant, Workload

SET_COLUMNS: tables.Columns = {
    "Canon": lambda row: row["canon_set"] or "none",
    "backend": lambda row: row["backend"],
}


def build(work: Workload, variant: Variant, is_model: bool, *, plain: bool) -> Any:
    """Return a step of `variant`; the first call compiles it."""
    if is_model:
        job = job_of(
            variants.with_canon(work.args, variant.canon_set),
            num_tokens=work.num_tokens,
            micro_batch=work.micro_batch,
            dtype=work.dtype,
            canon_backend=variant.backend,
        )
        return BareStep(job, work.device, plain=plain)
    block, compiled = variants.compiled_block(work, variant)
    shape = (work.micro_batch, work.num_tokens, work.args.dim)
    h_BTD = torch.randn(shape, device=work.device).to(work.dtype).requires_grad_()
    grad_BTD = torch.randn_like(h_BTD)

    def step() -> None:
        block.zero_grad()
        h_BTD.grad = None
        compiled(h_BTD).backward(grad_BTD)

    return step


# -- step


def add_step_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--unit", choices=("block", "model"), help="(default: model on a GPU, block on a CPU)"
    )
    variants.add_options(
        parser,
        [*variants.SHAPE, "sets", "backends", *variants.TIMING],
        shapes={"cuda": (3, 4096), "cpu": (2, 1024)},
        pairs=15,
        block_seconds=0.5,
    )


def measure_step(arguments: argparse.Namespace, machine: Machine, log: Log) -> Result:
    work = variants.workload(arguments, machine)
    unit = arguments.unit or ("model" if machine.on_gpu else "block")
    is_model = unit == "model"
    plain = machine.exclusive
    backends, missing = variants.available_backends(arguments.backends, work)
    chosen = variants.variants(arguments.sets, arguments.backends, backends)
    peaks = machine.peaks(work.dtype)
    block_s = arguments.block_seconds
    num_tokens = work.micro_batch * work.num_tokens

    def make(variant: Variant) -> Candidate:
        log(f"{variant.name} ...")
        if machine.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with variants.failures_as_not_measured(variant.backend):
            step = build(work, variant, is_model, plain=plain)
            seconds_of(step)
        peak = torch.cuda.max_memory_allocated() - before or None
        return Candidate(make_block(step, block_steps(step, block_s)), lambda: {"peak_bytes": peak})

    def speed(canon_set: str, seconds: float) -> dict[str, Any]:
        args = variants.with_canon(work.args, canon_set)
        count = flops_per_token if is_model else block_flops_per_token
        flops = count(args, work.num_tokens) * num_tokens / seconds
        stated = peaks["stated_flops"]
        return {
            "tokens_per_second": num_tokens / seconds,
            "mfu_of_measured": flops / peaks["matmul_flops"],
            "mfu_of_stated": flops / stated if stated else None,
        }

    # Each variant over no Canon; then, on a GPU, the parts of a whole step without Canon.
    with one_rank() if is_model else nullcontext():
        parts, facts, failed = variants.compare_variants(make, chosen, arguments.pairs, machine)
        variants.require_any("--sets", parts, failed)
        whole = None
        if is_model and plain:
            machine.free_memory()
            whole = measure_whole(work, arguments.pairs, block_s)

    rows = []
    for variant in chosen:
        if variant.name not in parts:
            continue
        times = parts[variant.name][STEP]
        args = variants.with_canon(work.args, variant.canon_set)
        least_bytes = min_canon_bytes(args, work.dtype.itemsize) * num_tokens
        if is_model:
            least_bytes *= args.num_layers
        row = variant.row() | facts[variant.name] | times
        row |= speed(variant.canon_set, times["other_s"])
        row["least"] = least_bytes / machine.copy_bandwidth / times["base_s"]
        rows.append(row)

    base_s = statistics.median(row["base_s"] for row in rows)
    return {
        **work.facts(),
        "unit": unit,
        "timed": "forward and backward" if plain or not is_model else "step",
        "attention": Attend(work.args, "auto").describe(machine.device.type),
        "flops_formula": flops_formula(work.args),
        "peaks": peaks,
        "unavailable": missing | failed,
        "base": Variant("", "").row() | facts[BASE] | {"other_s": base_s} | speed("", base_s),
        "whole": whole,
        "rows": rows,
    }


def measure_whole(work: Workload, pairs: int, block_s: float) -> dict[str, float]:
    """Return the seconds of forward and backward under FSDP2, and of the update, without Canon."""
    step = build(work, NONE, True, plain=False)
    step()
    parts = {"forward_backward_s": step.forward_backward, "update_s": step.update}
    blocks = {name: make_block(part, block_steps(part, block_s)) for name, part in parts.items()}
    medians = {}
    for name, block in blocks.items():
        medians[name] = statistics.median(block()[STEP] for _ in range(pairs))
    return medians


def print_step(result: dict[str, Any], console: Console) -> None:
    base = result["base"]
    rows = result["rows"]
    unit = result["unit"]
    args = ModelArgs(**result["args"])
    targets = {}
    if result["gpu"] and unit == "model" and args.dim == 2048:
        targets = tables.STEP
    elif (unit, result["dtype"], args.dim, args.ffn_dim) == ("block", "float32", 512, 1368):
        targets = tables.CPU_BLOCK

    columns: tables.Columns = {
        **SET_COLUMNS,
        "ms": lambda row: tables.ms(row["other_s"]),
        "tokens/s": lambda row: f"{row['tokens_per_second']:,.0f}",
        "of matmul": lambda row: f"{row['mfu_of_measured']:.1%}",
        "MFU": lambda row: f"{row['mfu_of_stated']:.1%}" if row["mfu_of_stated"] else "",
        "over none": tables.extra,
        "spread": tables.spread,
        "least": lambda row: f"{row['least']:+.1%}" if "least" in row else "",
        "target": lambda row: tables.verdict(targets, row),
    }
    lines = [
        f"{result['timed']} of the {unit}: {result['work']}; attention by {result['attention']}; "
        f"medians of {rows[0]['pairs']} pairs; spread: 10th to 90th percentile",
        tables.peaks_line(result["peaks"]),
        f"lower bounds: matmuls {tables.ms(base['mfu_of_measured'] * base['other_s'])} ms of "
        f"none's {tables.ms(base['other_s'])} at the measured peak ({result['flops_formula']}); "
        "least: Canon's bytes, one kernel per site, at the copy bandwidth",
    ]
    if whole := result["whole"]:
        lines.append(
            "without Canon: FSDP2 on one rank adds "
            f"{1000 * (whole['forward_backward_s'] - base['other_s']):+.2f} ms to forward and "
            f"backward; clipping and AdamW take {tables.ms(whole['update_s'])} ms"
        )
    if base["peak_bytes"]:
        peaks = [f"{row['variant']} {row['peak_bytes'] / GIB:.1f}" for row in (base, *rows)]
        lines.append(f"peak memory in GiB: {', '.join(peaks)}")
    tables.print_table(console, [base, *rows], columns, *lines)


# -- memory


def add_memory_arguments(parser: argparse.ArgumentParser) -> None:
    variants.add_options(
        parser,
        [*variants.SHAPE, "sets", "backends"],
        shapes={"cuda": (3, 4096), "cpu": (1, 512)},
    )
    parser.set_defaults(flavor="1b3", dtype="bfloat16", sets=[*CANON_SITES, "AC", "ABCD"])


def measure_memory(arguments: argparse.Namespace, machine: Machine, log: Log) -> Result:
    work = variants.workload(arguments, machine)
    backends, missing = variants.available_backends(arguments.backends, work)

    # Bytes per token that a compiled block saves, first without Canon.
    rows: list[dict[str, Any]] = []
    for variant in [NONE, *variants.variants(arguments.sets, arguments.backends, backends)]:
        block, compiled = variants.compiled_block(work, variant)
        h_BTD = torch.randn(1, work.num_tokens, work.args.dim, device=work.device).to(work.dtype)
        h_BTD.requires_grad_()
        saved = count_saved(partial(compiled, h_BTD), block) / work.num_tokens
        log(f"{variant.name}: {saved:,.1f} bytes per token")
        row = {**variant.row(), "bytes_per_token": saved}
        if rows:
            extra = saved - rows[0]["bytes_per_token"]
            channels = variants.with_canon(work.args, variant.canon_set).canon_channels
            row["extra_per_token"] = extra
            row["extra_per_channel"] = extra / sum(channels.values())
        rows.append(row)

    # Peaks of whole steps.
    peaks = {}
    if machine.on_gpu:
        with one_rank():
            for canon_set in ("", "ABCD"):
                machine.free_memory()
                torch.cuda.reset_peak_memory_stats()
                step = build(work, Variant(canon_set, "auto"), True, plain=False)
                seconds_of(step, 2)
                peaks[canon_set or "none"] = torch.cuda.max_memory_allocated()
                del step
    return {**work.facts(), "unavailable": missing, "rows": rows, "peaks": peaks}


def print_memory(result: dict[str, Any], console: Console) -> None:
    targets = tables.SAVED_BYTES if result["dtype"] == "bfloat16" else {}
    columns: tables.Columns = {
        **SET_COLUMNS,
        "bytes/token": lambda row: f"{row['bytes_per_token']:,.0f}",
        "Canon's": lambda row: f"{row['extra_per_token']:+,.0f}" if row["canon_set"] else "",
        "per channel": lambda row: f"{row['extra_per_channel']:.3f}" if row["canon_set"] else "",
        "target": lambda row: tables.verdict(
            targets, row, round(row.get("extra_per_channel", 0.0), 2)
        ),
    }
    lines = [f"saved for backward by one compiled block: {result['work']}"]
    for canon_set, peak in result["peaks"].items():
        lines.append(f"measured peak on one rank: {peak / GIB:.1f} GiB with Canon {canon_set}")
    tables.print_table(console, result["rows"], columns, *lines)


BENCHES = {
    "step": variants.Bench(add_step_arguments, measure_step, print_step),
    "memory": variants.Bench(add_memory_arguments, measure_memory, print_memory),
}

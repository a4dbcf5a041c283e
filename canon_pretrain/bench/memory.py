"""What a block keeps for backward, counted; on a GPU beside the measured peak of training steps.

Counted by saved_tensors_hooks on one compiled block, whole storages, parameters left out: exact, on
a CPU as on a GPU. What fits on a GPU is computed by `canon_pretrain.train --dry_run --gpu`.
"""

import argparse
import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from canon_pretrain.bench import tables, variants
from canon_pretrain.bench.machine import Machine
from canon_pretrain.bench.variants import NONE, Variant, Workload
from canon_pretrain.core.terminal import Console
from canon_pretrain.model.args import CANON_SITES
from canon_pretrain.titan.bare_step import BareStep, job_of, one_rank
from canon_pretrain.titan.dry_run import GIB, count_saved


def add_arguments(parser: argparse.ArgumentParser) -> None:
    variants.add_model_arguments(parser, gpu=(3, 4096), cpu=(1, 512))
    about = "no training steps on a GPU"
    parser.add_argument("--counted-only", action="store_true", help=about)
    variants.add_variant_arguments(parser)
    parser.set_defaults(flavor="1b3", dtype="bfloat16", sets=[*CANON_SITES, "AC", "ABCD"])


def measure(
    arguments: argparse.Namespace, machine: Machine, say: Callable[[str], None]
) -> dict[str, Any]:
    """Return the figures as JSON can hold them; bytes. Raises UserError."""
    work = variants.workload(arguments, machine)
    backends, missing = variants.available(arguments.backends, work.device, work.dtype)
    rows: list[dict[str, Any]] = []
    with variants.many_compilations():
        for variant in [NONE, *variants.variants(arguments.sets, arguments.backends, backends)]:
            saved = saved_per_token(work, variant)
            say(f"{variant.name}: {saved:,.1f} bytes per token")
            row = {"variant": variant.name, **dataclasses.asdict(variant)}
            row["bytes_per_token"] = saved
            if rows:
                extra = saved - rows[0]["bytes_per_token"]
                own = variants.with_canon(work.args, variant.canon_set)
                row["extra_per_token"] = extra
                row["extra_per_channel"] = extra / sum(own.canon_channels.values())
            rows.append(row)
    measures = machine.on_gpu and not arguments.counted_only
    measured = measured_peaks(work, machine) if measures else []
    return {**work.facts(), "unavailable": missing, "rows": rows, "measured": measured}


def saved_per_token(work: Workload, variant: Variant) -> float:
    """Return the bytes that one compiled block keeps for backward per token."""
    block, compiled = variants.compiled_block(work, variant)
    h_BTD = torch.randn(1, work.num_tokens, work.args.dim, device=work.device).to(work.dtype)
    h_BTD.requires_grad_()
    return count_saved(lambda: compiled(h_BTD), block) / work.num_tokens


def measured_peaks(work: Workload, machine: Machine) -> list[dict[str, Any]]:
    """Return the peak of two training steps, without Canon and with ABCD."""
    num_tokens, dtype, size = work.args.max_seq_len, work.dtype, work.micro_batch
    found = []
    with one_rank():
        for canon_set in ("", "ABCD"):
            own = variants.with_canon(work.args, canon_set)
            job = job_of(own, num_tokens=num_tokens, micro_batch=size, dtype=dtype)
            machine.free_memory()
            torch.cuda.reset_peak_memory_stats()
            step = BareStep(job, machine.device)
            for _ in range(2):
                step()
            torch.cuda.synchronize()
            row = {"canon_set": canon_set, "micro_batch": size, "num_tokens": num_tokens}
            found.append({**row, "peak": torch.cuda.max_memory_allocated()})
            del step
    return found


def print_result(result: dict[str, Any], console: Console) -> None:
    def goal(row: tables.Row) -> str:
        if row["canon_set"] != "ABCD" or result["dtype"] != "bfloat16":
            return ""
        return tables.SAVED_BYTES.verdict(round(row["extra_per_channel"], 2))

    columns: tables.Columns = {
        "Canon": lambda row: row["canon_set"] or "none",
        "backend": lambda row: row["backend"],
        "bytes/token": lambda row: f"{row['bytes_per_token']:,.0f}",
        "Canon's": lambda row: f"{row['extra_per_token']:+,.0f}" if row["canon_set"] else "",
        "per channel": lambda row: f"{row['extra_per_channel']:.3f}" if row["canon_set"] else "",
        "target": goal,
    }
    tables.print_table(console, result["rows"], columns)
    tables.print_lines(
        console,
        f"kept for backward by one compiled block: {tables.work_line(result)}",
        *(
            f"measured: peak {peak['peak'] / GIB:.1f} GiB with Canon "
            f"{peak['canon_set'] or 'none'}, {peak['micro_batch']} x {peak['num_tokens']:,} "
            "tokens, one rank"
            for peak in result["measured"]
        ),
    )

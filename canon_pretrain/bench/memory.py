"""What a block keeps for backward, counted; on a GPU beside the measured peak of training steps.

Counted by saved_tensors_hooks on one compiled block, whole storages, parameters left out: exact, on
a CPU as on a GPU. What fits on a GPU is computed by `canon_pretrain.train --dry_run --gpu`.
"""

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from canon_pretrain.bench import tables, variants
from canon_pretrain.bench.machine import Machine
from canon_pretrain.bench.step import build
from canon_pretrain.bench.variants import NONE, Variant
from canon_pretrain.core.terminal import Console
from canon_pretrain.model.args import CANON_SITES
from canon_pretrain.titan.dry_run import GIB, count_saved
from canon_pretrain.titan.spec import one_rank


def add_arguments(parser: argparse.ArgumentParser) -> None:
    about = "no training steps on a GPU"
    parser.add_argument("--counted-only", action="store_true", help=about)
    names = (*variants.SHAPE, "sets", "backends")
    variants.add_options(parser, *names, shapes={"cuda": (3, 4096), "cpu": (1, 512)})
    parser.set_defaults(flavor="1b3", dtype="bfloat16", sets=[*CANON_SITES, "AC", "ABCD"])


def measure(
    arguments: argparse.Namespace, machine: Machine, say: Callable[[str], None]
) -> dict[str, Any]:
    """Return the figures as JSON can hold them; bytes. Raises UserError."""
    work = variants.workload(arguments, machine)
    backends, missing = variants.available(arguments.backends, work)
    rows: list[dict[str, Any]] = []
    for variant in [NONE, *variants.variants(arguments.sets, arguments.backends, backends)]:
        block, compiled = variants.compiled_block(work, variant)
        h_BTD = torch.randn(1, work.num_tokens, work.args.dim, device=work.device).to(work.dtype)
        h_BTD.requires_grad_()
        saved = count_saved(partial(compiled, h_BTD), block) / work.num_tokens
        say(f"{variant.name}: {saved:,.1f} bytes per token")
        row = {**variant.row(), "bytes_per_token": saved}
        if rows:
            extra = saved - rows[0]["bytes_per_token"]
            channels = variants.with_canon(work.args, variant.canon_set).canon_channels
            row |= {"extra_per_token": extra, "extra_per_channel": extra / sum(channels.values())}
        rows.append(row)
    peaks = {}
    if machine.on_gpu and not arguments.counted_only:
        with one_rank():
            for canon_set in ("", "ABCD"):  # two training steps of each
                machine.free_memory()
                torch.cuda.reset_peak_memory_stats()
                step = build(work, Variant(canon_set, "auto"), True, plain=False)
                step()
                step()
                torch.cuda.synchronize()
                peaks[canon_set or "none"] = torch.cuda.max_memory_allocated()
                del step
    return {**work.facts(), "unavailable": missing, "rows": rows, "peaks": peaks}


def print_result(result: dict[str, Any], console: Console) -> None:
    targets = tables.SAVED_BYTES if result["dtype"] == "bfloat16" else {}
    columns: tables.Columns = {
        "Canon": lambda row: row["canon_set"] or "none",
        "backend": lambda row: row["backend"],
        "bytes/token": lambda row: f"{row['bytes_per_token']:,.0f}",
        "Canon's": lambda row: f"{row['extra_per_token']:+,.0f}" if row["canon_set"] else "",
        "per channel": lambda row: f"{row['extra_per_channel']:.3f}" if row["canon_set"] else "",
        "target": lambda row: tables.verdict(
            targets, row, round(row.get("extra_per_channel", 0.0), 2)
        ),
    }
    lines = [f"kept for backward by one compiled block: {result['work']}"]
    for canon_set, peak in result["peaks"].items():
        lines.append(f"measured on one rank: peak {peak / GIB:.1f} GiB with Canon {canon_set}")
    tables.print_table(console, result["rows"], columns, *lines)

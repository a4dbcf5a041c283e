"""What a block keeps for backward, counted, and what follows for a GPU's memory, computed.

Counted by saved_tensors_hooks on one compiled block, whole storages, parameters left out: exact, on
a CPU as on a GPU. On a GPU the peak of whole training steps is measured beside it.
"""

import argparse
import dataclasses
import gc
from collections.abc import Callable
from typing import Any

import torch

from canon_pretrain.bench import variants
from canon_pretrain.bench.bare import BareStep, job_of, one_rank
from canon_pretrain.bench.machine import Machine, heading
from canon_pretrain.bench.memory_plan import fitting_micro_batch, largest_micro_batch, parts_of
from canon_pretrain.bench.step import many_compilations
from canon_pretrain.bench.tables import make_table, print_lines, unavailable_lines
from canon_pretrain.bench.targets import SAVED_BYTES
from canon_pretrain.bench.variants import NONE, Variant
from canon_pretrain.core.terminal import Console
from canon_pretrain.kernels.backends import compile_options
from canon_pretrain.model.args import CANON_SITES, ModelArgs
from canon_pretrain.model.attend import Attend
from canon_pretrain.model.positions import Rope
from canon_pretrain.model.transformer import TransformerBlock
from canon_pretrain.titan.dry_run import GIB, GPUS
from canon_pretrain.titan.memory import count_saved

CPU_TOKENS = 512
PLANNED = ("h100", "h200")
WORLD_SIZES = (1, 8)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `memory`."""
    add = parser.add_argument
    variants.add_model_arguments(parser)
    add("--tokens", type=int, metavar="T", help="counted on (default: 512 on a CPU, else 4096)")
    add("--micro-batch", type=int, metavar="B", help="of the measured peak (default: what fits)")
    add("--counted-only", action="store_true", help="no training steps on a GPU")
    variants.add_variant_arguments(parser)
    parser.set_defaults(flavor="1b3", dtype="bfloat16", sets=[*CANON_SITES, "AC", "ABCD"])


def measure(
    arguments: argparse.Namespace, machine: Machine, say: Callable[[str], None]
) -> dict[str, Any]:
    """The figures of one run, as JSON can hold them; bytes. Raises UserError."""
    variants.check_at_least(1, tokens=arguments.tokens, micro_batch=arguments.micro_batch)
    num_tokens = arguments.tokens or (4096 if machine.on_gpu else CPU_TOKENS)
    args = variants.model_args(arguments, on_gpu=machine.on_gpu, num_tokens=num_tokens)
    dtype = variants.dtype_of(arguments, on_gpu=machine.on_gpu)
    backends, missing = variants.available(arguments.backends, machine.device, dtype)
    chosen = variants.variants(arguments.sets, arguments.backends, backends)

    def count(variant: Variant) -> float:
        own = variants.with_canon(args, variant.canon_set)
        found = saved_per_token(own, variant.backend, num_tokens, dtype, machine.device)
        say(f"{variant.name}: {found:,.1f} bytes a token")
        return found

    with many_compilations():
        base = count(NONE)
        rows = [
            {
                "variant": variant.name,
                "canon_set": variant.canon_set,
                "backend": variant.backend,
                "bytes_per_token": (saved := count(variant)),
                "extra_per_token": saved - base,
                "extra_per_channel": (saved - base) / channels_of(args, variant),
            }
            for variant in chosen
        ]
    rows.insert(0, {"variant": NONE.name, "canon_set": "", "bytes_per_token": base})
    train_tokens = args.max_seq_len
    measures = machine.on_gpu and not arguments.counted_only
    return {
        "bench": "memory",
        **machine.facts(),
        "model": variants.describe(args),
        "args": dataclasses.asdict(args),
        "dtype": str(dtype).removeprefix("torch."),
        "num_tokens": num_tokens,
        "unavailable": missing,
        "rows": rows,
        "target": dataclasses.asdict(SAVED_BYTES) if dtype == torch.bfloat16 else None,
        "plans": plans(args, rows, train_tokens, dtype),
        "measured": measured_peaks(arguments, args, dtype, machine) if measures else [],
    }


def channels_of(args: ModelArgs, variant: Variant) -> int:
    """Channels of all of a variant's sites together."""
    return sum(variants.with_canon(args, variant.canon_set).canon_channels.values())


def saved_per_token(
    args: ModelArgs, backend: str, num_tokens: int, dtype: torch.dtype, device: torch.device
) -> float:
    """Bytes that one compiled block keeps for backward of each of `num_tokens` tokens."""
    rope = Rope(args) if args.rope_dim else None
    block = TransformerBlock(args, rope, Attend(args), backend).to(device, dtype)
    if rope is not None:
        rope.reset(device)
    options = compile_options(device.type, backend)
    compiled = torch.compile(block, fullgraph=True, dynamic=False, options=options)
    h_BTD = torch.randn(1, num_tokens, args.dim, device=device).to(dtype).requires_grad_()
    return count_saved(lambda: compiled(h_BTD), block) / num_tokens


def plans(
    args: ModelArgs, rows: list[dict[str, Any]], num_tokens: int, dtype: torch.dtype
) -> list[dict[str, Any]]:
    """The largest micro-batch on each GPU, without Canon and with each backend's ABCD; computed."""
    found = []
    for row in rows:
        if row["canon_set"] not in ("", "ABCD"):
            continue
        own = variants.with_canon(args, row["canon_set"])
        for gpu in PLANNED:
            for world_size in WORLD_SIZES:
                options: dict[str, Any] = {
                    "num_tokens": num_tokens,
                    "dtype": dtype,
                    "world_size": world_size,
                    "saved_per_token": row["bytes_per_token"],
                }
                room = GPUS[gpu].memory_gib * GIB
                size = largest_micro_batch(own, room=room, **options)
                parts = parts_of(own, micro_batch=max(1, size), **options)
                found.append(
                    {
                        "variant": row["variant"],
                        "gpu": gpu,
                        "world_size": world_size,
                        "num_tokens": num_tokens,
                        "micro_batch": size,
                        "bytes": parts,
                        "total": sum(parts.values()),
                    }
                )
    return found


def measured_peaks(
    arguments: argparse.Namespace, args: ModelArgs, dtype: torch.dtype, machine: Machine
) -> list[dict[str, Any]]:
    """The peak of two training steps, without Canon and with ABCD, beside what was computed."""
    num_tokens = args.max_seq_len
    size = arguments.micro_batch or fitting_micro_batch(
        variants.with_canon(args, "ABCD"),
        num_tokens,
        dtype,
        room=torch.cuda.mem_get_info()[0],
    )
    found = []
    with one_rank():
        for canon_set in ("", "ABCD"):
            own = variants.with_canon(args, canon_set)
            job = job_of(own, num_tokens=num_tokens, micro_batch=size, dtype=dtype)
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            step = BareStep(job, machine.device)
            for _ in range(2):
                step()
            torch.cuda.synchronize()
            found.append(
                {
                    "canon_set": canon_set,
                    "micro_batch": size,
                    "num_tokens": num_tokens,
                    "peak": torch.cuda.max_memory_allocated(),
                }
            )
            del step
    return found


def print_result(result: dict[str, Any], console: Console) -> None:
    """The tables that a person reads."""
    print_lines(console, heading(result))
    print_lines(
        console,
        f"kept for backward by one compiled block of {result['model']}, {result['dtype']}, counted "
        f"on {result['num_tokens']:,} tokens",
    )
    table = make_table("Canon", "backend", "bytes/token", "Canon's", "per channel", "target")
    for row in result["rows"]:
        if not row["canon_set"]:
            table.add_row("none", "", f"{row['bytes_per_token']:,.0f}", "", "", "")
            continue
        asked = result["target"] is not None and row["canon_set"] == "ABCD"
        each = row["extra_per_channel"]
        table.add_row(
            row["canon_set"],
            row["backend"],
            f"{row['bytes_per_token']:,.0f}",
            f"{row['extra_per_token']:+,.0f}",
            f"{each:.3f}",
            f"{SAVED_BYTES.numbers()} B: {SAVED_BYTES.verdict(round(each, 2))}" if asked else "",
        )
    console.print(table)
    _print_plans(result, console)
    print_lines(console, *unavailable_lines(result["unavailable"]))


def _print_plans(result: dict[str, Any], console: Console) -> None:
    names = list(result["plans"][0]["bytes"]) if result["plans"] else []
    short = [name.partition(" (")[0].replace("gathered by FSDP2", "gathered") for name in names]
    table = make_table(
        "Canon", "GPU", "ranks", "micro-batch", *short, "GiB in all", title="computed"
    )
    for plan in result["plans"]:
        table.add_row(
            plan["variant"],
            plan["gpu"],
            str(plan["world_size"]),
            str(plan["micro_batch"]),
            *(f"{plan['bytes'][name] / GIB:.1f}" for name in names),
            f"{plan['total'] / GIB:.1f}",
        )
    console.print(table)
    for peak in result["measured"]:
        print_lines(
            console,
            f"measured: peak {peak['peak'] / GIB:.1f} GiB with "
            f"{'Canon ' + peak['canon_set'] if peak['canon_set'] else 'no Canon'}, "
            f"{peak['micro_batch']} x {peak['num_tokens']:,} tokens, one rank",
        )

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
from typing import Any

import torch

from canon_pretrain.bench import tables, variants
from canon_pretrain.bench.limits import block_flops_per_token, least_extra
from canon_pretrain.bench.machine import Machine
from canon_pretrain.bench.tables import print_lines
from canon_pretrain.bench.timing import (
    STEP,
    Step,
    Subject,
    block_of,
    compare_subjects,
    seconds_of,
    steps_for,
)
from canon_pretrain.bench.variants import NONE, Variant
from canon_pretrain.core.errors import UserError
from canon_pretrain.core.terminal import Console
from canon_pretrain.kernels.backends import OPTIONAL
from canon_pretrain.model.args import FLOPS_FORMULA, ModelArgs, flops_per_token
from canon_pretrain.model.attend import BACKENDS as ATTENTION
from canon_pretrain.model.attend import Attend
from canon_pretrain.model.transformer import Transformer
from canon_pretrain.titan.bare_step import BareStep, job_of, one_rank
from canon_pretrain.titan.dry_run import GIB, memory_by_part

UNITS = ("block", "model")
CPU_TOKENS, CPU_MICRO_BATCH = 1024, 2
ROOM = 0.92
"""The share of a GPU's memory that is planned with; fragments and workspaces take the rest."""
MICRO_BATCH = 6
"""Of the 1.3B runs (train_configs/base/1b3.toml), in sequences of 4,096 tokens."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """What all variants of one run have in common."""

    args: ModelArgs
    unit: str
    num_tokens: int
    micro_batch: int
    dtype: torch.dtype
    attention: str
    alone: bool
    """One model in memory at a time."""
    pairs: int
    block_s: float

    @property
    def tokens_per_step(self) -> int:
        return self.micro_batch * self.num_tokens

    def args_of(self, variant: Variant) -> ModelArgs:
        return variants.with_canon(self.args, variant.canon_set)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `step`."""
    add = parser.add_argument
    variants.add_model_arguments(parser)
    add("--unit", choices=UNITS, help="(default: model on a GPU, block on a CPU)")
    add("--tokens", type=int, metavar="T", help="(default: the flavor's on a GPU, 1024 on a CPU)")
    add("--micro-batch", type=int, metavar="B", help="sequences (default: what fits, 2 on a CPU)")
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
    with one_rank() if setting.unit == "model" else nullcontext(), variants.many_compilations():

        def make(variant: Variant) -> Callable[[], Subject | str]:
            def made() -> Subject | str:
                say(f"{variant.name} ...")
                return _subject(setting, variant, machine)

            return made

        found = compare_subjects(
            make(NONE),
            {variant.name: make(variant) for variant in chosen},
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
        per_byte = setting.tokens_per_step / machine.copy_bandwidth / beside.base_s
        per_byte *= setting.args.num_layers if setting.unit == "model" else 1
        rows.append(
            {
                "variant": variant.name,
                **dataclasses.asdict(variant),
                **found.facts[variant.name],
                **dataclasses.asdict(beside),
                **speed(setting, variant, beside.other_s, peaks),
                "least": least_extra(setting.args_of(variant), setting.dtype.itemsize) * per_byte,
            }
        )
    base_s = statistics.median(row["base_s"] for row in rows)
    base = {"variant": NONE.name, **found.base_facts, "s": base_s, "drift": found.drift}
    return {
        "bench": "step",
        **machine.facts(),
        **variants.model_facts(setting.args, setting.dtype),
        "unit": setting.unit,
        "timed": "forward and backward" if setting.alone or setting.unit == "block" else "step",
        "num_tokens": setting.num_tokens,
        "micro_batch": setting.micro_batch,
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
    variants.check_at_least(
        1, tokens=arguments.tokens, micro_batch=arguments.micro_batch, pairs=arguments.pairs
    )
    variants.check_at_least(0, block_seconds=arguments.block_seconds)
    num_tokens = arguments.tokens or (4096 if machine.on_gpu else CPU_TOKENS)
    args = variants.model_args(arguments, on_gpu=machine.on_gpu, num_tokens=num_tokens)
    dtype = variants.dtype_of(arguments, on_gpu=machine.on_gpu)
    micro_batch = arguments.micro_batch or CPU_MICRO_BATCH
    if machine.on_gpu and not arguments.micro_batch:
        micro_batch = fitting_micro_batch(args, num_tokens, dtype, torch.cuda.mem_get_info()[0])
    return Setting(
        args=args,
        unit=arguments.unit or ("model" if machine.on_gpu else "block"),
        num_tokens=num_tokens,
        micro_batch=micro_batch,
        dtype=dtype,
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
        parts = memory_by_part(
            args,
            model,
            num_shards=1,
            micro_batch=size,
            dtype=torch.float32,
            param_dtype=dtype,
        )
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
    block, compiled = variants.compiled_block(
        setting.args, variant, setting.attention, device, setting.dtype
    )
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
        setting.args_of(variant),
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
    flops = count(setting.args_of(variant), setting.num_tokens) * per_second
    measured, stated = peaks["matmul_flops"], peaks["stated_flops"]
    return {
        "tokens_per_second": per_second,
        "mfu_of_measured": flops / measured if measured else None,
        "mfu_of_stated": flops / stated if stated else None,
    }


def print_result(result: dict[str, Any], console: Console) -> None:
    """Print the table, and below it what bounds the figures."""
    base, rows, args = result["base"], result["rows"], result["args"]
    print_lines(
        console,
        tables.heading(result),
        f"{result['timed']} of the {result['unit']} of {result['model']}, "
        f"{result['micro_batch']} x {result['num_tokens']:,} tokens, {result['dtype']}; attention "
        f"by {result['attention']}",
    )
    has_stated = base["mfu_of_stated"] is not None
    columns = ["Canon", "backend", "ms", "tokens/s", "of matmul", *(["MFU"] if has_stated else [])]
    table = tables.make_table(*columns, "over none", "spread", "least", "target")
    targets = {}
    if "gpu" in result and result["gpu"] and result["unit"] == "model" and args["dim"] == 2048:
        targets = tables.STEP
    elif (result["unit"], result["dtype"], args["dim"], args["ffn_dim"]) == (
        *("block", "float32"),
        *(512, 1368),
    ):
        targets = tables.CPU_BLOCK
    table.add_row("none", "", *_speed_cells(base, base["s"], has_stated))
    for row in rows:
        table.add_row(
            row["canon_set"],
            row["backend"],
            *_speed_cells(row, row["other_s"], has_stated),
            *tables.extra_cells(row),
            f"{row['least']:+.1%}",
            tables.verdict(targets, row["canon_set"], row["ratio"] - 1),
        )
    console.print(table)
    print_lines(console, *tables.unavailable_lines(result["unavailable"]))
    how = f"medians of {rows[0]['pairs']} pairs of neighboring blocks"
    if base["drift"] is not None:
        how = (
            f"medians of {rows[0]['pairs']} blocks of each model by itself, beside none's before "
            f"and after ({base['drift'] - 1:+.1%})"
        )
    print_lines(
        console,
        f"{how}; spread: 10th to 90th percentile",
        tables.peaks_line(result["peaks"]),
        f"limits: the products alone take {1000 * base['mfu_of_measured'] * base['s']:.2f} ms of "
        f"none's {1000 * base['s']:.2f} at the measured matmul peak ({result['flops_formula']}); "
        "least: Canon's own bytes, one kernel per site, at the copy bandwidth",
    )
    if result["whole"] is not None:
        fsdp_s = result["whole"]["forward_backward_s"] - base["s"]
        print_lines(
            console,
            f"apart, without Canon: FSDP2 at one rank {1000 * fsdp_s:+.2f} ms on forward and "
            f"backward; clipping and AdamW of all parameters "
            f"{1000 * result['whole']['update_s']:.2f} ms",
        )
    if base["peak_bytes"] is not None:
        peaks = [f"{row['variant']} {row['peak_bytes'] / GIB:.1f}" for row in (base, *rows)]
        print_lines(console, f"peak memory of each by itself in GiB: {', '.join(peaks)}")
    is_1b3 = result["unit"] == "model" and (args["num_layers"], args["dim"]) == (24, 2048)
    if is_1b3 and args["position"] == "nope" and "H200" in result["device"]:
        best = min(rows, key=lambda row: (row["canon_set"] != "ABCD", row["ratio"]))
        share = best["mfu_of_stated"]
        target = tables.MFU.verdict(share)
        print_lines(console, f"MFU of {best['variant']}: {share:.1%}; target {target}")


def _speed_cells(row: Mapping[str, Any], seconds: float, has_stated: bool) -> list[str]:
    cells = [f"{1000 * seconds:.2f}", f"{row['tokens_per_second']:,.0f}"]
    cells.append(f"{row['mfu_of_measured']:.1%}")
    return [*cells, f"{row['mfu_of_stated']:.1%}"] if has_stated else cells

"""The table of `bench step`, from what its JSON holds."""

from typing import Any

from canon_pretrain.bench.machine import heading, peaks_line
from canon_pretrain.bench.tables import make_table, print_lines, unavailable_lines
from canon_pretrain.bench.targets import MFU, Target, show
from canon_pretrain.core.terminal import Console
from canon_pretrain.titan.dry_run import GIB


def print_result(result: dict[str, Any], console: Console) -> None:
    """The table that a person reads, and below it what bounds the figures."""
    print_lines(console, heading(result))
    print_lines(
        console,
        f"{result['timed']} of the {result['unit']} of {result['model']}, "
        f"{result['micro_batch']} x {result['num_tokens']:,} tokens, {result['dtype']}; attention "
        f"by {result['attention']}",
    )
    has_stated = result["base"]["mfu_of_stated"] is not None
    columns = ["Canon", "backend", "ms", "tokens/s", "of matmul", *(["MFU"] if has_stated else [])]
    limits = ("kernel a site", "fused")
    table = make_table(*columns, "over none", "spread", *limits, "target")
    base = result["base"]
    table.add_row("none", "", *_speed(base, base["s"], has_stated))
    targets = {name: Target(**bounds) for name, bounds in result["targets"].items()}
    for row in result["rows"]:
        extra = row["ratio"] - 1
        table.add_row(
            row["canon_set"],
            row["backend"],
            *_speed(row, row["other_s"], has_stated),
            f"{extra:+.1%}",
            f"{row['ratio_low'] - 1:+.1%} to {row['ratio_high'] - 1:+.1%}",
            f"{row['limits']['one_kernel_a_site']:+.1%}",
            f"{row['limits']['fused']:+.1%}",
            show(targets.get(row["canon_set"]), extra),
        )
    console.print(table)
    print_lines(console, *unavailable_lines(result["unavailable"]), *_limits(result))


def _speed(row: dict[str, Any], seconds: float, has_stated: bool) -> list[str]:
    cells = [f"{1000 * seconds:.2f}", f"{row['tokens_per_second']:,.0f}"]
    cells.append(f"{row['mfu_of_measured']:.1%}")
    return [*cells, f"{row['mfu_of_stated']:.1%}"] if has_stated else cells


def _limits(result: dict[str, Any]) -> list[str]:
    base = result["base"]
    pairs = result["rows"][0]["pairs"]
    lines = [
        f"medians of {pairs} pairs of neighbouring blocks; spread: 10th to 90th percentile"
        if "drift" not in base
        else f"medians of {pairs} blocks of each model by itself, beside none's before and after "
        f"({base['drift'] - 1:+.1%}); spread: 10th to 90th percentile",
        peaks_line(result["peaks"]),
        f"limits: the products alone take {1000 * base['mfu_of_measured'] * base['s']:.2f} ms of "
        f"none's {1000 * base['s']:.2f} at the measured matmul peak ({result['flops_formula']}); "
        "Canon's bytes at the copy bandwidth are the two columns before the target",
    ]
    best = min(result["rows"], key=lambda row: (row["canon_set"] != "ABCD", row["ratio"]))
    for form in ("one_kernel_a_site", "fused"):
        away = best["ratio"] - 1 - best["limits"][form]
        lines.append(
            f"{best['variant']} is {100 * away:+.1f} points from the limit of "
            f"{form.replace('_', ' ')}"
        )
    if result["whole"] is not None:
        lines.append(_whole(result["whole"], base["s"]))
    if base["peak_bytes"] is not None:
        peaks = [
            f"{row['variant']} {row['peak_bytes'] / GIB:.1f}" for row in (base, *result["rows"])
        ]
        lines.append(f"peak memory of each by itself in GiB: {', '.join(peaks)}")
    if _is_mfu_asked(result):
        share = best["mfu_of_stated"]
        lines.append(f"MFU of {best['variant']}: {share:.1%}; target {show(MFU, share)}")
    return lines


def _whole(whole: dict[str, Any], plain_s: float) -> str:
    """What a step takes beyond forward and backward, on this one GPU."""
    if "error" in whole:
        return f"FSDP2 and AdamW: not measured: {whole['error']}"
    fsdp_s = whole["forward_backward_s"] - plain_s
    return (
        f"apart, without Canon: FSDP2 at one rank {1000 * fsdp_s:+.2f} ms on forward and backward; "
        f"clipping and AdamW of all parameters {1000 * whole['update_s']:.2f} ms"
    )


def _is_mfu_asked(result: dict[str, Any]) -> bool:
    """The target speaks of the whole 1.3B NoPE model on an H200."""
    args = result["args"]
    whole = result["unit"] == "model" and (args["num_layers"], args["dim"]) == (24, 2048)
    return whole and args["position"] == "nope" and "H200" in result["device"]

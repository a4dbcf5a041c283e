"""Our runner beside `lm_eval --model hf`: the same export, the same requests, one run.

    python -m eval bench [--model 8L512D | --checkpoint RUN/checkpoint/step-N] [--json FILE]

A stage of its own: nothing reads what it writes. The two take turns on every case, so that whatever
else the machine does meets both, and must give the same answers. bench_run.py measures,
bench_cases.py has the requests.
"""

import argparse
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.table import Table

from canon_pretrain.core.errors import UserError
from canon_pretrain.core.files import write_json
from canon_pretrain.core.terminal import Console

TARGETS = {"multiple choice": 1.2, "generation": 1.5}
"""How many times as fast ours should be on a CPU."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `bench`."""
    model = parser.add_mutually_exclusive_group()
    model.add_argument(
        "--model",
        metavar="FLAVOR[,FIELD=VALUE...]",
        help="random weights of this size and variant, with Canon ABCD and no positions unless it "
        "says otherwise (default: 8L512D on a CPU, 1b3 on a GPU); its answers never end early",
    )
    model.add_argument(
        "--checkpoint", type=Path, metavar="RUN/checkpoint/step-N", help="a trained one instead"
    )
    add = parser.add_argument
    add("--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help="of both sides")
    add("--repeats", type=int, default=3, help="how often each case is measured (%(default)s)")
    add("--scale", type=float, help="so many times the requests (default: 1 on a CPU, 16 on a GPU)")
    add("--cases", nargs="+", metavar="CASE", help="these only, as hellaswag or jrt")
    add("--json", type=Path, metavar="FILE", help="write the figures to this file too")


def execute(arguments: argparse.Namespace) -> None:
    """Measure and print. Raises UserError, also where the two sides answer differently."""
    if arguments.repeats < 1 or (arguments.scale is not None and arguments.scale <= 0):
        raise UserError(
            f"--repeats {arguments.repeats} --scale {arguments.scale}: expected at least 1, and "
            "more than 0"
        )
    from eval.bench.run import measure  # behind the parser: torch takes seconds

    console = Console()
    result = measure(
        arguments.model,
        arguments.checkpoint,
        dtype=arguments.dtype,
        repeats=arguments.repeats,
        scale=arguments.scale,
        only=arguments.cases,
        say=lambda line: console.print(line, highlight=False, soft_wrap=True),
    )
    print_result(result, console)
    if arguments.json:
        write_json(arguments.json, result)


def print_result(result: dict[str, Any], console: Console) -> None:
    """The table that a person reads."""
    console.print(heading(result), highlight=False, soft_wrap=True)
    clock = result["ratio_of"]
    columns = ("case", "tokens", "ours s", "hf s", "batch", "faster", "spread", "goal")
    table = Table(*columns, box=SIMPLE, padding=(0, 1, 0, 0))
    for column in table.columns:
        column.no_wrap = True
    for case in result["cases"]:
        table.add_row(
            case["case"],
            f"{case['tokens']:,}",
            *(f"{case[side][clock]:.2f}" for side in ("ours", "hf")),
            str(case["hf"]["batch_size"]),
            f"{case['ratio']:.2f}x",
            f"{case['ratio_low']:.2f}-{case['ratio_high']:.2f}",
            verdict(case["ratio"], case["target"]),
        )
    console.print(table)
    for group in result["groups"]:
        target = verdict(group["ratio"], group["target"])
        console.print(
            f"{group['group']}: {group['ratio']:.2f}x, the geometric mean of its cases"
            + (f"; goal {target}" if target else ""),
            highlight=False,
        )
    agreed = ", ".join(f"{case['case']} {case['agreement']}" for case in result["cases"])
    console.print(f"answers agree: {agreed}", highlight=False)


def heading(result: dict[str, Any]) -> str:
    """Where and with what it was measured, in two lines."""
    versions = ", ".join(f"{name} {found}" for name, found in result["versions"].items())
    return (
        f"{result['device']}; {versions}; {result['time']}\n{result['model']}, "
        f"{result['num_parameters']:,} parameters in {result['dtype']}; ours with batch_tokens "
        f"{result['batch_tokens']:,}, hf with the best batch size; medians of {result['repeats']}, "
        f"{result['ratio_of']} time"
    )


def verdict(ratio: float, target: float | None) -> str:
    """Whether a ratio is what it should be; empty where nothing is asked of it."""
    if target is None:
        return ""
    return f"{target:g} {'met' if ratio >= target else 'MISSED'}"

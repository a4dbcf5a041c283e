"""`python -m canon_pretrain.run profile RUN`: where the time of a traced step went.

It reads the newest trace that `--profiling.enable_profiling` left in the run folder.
"""

import argparse
import json
import os
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table
from rich.text import Text

from canon_pretrain.core.errors import UserError
from canon_pretrain.core.terminal import Console
from canon_pretrain.report.trace_summary import COMMUNICATION, PURPOSES, Summary, summarize
from canon_pretrain.run.folder import RunFolder
from canon_pretrain.run.trace import DATA, read_trace

TRACES = "profile_traces"
_NAME = re.compile(r"rank(\d+)_trace\.json(\.gz)?")

EXAMPLES = """a trace first, of every 100th step:
  torchrun ... -m canon_pretrain.train --config FILE --profiling.enable_profiling \\
      --profiling.profile_freq 100

then:
  python -m canon_pretrain.run profile outputs/rope_canon
  python -m canon_pretrain.run profile outputs/rope_canon --rank 3 --top 50
  python -m canon_pretrain.run profile rank0_trace.json.gz --json

The files open in Perfetto (ui.perfetto.dev) and chrome://tracing as well."""


def add_parser(subparsers: Any) -> None:
    """Add the command `profile`."""
    parser = subparsers.add_parser(
        "profile",
        help="top kernels of a traced step, and what its time was for",
        description="Show where the time of a traced step went.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, metavar="RUN", help="a run folder, or a trace's file")
    parser.add_argument("--top", type=int, default=20, help="rows of the table (default 20)")
    parser.add_argument("--rank", type=int, default=0, help="whose trace (default 0)")
    parser.add_argument("--json", action="store_true", help="one JSON document instead")
    parser.set_defaults(run=main)


def main(arguments: argparse.Namespace) -> int:
    """Print the summary of one trace; returns the exit code. Raises UserError."""
    if arguments.top < 0:
        raise UserError(f"--top {arguments.top}: expected 0 or more")
    path = find_trace(arguments.folder, arguments.rank)
    trace = read_trace(path)
    try:
        summary = summarize(trace)
    except ValueError as error:
        raise UserError(f"{path} can't be added up: {error}") from None
    if arguments.json:
        document = {"trace": str(path), "events": trace.num_events, "is_whole": trace.is_whole}
        print(json.dumps(document | asdict(summary) | {"rows": _rows(summary, arguments.top)}))
        return 0
    print_summary(Console(), path, summary, top=arguments.top, is_whole=trace.is_whole)
    return 0


def find_trace(run: Path, rank: int) -> Path:
    """The newest trace of a rank in a run folder; `run` itself where it is a file.

    Raises UserError where there is none.
    """
    if run.is_file():
        return run
    if not run.is_dir():
        raise UserError(f"{run}: no such run folder or trace")
    folder = run / _traces_folder(run)
    traces: dict[int, list[Path]] = {}
    for path in folder.glob("iteration_*/*"):
        if found := _NAME.fullmatch(path.name):
            traces.setdefault(int(found[1]), []).append(path)
    if rank not in traces:
        there = f"; it has some of rank {', '.join(map(str, sorted(traces)))}" if traces else ""
        raise UserError(
            f"{folder} holds no trace of rank {rank}{there}. A run makes them with "
            "--profiling.enable_profiling, one every profiling.profile_freq steps"
        )
    return max(traces[rank], key=lambda path: path.stat().st_mtime_ns)


def _traces_folder(run: Path) -> str:
    """What the run calls its folder of traces."""
    try:
        config = RunFolder(run).read_config().get("config", {})
        return str(config["profiling"]["save_traces_folder"])
    except (UserError, OSError, KeyError, TypeError, AttributeError):
        return TRACES


def _rows(summary: Summary, top: int) -> list[dict[str, Any]]:
    return [asdict(row) | {"share": row.self_us / summary.window_us} for row in summary.rows[:top]]


def print_summary(
    console: Console, path: Path, summary: Summary, *, top: int, is_whole: bool = True
) -> None:
    """The tables that a person reads."""
    size = os.path.getsize(path) / 1e6
    what = "GPU" if summary.is_device else "CPU"
    steps = ", ".join(map(str, summary.steps))
    console.print(f"{escape(str(path))} ({size:,.1f} MB)", soft_wrap=True, highlight=False)
    if not is_whole:
        console.print("[yellow]the file ends too early: what follows is of its beginning[/yellow]")
    console.print(
        f"{f'step {steps}' if steps else 'no step marked'}: {summary.window_us / 1000:,.1f} ms, "
        f"{what} busy {summary.busy_share:.1%}, idle {summary.idle_share:.1%}",
        highlight=False,
    )
    table = Table("purpose", "share", "what it is", box=None, pad_edge=False)
    table.columns[0].no_wrap = table.columns[1].no_wrap = True
    table.columns[1].justify = "right"
    for name, explained in PURPOSES.items():
        share = summary.purposes[name]
        if name == COMMUNICATION:
            explained += (
                f"; {summary.communication_exposed:.1%} exposed, "
                f"{summary.communication_overlapped:.1%} overlapped"
            )
        if name == DATA and summary.is_device:
            explained += ", on the host"
        table.add_row(name, f"{share:.1%}", explained)
    idle = "no kernel runs" if summary.is_device else "no operator runs: Python, waiting for others"
    table.add_row("idle", f"{summary.idle_share:.1%}", idle)
    console.print(table)
    if not top:
        return
    title = "kernel" if summary.is_device else "operator"
    table = Table(box=None, pad_edge=False)
    # the other columns take 47 characters: a kernel's name has what is left
    table.add_column(title, no_wrap=True, max_width=max(20, console.width - 47))
    table.add_column("purpose", no_wrap=True)
    for name in ("calls", "self ms", "share"):
        table.add_column(name, no_wrap=True, justify="right")
    for row in summary.rows[:top]:
        table.add_row(
            Text(row.name, overflow="ellipsis"),
            row.purpose,
            f"{row.count:,}",
            f"{row.self_us / 1000:,.3f}",
            f"{row.self_us / summary.window_us:.1%}",
        )
    console.print()
    console.print(table)

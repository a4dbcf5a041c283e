"""`canon doctor --fake GPU --world N CONFIG`: run a config on fake GPUs before a node is booked."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from canon_pretrain.core.children import start_child
from canon_pretrain.core.errors import UserError, reason_in
from canon_pretrain.core.terminal import Console
from canon_pretrain.fake_gpu.record import BETWEEN, REPORT, Options, Phase, Report, report_from
from canon_pretrain.machine.gpus import GPUS

MODULE = "canon_pretrain.fake_gpu"
GIB = 2**30
KIB = 2**10
TERA = 1e12
EXIT_CODE = "exit code"
STEADY_PHASES = ("quiet step",)
"""In which nothing may be compiled, and the host may not wait."""
SHOWN_LINES = 8  # of the output of a process that ended without a report
SHOWN_BYTES = 0.005 * GIB  # smaller parts of the memory would be listed as 0.00 GiB
BLIND_SPOTS = (
    "Not seen: values, time, memory fragmentation, NCCL's buffers, other ranks, copies into memory "
    "that is not pinned, what flash-linear-attention computes (recurrences run chunked)"
)


def run_in_subprocess(arguments: Sequence[str], options: Options) -> Report:
    """Run the trainer on fake GPUs in a process of its own. Raises UserError.

    `arguments`: those of `canon train`. A process that ends without a report is a UserError with
    the end of its output.
    """
    with tempfile.TemporaryDirectory(prefix="fake_gpu.") as folder:
        report_path = Path(folder) / "report.json"
        log_path = Path(folder) / "output"
        with log_path.open("wb") as output:
            child = start_child(
                [sys.executable, "-m", MODULE, json.dumps(vars(options)), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={"OMP_NUM_THREADS": "1"} | os.environ | {REPORT: str(report_path)},
            )
            exit_code = child.wait()

        # The report, or why there is none.
        log = log_path.read_text(errors="replace")
        if not report_path.exists():
            last_lines = "\n".join(log.splitlines()[-SHOWN_LINES:])
            raise UserError(
                "fake_gpu.failed",
                f"the fake run ended with exit code {exit_code}: {reason_in(log) or last_lines}",
                exit_code=exit_code,
            )
        report = report_from(json.loads(report_path.read_text()))
        if report.error.startswith(EXIT_CODE):  # the trainer has printed why
            reason = reason_in(log) or report.error
            report.error = reason.removeprefix("error: ")
        return report


def problems_of(report: Report) -> list[str]:
    """Return what would end this run on real GPUs."""
    problems = []
    if report.error:
        line = f" (at {report.error_line})" if report.error_line else ""
        problems.append(f"fails{line}: {report.error}")
    if report.peak_bytes > report.memory_bytes:
        problems.append(
            f"runs out of memory: the peak is {report.peak_bytes / GIB:.1f} GiB, "
            f"a GPU has {report.memory_bytes / GIB:.1f}"
        )
    return problems


def warnings_of(report: Report) -> list[str]:
    """Return what would make this run slower on real GPUs than it has to be."""
    warnings = []
    for phase in report.phases:
        warnings += [f"graph break, {phase.name}: {text}" for text in phase.graph_breaks]
        if phase.name not in STEADY_PHASES:
            continue

        warnings += [f"recompiled, {phase.name}: {text}" for text in phase.recompiles]
        warnings += [
            f"the host waits for the GPU, {phase.name}: {wait}, {count} times"
            for wait, count in phase.waits.items()
        ]
    return warnings


def show_fake_run(report: Report, console: Console) -> None:
    """Print a report: verdict, memory, and a table of its phases."""
    # What was run, and whether it would end early.
    has_steps = report.micro_batch > 0  # else it ended before the first one
    if has_steps:
        console.print(
            f"the trainer as rank 0 of {report.world_size} x {GPUS[report.gpu].name}, "
            f"{report.micro_batch} x {report.seq_len} tokens per rank at once, "
            f"in {report.seconds:.0f} s; GPUs are fake, nothing is computed"
        )
    problems = problems_of(report)
    for problem in problems:
        console.print(f"[bold red]{problem}[/]")
    if not has_steps:
        return

    if report.traceback:
        console.print(report.traceback, markup=False)
    if not problems:
        console.print("[green]runs[/]")

    # Memory, time, and the counts of each phase.
    console.print(_memory_line(report))
    if report.step_seconds:
        slow, likely, fast = (1000 * seconds for seconds in report.step_seconds)
        console.print(
            f"a step takes about {likely:,.1f} ms ({fast:,.1f} to {slow:,.1f}): "
            "computed from these counts with assumed speeds, not measured"
        )
    console.print(_phase_table(report))
    for warning in warnings_of(report):
        console.print(f"[yellow]{warning}[/]")
    console.print(BLIND_SPOTS)


def _memory_line(report: Report) -> str:
    """Return the peak of the memory, when it is reached, and its parts, the largest first."""
    peak = max(report.phases, key=lambda phase: phase.peak_bytes)
    parts = sorted(peak.peak_parts.items(), key=lambda part: -part[1])
    listed = ", ".join(
        f"{name} {num_bytes / GIB:.2f}" for name, num_bytes in parts if num_bytes > SHOWN_BYTES
    )
    return (
        f"peak memory: {peak.peak_bytes / GIB:.2f} of {report.memory_bytes / GIB:.1f} GiB, "
        f"in the {peak.name}: {listed}"
    )


def _phase_table(report: Report) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("phase")
    for title in ("peak GiB", "kernels", "KiB/token", "TFLOP", "exchanged GiB", "waits", "graphs"):
        table.add_column(title, justify="right")

    tokens = report.micro_batch * report.seq_len
    for phase in report.phases:
        if phase.name != BETWEEN:
            table.add_row(phase.name, *_cells(phase, tokens))
    return table


def _cells(phase: Phase, tokens: int) -> list[str]:
    work = phase.work()
    return [
        f"{phase.peak_bytes / GIB:.2f}",
        f"{work.launches:,}",
        f"{work.bytes_moved / max(1, tokens) / KIB:,.0f}",
        f"{work.flops.total() / TERA:,.1f}",
        f"{phase.collective_bytes.total() / GIB:.2f}",
        str(phase.waits.total()),
        str(len(phase.graphs)),
    ]

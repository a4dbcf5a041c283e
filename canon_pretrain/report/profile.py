"""`python -m canon_pretrain.run profile RUN`: where the time of a traced step went.

Reads the newest trace that `--profiling.enable_profiling` left in the run folder, without torch,
and adds its time up by kernel or operator, and by purpose.
"""

import argparse
import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from canon_pretrain.core.errors import UserError
from canon_pretrain.core.terminal import Console
from canon_pretrain.core.text import size
from canon_pretrain.report.record import RunRecord
from canon_pretrain.run.folder import CANON, DATA, VALIDATION
from canon_pretrain.run.trace import STEP, Event, Trace, read_trace

TRACES = "profile_traces"
_NAME = re.compile(r"rank(\d+)_trace\.json(\.gz)?")

COMMUNICATION, SHARDING, OTHER = "communication", "sharding", "other"
ATTENTION, MATMUL, OPTIMIZER = "attention", "matmul", "optimizer"
PURPOSES = {
    MATMUL: "matrix products outside attention",
    ATTENTION: "attention",
    CANON: "Canon, and what torch.compile fused with it",
    OPTIMIZER: "the optimizer's step",
    SHARDING: "FSDP2's copies and casts around communication",
    COMMUNICATION: "collectives",
    VALIDATION: "held-out loss",
    DATA: "waiting for a batch",
    OTHER: "norms, activations, loss, clipping, the rest",
}
"""What time can be for, in the order of the table."""

_RULES = {
    COMMUNICATION: re.compile(r"nccl|gloo:|c10d::", re.I),
    SHARDING: re.compile(r"^fsdp::", re.I),
    OPTIMIZER: re.compile(r"^Optimizer\.(step|zero_grad)#"),
    DATA: re.compile(rf"^{DATA}$"),
    VALIDATION: re.compile(rf"^{VALIDATION}$"),
    # a pad is Canon's alone in this model, and inductor names a kernel by what it fused
    CANON: re.compile(r"canon|causal_?conv1d|constant_pad_nd", re.I),
    ATTENTION: re.compile(r"attention|flash_?(fwd|bwd|attn)|fmha|sdpa|scaled_?dot", re.I),
    MATMUL: re.compile(
        r"^aten::(mm|bmm|addmm|baddbmm|matmul|linear)$|gemm|cutlass|nvjet|cublas|_fused_(add)?mm"
    ),
}
"""The purpose of a name; the first that fits."""

_BACKWARD = re.compile(r"^autograd::engine::evaluate_function: \w+Backward\d+$")
"""The backward of one operator; that of a Python function (a compiled graph) ends in no digit, and
shares its number with what ran before it."""

Interval = tuple[float, float]
Busy = dict[bool, list[Interval]]
"""When something ran: communication (True), and the rest (False)."""


@dataclass(frozen=True)
class Row:
    """A kernel or operator: its calls and its own time, in us."""

    name: str
    purpose: str
    count: int
    self_us: float


@dataclass(frozen=True)
class Summary:
    """A trace added up; times in us, shares of the window.

    With device work in the trace that is counted, else the host's operators by the time that is not
    in an operator they called. `purposes` are sums of own times: where device streams overlap they
    exceed `busy_share`. `exposed` communication is that during which nothing else ran.
    """

    is_device: bool
    steps: list[int]
    window_us: float
    busy_share: float
    idle_share: float
    purposes: dict[str, float]
    communication_exposed: float
    communication_overlapped: float
    rows: list[Row]


@cache
def purpose_of(name: str) -> str | None:
    """Return the purpose of a kernel, operator or scope, if its name tells."""
    return next((purpose for purpose, pattern in _RULES.items() if pattern.search(name)), None)


def summarize(trace: Trace) -> Summary:
    """Add up a trace. Raises ValueError if there is nothing in it to add up."""
    host = _Host()
    # sequence numbers are counted by thread: forward passes first
    for events in sorted(trace.threads.values(), key=_is_autograds_own):
        host.sweep(events, has_forward=not _is_autograds_own(events))
    events = [event for events in trace.threads.values() for event in events]
    steps = [event for event in events if event.name.startswith(STEP)]
    calls, busy = host.calls, host.busy
    window: Sequence[Any] = steps or events
    if trace.work:
        calls, busy, window = [], {True: [], False: []}, [*steps, *trace.work]
        for work in trace.work:
            purpose = host.purpose_of_launch(work.name, work.correlation)
            calls.append((work.name, purpose, work.end - work.begin))
            busy[purpose == COMMUNICATION].append((work.begin, work.end))
    elif not calls:
        raise ValueError("it holds neither operators nor kernels")
    begin, end = min(each.begin for each in window), max(each.end for each in window)
    if end <= begin:
        raise ValueError("its events take no time")
    window_us = end - begin

    def share(*intervals: Iterable[Interval]) -> float:
        """Return the share of the window that intervals cover together."""
        merged = union(interval for each in intervals for interval in each)
        return sum(max(0.0, min(e, end) - max(b, begin)) for b, e in merged) / window_us

    own_times: dict[tuple[str, str], list[float]] = defaultdict(list)
    purposes = dict.fromkeys(PURPOSES, 0.0)
    for name, purpose, own in calls:
        own_times[name, purpose].append(own)
        purposes[purpose] += own / window_us
    rows = [Row(*key, len(times), sum(times)) for key, times in own_times.items()]
    purposes[DATA] = share(host.waits)  # all of it, beside what a device did meanwhile
    both, communication = share(busy[True], busy[False]), share(busy[True])
    overlapped = communication + share(busy[False]) - both
    # the host does nothing else while it waits for data, a device may
    occupied = both if trace.work else share(busy[True], busy[False], host.waits)
    # the profiler counts the steps that are done
    numbers = {int(e.name[len(STEP) :]) + 1 for e in steps if e.name[len(STEP) :].isdigit()}
    return Summary(
        is_device=bool(trace.work),
        steps=sorted(numbers),
        window_us=window_us,
        busy_share=both,
        idle_share=1 - occupied,
        purposes=purposes,
        communication_exposed=communication - overlapped,
        communication_overlapped=overlapped,
        rows=sorted(rows, key=lambda row: -row.self_us),
    )


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the intervals that cover the same points without overlap, in order."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def _is_autograds_own(events: Sequence[Event]) -> bool:
    """Return whether a thread runs backward passes only: one per device but the CPU."""
    names = {event.name for event in events}
    backward = any(name.startswith("autograd::engine") for name in names)
    return backward and not any(name.startswith(STEP) for name in names)


@dataclass
class _Open:
    """An event that has begun, and its own time so far."""

    event: Event
    purpose: str | None
    own: float = 0.0

    @property
    def is_work(self) -> bool:
        """Operators are; of scopes those by which gloo marks its threads' work."""
        return self.event.kind == "cpu_op" or purpose_of(self.event.name) == COMMUNICATION


class _Host:
    """What ran on the host's threads, and its purpose.

    `calls`: name, purpose and own time of each operator; `busy`: when any of them ran itself;
    `waits`: for batches.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, float]] = []
        self.busy: Busy = {True: [], False: []}
        self.waits: list[Interval] = []
        self._of_sequence: dict[int, str | None] = {}
        self._of_launch: dict[int, str | None] = {}

    def purpose_of_launch(self, name: str, correlation: int) -> str:
        """Return a kernel's purpose: its launch's, but for communication, which its name tells."""
        own = purpose_of(name)
        if own == COMMUNICATION:
            return own
        return self._of_launch.get(correlation) or own or OTHER

    def sweep(self, events: list[Event], *, has_forward: bool) -> None:
        """Add one thread: the own time of its operators, and the purpose of all that is in it."""
        stack: list[_Open] = []
        now = -math.inf

        def advance(time: float) -> None:
            """Count the time until then as the innermost event's own."""
            nonlocal now
            if stack and time > now:
                stack[-1].own += time - now
                if stack[-1].is_work:
                    self.busy[stack[-1].purpose == COMMUNICATION].append((now, time))
            now = max(now, time)

        def close(before: float) -> None:
            while stack and stack[-1].event.end <= before:
                advance(stack[-1].event.end)
                done = stack.pop()
                if done.is_work:
                    self.calls.append((done.event.name, done.purpose or OTHER, done.own))
                elif done.event.name == DATA:
                    self.waits.append((done.event.begin, done.event.end))

        # outer events first if two begin at once
        for event in sorted(events, key=lambda event: (event.begin, -event.end)):
            close(event.begin)
            purpose = self._purpose(event, stack[-1].purpose if stack else None)
            if event.kind == "launch":
                self._of_launch[event.link] = purpose
                continue
            if has_forward and event.link >= 0 and not event.name.startswith("autograd::"):
                # of the operators that share a number the last is the one that has a backward
                self._of_sequence[event.link] = purpose
            advance(event.begin)
            stack.append(_Open(event, purpose))
        close(math.inf)

    def _purpose(self, event: Event, outer: str | None) -> str | None:
        """Return an event's purpose; a backward's is that of its forward, by sequence number."""
        own = purpose_of(event.name)
        if own == COMMUNICATION:
            return own
        if outer is not None:
            return outer
        if own is None and _BACKWARD.search(event.name):
            of_forward = self._of_sequence.get(event.link)
            return of_forward if of_forward in (CANON, ATTENTION, MATMUL) else None
        return own


# -- the command


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "profile",
        help="top kernels of a traced step, and what its time was for",
        description="Show where the time of a traced step went. --profiling.enable_profiling makes "
        "traces, of one step of every --profiling.profile_freq; Perfetto opens them as well.",
    )
    add = parser.add_argument
    add("folder", type=Path, metavar="RUN", help="a run folder, or a trace's file")
    add("--top", type=int, default=20, help="rows of the table (default 20)")
    add("--rank", type=int, default=0, help="whose trace (default 0)")
    add("--json", action="store_true", help="one JSON document instead")
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
    rows = summary.rows[: arguments.top]
    if arguments.json:
        document = {"trace": str(path), "events": trace.num_events, "is_whole": trace.is_whole}
        shares = [asdict(row) | {"share": row.self_us / summary.window_us} for row in rows]
        print(json.dumps(document | asdict(summary) | {"rows": shares}))
        return 0
    console = Console(highlight=False)
    console.print(f"{path} ({size(path.stat().st_size)})", soft_wrap=True, markup=False)
    if not trace.is_whole:
        console.print("[yellow]the file ends too early: what follows is of its beginning[/yellow]")
    print_summary(console, summary, rows)
    return 0


def find_trace(run: Path, rank: int) -> Path:
    """Return the newest trace of a rank in a run folder; `run` itself if it is a file."""
    if run.is_file():
        return run
    if not run.is_dir():
        raise UserError(f"{run}: no such run folder or trace")
    try:
        folder = run / str(RunRecord(run).config["profiling"]["save_traces_folder"])
    except (UserError, KeyError, TypeError):
        folder = run / TRACES
    traces: dict[int, list[Path]] = {}
    for path in folder.glob("iteration_*/*"):
        if found := _NAME.fullmatch(path.name):
            traces.setdefault(int(found[1]), []).append(path)
    if rank not in traces:
        raise UserError(
            f"{folder} holds no trace of rank {rank}, of rank {', '.join(map(str, sorted(traces)))}"
            ". A run makes them with --profiling.enable_profiling, every profiling.profile_freq "
            "steps"
        )
    return max(traces[rank], key=lambda path: path.stat().st_mtime_ns)


def print_summary(console: Console, summary: Summary, rows: Sequence[Row]) -> None:
    """Print the table of purposes, and that of `rows`."""
    processor, work = ("GPU", "kernel") if summary.is_device else ("CPU", "operator")
    steps = f"step {', '.join(map(str, summary.steps))}" if summary.steps else "no step marked"
    console.print(
        f"{steps}: {summary.window_us / 1000:,.1f} ms, {processor} busy {summary.busy_share:.1%}, "
        f"idle {summary.idle_share:.1%}"
    )
    table = Table("purpose", "share", "what it is", box=None, pad_edge=False)
    communication = (
        f"; {summary.communication_exposed:.1%} exposed, "
        f"{summary.communication_overlapped:.1%} overlapped"
    )
    more = {COMMUNICATION: communication, DATA: ", on the host" if summary.is_device else ""}
    for name, explained in PURPOSES.items():
        table.add_row(name, f"{summary.purposes[name]:.1%}", explained + more.get(name, ""))
    table.add_row("idle", f"{summary.idle_share:.1%}", f"no {work} runs")
    console.print(table)
    if not rows:
        return
    table = Table(box=None, pad_edge=False)
    # the other columns take 47 characters: a kernel's name has what is left
    table.add_column(work, no_wrap=True, max_width=max(20, console.width - 47))
    for name in ("purpose", "calls", "self ms", "share"):
        table.add_column(name, no_wrap=True, justify="left" if name == "purpose" else "right")
    for row in rows:
        table.add_row(
            Text(row.name, overflow="ellipsis"),
            *(row.purpose, f"{row.count:,}", f"{row.self_us / 1000:,.3f}"),
            f"{row.self_us / summary.window_us:.1%}",
        )
    console.print()
    console.print(table)

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
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table
from rich.text import Text

from canon_pretrain.core.errors import UserError
from canon_pretrain.core.terminal import Console, size
from canon_pretrain.run.folder import CANON, DATA, VALIDATION
from canon_pretrain.run.trace import LAUNCH, OPERATOR, SCOPE, STEP, Event, Trace, read_trace

TRACES = "profile_traces"

COMMUNICATION, OTHER = "communication", "other"
ATTENTION, MATMUL = "attention", "matmul"
PURPOSES = {
    MATMUL: (
        "matrix products outside attention",
        r"^aten::(mm|bmm|addmm|baddbmm|matmul|linear)$|gemm|cutlass|nvjet|cublas|_fused_(add)?mm",
    ),
    ATTENTION: ("attention", r"(?i)attention|flash_?(fwd|bwd|attn)|fmha|sdpa|scaled_?dot"),
    # a pad is Canon's alone in this model, and inductor names a kernel by what it fused
    CANON: ("Canon, and what is fused with it", r"(?i)canon|causal_?conv1d|constant_pad_nd"),
    "optimizer": ("the optimizer's step", r"^Optimizer\.(step|zero_grad)#"),
    "sharding": ("FSDP2's copies and casts around communication", r"(?i)^fsdp::"),
    COMMUNICATION: ("collectives", r"(?i)nccl|gloo:|c10d::"),
    VALIDATION: ("held-out loss", rf"^{VALIDATION}$"),
    DATA: ("waiting for a batch", rf"^{DATA}$"),
    OTHER: ("norms, activations, loss, clipping, the rest", r"(?!)"),
}
"""What time can be for, in words, and by which names; of several that fit the last."""

# that of a Python function (a compiled graph) ends in no digit and shares an earlier one's number
_BACKWARD = re.compile(r"^autograd::engine::evaluate_function: \w+Backward\d+$")

Facts = dict[str, Any]


@cache
def purpose_of(name: str) -> str | None:
    """Return the purpose of a kernel, operator or scope, if its name tells."""
    found = (x for x, (_, names) in reversed(PURPOSES.items()) if re.search(names, name))
    return next(found, None)


@dataclass(slots=True)
class _Span:
    """An event, its purpose, and when it ran itself, not in an event within it."""

    event: Event
    purpose: str | None
    own: list[tuple[float, float]] = field(default_factory=list)


def summarize(trace: Trace) -> Facts:
    """Add up a trace; times in us, shares of the window. ValueError if there is nothing in it.

    Counts device work if any, else operators without what they called. `purposes` are sums of own
    times, also of streams that overlap; while communication is `exposed` nothing else runs.
    """
    host = _Host(trace.threads.values())
    steps = [x.event for x in host.spans if x.event.name.startswith(STEP)]
    if trace.work:
        spans = [_Span(x, host.purpose_of_work(x), [(x.begin, x.end)]) for x in trace.work]
    else:  # of scopes those by which gloo marks its work
        spans = [x for x in host.spans if x.event.kind == OPERATOR or x.purpose == COMMUNICATION]
    if not spans or not steps:
        raise ValueError(f"it holds no operators and kernels, or no {STEP}")
    window = [*steps, *trace.work]
    begin, end = min(event.begin for event in window), max(event.end for event in window)
    if end <= begin:
        raise ValueError("its events take no time")

    def share(*kinds: Sequence[_Span]) -> float:
        own = sorted(interval for each in kinds for span in each for interval in span.own)
        begins, ends = np.clip(np.array(own).reshape(-1, 2), begin, end).T
        done = np.maximum.accumulate(np.append(begin, ends))[:-1]
        return float(np.maximum(ends - np.maximum(begins, done), 0).sum()) / (end - begin)

    times: dict[tuple[str, str], list[float]] = defaultdict(list)
    for span in spans:
        own_us = sum(until - since for since, until in span.own)
        times[span.event.name, span.purpose or OTHER].append(own_us)
    rows: list[Facts] = []
    purposes = dict.fromkeys(PURPOSES, 0.0)
    for (name, purpose), each in times.items():
        facts = {"count": len(each), "self_us": sum(each), "share": sum(each) / (end - begin)}
        rows.append({"name": name, "purpose": purpose, **facts})
        purposes[purpose] += facts["share"]
    scopes = [x.event for x in host.spans if (x.event.kind, x.event.name) == (SCOPE, DATA)]
    waits = [_Span(each, DATA, [(each.begin, each.end)]) for each in scopes]
    purposes[DATA] = share(waits)  # all of it, beside what a device did meanwhile
    talks = [span for span in spans if span.purpose == COMMUNICATION]
    rest = [span for span in spans if span.purpose != COMMUNICATION]
    busy = share(spans)
    overlapped = share(talks) + share(rest) - busy
    return {
        "is_device": bool(trace.work),
        # the profiler counts the steps that are done
        "steps": sorted({int(event.name.removeprefix(STEP)) + 1 for event in steps}),
        "window_us": end - begin,
        "busy_share": busy,
        # the host does nothing else while it waits for data, a device may
        "idle_share": 1 - (busy if trace.work else share(spans, waits)),
        "purposes": purposes,
        "communication_exposed": share(talks) - overlapped,
        "communication_overlapped": overlapped,
        "rows": sorted(rows, key=lambda row: -row["self_us"]),
    }


class _Host:
    """What ran on the host's threads, and its purpose."""

    def __init__(self, threads: Iterable[list[Event]]) -> None:
        self.spans: list[_Span] = []
        self._of_sequence: dict[int, str | None] = {}
        self._of_launch: dict[int, str | None] = {}
        # sequence numbers are counted by thread: first that of forward passes, which marks steps
        marked = [(any(e.name.startswith(STEP) for e in events), events) for events in threads]
        for has_forward, events in sorted(marked, key=lambda x: not x[0]):
            self._add(events, has_forward=has_forward)

    def purpose_of_work(self, work: Event) -> str:
        """Return a kernel's purpose: its launch's, but for communication, which its name tells."""
        if purpose_of(work.name) == COMMUNICATION:
            return COMMUNICATION
        return self._of_launch.get(work.link) or purpose_of(work.name) or OTHER

    def _add(self, events: list[Event], *, has_forward: bool) -> None:
        stack: list[_Span] = []
        now = -math.inf
        # outer events first if two begin at once; one after all others closes them
        last = Event(math.inf, math.inf, "", LAUNCH, -1)
        for event in [*sorted(events, key=lambda event: (event.begin, -event.end)), last]:
            while stack:
                until = min(stack[-1].event.end, event.begin)
                if until > now:
                    stack[-1].own.append((now, until))
                    now = until
                if stack[-1].event.end > event.begin:
                    break
                stack.pop()
            purpose = self._purpose(event, stack[-1].purpose if stack else None)
            if event.kind == LAUNCH:
                self._of_launch[event.link] = purpose
                continue
            if has_forward and event.link >= 0 and not event.name.startswith("autograd::"):
                # of the operators that share a number the last is the one that has a backward
                self._of_sequence[event.link] = purpose
            now = max(now, event.begin)
            stack.append(_Span(event, purpose))
            self.spans.append(stack[-1])

    def _purpose(self, event: Event, outer: str | None) -> str | None:
        """Return an event's purpose; a backward's is that of its forward, by sequence number."""
        own = purpose_of(event.name)
        if own == COMMUNICATION or outer is None:
            of_forward = self._of_sequence.get(event.link)
            is_known = own is None and of_forward in (CANON, ATTENTION, MATMUL)
            return of_forward if is_known and _BACKWARD.search(event.name) else own
        return outer


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
    path = find_trace(arguments.folder, arguments.rank)
    trace = read_trace(path)
    try:
        summary = summarize(trace)
    except ValueError as error:
        message = f"{path} has no step to summarize: {error}"
        raise UserError("profile.empty_trace", message, path=path) from None
    summary["rows"] = summary["rows"][: arguments.top]
    if arguments.json:
        document = {"trace": str(path), "events": trace.num_events, "is_whole": trace.is_whole}
        print(json.dumps(document | summary))
        return 0
    console = Console(highlight=False)
    console.print(f"{path} ({size(path.stat().st_size)})", soft_wrap=True, markup=False)
    if not trace.is_whole:
        console.print("[yellow]the file ends too early: what follows is of its beginning[/yellow]")
    print_summary(console, summary)
    return 0


def find_trace(run: Path, rank: int) -> Path:
    """Return the newest trace of a rank in a run folder; `run` itself if it is a file."""
    if run.is_file():
        return run
    traces = run.glob(f"{TRACES}/iteration_*/rank*_trace.json*")
    by_time = sorted(traces, key=lambda path: path.stat().st_mtime_ns)
    newest = {path.name.partition("_")[0]: path for path in by_time}
    if f"rank{rank}" not in newest:
        raise UserError(
            "profile.no_trace",
            f"{run / TRACES} has no trace of rank {rank}, found {', '.join(sorted(newest))}. A run "
            "writes them with --profiling.enable_profiling, every profiling.profile_freq steps",
            found=sorted(newest),
        )
    return newest[f"rank{rank}"]


def print_summary(console: Console, summary: Facts) -> None:
    """Print the table of purposes, and that of the rows."""
    processor, work = ("GPU", "kernel") if summary["is_device"] else ("CPU", "operator")
    steps = ", ".join(map(str, summary["steps"]))
    shares = {k: f"{v:.1%}" for k, v in summary.items() if isinstance(v, float)}
    console.print(
        f"step {steps}: {summary['window_us'] / 1000:,.1f} ms, "
        f"{processor} busy {shares['busy_share']}, idle {shares['idle_share']}"
    )
    exposed, overlapped = (shares[f"communication_{how}"] for how in ("exposed", "overlapped"))
    more = {COMMUNICATION: f"; {exposed} exposed, {overlapped} overlapped"}
    table = Table("purpose", "share", "what it is", box=None, pad_edge=False)
    for name, (words, _) in PURPOSES.items():
        table.add_row(name, f"{summary['purposes'][name]:.1%}", words + more.get(name, ""))
    table.add_row("idle", shares["idle_share"], f"no {work} runs")
    console.print(table, "")
    table = Table(box=None, pad_edge=False)
    table.add_column(work, no_wrap=True, max_width=max(20, console.width - 47))
    for name in ("purpose", "calls", "self ms", "share"):
        table.add_column(name, no_wrap=True, justify="left" if name == "purpose" else "right")
    for row in summary["rows"]:
        numbers = f"{row['count']:,}", f"{row['self_us'] / 1000:,.3f}", f"{row['share']:.1%}"
        table.add_row(Text(row["name"], overflow="ellipsis"), row["purpose"], *numbers)
    console.print(table)

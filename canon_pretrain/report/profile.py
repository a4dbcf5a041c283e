"""`canon run profile RUN`: the time of a traced step by kernel and purpose.

Reads the newest trace that `--profiling.enable_profiling` wrote to the run folder. No torch.
"""

import argparse
import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path

import numpy as np
from rich.table import Table
from rich.text import Text

from canon_pretrain.core.errors import UserError
from canon_pretrain.core.terminal import Console, size
from canon_pretrain.run.folder import CANON, DATA, VALIDATION, is_run_folder, not_a_run
from canon_pretrain.run.trace import LAUNCH, OPERATOR, SCOPE, STEP, Event, Trace, read_trace

TRACES = "profile_traces"

COMMUNICATION = "communication"
OTHER = "other"
ATTENTION = "attention"
MATMUL = "matmul"
PURPOSES = {
    MATMUL: (
        "matrix products outside attention",
        r"^aten::(mm|bmm|addmm|baddbmm|matmul|linear)$|gemm|cutlass|nvjet|cublas|_fused_(add)?mm",
    ),
    ATTENTION: ("attention", r"(?i)attention|flash_?(fwd|bwd|attn)|fmha|sdpa|scaled_?dot"),
    # only Canon pads in this model, and inductor names a kernel after the fused operators
    CANON: ("Canon and operators fused with it", r"(?i)canon|causal_?conv1d|constant_pad_nd"),
    "optimizer": ("optimizer step", r"^Optimizer\.(step|zero_grad)#"),
    "sharding": ("copies and casts of FSDP2", r"(?i)^fsdp::"),
    COMMUNICATION: ("collectives", r"(?i)nccl|gloo:|c10d::"),
    VALIDATION: ("held-out loss, samples", rf"^{VALIDATION}$"),
    DATA: ("waiting for a batch", rf"^{DATA}$"),
    OTHER: ("norms, activations, loss, clipping, other", r"(?!)"),
}
"""Purpose -> description and pattern of names; the last match wins."""

# without autograd functions in Python (compiled graphs), which share an earlier sequence number
_BACKWARD = re.compile(r"^autograd::engine::evaluate_function: \w+Backward\d+$")


@cache
def purpose_of(name: str) -> str | None:
    """Return the purpose of a kernel, operator or scope by its name; None if unknown."""
    for purpose, (_, pattern) in reversed(PURPOSES.items()):
        if re.search(pattern, name):
            return purpose
    return None


@dataclass(frozen=True)
class Row:
    """One kernel or operator of the window."""

    name: str
    purpose: str
    count: int
    self_us: float
    share: float


@dataclass
class Summary:
    """A traced window: its time in us, and shares of it; `rows` are sorted by their time."""

    is_device: bool
    steps: list[int]
    window_us: float
    busy_share: float
    idle_share: float
    purposes: dict[str, float]
    communication_exposed: float
    communication_overlapped: float
    rows: list[Row]


@dataclass(slots=True)
class _Span:
    """An event, its purpose, and the intervals of its self time."""

    event: Event
    purpose: str | None
    self_intervals: list[tuple[float, float]] = field(default_factory=list)

    @classmethod
    def whole(cls, event: Event, purpose: str | None) -> "_Span":
        """Return an event whose whole duration is self time."""
        return cls(event, purpose, [(event.begin, event.end)])


def _busy_share(spans: Iterable[_Span], begin: float, end: float) -> float:
    """Return the part of the window in which at least one of the spans runs."""
    intervals = sorted(interval for span in spans for interval in span.self_intervals)
    bounds = np.array(intervals).reshape(-1, 2)
    begins, ends = np.clip(bounds, begin, end).T

    # Of each interval, only what is after the end of all earlier ones counts.
    earlier_ends = np.append(begin, ends[:-1])
    covered_until = np.maximum.accumulate(earlier_ends)
    busy_us = np.maximum(ends - np.maximum(begins, covered_until), 0)
    return float(busy_us.sum()) / (end - begin)


def summarize(trace: Trace) -> Summary:
    """Summarize a trace: times in us, shares of the window. Raises ValueError if it is empty.

    Counts device work if there is any, else the self time of operators. `purposes` sum over streams
    that may overlap; while communication is `exposed`, nothing else runs.
    """
    host = _Host(trace.threads.values())
    host_events = [span.event for span in host.spans]
    steps = [event for event in host_events if event.name.startswith(STEP)]
    if trace.work:
        spans = [_Span.whole(work, host.purpose_of_work(work)) for work in trace.work]
    else:  # and the scopes of gloo's collectives
        spans = [
            span
            for span in host.spans
            if span.event.kind == OPERATOR or span.purpose == COMMUNICATION
        ]
    if not spans or not steps:
        raise ValueError(f"no operators and kernels, or no {STEP}")

    # The window is that of the steps, and of device work that ends after them.
    window = [*steps, *trace.work]
    begin = min(event.begin for event in window)
    end = max(event.end for event in window)
    window_us = end - begin
    if window_us <= 0:
        raise ValueError("events without duration")

    # Kernels or operators, and their purposes.
    calls: dict[tuple[str, str], list[float]] = defaultdict(list)
    for span in spans:
        self_us = sum(until - since for since, until in span.self_intervals)
        purpose = span.purpose or OTHER
        calls[span.event.name, purpose].append(self_us)
    rows = []
    purposes = dict.fromkeys(PURPOSES, 0.0)
    for (name, purpose), calls_us in calls.items():
        total_us = sum(calls_us)
        share = total_us / window_us
        purposes[purpose] += share
        rows.append(Row(name, purpose, len(calls_us), total_us, share))

    # Waiting for data, including overlap with device work.
    waits = []
    for event in host_events:
        if event.kind == SCOPE and event.name == DATA:
            waits.append(_Span.whole(event, DATA))
    purposes[DATA] = _busy_share(waits, begin, end)

    # Time in which both run counts in both shares, and once in that of all spans.
    communication_spans = [span for span in spans if span.purpose == COMMUNICATION]
    computation_spans = [span for span in spans if span.purpose != COMMUNICATION]
    communication = _busy_share(communication_spans, begin, end)
    computation = _busy_share(computation_spans, begin, end)
    busy = _busy_share(spans, begin, end)
    overlapped = communication + computation - busy

    # A host is idle while it waits for data, a device may not be.
    not_idle = busy
    if not trace.work:
        not_idle = _busy_share([*spans, *waits], begin, end)
    return Summary(
        is_device=bool(trace.work),
        # The profiler counts completed steps.
        steps=sorted({int(event.name.removeprefix(STEP)) + 1 for event in steps}),
        window_us=window_us,
        busy_share=busy,
        idle_share=1 - not_idle,
        purposes=purposes,
        communication_exposed=communication - overlapped,
        communication_overlapped=overlapped,
        rows=sorted(rows, key=lambda row: -row.self_us),
    )


class _Host:
    """The events of the host's threads and their purposes."""

    def __init__(self, threads: Iterable[list[Event]]) -> None:
        self.spans: list[_Span] = []
        self._purpose_of_sequence: dict[int, str | None] = {}
        self._purpose_of_launch: dict[int, str | None] = {}

        # Sequence numbers are per thread: read the forward thread first, the one that marks steps.
        for events in sorted(threads, key=_has_steps, reverse=True):
            self._add(events, has_forward=_has_steps(events))

    def purpose_of_work(self, work: Event) -> str:
        """Return a kernel's purpose: its launch's, except for communication, known by name."""
        if purpose_of(work.name) == COMMUNICATION:
            return COMMUNICATION
        return self._purpose_of_launch.get(work.link) or purpose_of(work.name) or OTHER

    def _add(self, events: list[Event], *, has_forward: bool) -> None:
        """Add the nested events of a thread; an event's self time is that outside its children."""
        # Outer events first if two start together; a sentinel closes all others.
        ordered = sorted(events, key=lambda event: (event.begin, -event.end))
        sentinel = Event(math.inf, math.inf, "", LAUNCH, -1)
        open_spans: list[_Span] = []  # outermost first
        now = -math.inf
        for event in [*ordered, sentinel]:
            # The innermost open event has the time until its end, or until this event begins.
            while open_spans:
                innermost = open_spans[-1]
                until = min(innermost.event.end, event.begin)
                if until > now:
                    innermost.self_intervals.append((now, until))
                    now = until
                if innermost.event.end > event.begin:
                    break
                open_spans.pop()

            outer_purpose = open_spans[-1].purpose if open_spans else None
            purpose = self._purpose(event, outer_purpose)

            # A launch is not a span: its time counts for the operator around it.
            if event.kind == LAUNCH:
                self._purpose_of_launch[event.link] = purpose
                continue
            if has_forward and event.link >= 0 and not event.name.startswith("autograd::"):
                # Of operators with the same number, the last one has the backward.
                self._purpose_of_sequence[event.link] = purpose
            now = max(now, event.begin)
            span = _Span(event, purpose)
            open_spans.append(span)
            self.spans.append(span)

    def _purpose(self, event: Event, outer: str | None) -> str | None:
        """Return the purpose of an event inside one with the purpose `outer`.

        That of the outer event counts, except for communication. A backward has that of its
        forward, by sequence number.
        """
        purpose = purpose_of(event.name)
        if outer is not None and purpose != COMMUNICATION:
            return outer
        if purpose is None and _BACKWARD.search(event.name):
            forward_purpose = self._purpose_of_sequence.get(event.link)
            if forward_purpose in (CANON, ATTENTION, MATMUL):
                return forward_purpose
        return purpose


def _has_steps(events: Iterable[Event]) -> bool:
    return any(event.name.startswith(STEP) for event in events)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Show the time of a traced step by purpose and kernel. Training with "
        "--profiling.enable_profiling traces one step of every --profiling.profile_freq."
    )
    add = parser.add_argument
    add("folder", type=Path, metavar="RUN", help="a run folder, or a trace file")
    add("--top", type=int, default=20, help="rows of the table (default 20)")
    add("--rank", type=int, default=0, help="rank of the trace (default 0)")
    add("--json", action="store_true", help="print one JSON document")


def run(arguments: argparse.Namespace) -> int:
    """Print the summary of one trace; return the exit code. Raises UserError."""
    path = find_trace(arguments.folder, arguments.rank)
    trace = read_trace(path)
    try:
        summary = summarize(trace)
    except ValueError as error:
        raise UserError(
            "profile.empty_trace",
            f"{path} has no step to summarize: {error}",
            path=path,
        ) from None
    summary.rows = summary.rows[: arguments.top]
    if arguments.json:
        document = {
            "trace": str(path),
            "events": trace.num_events,
            **asdict(summary),
        }
        print(json.dumps(document))
        return 0

    console = Console(highlight=False)
    file_size = size(path.stat().st_size)
    console.print(f"{path} ({file_size})", soft_wrap=True, markup=False)
    print_summary(console, summary)
    return 0


def find_trace(run: Path, rank: int) -> Path:
    """Return the newest trace of a rank in a run folder, or `run` itself if it is a file."""
    if run.is_file():
        return run
    traces = run.glob(f"{TRACES}/iteration_*/rank*_trace.json*")
    by_time = sorted(traces, key=lambda path: path.stat().st_mtime_ns)
    newest = {path.name.partition("_")[0]: path for path in by_time}  # by "rankN"
    if not newest and not is_run_folder(run):
        raise not_a_run(run)
    if f"rank{rank}" not in newest:
        ranks = sorted(newest)
        others = f", only of {', '.join(ranks)}" if ranks else ""
        raise UserError(
            "profile.no_trace",
            f"{run} has no trace of rank {rank}{others}. A run writes traces to {TRACES}/ with "
            "--profiling.enable_profiling, every profiling.profile_freq steps",
            found=ranks,
        )
    return newest[f"rank{rank}"]


def print_summary(console: Console, summary: Summary) -> None:
    """Print the tables of purposes and of kernels or operators."""
    processor = "GPU" if summary.is_device else "CPU"
    work = "kernel" if summary.is_device else "operator"
    steps = ", ".join(map(str, summary.steps))
    window_ms = summary.window_us / 1000
    idle = f"{summary.idle_share:.1%}"
    console.print(
        f"step {steps}: {window_ms:,.1f} ms, {processor} busy {summary.busy_share:.1%}, idle {idle}"
    )

    # By purpose, all of them, and idle time.
    table = Table("purpose", "share", "description", box=None, pad_edge=False)
    for name, (description, _) in PURPOSES.items():
        if name == COMMUNICATION:
            description = (
                f"{description}; {summary.communication_exposed:.1%} exposed, "
                f"{summary.communication_overlapped:.1%} overlapped"
            )
        share = summary.purposes[name]
        table.add_row(name, f"{share:.1%}", description)
    table.add_row("idle", idle, f"no {work} runs")
    console.print(table, "")

    # By kernel or operator. The other columns need 47 characters.
    table = Table(box=None, pad_edge=False)
    max_width = max(20, console.width - 47)
    table.add_column(work, no_wrap=True, max_width=max_width)
    table.add_column("purpose", no_wrap=True)
    for name in ("calls", "self ms", "share"):
        table.add_column(name, no_wrap=True, justify="right")
    for row in summary.rows:
        self_ms = row.self_us / 1000
        table.add_row(
            Text(row.name, overflow="ellipsis"),
            row.purpose,
            f"{row.count:,}",
            f"{self_ms:,.3f}",
            f"{row.share:.1%}",
        )
    console.print(table)

"""Where the time of a traced step went: by kernel or operator, and by what it was for.

With device work in the trace that is what is counted, and what launched it says what it was for;
without, the operators of the host are, by the time in them that is not in an operator they called.
An operator of the backward pass is for what its forward was for: the two share a sequence number.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from canon_pretrain.run.trace import CANON, DATA, STEP, VALIDATION, Event, Trace

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
"""What time can be for, in the order that it is shown in."""

_RULES = [
    (COMMUNICATION, re.compile(r"nccl|gloo:|c10d::", re.I)),
    (SHARDING, re.compile(r"^fsdp::", re.I)),
    (OPTIMIZER, re.compile(r"^Optimizer\.(step|zero_grad)#")),
    (DATA, re.compile(rf"^{DATA}$")),
    (VALIDATION, re.compile(rf"^{VALIDATION}$")),
    # a pad is Canon's alone in this model, and inductor names a kernel by what it fused
    (CANON, re.compile(r"canon|causal_?conv1d|constant_pad_nd", re.I)),
    (
        ATTENTION,
        re.compile(r"attention|flash_?(fwd|bwd|attn)|fmha|sdpa|scaled_?dot", re.I),
    ),
    (
        MATMUL,
        re.compile(
            r"^aten::(mm|bmm|addmm|baddbmm|matmul|linear)$|gemm|cutlass|nvjet|cublas|_fused_(add)?mm"
        ),
    ),
]
"""The purpose that a name tells by itself; the first that fits."""

_BACKWARD = re.compile(r"^autograd::engine::evaluate_function: \w+Backward\d+$")
"""The backward of one operator; that of a Python function (a compiled graph) ends in no digit, and
shares its number with what ran before it."""

Interval = tuple[float, float]


@dataclass(frozen=True)
class Row:
    """One kernel or operator by name: its calls and its own time, in us."""

    name: str
    purpose: str
    count: int
    self_us: float


@dataclass(frozen=True)
class Summary:
    """A trace added up; times in us, shares of the window.

    `purposes` are sums of the work's own time: where device streams overlap they add up to more
    than `busy_share`. `exposed` communication is that during which nothing else ran.
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
    """What a kernel, operator or scope is for, where its name tells."""
    return next((purpose for purpose, pattern in _RULES if pattern.search(name)), None)


def summarize(trace: Trace) -> Summary:
    """Add up a trace. Raises ValueError where there is nothing in it to add up."""
    host = _Host()
    for events in sorted(trace.threads.values(), key=_is_autograds_own):
        host.sweep(events, has_forward=not _is_autograds_own(events))
    events = [event for events in trace.threads.values() for event in events]
    steps = [event for event in events if event.name.startswith(STEP)]
    if trace.work:
        calls, busy = _device_work(trace, host)
        begin, end = _span([*steps, *trace.work])
    elif host.calls:
        calls, busy = host.calls, host.busy
        begin, end = _span(steps or events)
    else:
        raise ValueError("it holds neither operators nor kernels")
    if end <= begin:
        raise ValueError("its events take no time")
    # the profiler counts the steps that are done
    numbers = {int(e.name[len(STEP) :]) + 1 for e in steps if e.name[len(STEP) :].isdigit()}
    return _add_up(
        calls,
        {purpose: _cut(union(pieces), begin, end) for purpose, pieces in busy.items()},
        _cut(union(host.waits), begin, end),
        window_us=end - begin,
        steps=sorted(numbers),
        is_device=bool(trace.work),
    )


_Call = tuple[str, str, float]
"""Name, purpose and own time of one call."""
_Busy = dict[bool, list[Interval]]
"""When something ran: what communicates (True), and the rest (False)."""


def _device_work(trace: Trace, host: "_Host") -> tuple[list[_Call], _Busy]:
    calls: list[_Call] = []
    busy: _Busy = {True: [], False: []}
    for work in trace.work:
        purpose = host.purpose_of_launch(work.name, work.correlation)
        calls.append((work.name, purpose, work.end - work.begin))
        busy[purpose == COMMUNICATION].append((work.begin, work.end))
    return calls, busy


class _Host:
    """What ran on the host's threads, and what for.

    `calls` are the operators, `busy` when any of them ran itself, `waits` when a batch was waited
    for.
    """

    def __init__(self) -> None:
        self.calls: list[_Call] = []
        self.busy: _Busy = {True: [], False: []}
        self.waits: list[Interval] = []
        self._of_sequence: dict[int, str | None] = {}
        self._of_launch: dict[int, str | None] = {}

    def purpose_of_launch(self, name: str, correlation: int) -> str:
        """A kernel's purpose: its launch tells, but for communication, which its name does."""
        own = purpose_of(name)
        if own == COMMUNICATION:
            return own
        return self._of_launch.get(correlation) or own or OTHER

    def sweep(self, events: list[Event], *, has_forward: bool) -> None:
        """Take in one thread: the own time of its operators, and the purpose of all that is in it.

        Threads with `has_forward` come first: sequence numbers are counted by thread.
        """
        stack: list[_Open] = []
        now = -math.inf
        # outer events first where two begin at once
        for event in sorted(events, key=lambda event: (event.begin, -event.end)):
            while stack and stack[-1].event.end <= event.begin:
                now = self._pass(stack[-1], now, stack[-1].event.end)
                self._close(stack.pop())
            purpose = self._purpose(event, stack[-1].purpose if stack else None)
            if event.kind == "launch":
                self._of_launch[event.link] = purpose
                continue
            if has_forward and event.link >= 0 and not event.name.startswith("autograd::"):
                # of the operators that share a number the last is the one that has a backward
                self._of_sequence[event.link] = purpose
            if stack:
                self._pass(stack[-1], now, event.begin)
            now = event.begin
            stack.append(_Open(event, purpose))
        while stack:
            now = self._pass(stack[-1], now, stack[-1].event.end)
            self._close(stack.pop())

    def _purpose(self, event: Event, outer: str | None) -> str | None:
        own = purpose_of(event.name)
        if own == COMMUNICATION:
            return own
        if outer is not None:
            return outer
        if own is None and _BACKWARD.search(event.name):
            of_forward = self._of_sequence.get(event.link)
            return of_forward if of_forward in (CANON, ATTENTION, MATMUL) else None
        return own

    def _pass(self, running: "_Open", begin: float, end: float) -> float:
        """Count the time between as the running event's own; gives the time that it is now."""
        if end <= begin:
            return begin
        running.own += end - begin
        if running.is_work:
            self.busy[running.purpose == COMMUNICATION].append((begin, end))
        return end

    def _close(self, done: "_Open") -> None:
        if done.is_work:
            self.calls.append((done.event.name, done.purpose or OTHER, done.own))
        elif done.event.name == DATA:
            self.waits.append((done.event.begin, done.event.end))


@dataclass
class _Open:
    """An event that has begun, and how long it has run itself."""

    event: Event
    purpose: str | None
    own: float = 0.0

    @property
    def is_work(self) -> bool:
        """Operators are; of scopes those that gloo marks what its threads do with."""
        return self.event.kind == "cpu_op" or purpose_of(self.event.name) == COMMUNICATION


def _is_autograds_own(events: Sequence[Event]) -> bool:
    """Whether a thread runs backward passes only, as there is one for each device but the CPU."""
    names = {event.name for event in events}
    backward = any(name.startswith("autograd::engine") for name in names)
    return backward and not any(name.startswith(STEP) for name in names)


def _span(items: Iterable[Any]) -> Interval:
    items = list(items)
    return min(item.begin for item in items), max(item.end for item in items)


def _add_up(
    calls: list[_Call],
    busy: _Busy,
    waits: list[Interval],
    *,
    window_us: float,
    steps: list[int],
    is_device: bool,
) -> Summary:
    """The sums over `calls`; `busy` and `waits` are within the window and overlap in nothing."""
    rows: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0, 0.0])
    purposes = dict.fromkeys(PURPOSES, 0.0)
    for name, purpose, own in calls:
        row = rows[name, purpose]
        row[0] += 1
        row[1] += own
        purposes[purpose] += own / window_us
    # all of the wait, which on a device's trace stands beside what the device did
    purposes[DATA] = _length(waits) / window_us
    both = _length(union([*busy[True], *busy[False]]))
    # the host does nothing else while it waits for data, a device may
    occupied = both if is_device else _length(union([*busy[True], *busy[False], *waits]))
    overlapped = _length(busy[True]) + _length(busy[False]) - both
    return Summary(
        is_device=is_device,
        steps=steps,
        window_us=window_us,
        busy_share=both / window_us,
        idle_share=1 - occupied / window_us,
        purposes=purposes,
        communication_exposed=(_length(busy[True]) - overlapped) / window_us,
        communication_overlapped=overlapped / window_us,
        rows=sorted(
            (Row(name, purpose, int(n), own) for (name, purpose), (n, own) in rows.items()),
            key=lambda row: -row.self_us,
        ),
    )


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The intervals that cover the same points and do not overlap, in order."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def _cut(intervals: Iterable[Interval], begin: float, end: float) -> list[Interval]:
    """What of the intervals lies between two times."""
    return [(max(b, begin), min(e, end)) for b, e in intervals if b < end and e > begin]


def _length(intervals: Iterable[Interval]) -> float:
    return sum(end - begin for begin, end in intervals)

"""The events of the profiler's chrome traces."""

import json
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from canon_pretrain.core.errors import UserError

STEP = "ProfilerStep#"

OPERATOR = "operator"
SCOPE = "scope"
LAUNCH = "launch"
WORK = "work"
KINDS = {
    "cpu_op": OPERATOR,
    "user_annotation": SCOPE,
    "cuda_runtime": LAUNCH,
    "cuda_driver": LAUNCH,
    "kernel": WORK,
    "gpu_memcpy": WORK,
    "gpu_memset": WORK,
}
"""Category of the profiler -> kind of an Event"""


class Event(NamedTuple):
    """A host event, or WORK of a device: a kernel, a copy or a fill. Times in us."""

    begin: float
    end: float
    name: str
    kind: str
    link: int
    """Correlation id of WORK and its LAUNCH; autograd sequence number of an operator, which its
    backward shares. -1: none."""


@dataclass
class Trace:
    """The relevant events of a trace."""

    threads: dict[Any, list[Event]] = field(default_factory=lambda: defaultdict(list))
    work: list[Event] = field(default_factory=list)
    num_events: int = 0


def read_trace(path: Path) -> Trace:
    """Read a chrome trace: a list of events, or an object with `traceEvents`. Raises UserError."""
    trace = Trace()
    try:
        # names may contain invalid UTF-8 and control characters
        content = json.loads(path.read_text("utf-8", "replace"), strict=False)
        events = content["traceEvents"] if isinstance(content, dict) else content
        trace.num_events = len(events)
        for event in events:
            _keep(event, trace)
    except (OSError, AttributeError, KeyError, ValueError, TypeError) as error:
        raise UserError(
            "profile.trace", f"{path} is not a chrome trace: {error!r}", path=path
        ) from None
    return trace


def _keep(event: dict[str, Any], trace: Trace) -> None:
    """Add an event of the file to the trace, if it is complete ("X") and of one of KINDS."""
    kind = KINDS.get(event.get("cat", ""))
    if event.get("ph") != "X" or kind is None:
        return

    begin = float(event["ts"])
    end = begin + float(event.get("dur", 0))
    link_name = "correlation" if kind in (LAUNCH, WORK) else "Sequence number"
    arguments = event.get("args") or {}
    link = int(arguments.get(link_name, -1))

    events = trace.work
    if kind != WORK:
        events = trace.threads[event.get("pid"), event.get("tid")]
    events.append(Event(begin, end, event["name"], kind, link))

"""A streaming reader of the profiler's chrome traces, which have hundreds of megabytes."""

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from canon_pretrain.core.errors import UserError

STEP = "ProfilerStep#"
CHUNK = 1 << 22
MAX_EVENT = 1 << 26  # characters of one event
BEGINNING = re.compile(r'\A\s*\[|"traceEvents"\s*:\s*\[')
BETWEEN = re.compile(r"[\s,]*")

OPERATOR, SCOPE, LAUNCH, WORK = "operator", "scope", "launch", "work"
KINDS = {
    **{"cpu_op": OPERATOR, "user_annotation": SCOPE},
    **dict.fromkeys(("cuda_runtime", "cuda_driver"), LAUNCH),
    **dict.fromkeys(("kernel", "gpu_memcpy", "gpu_memset"), WORK),
}


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
    """The relevant events of a trace; `is_whole` is false if the file is truncated."""

    threads: dict[Any, list[Event]] = field(default_factory=lambda: defaultdict(list))
    work: list[Event] = field(default_factory=list)
    num_events: int = 0
    is_whole: bool = True


def read_trace(path: Path) -> Trace:
    """Read a chrome trace. Raises UserError."""
    trace = Trace()
    try:
        # names may contain invalid UTF-8
        with open(path, encoding="utf-8", errors="replace") as file:
            for event in _events(file, trace):
                _keep(event, trace)
    except (OSError, KeyError, ValueError, TypeError) as error:
        message = f"{path} is not a chrome trace: {error!r}"
        raise UserError("profile.trace", message, path=path) from None
    return trace


def _events(file: TextIO, trace: Trace) -> Iterator[dict[str, Any]]:
    """Yield the event objects, decoded one at a time."""
    decode = json.JSONDecoder(strict=False).raw_decode
    text = file.read(CHUNK)
    while (beginning := BEGINNING.search(text)) is None:
        more = file.read(CHUNK)
        if not more or len(text) > MAX_EVENT:
            raise ValueError("no traceEvents")
        text += more
    place = beginning.end()
    while True:
        place = BETWEEN.match(text, place).end()  # type: ignore[union-attr]  # it matches ""
        if text.startswith("]", place):
            return
        try:
            event, place = decode(text, place)
        except json.JSONDecodeError:
            # the chunk, or the file, ends within an event
            if not (more := file.read(CHUNK)):
                trace.is_whole = False
                return
            if len(text) - place > MAX_EVENT:
                raise
            text, place = text[place:] + more, 0
            continue
        if isinstance(event, dict):
            yield event


def _keep(event: dict[str, Any], trace: Trace) -> None:
    trace.num_events += 1
    kind = KINDS.get(event.get("cat", ""))
    if event.get("ph") != "X" or kind is None:
        return
    link = "correlation" if kind in (LAUNCH, WORK) else "Sequence number"
    begin, number = float(event["ts"]), int((event.get("args") or {}).get(link, -1))
    found = Event(begin, begin + float(event.get("dur", 0)), event["name"], kind, number)
    thread = trace.threads[event.get("pid"), event.get("tid")] if kind != WORK else trace.work
    thread.append(found)

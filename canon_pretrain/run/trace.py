"""A profiler's chrome trace, read event by event: one of hundreds of megabytes needs little memory.

`--profiling.enable_profiling` writes them (titan/metrics.py), report/profile.py adds them up. No
torch.
"""

import gzip
import json
import zlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from canon_pretrain.core.errors import UserError

STEP = "ProfilerStep#"
CHUNK = 1 << 22
MAX_EVENT = 1 << 26
"""Characters; what is longer and still does not parse is no event."""

DEVICE_WORK = {"kernel", "gpu_memcpy", "gpu_memset"}
LAUNCHES = {"cuda_runtime", "cuda_driver"}
HOST = {"cpu_op", "user_annotation"}


class Event(NamedTuple):
    """Something on the host: an operator, a scope, or a launch of device work. Times in us."""

    begin: float
    end: float
    name: str
    kind: str
    """cpu_op, user_annotation, or launch."""
    link: int
    """Of a launch its correlation id; of an operator its autograd sequence number, which a forward
    operator shares with its backward. -1: none."""


class Work(NamedTuple):
    """Something on a device: a kernel, a copy or a fill. Times in us."""

    begin: float
    end: float
    name: str
    correlation: int


@dataclass
class Trace:
    """What is kept of a trace; `is_whole` is false where its file ends too early."""

    threads: dict[Any, list[Event]] = field(default_factory=lambda: defaultdict(list))
    work: list[Work] = field(default_factory=list)
    num_events: int = 0
    is_whole: bool = True


def read_trace(path: Path) -> Trace:
    """Read a chrome trace, plain or .gz. Raises UserError."""
    trace = Trace()
    try:
        with open(path, "rb") as file:
            is_packed = file.read(2) == b"\x1f\x8b"
        opened: Any = gzip.open if is_packed else open
        # names may hold anything: a byte that is no UTF-8 is shown as such
        with opened(path, "rt", encoding="utf-8", errors="replace") as text:
            for event in _events(text, trace):
                _keep(event, trace)
    except EOFError:  # gzip's
        trace.is_whole = False
    except KeyError as error:
        raise UserError(f"{path} is no chrome trace: an event of it has no {error}") from None
    except (OSError, ValueError, TypeError, zlib.error) as error:
        raise UserError(f"{path} is no chrome trace: {error}") from None
    return trace


def _events(file: TextIO, trace: Trace) -> Iterator[dict[str, Any]]:
    """Yield the objects of the trace's list of events, decoded one at a time."""
    decode = json.JSONDecoder(strict=False).raw_decode
    text, place = _find_list(file)
    while True:
        while place < len(text) and text[place] in " \t\r\n,":
            place += 1
        if place < len(text) and text[place] == "]":
            return
        try:
            event, place = decode(text, place)
        except json.JSONDecodeError:
            # the chunk ends within an event, or the file does
            more = file.read(CHUNK)
            if not more:
                trace.is_whole = False
                return
            if len(text) - place > MAX_EVENT:
                raise ValueError("an event of it is no JSON") from None
            text, place = text[place:] + more, 0
            continue
        if isinstance(event, dict):
            yield event


def _find_list(file: TextIO) -> tuple[str, int]:
    """Return a text and the place of the first event in it; a bare list of them is a trace too."""
    text = file.read(CHUNK)
    start = text.lstrip()
    if start.startswith("["):
        return start, 1
    if not start.startswith("{"):
        raise ValueError("it does not begin with { or [")
    key = '"traceEvents"'
    while (found := text.find(key)) < 0:
        more = file.read(CHUNK)
        if not more:
            raise ValueError("it has no traceEvents")
        text = text[-len(key) :] + more
    while (bracket := text.find("[", found)) < 0:
        more = file.read(CHUNK)
        if not more:
            raise ValueError("its traceEvents are no list")
        text += more
    return text, bracket + 1


def _keep(event: dict[str, Any], trace: Trace) -> None:
    trace.num_events += 1
    kind = event.get("cat")
    if event.get("ph") != "X" or not (kind in HOST or kind in DEVICE_WORK or kind in LAUNCHES):
        return
    arguments = event.get("args") or {}
    begin = float(event["ts"])
    end = begin + float(event.get("dur", 0))
    correlation = int(arguments.get("correlation", -1))
    if kind in DEVICE_WORK:
        trace.work.append(Work(begin, end, event["name"], correlation))
        return
    thread = trace.threads[event.get("pid"), event.get("tid")]
    if kind in LAUNCHES:
        if correlation >= 0:
            thread.append(Event(begin, end, event["name"], "launch", correlation))
        return
    number = int(arguments.get("Sequence number", -1))
    thread.append(Event(begin, end, event["name"], str(kind), number))

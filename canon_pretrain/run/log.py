"""The run's log: JSON lines, appended whole, the source of every curve.

An event is one line, written by one `write` to a file opened with O_APPEND, so that lines of two
writers never mix and a crash tears the last line at most. NaN and infinities are strings, since
JSON has none; `number` gives them back. The trainer writes it; plots, exports, status and reports
read it: `read_log` the whole, `read_tail` its end, `LogFollower` what comes.

    event, time (UTC)        in every line; run_id and segment too, where the folder has a run.json
    start, resume            head a segment, that is a launch: where it begins and what it runs on
    step                     loss and max_loss (nats a token), grad_norm, lr, tokens (so far),
                             tokens_per_second, data_wait and mfu (shares of 1), memory_gib,
                             skipped_steps and restarts (so far), checkpoint_seconds (since the line
                             before; of them the step waited checkpoint_stall_seconds),
                             data_digests (one a step since the line before)
    validation               loss and bits_per_byte on held-out text, by source too
    checkpoint, skip, ...    what happened; with the step and the tokens at which it did
"""

import contextlib
import errno
import gc
import json
import logging
import math
import os
import threading
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from canon_pretrain.errors import UserError

logger = logging.getLogger(__name__)

RETAKEN = ("step", "validation")
"""Events that a launch which goes back over their steps writes anew."""
TAIL_BYTES = 1 << 16


class RunLog:
    """An append-only writer of events.

    `run_id` and `segment` (the number of the launch) come from the run.json beside it; without one
    its lines do not have them.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.run_id, self.segment = _read_run_file(path.parent / "run.json")
        self._head: dict[str, Any] = {}
        if self.run_id is not None:
            self._head = {"run_id": self.run_id, "segment": self.segment}
        self._unwritten = b""
        self._is_full = self._is_closed = False
        self._lock = threading.Lock()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        size = os.fstat(self._descriptor).st_size
        if size and os.pread(self._descriptor, 1, size - 1) != b"\n":
            # a crash tore the last line: end it, or ours would be glued to it and lost as well
            os.write(self._descriptor, b"\n")

    def write(self, event: str, **fields: Any) -> None:
        """Append one event with its UTC time; non-finite floats become strings.

        What the disk does not take (it is full, or away) is kept, and written before the next
        event.
        """
        time = datetime.now(UTC).isoformat(timespec="milliseconds")
        record = {"event": event, "time": time, **self._head}
        record |= {name: json_value(value) for name, value in fields.items()}
        line = (json.dumps(record, allow_nan=False) + "\n").encode()
        with self._lock:  # the retention's thread writes events too
            if self._is_closed:
                return
            self._unwritten += line
            self._flush()

    def _flush(self) -> None:
        try:
            while self._unwritten:
                done = os.write(self._descriptor, self._unwritten)
                self._unwritten = self._unwritten[done:]
        except OSError as error:
            if not self._is_full:
                logger.warning(f"{self.path}: {error.strerror}; its lines wait in memory for room")
            if error.errno == errno.ESTALE:  # a file server that came back knows its files anew
                self._open_anew()
        self._is_full = bool(self._unwritten)

    def _open_anew(self) -> None:
        with contextlib.suppress(OSError):
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            os.dup2(descriptor, self._descriptor, inheritable=False)
            os.close(descriptor)

    def close(self) -> None:
        """Write what waits; what the disk does not take even now is lost, and that is said."""
        with self._lock:
            if self._is_closed:
                return
            self._flush()
            self._is_closed = True
            if self._unwritten:
                lines = self._unwritten.count(b"\n")
                logger.warning(f"{self.path}: the last {lines} line(s) could not be written")
            with contextlib.suppress(OSError):  # what is written is; NFS tells late of the rest
                os.close(self._descriptor)


def _read_run_file(path: Path) -> tuple[str | None, int]:
    """The run's id and the number of the launch; (None, 1) where there is no such file."""
    try:
        record = json.loads(path.read_bytes())
        return str(record["run_id"]), int(record["launches"])
    except FileNotFoundError:
        return None, 1
    except (ValueError, KeyError, TypeError) as error:
        logger.warning(f"{path} is damaged ({error!r}): the log's lines go without a run_id")
        return None, 1


def json_value(value: Any) -> Any:
    """`value` as JSON can hold it: "NaN", "Infinity" or "-Infinity" for a non-finite float.

    Dicts, lists and tuples are gone through.
    """
    if isinstance(value, dict):
        return {name: json_value(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(item) for item in value]
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")


def number(value: Any) -> float:
    """The float that a value of the log stands for, "NaN" and infinities too; else ValueError."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"{value!r} in a log, expected a number")
    return float(value)


# -- reading ------------------------------------------------------------------------------------


def read_log(path: Path) -> list[dict[str, Any]]:
    """All events in order, without those that a later launch went back over (`drop_superseded`).

    A line that is no JSON (torn by a crash, or still being written) is left out. Raises UserError,
    naming the line, for one that is no event.
    """
    events = []
    with _no_garbage_collection(), open(path, encoding="utf-8", errors="replace") as file:
        for place, line in enumerate(file, 1):
            event = _parse(line)
            if event is not None:
                if fault := _fault(event):
                    raise UserError(f"{path} is damaged: line {place} {fault}")
                events.append(event)
            if not line.endswith("\n"):
                break  # the file's end just now: its other half would be read as a line of its own
        return drop_superseded(events)


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Collections would walk through all that was read again and again: half of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def read_tail(
    path: Path, num_bytes: int = TAIL_BYTES, *, until: str | None = "step"
) -> list[dict[str, Any]]:
    """The events of the file's last `num_bytes`, in order, without superseded ones.

    More is read, doubling, until an event of kind `until` is among them (None: never). Quick on a
    log of any size that has such an event near its end. What is no event is left out.
    """
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        while True:
            start = max(0, size - num_bytes)
            file.seek(start)
            lines = file.read(size - start).split(b"\n")
            if start:
                del lines[0]  # begins before what was read
            events = drop_superseded(parse_events(lines))
            if not start or until is None or any(event["event"] == until for event in events):
                return events
            num_bytes *= 2


def drop_superseded(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """`events` without steps and validations that were taken anew.

    A `resume` with `from_step` takes anew what stands before it of later steps; a `start` (again,
    after a run that died before its first checkpoint) takes all anew. Other kinds stay: they
    happened.
    """
    kept = []
    last = math.inf
    for event in reversed(list(events)):
        if event["event"] in RETAKEN and event["step"] > last:
            continue
        if event["event"] in ("start", "resume"):
            last = min(last, event.get("from_step", 0))
        kept.append(event)
    kept.reverse()
    return kept


def parse_events(lines: Iterable[bytes]) -> list[dict[str, Any]]:
    """The events among `lines`; what is none is left out."""
    return [event for line in lines if (event := _parse(line)) and not _fault(event)]


def _parse(line: bytes | str) -> Any:
    """What a line holds; None where it is torn, or the zeros that a crash leaves in a file."""
    try:
        return json.loads(line)
    except ValueError:  # UnicodeDecodeError is one, too
        return None


def _fault(event: Any) -> str | None:
    """Why this is no event of a log."""
    if not isinstance(event, dict) or not isinstance(event.get("event"), str):
        return "is no object with an `event`"
    needed = "step" if event["event"] in RETAKEN else "from_step"
    if (needed in event or needed == "step") and not isinstance(event.get(needed), int):
        return f"has {needed} = {event.get(needed)!r}, expected an integer"
    return None


class LogFollower:
    """Reads a log while it is written: each `poll` gives the whole lines that are new.

    Nothing is dropped: who follows over several launches looks at `resume` and `start`. A file that
    is not there yet has no lines; one that was replaced or cut is read from its beginning.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._inode = -1
        self._offset = 0

    def poll(self) -> list[dict[str, Any]]:
        """New events, oldest first; the beginning of a line waits for its end."""
        try:
            with open(self.path, "rb") as file:
                status = os.fstat(file.fileno())
                if status.st_ino != self._inode or status.st_size < self._offset:
                    self._inode, self._offset = status.st_ino, 0
                file.seek(self._offset)
                content = file.read()
        except FileNotFoundError:
            return []
        whole = content.rfind(b"\n") + 1
        self._offset += whole
        return parse_events(content[:whole].split(b"\n"))

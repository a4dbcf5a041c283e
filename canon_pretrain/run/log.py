"""The run's log: JSON lines, appended whole, the source of every curve.

An event is one line, written by one `write` to a file opened with O_APPEND, so that lines of two
writers never mix and a crash tears the last line at most. NaN and infinities are strings, since
JSON has none. The trainer writes it; plots, status and reports read it through `read_log`.
"""

import errno
import json
import logging
import math
import os
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


class RunLog:
    """An append-only writer of events."""

    def __init__(self, path: Path) -> None:
        self.path = path
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

        What a full disk does not take is kept, and written before the next event.
        """
        record = {"event": event, "time": datetime.now(UTC).isoformat(timespec="milliseconds")}
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
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            if not self._is_full:
                logger.warning(f"{self.path}: {error.strerror}; its lines wait in memory for room")
        self._is_full = bool(self._unwritten)

    def close(self) -> None:
        with self._lock:
            self._flush()
            self._is_closed = True
            os.close(self._descriptor)


def json_value(value: Any) -> Any:
    """`value` as JSON can hold it: "NaN", "Infinity" or "-Infinity" for a non-finite float."""
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")


def read_log(path: Path) -> list[dict[str, Any]]:
    """All events in order, without the steps that a later resume went back over.

    A line that is no JSON (torn by a crash, or still being written) is left out. A `resume` event
    with `from_step` drops the `step` events after that step that stand before it; a `start` (again
    after a run that died before its first checkpoint) drops them all.
    """
    events: list[dict[str, Any]] = []
    with open(path, encoding="utf-8") as file:
        for line in file:
            try:
                event = json.loads(line)
            except json.JSONDecodeError:
                continue
            if event["event"] in ("start", "resume"):
                last = event.get("from_step", 0)
                events = [e for e in events if e["event"] != "step" or e["step"] <= last]
            events.append(event)
    return events

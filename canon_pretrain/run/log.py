"""The run's log: one JSON object per line, the source of all curves.

Lines of two writers never mix, and a crash truncates at most the last one. A thread writes them, so
that the trainer does not wait for the disk. NaN and infinities, which JSON lacks, are the strings
"NaN", "Infinity" and "-Infinity" in the file, and floats in the events that this module returns.

    event, time (UTC)        in every line; with a run.json also run_id and segment (launch number)
    start, resume            first event of a launch: its first step, code and hosts
    step                     loss and max_loss (nats per token), grad_norm, lr, tokens (so far),
                             tokens_per_second, data_wait and mfu (fractions), memory_gib,
                             skipped_steps and restarts (so far), checkpoint_seconds (since the
                             previous line; of these, steps waited checkpoint_stall_seconds),
                             data_digests (one per step since the previous line), objective (what
                             is minimized, if not loss); by layer of experts expert_load_max (the
                             largest load over the mean) and expert_dropped (fraction), of this step
    validation               loss and bits_per_byte on held-out text, in total and by source; of a
                             synthetic task, loss, scores (name -> number) and score_stderrs, whose
                             standard errors are over windows
    samples                  what the model writes: a list of prompt, text and number of tokens; the
                             texts are empty if there is a reason ("not finite")
    count_models             what a unigram and a bigram model of the training text reach on the
                             held-out text (nats per token), tokens_counted and tokens_scored
    lines_dropped            number of lines lost here because too many waited for the disk
    done, stop               of a launch that ends in order; cpu_seconds of its first rank and
                             that rank's children, such as compilers
    checkpoint, skip, ...    other events, with step and tokens
"""

import contextlib
import json
import logging
import math
import os
import stat
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Any

from canon_pretrain.core import files
from canon_pretrain.core.files import MAX_LINE_BYTES, UnreadableFile, open_regular
from canon_pretrain.core.holder import utc_now
from canon_pretrain.run.background import Background

logger = logging.getLogger(__name__)

MAX_WAITING_BYTES = 1 << 26  # of lines that wait for the disk: half a day at one line per second
FLUSH_TIMEOUT_S = 30.0
REPEATABLE_EVENTS = ("step", "validation", "samples")  # written again if their steps are repeated
SEGMENT_EVENTS = ("start", "resume")
STEP_EVENTS = (*REPEATABLE_EVENTS, "skip", "checkpoint", "archive")
# integer fields, and the events that require them
INTEGERS: dict[str, tuple[str, ...]] = {
    "step": STEP_EVENTS,
    "from_step": ("resume",),
    "checkpoint_step": ("initial_load",),
    "tokens": (),
    "tokens_counted": (),
    "tokens_scored": (),
    "world_size": (),
    "skipped_steps": (),
    "restarts": (),
}
NUMBERS = (
    "loss",
    "max_loss",
    "bits_per_byte",
    "grad_norm",
    "lr",
    "mfu",
    "data_wait",
    "memory_gib",
    "tokens_per_second",
    "tokens_per_second_per_device",
    "seconds_per_step",
    "checkpoint_seconds",
    "checkpoint_stall_seconds",
    "cpu_seconds",
    "unigram",
    "bigram",
)
TEXTS = ("time", "run_id", "reason")
TAIL_BYTES = 1 << 16
MAX_TAIL_BYTES = 1 << 24
OPEN_FLAGS = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK


@dataclass(frozen=True)
class RunFacts:
    """The content of run.json."""

    run_id: str  # 8 hexadecimal digits; a fresh start is a new run
    created: str
    launches: files.Count  # that trained or wrote to the log


class Event(dict[str, Any]):
    """One line of the log; fields that not every event has are its items."""

    @property
    def kind(self) -> str:
        return str(self["event"])

    @property
    def step(self) -> int:
        return int(self["step"])

    @property
    def from_step(self) -> int:
        """The step that a launch continues from; 0 for a new run."""
        return int(self.get("from_step", 0))

    @property
    def tokens(self) -> int:
        return int(self.get("tokens", 0))


class RunLog:
    """A thread-safe, append-only event writer. Lines wait in memory while not `may_write()`."""

    def __init__(self, path: Path, may_write: Callable[[], bool] = lambda: True) -> None:
        self.path = path
        self._may_write = may_write
        run = _read_run(path)
        self.segment = 1
        self._head: dict[str, Any] = {}  # fields of every line
        if run is not None:
            self.segment = run.launches
            self._head = {"run_id": run.run_id, "segment": run.launches}
        self._unwritten = bytearray()
        self._dropped = 0  # lines since the last one that was kept
        self._is_full = False  # whether the last write failed, for one warning
        self._is_closed = False
        self._memory = threading.Lock()  # of the lines; held for microseconds only
        self._writing = Background(self._write_waiting, "run log")

        # A pipe or a device would block, or lose the lines.
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(path, OPEN_FLAGS, 0o644)
        except OSError as error:
            raise UnreadableFile(path, f"cannot be opened: {error.strerror}", error) from None
        if not stat.S_ISREG(os.fstat(self._descriptor).st_mode):
            os.close(self._descriptor)
            raise UnreadableFile(path, "is not a regular file")
        self._end_torn_line()

    def _end_torn_line(self) -> None:
        """End a line that a crash has truncated: else the next line would be lost with it."""
        size = os.fstat(self._descriptor).st_size
        if size and os.pread(self._descriptor, 1, size - 1) != b"\n":
            os.write(self._descriptor, b"\n")

    def write(self, event: str, **fields: Any) -> None:
        """Queue one event with its UTC time; non-finite floats become strings."""
        line = self._line(event, fields)
        with self._memory:
            if self._is_closed:
                return

            # The first line after dropped ones says how many they were.
            if self._dropped:
                line = self._line("lines_dropped", {"lines": self._dropped}) + line
            if len(self._unwritten) + len(line) <= MAX_WAITING_BYTES:
                self._unwritten += line
                self._dropped = 0
            else:
                self._dropped += 1

        if self._dropped == 1:
            logger.warning(
                f"{self.path}: {MAX_WAITING_BYTES:,} bytes are unwritten: dropping lines"
            )
        self._writing.request()

    def _line(self, event: str, fields: dict[str, Any]) -> bytes:
        record = {
            "event": event,
            "time": utc_now(),
            **self._head,
            **json_value(fields),
        }
        line = json.dumps(record, allow_nan=False)
        return f"{line}\n".encode()

    def flush(self, timeout_s: float = FLUSH_TIMEOUT_S) -> bool:
        """Try to write all queued lines; return whether the file has them."""
        self._writing.request()
        return self._writing.wait(timeout_s) and not self._unwritten

    def _write_waiting(self) -> None:
        if self._unwritten and self._may_write():
            self._follow_path()
            self._append()

    def _follow_path(self) -> None:
        """Switch to the current file at `path` if it was replaced; rewrite it if it was removed."""
        with contextlib.suppress(OSError):  # keep the open file; the next event retries
            exists = os.path.lexists(self.path)
            open_file = os.fstat(self._descriptor)
            if exists and os.path.samestat(os.stat(self.path), open_file):
                return
            run = _read_run(self.path)
            if (run and run.run_id) != self._head.get("run_id"):
                return  # another launch archived this log and its run.json

            change = "replaced: continuing in the new file"
            if not exists:
                change = "removed: rewritten"
                content = os.pread(self._descriptor, open_file.st_size, 0)
                files.write_atomic(self.path, content)
            # keep the number: other threads may use it
            descriptor = os.open(self.path, OPEN_FLAGS, 0o644)
            os.dup2(descriptor, self._descriptor, inheritable=False)
            os.close(descriptor)
            self._end_torn_line()
            logger.warning(f"{self.path} was {change}")

    def _append(self) -> None:
        try:
            while content := bytes(self._unwritten):
                num_written = os.write(self._descriptor, content)
                with self._memory:
                    del self._unwritten[:num_written]
        except OSError as error:
            if not self._is_full:
                logger.warning(f"{self.path}: {error.strerror}; keeping lines in memory")
        self._is_full = bool(self._unwritten)

    def close(self, timeout_s: float = FLUSH_TIMEOUT_S) -> None:
        """Write queued lines; log how many could not be written in time."""
        with self._memory:
            if self._is_closed:
                return
            self._is_closed = True

        # Write once more, and stop the thread.
        self._writing.request()
        has_ended = self._writing.wait(timeout_s)
        self._writing.close()

        if lines := self._unwritten.count(b"\n") + self._dropped:
            logger.warning(f"{self.path}: the last {lines} line(s) could not be written")
        if has_ended:  # else the thread still uses it
            with contextlib.suppress(OSError):  # NFS reports errors of earlier writes here
                os.close(self._descriptor)


def _read_run(log: Path) -> RunFacts | None:
    """Return the run.json in the folder of `log`; None if it is missing or damaged."""
    try:
        return files.read_record(log.with_name("run.json"), RunFacts)
    except UnreadableFile as error:
        if not error.is_missing:
            logger.warning(f"{error}: the log's lines have no run_id")
        return None


def json_value(value: Any) -> Any:
    """Return `value` as JSON, with "NaN", "Infinity" or "-Infinity" for each non-finite float.

    A dataclass is an object with its fields, or what its `to_json` returns.
    """
    if is_dataclass(value):
        if hasattr(value, "to_json"):
            value = value.to_json()
        else:
            value = vars(value)
    if isinstance(value, dict):
        return {name: json_value(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(item) for item in value]
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return json.dumps(value)


def number(value: Any) -> float:
    """Return a number of JSON, or the text of one that is not finite, as a float. ValueError."""
    if isinstance(value, int | float | str) and not isinstance(value, bool):
        with contextlib.suppress(OverflowError):  # an integer beyond the largest float
            return float(value)
    raise ValueError(f"{value!r:.40} in a log, expected a number")


# -- reading


def read_log(path: Path) -> list[Event]:
    """Return all events in order, without superseded ones; skip invalid lines."""
    events = []
    num_invalid = 0
    for line in files.read_lines(path):
        event = _parse(line)
        if event is not None:
            events.append(event)

        if not line.endswith(b"\n"):
            break  # still being written: its rest would be read as another line
        if event is None and line.strip():
            num_invalid += 1

    if num_invalid:
        logger.warning(f"{path}: skipped {num_invalid} invalid line(s)")
    return drop_superseded(events)


def read_tail(
    path: Path, num_bytes: int = TAIL_BYTES, *, until: str | None = "step"
) -> list[Event]:
    """Return the events of the last `num_bytes` (more, up to MAX_TAIL_BYTES, to find `until`)."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        while True:
            start = max(0, size - num_bytes)
            file.seek(start)
            lines = file.read(size - start).split(b"\n")
            if start:
                del lines[0]  # it may be incomplete
            events = drop_superseded(parse_events(lines))

            has_event = any(event.kind == until for event in events)
            is_enough = until is None or has_event
            if is_enough or not start or num_bytes >= MAX_TAIL_BYTES:
                return events
            num_bytes *= 2


def drop_superseded(events: Iterable[Event]) -> list[Event]:
    """Return `events` without those repeated after a `resume` or `start`, or written too late."""
    # Forwards: drop what a launch wrote after the first line of a later one.
    timely: list[Event] = []
    launches: set[str] = set()
    newest = ""
    for event in events:
        launch = newest  # of events without a run_id
        if event.get("run_id"):
            launch = f"{event['run_id']} {event.get('segment')}"
        is_late = launch in launches and launch != newest
        if is_late and event.kind not in SEGMENT_EVENTS:
            continue
        launches.add(launch)
        newest = launch
        timely.append(event)

    # Backwards: drop the steps beyond the one from which any later launch continued.
    final: list[Event] = []
    last_step = math.inf
    for event in reversed(timely):
        if event.kind in REPEATABLE_EVENTS and event.step > last_step:
            continue
        if event.kind in SEGMENT_EVENTS:
            last_step = min(last_step, event.from_step)
        final.append(event)
    return final[::-1]


def parse_events(lines: Iterable[bytes]) -> list[Event]:
    """Return the events in `lines` without invalid ones."""
    events = map(_parse, lines)
    return [event for event in events if event is not None]


def _parse(line: bytes) -> Event | None:
    """Return the event in a line; None if it is invalid or one of its fields has a wrong type."""
    # truncated, zeros after a crash, not UTF-8, not an object
    with contextlib.suppress(ValueError, LookupError, TypeError, AttributeError):
        event = Event(**files.parse_json(line, finite=False))
        if isinstance(event["event"], str):
            return _checked(event)
    return None


def _checked(event: Event) -> Event:
    """Return the event with all its numbers as floats.

    Raises ValueError, LookupError, TypeError or AttributeError for an odd value.
    """
    # Integers stay integers, of 64 bits.
    for name, kinds in INTEGERS.items():
        if name in event or event.kind in kinds:
            _check_integer(event[name])
    for num_tokens in (event.get("source_tokens") or {}).values():
        _check_integer(num_tokens)

    # Any other number may be null, except a loss, which `number` refuses.
    number(event.get("loss", 0.0))
    _convert_numbers(event, NUMBERS)
    for name in ("scores", "score_stderrs"):
        if scores := event.get(name):
            _convert_numbers(scores, scores.keys())
    for source_losses in (event.get("sources") or {}).values():
        _convert_numbers(source_losses, NUMBERS)

    # Texts, which are printed.
    for name in TEXTS:
        _check_text(event.get(name, ""))
    for digest in _list(event, "data_digests"):
        _check_text(digest)
    for sample in _list(event, "samples"):
        _check_text(sample["prompt"])
        _check_text(sample["text"])
    return event


def _check_integer(value: Any) -> None:
    if type(value) is not int or abs(value) >= 1 << 63:
        raise ValueError(f"{value!r:.40} is not an integer of 64 bits")


def _check_text(value: Any) -> None:
    if not isinstance(value, str):
        raise ValueError(f"{value!r:.40} is not a text")


def _list(event: Event, name: str) -> list[Any]:
    values = event.get(name) or []
    if not isinstance(values, list):
        raise ValueError(f"{name} is not a list")
    return values


def _convert_numbers(values: dict[str, Any], names: Iterable[str]) -> None:
    """Convert the numbers of these names, if there and not null, to floats. ValueError."""
    for name in names:
        if values.get(name) is not None:
            values[name] = number(values[name])


class LogFollower:
    """A reader of a log that is being written: `poll` returns the new events."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._inode = -1
        self._offset = 0

    def poll(self) -> list[Event]:
        """Return the events of complete lines since the last call; none without a file."""
        lines = []
        try:
            with open_regular(self.path) as file:
                status = os.fstat(file.fileno())
                # another file, or it was truncated: start again
                if status.st_ino != self._inode or status.st_size < self._offset:
                    self._inode = status.st_ino
                    self._offset = 0

                # only complete lines are read, however many times it takes
                file.seek(self._offset)
                while line := file.readline(MAX_LINE_BYTES):
                    if not line.endswith(b"\n") and len(line) < MAX_LINE_BYTES:
                        break  # incomplete: read it in the next poll
                    self._offset += len(line)
                    lines.append(line)
        except UnreadableFile as error:
            if not error.is_missing:
                raise
        return parse_events(lines)

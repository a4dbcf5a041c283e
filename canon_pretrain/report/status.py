"""`canon run status RUN...`: print the state of runs on one screen.

Reads the small files of a run and the end of its log; writes nothing. Values of a damaged file are
None, and `problems` names the file. No torch.
"""

import argparse
import glob
import json
import math
import os
import signal
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from canon_pretrain.checkpoint.folder import HOLDS, CheckpointFolder, entries
from canon_pretrain.checkpoint.manifest import verify
from canon_pretrain.core.errors import UserError
from canon_pretrain.core.holder import process_lives
from canon_pretrain.core.lock import EXPIRY_HEARTBEATS, HEARTBEAT_S, read_holder
from canon_pretrain.core.terminal import Console, duration, printable
from canon_pretrain.report.record import RunRecord, unix_time
from canon_pretrain.run.folder import CHECKPOINTS, EVALS, natural_key, not_a_run, runs_below
from canon_pretrain.run.launches import read_run
from canon_pretrain.run.log import Event, json_value, read_tail
from canon_pretrain.run.results import RESULTS
from canon_pretrain.run.status import Status, health

WATCH_S = 5.0
PIPED_WIDTH = 100_000  # longer than any line: nothing is folded
CHECKED = "its manifest and the size of each file in it; no hash is read"
ACTIVE_STATES = (
    "starting",
    "loading",
    "training",
    "validating",
    "sampling",
    "saving",
    "slow",
    "hung",
)

# Fields of RunSummary that have the name of what they are read from: a step's event, status.json.
STEP_FIELDS = ("step", "skipped_steps", "loss", "tokens", "tokens_per_second", "mfu")
LAUNCH_FIELDS = ("checkpoint_failures", "world_size", "host", "job_id", "restart_count", "nodes")

T = TypeVar("T")


@dataclass(frozen=True)
class NewestCheckpoint:
    """The newest full checkpoint of a run, verified as `checked` says."""

    step: int
    saved: str
    age_s: float | None
    checked: str = CHECKED


@dataclass(frozen=True)
class EvaluationCounts:
    done: int
    pending: int


@dataclass
class RunSummary:
    """The state of a run at one time, None if unknown; fields are the keys of `status --json`."""

    path: str
    # One of ACTIVE_STATES, or dead (no heartbeat), stopped, done, failed, unknown.
    state: str = "unknown"
    reason: str | None = None
    run_id: str | None = None
    step: int | None = None
    steps: int | None = None
    loss: float | None = None
    tokens: int | None = None
    tokens_per_second: float | None = None
    mfu: float | None = None
    eta_s: float | None = None
    restarts: int | None = None
    skipped_steps: int | None = None
    checkpoint: NewestCheckpoint | None = None
    heartbeat_age_s: float | None = None
    written_age_s: float | None = None
    holder: str | None = None
    evaluations: EvaluationCounts | None = None
    checkpoint_failures: int | None = None
    world_size: int | None = None
    host: str | None = None
    job_id: str | None = None
    restart_count: int | None = None
    nodes: str | None = None
    problems: list[str] = field(default_factory=list)


def summarize_run(path: Path, now: datetime) -> RunSummary:
    """Return the summary of a run at `now`; never raises."""
    problems: list[str] = []
    try:
        reader = _RunReader(RunRecord(path), now.astimezone(UTC), problems)
        return reader.summary()
    except UserError as error:
        problems.append(str(error))
    except Exception as error:  # an unexpected error in one run must not hide the others
        problems.append(f"{type(error).__name__}: {error}")
    return RunSummary(str(path), problems=problems)


class _RunReader:
    """Reads the files of one run; `problems` collects what could not be read."""

    def __init__(self, run: RunRecord, now: datetime, problems: list[str]) -> None:
        self.run = run
        self.folder = run.folder
        self.now = now
        self.problems = problems
        self.config: dict[str, Any] = {}
        if self.folder.config_file.exists():
            self.config = self._try_read(lambda: run.config) or {}
        self.status = self._try_read(lambda: run.status)
        self.holder = self._try_read(lambda: read_holder(self.folder.lock_file))

    def _try_read(self, read: Callable[[], T]) -> T | None:
        """Return `read()`; None if it fails, which is a problem unless the file is missing."""
        try:
            return read()
        except (UserError, OSError, ValueError) as error:
            if not getattr(error, "is_missing", False):
                parent = f"{self.folder.path}{os.sep}"
                self.problems.append(str(error).replace(parent, ""))
            return None

    def _setting(self, section: str, key: str) -> Any:
        return self.config.get(section, {}).get(key)

    def _age_s(self, time: str | None) -> float | None:
        age_s = self.now.timestamp() - unix_time(time)
        return max(0.0, age_s) if math.isfinite(age_s) else None

    def summary(self) -> RunSummary:
        summary = RunSummary(str(self.folder.path), problems=self.problems)
        if not self.folder.status_file.exists():
            self.problems.append(f"no {self.folder.status_file.name}")

        # run.json counts the launches; it may be missing, but not damaged.
        launched = read_run(self.folder)
        if launched is not None:
            summary.run_id = launched.run_id
            summary.restarts = max(launched.launches - 1, 0)
        elif self.folder.run_file.exists():
            self.problems.append(f"{self.folder.run_file.name} is damaged")

        # The last step in the log.
        last_step = Event()
        last_events = self._try_read(lambda: read_tail(self.folder.log_file)) or ()
        for event in last_events:
            if event.kind == "step":
                last_step = event
        for name in STEP_FIELDS:
            setattr(summary, name, last_step.get(name))
        summary.steps = self._setting("training", "steps")

        # status.json is written at each heartbeat.
        if self.status is not None:
            self._add_status(summary, self.status)
        summary.state, summary.reason = self._state()
        summary.eta_s = self._eta_s(summary)

        # What is saved and evaluated, and which process holds the run.
        summary.checkpoint = self._newest_checkpoint()
        if self.holder is not None:
            summary.holder = str(self.holder)
        evals = self.folder.path / EVALS
        results = [*evals.glob(f"step-*/*/*/{RESULTS}")]
        holds = [path for path in entries(evals / HOLDS) if path.suffix]
        summary.evaluations = EvaluationCounts(done=len(results), pending=len(holds))
        return summary

    def _eta_s(self, summary: RunSummary) -> float | None:
        """Return the seconds to the last step, at the pace of this launch; None if it is over."""
        if self.status is None or summary.state not in ACTIVE_STATES:
            return None
        # Not the pace in the log, whose last step may be of an earlier launch.
        pace_s = self.status.seconds_per_step
        if pace_s is None or not math.isfinite(pace_s):
            return None
        if summary.step is None or summary.steps is None:
            return None
        return max(summary.steps - summary.step, 0) * pace_s

    def _add_status(self, summary: RunSummary, status: Status) -> None:
        """Add what status.json says, which may be a heartbeat behind the log.

        While a launch loads, it has step 0.
        """
        summary.step = max(status.step, summary.step or 0)
        summary.skipped_steps = max(status.skipped_steps, summary.skipped_steps or 0)
        summary.steps = status.steps or summary.steps
        if summary.restarts is None:
            summary.restarts = max(status.launches - 1, 0)
        summary.heartbeat_age_s = self._age_s(status.heartbeat)
        summary.written_age_s = self._age_s(status.written)
        for name in LAUNCH_FIELDS:
            setattr(summary, name, getattr(status, name))

    def _state(self) -> tuple[str, str | None]:
        # Before status.json, a launch is known by the lock that it holds.
        status = self.status
        is_done = self.run.is_done
        if status is None:
            if self.holder is not None and process_lives(self.holder):
                return "starting", None
            return "done" if is_done else "unknown", None

        # A running process may have died, or hang, without a last word in status.json.
        heartbeat_s = self._setting("run", "heartbeat_s") or HEARTBEAT_S
        state: str = health(status, self.now, dead_after_s=EXPIRY_HEARTBEATS * heartbeat_s)
        reason = status.reason or None
        if status.state == "running" and self._has_exited(status):
            state = "dead"
            reason = "its process has exited"
        elif state == "running":
            state = status.phase
        elif state == "dead":
            silence = format_duration(self._age_s(status.written))
            reason = f"no heartbeat for {silence}"
        elif state in ("slow", "hung"):
            delay = format_duration(self._age_s(status.heartbeat))
            reason = f"no progress for {delay} ({status.phase})"

        # A launch that trains removes DONE first: a failed one has not changed the result.
        if is_done and state in ("dead", "failed"):
            return "done", f"a later launch is {state}: {reason}"
        return state, None if state == "done" else reason

    def _has_exited(self, status: Status) -> bool:
        """Return whether the process that wrote the status is known to have ended."""
        holder = self.holder
        if holder is None:
            return False
        is_writer = holder.pid == status.pid and holder.host == status.host
        return is_writer and process_lives(holder) is False

    def _newest_checkpoint(self) -> NewestCheckpoint | None:
        """Return the newest full checkpoint, verified as in CHECKED; damaged ones are problems."""
        name = self._setting("checkpoint", "folder") or CHECKPOINTS
        folder = CheckpointFolder(self.folder.path / str(name))
        for step in reversed(folder.steps()):
            check_sizes = partial(verify, folder.step_path(step), hashes=False)
            manifest = self._try_read(check_sizes)
            if manifest is not None and manifest.kind == "full":
                age_s = self._age_s(manifest.saved)
                return NewestCheckpoint(step, manifest.saved, age_s)
        return None


def format_number(value: float | None, form: str = ",") -> str:
    """Return a number, or its name in JSON if it is not finite; "" for None."""
    if value is None:
        return ""
    if not math.isfinite(value):
        return str(json_value(value))
    return format(value, form)


def format_duration(seconds: float | None) -> str:
    """Return a duration in its largest fitting unit; "" for None."""
    return "" if seconds is None else duration(seconds)


def _cells(run: RunSummary) -> dict[str, str]:
    """Return one line of the table by column title."""
    step = format_number(run.step) or "-"
    num_steps = format_number(run.steps) or "?"
    progress = ""
    if run.steps and run.step is not None:
        progress = f"{100 * run.step / run.steps:.1f} %"

    checkpoint = "none"
    if run.checkpoint is not None:
        age = format_duration(run.checkpoint.age_s)
        checkpoint = f"{run.checkpoint.step:,} ({age} ago)"
    if run.checkpoint_failures:
        checkpoint = f"{checkpoint}, then {run.checkpoint_failures} failed"

    evals = ""
    counts = run.evaluations
    if counts is not None and (counts.done or counts.pending):
        evals = f"{counts.done}+{counts.pending}"

    job = run.job_id
    if job and run.restart_count:
        job = f"{job}.{run.restart_count}"

    return {
        "run": printable(run.path),
        "state": run.state,
        "step": f"{step}/{num_steps}",
        "": progress,
        "loss": format_number(run.loss, ".4f"),
        "tokens/s": format_number(run.tokens_per_second, ",.0f"),
        "ETA": format_duration(run.eta_s),
        "MFU": format_number(run.mfu, ".1%"),
        "restarts": format_number(run.restarts),
        "skipped": format_number(run.skipped_steps),
        "checkpoint": checkpoint,
        "heartbeat": format_duration(run.heartbeat_age_s),
        "evals done+pending": evals,
        "job": " on ".join(filter(None, (job, run.nodes))),
    }


NARROW_COLUMNS = 7  # of the table in a narrow window; the others follow below it
COLORS = {
    **dict.fromkeys(ACTIVE_STATES, "cyan"),
    **dict.fromkeys(("hung", "dead", "failed"), "bold red"),
    **dict.fromkeys(("slow", "stopped", "unknown"), "yellow"),
    "training": "green",
    "done": "blue",
}


def _table(rows: Sequence[dict[str, str]], titles: Sequence[str]) -> Table:
    table = Table(
        box=None,
        padding=(0, 2, 0, 0),
        pad_edge=False,
        header_style="dim",
    )
    for title in titles:
        justify: Any = "left" if title in ("run", "state", "job") else "right"
        table.add_column(
            title,
            justify=justify,
            no_wrap=title != "run",
            overflow="fold",
        )

    for row in rows:
        styles = {"run": "bold", "state": COLORS[row["state"]]}
        cells = []
        for title in titles:
            style = styles.get(title, "")
            cells.append(Text(row[title], style))
        table.add_row(*cells)
    return table


def overview(runs: Sequence[RunSummary], console: Console) -> Group:
    """Return the table of `runs` and the lines below it.

    Columns that are empty for all runs are left out. If the others do not fit into the window, the
    table has the first NARROW_COLUMNS, also empty ones, and the lines below it have the rest.
    """
    # Try the table with every column that a run has a text in.
    rows = [_cells(run) for run in runs]
    titles = []
    for title in rows[0]:
        if any(row[title] for row in rows):
            titles.append(title)
    titles_below: list[str] = []
    table = _table(rows, titles)

    # Measured without a limit: else no table is wider than the window.
    unlimited = console.options.update_width(PIPED_WIDTH)
    if console.measure(table, options=unlimited).maximum > console.width:
        narrow_titles = [*rows[0]][:NARROW_COLUMNS]
        titles_below = [title for title in titles if title not in narrow_titles]
        table = _table(rows, narrow_titles)

    # Below the table, a line for each run with cells that are left, or with something to explain.
    lines = []
    for run, row in zip(runs, rows, strict=True):
        cells = []
        for title in titles_below:
            if row[title]:
                name, *_ = title.split()
                cells.append(f"{name} {row[title]}")
        details = []
        if cells:
            details.append(", ".join(cells))
        if run.reason:
            details.append(f"{run.state}: {run.reason}")
        if run.state == "dead" and run.holder:
            details.append(f"lock held by {run.holder}")

        details += run.problems
        if details:
            text = "; ".join(details)
            line = printable(f"{run.path}: {text}")
            lines.append(Text(line, overflow="fold"))

    count = f"{len(runs)} runs" if len(runs) > 1 else "1 run"
    now = datetime.now(UTC)
    heading = Text(f"{count}, {now:%F %T} UTC", "bold")
    return Group(heading, table, *lines)


def find_runs(patterns: Iterable[str]) -> list[Path]:
    """Return the distinct runs that paths and globs match. Raises UserError if one matches none."""
    runs: dict[Path, Path] = {}
    for pattern in patterns:
        paths = [pattern]
        if not os.path.lexists(pattern):
            paths = sorted(glob.glob(pattern), key=natural_key)
        matched: list[Path] = []
        for path in paths:
            matched += runs_below(Path(path))
        if not matched:
            raise not_a_run(Path(pattern))
        for run in matched:
            runs.setdefault(run.resolve(), run)
    return list(runs.values())


def summarize_runs(patterns: Iterable[str]) -> list[RunSummary]:
    now = datetime.now(UTC)
    return [summarize_run(run, now) for run in find_runs(patterns)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        f"Show the state of runs, one per line. A checkpoint is verified by {CHECKED}."
    )
    add = parser.add_argument
    add("runs", nargs="+", metavar="RUN", help="a run folder, a folder of runs, or a pattern")
    add("--json", action="store_true", help="print one JSON document")
    add(
        "--watch",
        nargs="?",
        type=float,
        const=WATCH_S,
        metavar="SECONDS",
        help=f"refresh every SECONDS (default {WATCH_S:g}) until Ctrl-C; pass it after the runs",
    )


def run(args: argparse.Namespace) -> int:
    """Print the overview; returns 0. Raises UserError if no run is named."""
    console = Console()
    if args.watch is not None:
        if args.json or not console.is_terminal or not 0.1 <= args.watch <= 86_400:
            raise UserError(
                "status.watch",
                f"--watch {args.watch:g}: expected 0.1 to 86400 s, on a terminal, without --json",
            )
        _watch(console, args)
        return 0
    runs = summarize_runs(args.runs)
    if args.json:
        time = datetime.now(UTC).isoformat(timespec="seconds")
        document = json_value({"time": time, "runs": runs})
        print(json.dumps(document, indent=2, ensure_ascii=False))
        return 0

    if not console.is_terminal:
        console = Console(width=PIPED_WIDTH, color_system=None)
    console.print(overview(runs, console))
    return 0


def _watch(console: Console, args: argparse.Namespace) -> None:
    """Show the runs until Ctrl-C or SIGTERM; the last overview stays on the terminal."""
    screen = overview(summarize_runs(args.runs), console)
    # Signals are waited for: an exception while drawing would make rich lose its buffer.
    signals = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    with Live(screen, console=console, screen=True, auto_refresh=False) as live:
        while not signal.sigtimedwait(signals, args.watch):
            screen = overview(summarize_runs(args.runs), console)
            live.update(screen, refresh=True)
    console.print(screen)

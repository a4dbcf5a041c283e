"""`canon run status RUN...`: the state of runs on one screen.

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
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

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
from canon_pretrain.run.log import json_value, read_tail
from canon_pretrain.run.results import RESULTS
from canon_pretrain.run.status import health

WATCH_S = 5.0
PIPED_WIDTH = 100_000  # longer than any line: nothing is folded
CHECKED = "its manifest and the size of each file in it; no hash is read"
ACTIVE_STATES = (
    *("starting", "loading", "training", "validating", "sampling", "saving", "slow", "hung"),
)
STATUS_FIELDS = ("checkpoint_failures", "world_size", "host", "job_id", "restart_count", "nodes")
STEP_FIELDS = ("loss", "tokens", "tokens_per_second", "mfu")
JSON_KEYS = (
    *("path", "state", "reason", "run_id", "step", "steps", *STEP_FIELDS, "eta_s"),
    *("restarts", "skipped_steps", "checkpoint", "heartbeat_age_s", "written_age_s", "holder"),
    *("evaluations", *STATUS_FIELDS, "problems"),
)
"""The keys of a run in `status --json`."""

Facts = dict[str, Any]


def summarize_run(path: Path, now: datetime) -> Facts:
    """Return the JSON_KEYS of a run at `now`, None if unknown; never raises.

    `state`: one of ACTIVE_STATES, or dead (no heartbeat), stopped, done, failed, unknown.
    """
    problems: list[str] = []
    facts: Facts = {"path": str(path), "state": "unknown", "problems": problems}
    try:
        facts |= _RunReader(RunRecord(path), now.astimezone(UTC), problems).facts()
    except Exception as error:  # an unexpected error in one run must not hide the others
        kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
        problems.append(f"{kind}{error}")
    return {key: facts.get(key) for key in JSON_KEYS}


class _RunReader:
    """Reads the files of one run; `problems` collects what could not be read."""

    def __init__(self, run: RunRecord, now: datetime, problems: list[str]) -> None:
        self.run, self.folder, self.now, self.problems = run, run.folder, now, problems
        has_config = self.folder.config_file.exists()
        self.config = (self._try_read(lambda: run.config) if has_config else None) or {}
        self.status = self._try_read(lambda: run.status)
        self.holder = self._try_read(lambda: read_holder(self.folder.lock_file))

    def _try_read(self, read: Callable[[], Any]) -> Any:
        """Return `read()`; None if it fails, which is a problem unless the file is missing."""
        try:
            return read()
        except (UserError, OSError, ValueError) as error:
            if not getattr(error, "is_missing", False):
                self.problems.append(str(error).replace(f"{self.folder.path}{os.sep}", ""))
            return None

    def _setting(self, section: str, key: str) -> Any:
        return self.config.get(section, {}).get(key)

    def _age_s(self, time: str | None) -> float | None:
        age_s = self.now.timestamp() - unix_time(time)
        return max(0.0, age_s) if math.isfinite(age_s) else None

    def facts(self) -> Facts:
        beat: Facts = asdict(self.status) if self.status else {}
        counts = read_run(self.folder)
        if not self.folder.status_file.exists():
            self.problems.append(f"no {self.folder.status_file.name}")
        if counts is None and self.folder.run_file.exists():
            self.problems.append(f"{self.folder.run_file.name} is damaged")
        events = self._try_read(lambda: read_tail(self.folder.log_file)) or []
        last: Facts = next((each for each in reversed(events) if each["event"] == "step"), {})
        # status.json may be a heartbeat behind the log, and has step 0 while a launch loads
        step, skipped = (
            max((x[name] for x in (beat, last) if name in x), default=None)
            for name in ("step", "skipped_steps")
        )
        steps = beat.get("steps") or self._setting("training", "steps")
        pace = beat.get("seconds_per_step")  # of this launch; the log's last step may be older
        launches = counts.launches if counts else beat.get("launches")
        state, reason = self._state()
        eta_s = max(steps - step, 0) * pace if None not in (step, steps, pace) else None
        has_eta = state in ACTIVE_STATES and eta_s is not None and math.isfinite(eta_s)
        evals = self.folder.path / EVALS
        return {
            **{name: last.get(name) for name in STEP_FIELDS},
            **{name: beat.get(name) for name in STATUS_FIELDS},
            **{"state": state, "reason": reason, "step": step, "steps": steps},
            "run_id": counts.run_id if counts else None,
            "eta_s": eta_s if has_eta else None,
            "restarts": None if launches is None else max(launches - 1, 0),
            "skipped_steps": skipped,
            "checkpoint": self._newest_checkpoint(),
            "heartbeat_age_s": self._age_s(beat.get("heartbeat")),
            "written_age_s": self._age_s(beat.get("written")),
            "holder": str(self.holder) if self.holder else None,
            "evaluations": {
                "done": len(list(evals.glob(f"step-*/*/*/{RESULTS}"))),
                "pending": len([path for path in entries(evals / HOLDS) if path.suffix]),
            },
        }

    def _state(self) -> tuple[str, str | None]:
        """Return the state and its reason."""
        status, holder, is_done = self.status, self.holder, self.run.is_done
        if status is None:
            is_alive = holder is not None and process_lives(holder)
            return "starting" if is_alive else "done" if is_done else "unknown", None
        expiry_s = EXPIRY_HEARTBEATS * (self._setting("run", "heartbeat_s") or HEARTBEAT_S)
        state, reason = health(status, self.now, dead_after_s=expiry_s), status.reason or None
        is_holder = holder and (holder.pid, holder.host) == (status.pid, status.host)
        if status.state == "running" and is_holder and process_lives(holder) is False:
            state, reason = "dead", "its process has exited"
        elif state == "running":
            state = status.phase
        elif state == "dead":
            reason = f"no heartbeat for {_age(self._age_s(status.written))}"
        elif state in ("slow", "hung"):
            reason = f"no progress for {_age(self._age_s(status.heartbeat))} ({status.phase})"
        if is_done and state in ("dead", "failed"):  # each launch that trains removes DONE first
            return "done", f"a later launch is {state}: {reason}"
        return state, None if state == "done" else reason

    def _newest_checkpoint(self) -> Facts | None:
        """Return the newest full checkpoint, verified as in CHECKED; damaged ones are problems."""
        name = self._setting("checkpoint", "folder") or CHECKPOINTS
        folder = CheckpointFolder(self.folder.path / str(name))
        for step in reversed(folder.steps()):
            manifest = self._try_read(partial(verify, folder.step_path(step), hashes=False))
            if manifest is not None and manifest.kind == "full":
                ages = {"saved": manifest.saved, "age_s": self._age_s(manifest.saved)}
                return {"step": step, **ages, "checked": CHECKED}
        return None


def format_number(value: float | None, form: str = ",") -> str:
    """Return a number, or its name in JSON if it is not finite; "" for None."""
    if value is None:
        return ""
    return format(value, form) if math.isfinite(value) else str(json_value(value))


def _age(seconds: float | None) -> str:
    return "" if seconds is None else duration(seconds)


def _cells(run: Facts) -> dict[str, str]:
    """Return one line of the table by column title."""
    step, steps, saved = run["step"], run["steps"], run["checkpoint"]
    evals = run["evaluations"] or {"done": 0, "pending": 0}
    failed, restarts = run["checkpoint_failures"], run["restart_count"]
    newest = f"{saved['step']:,} ({_age(saved['age_s'])} ago)" if saved else "none"
    job = [run["job_id"] and f"{run['job_id']}{f'.{restarts}' * bool(restarts)}", run["nodes"]]
    return {
        "run": printable(run["path"]),
        "state": run["state"],
        "step": f"{format_number(step) or '-'}/{format_number(steps) or '?'}",
        "": f"{100 * step / steps:.1f} %" if steps and step is not None else "",
        "loss": format_number(run["loss"], ".4f"),
        "tokens/s": format_number(run["tokens_per_second"], ",.0f"),
        "ETA": _age(run["eta_s"]),
        "MFU": format_number(run["mfu"], ".1%"),
        "restarts": format_number(run["restarts"]),
        "skipped": format_number(run["skipped_steps"]),
        "checkpoint": f"{newest}, then {failed} failed" if failed else newest,
        "heartbeat": _age(run["heartbeat_age_s"]),
        "evals done+pending": f"{evals['done']}+{evals['pending']}" if any(evals.values()) else "",
        "job": " on ".join(filter(None, job)),
    }


NUM_FIRST = 7  # columns of the table in a narrow window; the others follow below it
COLORS = {
    **dict.fromkeys(ACTIVE_STATES, "cyan"),
    **dict.fromkeys(("hung", "dead", "failed"), "bold red"),
    **dict.fromkeys(("slow", "stopped", "unknown"), "yellow"),
    **{"training": "green", "done": "blue"},
}


def _table(rows: Sequence[dict[str, str]], titles: Sequence[str]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for title in titles:
        justify: Any = "left" if title in ("run", "state", "job") else "right"
        table.add_column(title, justify=justify, no_wrap=title != "run", overflow="fold")
    for row in rows:
        styles = {"run": "bold", "state": COLORS[row["state"]]}
        table.add_row(*(Text(row[title], styles.get(title, "")) for title in titles))
    return table


def overview(runs: Sequence[Facts], console: Console) -> Group:
    """Return the table of `runs` and the lines below it."""
    rows = [_cells(run) for run in runs]
    titles = [title for title in rows[0] if any(row[title] for row in rows)]
    table, rest = _table(rows, titles), titles[:0]
    unlimited = console.options.update_width(PIPED_WIDTH)
    if console.measure(table, options=unlimited).maximum > console.width:
        first = list(rows[0])[:NUM_FIRST]
        table, rest = _table(rows, first), [title for title in titles if title not in first]
    count = f"{len(runs)} run{'s' * (len(runs) > 1)}"
    lines: list[Any] = [Text(f"{count}, {datetime.now(UTC):%F %T} UTC", "bold"), table]
    for run, row in zip(runs, rows, strict=True):
        cells = ", ".join(f"{title.split()[0]} {row[title]}" for title in rest if row[title])
        reason = run["reason"] and f"{run['state']}: {run['reason']}"
        is_locked = run["state"] == "dead" and run["holder"]
        lock = f"lock held by {run['holder']}" if is_locked else ""
        if details := list(filter(None, (cells, reason, lock, *run["problems"]))):
            lines.append(Text(printable(f"{row['run']}: {'; '.join(details)}"), overflow="fold"))
    return Group(*lines)


def find_runs(patterns: Iterable[str]) -> list[Path]:
    """Return the distinct runs that paths and globs match. Raises UserError if one matches none."""
    runs: dict[Path, Path] = {}
    for given in patterns:
        paths = [given] if os.path.lexists(given) else sorted(glob.glob(given), key=natural_key)
        found = [run for path in paths for run in runs_below(Path(path))]
        if not found:
            raise not_a_run(Path(given))
        for run in found:
            runs.setdefault(run.resolve(), run)
    return list(runs.values())


def summarize_runs(patterns: Iterable[str]) -> list[Facts]:
    """Return the summaries of the runs that `patterns` match."""
    now = datetime.now(UTC)
    return [summarize_run(run, now) for run in find_runs(patterns)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `canon run status`."""
    parser.description = (
        f"Show the state of runs, one per line. A checkpoint is verified by {CHECKED}."
    )
    add = parser.add_argument
    add("runs", nargs="+", metavar="RUN", help="a run folder, a folder of runs, or a pattern")
    add("--json", action="store_true", help="print one JSON document")
    about = f"refresh every SECONDS (default {WATCH_S:g}) until Ctrl-C; give it after the runs"
    add("--watch", nargs="?", type=float, const=WATCH_S, metavar="SECONDS", help=about)


def run(args: argparse.Namespace) -> int:
    """Print the overview; returns 0. Raises UserError if no run is named."""
    console = Console()
    if args.watch is not None:
        if args.json or not console.is_terminal or not 0.1 <= args.watch <= 86_400:
            expected = "0.1 to 86400 s, on a terminal, without --json"
            raise UserError("status.watch", f"--watch {args.watch:g}: expected {expected}")
        _watch(console, args)
        return 0
    runs = summarize_runs(args.runs)
    if args.json:
        time = datetime.now(UTC).isoformat(timespec="seconds")
        document = json_value({"time": time, "runs": runs})
        print(json.dumps(document, indent=2, ensure_ascii=False))
    else:
        if not console.is_terminal:
            console = Console(width=PIPED_WIDTH, color_system=None)
        console.print(overview(runs, console))
    return 0


def _watch(console: Console, args: argparse.Namespace) -> None:
    """Show the runs until Ctrl-C or SIGTERM; the last overview stays on the terminal."""
    shown = overview(summarize_runs(args.runs), console)
    # blocked and waited for: an exception while drawing would make rich lose its buffer
    signals = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    with Live(shown, console=console, screen=True, auto_refresh=False) as live:
        while not signal.sigtimedwait(signals, args.watch):
            shown = overview(summarize_runs(args.runs), console)
            live.update(shown, refresh=True)
    console.print(shown)

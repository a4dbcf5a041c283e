"""`python -m canon_pretrain.run status RUN...`: the state of runs, on one screen.

A run is read from its small files and the end of its log; nothing is written. A damaged file leaves
its facts out and is named in `problems`. No torch.
"""

import argparse
import glob
import json
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.cells import cell_len
from rich.console import ConsoleOptions
from rich.live import Live
from rich.padding import Padding
from rich.text import Text

from canon_pretrain.checkpoint.folder import HOLDS, CheckpointFolder, entries, step_number
from canon_pretrain.checkpoint.manifest import verify
from canon_pretrain.core.cli import stdout_failure
from canon_pretrain.core.errors import UserError
from canon_pretrain.core.files import UnreadableFile
from canon_pretrain.core.holder import process_lives
from canon_pretrain.core.link_lock import EXPIRY_BEATS, HEARTBEAT_S, read_holder
from canon_pretrain.core.terminal import Console
from canon_pretrain.core.text import duration, printable
from canon_pretrain.report.record import RunRecord
from canon_pretrain.run.folder import CHECKPOINTS, EVALS, natural, runs_below
from canon_pretrain.run.launches import read_run
from canon_pretrain.run.log import read_tail
from canon_pretrain.run.results import RESULTS
from canon_pretrain.run.status import Status, health

WATCH_S = 5.0
PIPED_WIDTH = 100_000
"""No line of a table is as long: nothing is folded."""
CHECKED = "its manifest, and that each file it names is there with its size; no hash is read"
ALIVE = ("starting", "loading", "training", "validating", "saving", "slow", "hung")


@dataclass(frozen=True)
class Saved:
    """The newest checkpoint that a launch can resume, as far as CHECKED proves it."""

    step: int
    saved: str
    age_s: float
    checked: str = CHECKED


@dataclass(frozen=True)
class Evaluations:
    """The results in RUN/evals, and the holds of steps that an evaluation still waits for."""

    done: int = 0
    done_steps: list[int] = field(default_factory=list)
    pending: int = 0
    pending_steps: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class RunSummary:
    """The facts; their names are the keys of `status --json`. None: not known."""

    path: str
    name: str
    state: str = "unknown"
    """One of ALIVE (slow, hung: steps come late or not at all), dead (no sign of life), stopped,
    done, failed, unknown."""
    reason: str | None = None
    run_id: str | None = None
    step: int | None = None
    steps: int | None = None
    loss: float | str | None = None
    """Of the newest step in the log, as the next; "NaN", "Infinity" or "-Infinity" if such."""
    tokens: int | None = None
    tokens_per_second: float | str | None = None
    mfu: float | str | None = None
    eta_s: float | None = None
    restarts: int | None = None
    skipped_steps: int | None = None
    checkpoint: Saved | None = None
    checkpoint_failures: int | None = None
    """Failed saves in a row."""
    heartbeat_age_s: float | None = None
    """Since the trainer's last progress."""
    written_age_s: float | None = None
    """Since the process's last sign of life."""
    holder: str | None = None
    """Who holds the lock, alive or not."""
    evaluations: Evaluations = Evaluations()
    world_size: int | None = None
    host: str | None = None
    job_id: str | None = None
    restart_count: int | None = None
    nodes: str | None = None
    problems: list[str] = field(default_factory=list)


def summarize_run(path: Path, name: str, now: datetime) -> RunSummary:
    """Return the facts of a run at `now`; never raises."""
    problems: list[str] = []
    facts: dict[str, Any] = {}
    try:
        facts = _Reader(RunRecord(path), now.astimezone(UTC), problems).facts()
    except Exception as error:  # an unforeseen fault in one run must not hide the others
        problems.append(f"{type(error).__name__}: {error}")
    return RunSummary(path=str(path), name=name, problems=problems, **facts)


class _Reader:
    """The files of one run at one time; `problems` names what could not be read."""

    def __init__(self, run: RunRecord, now: datetime, problems: list[str]) -> None:
        self.run, self.folder, self.now, self.problems = run, run.folder, now, problems
        has_config = self.folder.config_file.exists()
        self.config: dict[str, Any] = (self._tried(lambda: run.config) if has_config else {}) or {}
        self.status: Status | None = self._tried(lambda: run.status)
        if not self.folder.status_file.exists():
            problems.append(f"no {self.folder.status_file.name}")
        self.holder = self._tried(lambda: read_holder(self.folder.lock_file))
        events = self._tried(lambda: read_tail(self.folder.log_file)) or []
        steps = (event for event in reversed(events) if event["event"] == "step")
        self.last: dict[str, Any] = next(steps, {})

    def _tried(self, read: Callable[[], Any]) -> Any:
        """Return what `read` finds; None if it fails: a problem, unless a file is missing."""
        try:
            return read()
        except (UserError, OSError) as error:
            if not (isinstance(error, UnreadableFile) and error.is_missing):
                self._note(error)
            return None

    def _note(self, error: Exception) -> None:
        self.problems.append(str(error).replace(f"{self.folder.path}{os.sep}", ""))

    def _setting(self, section: str, key: str) -> Any:
        keys = self.config.get(section)
        return keys.get(key) if isinstance(keys, dict) else None

    def _age_s(self, time: str) -> float:
        return max(0.0, (self.now - datetime.fromisoformat(time)).total_seconds())

    def facts(self) -> dict[str, Any]:
        """Return the fields of RunSummary, but for its names and problems."""
        status, last, counts = self.status, self.last, read_run(self.folder)
        if counts is None and self.folder.run_file.exists():
            self.problems.append(f"{self.folder.run_file.name} is damaged")
        state, reason = self._state()
        facts: dict[str, Any] = {"steps": self._setting("training", "steps")}
        # status.json is a heartbeat old, and a launch that loads has step 0 in it
        known, skipped = [last.get("step")], [last.get("skipped_steps")]
        pace, launches = _finite(last.get("seconds_per_step")), None
        if status is not None:
            names = ("checkpoint_failures", "world_size", "host", "job_id", "restart_count")
            facts = {name: getattr(status, name) for name in (*names, "nodes", "steps")}
            facts["heartbeat_age_s"] = self._age_s(status.heartbeat)
            facts["written_age_s"] = self._age_s(status.written)
            known.append(status.step)
            skipped.append(status.skipped_steps)
            pace, launches = status.seconds_per_step or pace, status.launches
        elif state == "starting" and self.holder:
            facts |= {"host": self.holder.host, "job_id": self.holder.job_id}
        launches = counts.launches if counts else launches
        step = max((n for n in known if n is not None), default=None)
        if state in ALIVE and step is not None and facts["steps"] is not None and pace is not None:
            facts["eta_s"] = max(facts["steps"] - step, 0) * pace
        return facts | {
            **{name: last.get(name) for name in ("loss", "tokens", "tokens_per_second", "mfu")},
            "state": state,
            "reason": reason,
            "run_id": counts.run_id if counts else None,
            "step": step,
            "restarts": None if launches is None else max(launches - 1, 0),
            "skipped_steps": max((n for n in skipped if isinstance(n, int)), default=None),
            "checkpoint": self._newest_checkpoint(),
            "holder": str(self.holder) if self.holder else None,
            "evaluations": self._evaluations(),
        }

    def _state(self) -> tuple[str, str | None]:
        status, holder, is_done = self.status, self.holder, self.run.is_done
        if status is None:
            lives = holder is not None and process_lives(holder)
            return "starting" if lives else "done" if is_done else "unknown", None
        heartbeat_s = _finite(self._setting("run", "heartbeat_s")) or HEARTBEAT_S
        state = health(status, self.now, dead_after_s=EXPIRY_BEATS * heartbeat_s)
        reason = status.reason or None
        if status.state == "running":
            is_holder = holder and (holder.pid, holder.host) == (status.pid, status.host)
            if is_holder and process_lives(holder) is False:
                state, reason = "dead", "its process is gone"
            elif state == "dead":
                reason = f"no sign of life for {duration(self._age_s(status.written))}"
            elif state == "running":
                state = status.phase
            else:
                silent = duration(self._age_s(status.heartbeat))
                reason = f"no progress for {silent} ({status.phase})"
        if is_done and state in ("dead", "failed"):  # each launch that trains removes DONE first
            return "done", f"a launch since then is {state}: {reason}"
        return state, None if state == "done" else reason

    def _newest_checkpoint(self) -> Saved | None:
        """Return the newest step-N that is whole by CHECKED; newer damaged ones are problems."""
        name = self._setting("checkpoint", "folder") or CHECKPOINTS
        folder = CheckpointFolder(self.folder.path / str(name))
        for step in reversed(folder.steps()):
            path = folder.step_path(step)
            try:
                manifest = verify(path, hashes=False)
                if manifest.kind == "full":
                    return Saved(step, manifest.saved, self._age_s(manifest.saved))
            except (UserError, OSError, ValueError) as error:
                if path.exists():  # else retention has deleted it since
                    self._note(error)
        return None

    def _evaluations(self) -> Evaluations:
        evals = self.folder.path / EVALS
        of_results = (path.parents[2].name for path in evals.glob(f"step-*/*/*/{RESULTS}"))
        of_holds = (p.name.partition(".")[0] for p in entries(evals / HOLDS) if p.suffix)
        done, pending = (
            [step for name in names if (step := step_number(name)) is not None]
            for names in (of_results, of_holds)
        )
        return Evaluations(len(done), sorted(set(done)), len(pending), sorted(set(pending)))


def _finite(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) <= sys.float_info.max else None


# -- the table


COLUMNS = (
    *("run", "state", "step", "", "loss", "tokens/s", "ETA"),
    *("MFU", "restarts", "skipped", "checkpoint", "heartbeat", "evals done+pending", "job"),
)
NUM_FIRST = 7
"""Of COLUMNS; the others are in a second line, in words, if the window is narrow."""
GAP = "  "
COLORS = {
    **dict.fromkeys(ALIVE, "cyan"),
    **dict.fromkeys(("hung", "dead", "failed"), "bold red"),
    **dict.fromkeys(("slow", "stopped", "unknown"), "yellow"),
    **{"training": "green", "done": "blue"},
}


def _cells(run: RunSummary) -> dict[str, str]:
    def shown(value: Any, form: str = ",") -> str:
        return "" if value is None else value if isinstance(value, str) else format(value, form)

    def since(seconds: float | None) -> str:
        return "" if seconds is None else duration(seconds)

    saved, evals, job = run.checkpoint, run.evaluations, run.job_id or ""
    checkpoint = f"{saved.step:,} ({duration(saved.age_s)} ago)" if saved else "none"
    if run.checkpoint_failures:
        checkpoint += f", then {run.checkpoint_failures} failed"
    if job:
        job += f".{run.restart_count}" if run.restart_count else ""
        job += f" on {run.nodes}" if run.nodes else ""
    texts = (
        *(printable(run.name), run.state, f"{shown(run.step) or '-'}/{shown(run.steps) or '?'}"),
        f"{100 * run.step / run.steps:.1f} %" if run.step is not None and run.steps else "",
        *(shown(run.loss, ".4f"), shown(run.tokens_per_second, ",.0f"), since(run.eta_s)),
        *(shown(run.mfu, ".1%"), shown(run.restarts), shown(run.skipped_steps)),
        *(checkpoint, since(run.heartbeat_age_s)),
        *(f"{evals.done}+{evals.pending}" if evals.done or evals.pending else "", job),
    )
    return dict(zip(COLUMNS, texts, strict=True))


@dataclass(frozen=True)
class Overview:
    """The runs at `now`, in the folder `base` ("": named in full), and words that name no run."""

    now: datetime
    base: str
    runs: list[RunSummary]
    others: list[str]

    def __rich_console__(self, console: object, options: ConsoleOptions) -> Iterator[Any]:
        place = f" in {self.base}" if self.base else ""
        count = f"{len(self.runs)} run{'s' * (len(self.runs) != 1)}"
        yield Text(f"{count}{place}, {self.now:%Y-%m-%d %H:%M:%S} UTC", "bold")
        rows = [_cells(run) for run in self.runs]
        shown = [title for title in COLUMNS if title == "run" or any(row[title] for row in rows)]
        widths = {t: max(map(cell_len, (t, *(row[t] for row in rows)))) for t in shown}
        is_wide = sum(widths.values()) + len(GAP) * (len(shown) - 1) <= options.max_width
        first = shown if is_wide else [title for title in shown if title in COLUMNS[:NUM_FIRST]]
        room = max(options.max_width - sum(widths[t] + len(GAP) for t in first[1:]), 4)
        widths["run"] = max([3, *(size for row in rows if (size := cell_len(row["run"])) <= room)])

        def line(cells: dict[str, str], styles: dict[str, str]) -> Text:
            text = Text(overflow="fold")
            for title in first:
                pad = " " * (widths[title] - cell_len(cells[title]))
                is_left = title in ("run", "state", "job")
                cell = cells[title] + pad if is_left else pad + cells[title]
                text.append(cell, styles.get(title, "")).append(GAP)
            text.rstrip()
            return text

        yield line(dict(zip(COLUMNS, COLUMNS, strict=True)), dict.fromkeys(COLUMNS, "dim"))
        for run, row in zip(self.runs, rows, strict=True):
            if cell_len(row["run"]) > room:  # a long name has a line of its own
                yield Text(row["run"], "bold", overflow="fold")
                row |= {"run": ""}
            yield line(row, {"run": "bold", "state": COLORS[run.state]})
            rest = (f"{t.split()[0]} {row[t]}" for t in shown if t not in first and row[t])
            below = [(", ".join(rest), "dim"), (run.reason and f"{run.state}: {run.reason}", "")]
            below.append((f"lock held by {run.holder}" if run.state == "dead" else "", ""))
            for text, style in (*below, *((problem, "yellow") for problem in run.problems)):
                if text:
                    yield Padding.indent(Text(printable(text), style), 4)
        for word in self.others:
            yield Text(f"no run in {printable(word)}", "yellow")
        if any(run.checkpoint for run in self.runs):
            yield Text(f"checkpoint: the newest, by {CHECKED}", "dim")


def find_runs(words: Iterable[str]) -> tuple[list[Path], list[str]]:
    """Return the run folders that `words` name, each once, and the words that name none.

    A word is a run folder, a folder with runs in it (a sweep), or a pattern (`*`) of either; an
    existing name is taken literally.
    """
    runs: dict[Path, Path] = {}
    others = []
    for word in words:
        paths = [word] if os.path.lexists(word) else sorted(glob.glob(word), key=natural)
        found = [run for path in paths for run in runs_below(Path(path))]
        if not found:
            others.append(word)
        for run in found:
            runs.setdefault(run.resolve(), run)
    return list(runs.values()), others


def look(words: Sequence[str]) -> Overview:
    """Return the overview of all runs that `words` name."""
    runs, others = find_runs(words)
    now = datetime.now(UTC)
    base, names = "", [str(run) for run in runs]
    if len(runs) > 1:
        absolute = [os.path.abspath(run) for run in runs]
        base = os.path.commonpath([os.path.dirname(path) for path in absolute])
        names = [os.path.relpath(path, base) for path in absolute]
        base = printable(os.path.relpath(base) if base.startswith(os.getcwd()) else base)
    with ThreadPoolExecutor(8) as pool:  # disks of a cluster answer slowly, and many at once
        summaries = list(pool.map(lambda run, name: summarize_run(run, name, now), runs, names))
    return Overview(now, base, summaries, others)


# -- the command


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "status",
        help="the state of runs: step, loss, speed, checkpoint, evaluations, job",
        description="The state of runs, one line each. A checkpoint counts as verified by "
        f"{CHECKED}; `python -m canon_pretrain.checkpoint verify RUN` reads them. "
        "Nothing is written.",
        epilog="example: python -m canon_pretrain.run status 'outputs/lr*' --watch",
    )
    add = parser.add_argument
    add("runs", nargs="+", metavar="RUN", help="a run folder, a folder of runs, or a pattern")
    add("--json", action="store_true", help="one document, for scripts")
    about = f"repeat so often (default {WATCH_S:g}), until Ctrl-C; after the runs"
    add("--watch", nargs="?", type=float, const=WATCH_S, metavar="SECONDS", help=about)
    parser.set_defaults(run=show_status)


def show_status(args: argparse.Namespace) -> int:
    """Print the overview; returns 0. Raises UserError if no run is named."""
    if args.json and args.watch is not None:
        raise UserError("--json gives one document, --watch repeats: choose one of them")
    if args.watch is not None and not 0.1 <= args.watch <= 86_400:
        raise UserError(f"--watch {args.watch:g}: expected 0.1 to 86400 seconds")
    overview = look(args.runs)
    if not overview.runs:
        raise UserError(
            f"no run in {', '.join(args.runs)}: expected a folder that canon_pretrain.train wrote "
            "(job.dump_folder), a folder that holds some, or a pattern that matches some"
        )
    if args.json:
        document = {
            "time": overview.now.isoformat(timespec="seconds"),
            "runs": [asdict(run) for run in overview.runs],
            "no_run_in": overview.others,
        }
        print(json.dumps(document, indent=2, ensure_ascii=False))
        return 0
    console = Console()
    if not console.is_terminal:
        console = Console(width=PIPED_WIDTH, color_system=None)
    if args.watch is None:
        console.print(overview)
    else:
        _watch(console, overview, args)
    return 0


def _watch(console: Console, overview: Overview, args: argparse.Namespace) -> None:
    """Show the runs until Ctrl-C or SIGTERM; the last overview stays on the terminal."""
    # waited for, not handled: an exception amid drawing leaves rich with a buffer that it loses
    signals = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    live = Live(console=console, screen=True, auto_refresh=False) if console.is_terminal else None
    try:
        with live or nullcontext():
            while True:
                if live is not None:
                    live.update(overview, refresh=True)
                else:
                    console.print(overview)
                    sys.stdout.flush()
                if stdout_failure() or signal.sigtimedwait(signals, args.watch):
                    break
                overview = look(args.runs)
        if live is not None:
            console.print(overview)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)

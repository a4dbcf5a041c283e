"""`python -m canon_pretrain.run status RUN...`: the state of runs, on one screen.

summary.py reads the runs; here they are found and shown, once or again and again. No torch.
"""

import argparse
import glob
import json
import os
import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from rich import console as rich_console
from rich.cells import cell_len
from rich.live import Live
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from canon_pretrain.core.cli import stdout_failure
from canon_pretrain.core.errors import UserError
from canon_pretrain.core.terminal import Console
from canon_pretrain.core.text import duration, printable
from canon_pretrain.report.summary import ALIVE, CHECKED, RunSummary, summarize_run
from canon_pretrain.run.names import natural, runs_below

WATCH_S = 5.0
PIPED_WIDTH = 100_000
"""No line of a table is as long: nothing is folded."""


# -- the table


class Column(NamedTuple):
    title: str
    justify: Any = "right"
    label: str | None = None
    """The cell's text in the second line of a narrow table; None: it stays in the first."""


COLUMNS = (
    Column("run", "left"),
    Column("state", "left"),
    Column("step"),
    Column(""),
    Column("loss"),
    Column("tokens/s"),
    Column("ETA"),
    Column("MFU", label="MFU {}"),
    Column("restarts", label="restarts {}"),
    Column("skipped", label="skipped {}"),
    Column("checkpoint", label="checkpoint {}"),
    Column("heartbeat", label="heartbeat {}"),
    Column("evals done+pending", label="evals {}"),
    Column("job", "left", label="job {}"),
)
GAP = 2
COLORS = {
    **dict.fromkeys(ALIVE, "cyan"),
    "training": "green",
    "slow": "yellow",
    "hung": "bold red",
    "dead": "bold red",
    "failed": "bold red",
    "stopped": "yellow",
    "done": "blue",
    "unknown": "yellow",
}


def _cells(run: RunSummary) -> list[str]:
    """Return the texts of COLUMNS."""

    def shown(value: Any, form: str = ",") -> str:
        return "" if value is None else value if isinstance(value, str) else format(value, form)

    def since(seconds: float | None) -> str:
        return "" if seconds is None else duration(seconds)

    saved, evals = run.checkpoint, run.evaluations
    checkpoint = f"{saved.step:,} ({duration(saved.age_s)} ago)" if saved else "none"
    if run.checkpoint_failures:
        checkpoint += f", then {run.checkpoint_failures} failed"
    job = run.job_id or ""
    if job:
        job += f".{run.restart_count}" if run.restart_count else ""
        job += f" on {run.nodes}" if run.nodes else ""
    return [
        printable(run.name),
        run.state,
        f"{shown(run.step) or '-'}/{shown(run.steps) or '?'}",
        f"{100 * run.step / run.steps:.1f} %" if run.step is not None and run.steps else "",
        shown(run.loss, ".4f"),
        shown(run.tokens_per_second, ",.0f"),
        since(run.eta_s),
        shown(run.mfu, ".1%"),
        shown(run.restarts),
        shown(run.skipped_steps),
        checkpoint,
        since(run.heartbeat_age_s),
        f"{evals.done}+{evals.pending}" if evals.done or evals.pending else "",
        job,
    ]


@dataclass(frozen=True)
class Overview:
    """The runs at `now`, in the folder `base` ("": named in full), and words that name no run."""

    now: datetime
    base: str
    runs: list[RunSummary]
    others: list[str]
    is_screen: bool = False
    """Whether it is cut to the height of the window."""

    def document(self) -> dict[str, Any]:
        """Return the content of --json."""
        return {
            "time": self.now.isoformat(timespec="seconds"),
            "runs": [asdict(run) for run in self.runs],
            "no_run_in": self.others,
        }

    def __rich_console__(
        self, console: rich_console.Console, options: rich_console.ConsoleOptions
    ) -> rich_console.RenderResult:
        if not self.is_screen:
            yield from self._parts(options.max_width)
            return
        parts = rich_console.Group(*self._parts(options.max_width))
        lines = console.render_lines(parts, options.update(height=None), pad=False)
        if len(lines) > console.height:
            hidden = len(lines) - console.height + 1
            note = Text(f"... {hidden} more lines: make the window taller")
            lines[console.height - 1 :] = console.render_lines(note, options, pad=False)[:1]
        for k, line in enumerate(lines):
            yield from [rich_console.NewLine()] * (k > 0)
            yield from line

    def _parts(self, width: int) -> Iterator[rich_console.RenderableType]:
        place = f" in {self.base}" if self.base else ""
        title = f"{len(self.runs)} run{'s' * (len(self.runs) != 1)}{place}"
        yield Text(f"{title}, {self.now:%Y-%m-%d %H:%M:%S} UTC", "bold")
        rows = [_cells(run) for run in self.runs]
        shown = [k for k in range(len(COLUMNS)) if k == 0 or any(row[k] for row in rows)]
        titles = [column.title for column in COLUMNS]
        widths = {k: max(cell_len(row[k]) for row in (titles, *rows)) for k in shown}
        is_wide = sum(widths.values()) + GAP * (len(shown) - 1) <= width
        main = [k for k in shown if is_wide or COLUMNS[k].label is None]
        room = max(width - sum(widths[k] + GAP for k in main[1:]), 4)
        widths[0] = max([3, *(size for row in rows if (size := cell_len(row[0])) <= room)])

        def line(cells: Sequence[str], *styles: str) -> Table:
            grid = Table.grid(padding=(0, GAP, 0, 0))
            for k, style in zip(main, (*styles, *[styles[-1]] * len(main)), strict=False):
                grid.add_column(width=widths[k], justify=COLUMNS[k].justify, style=style)
            grid.add_row(*(Text(cells[k], overflow="fold") for k in main))
            return grid

        yield line(titles, "dim")
        for run, row in zip(self.runs, rows, strict=True):
            if cell_len(row[0]) > room:  # a long name has a line of its own
                yield Text(row[0], "bold")
                row = ["", *row[1:]]
            yield line(row, "bold", COLORS.get(run.state, ""), "")
            rest = [
                column.label.format(cell)
                for column, cell in zip(COLUMNS, row, strict=True)
                if column.label and cell and not is_wide
            ]
            below = [(", ".join(rest), "dim"), (run.reason and f"{run.state}: {run.reason}", "")]
            below.append((f"lock held by {run.holder}" if run.state == "dead" else "", ""))
            for text, style in (*below, *((problem, "yellow") for problem in run.problems)):
                if text:
                    yield Padding.indent(Text(printable(text), style), 4)
        for word in self.others:
            yield Text(f"no run in {printable(word)}", "yellow")
        if any(run.checkpoint for run in self.runs):
            yield Text(f"checkpoint: the newest, by {CHECKED}", "dim")


# -- the command


def add_parser(subparsers: Any) -> None:
    """Add `status` to the commands of `python -m canon_pretrain.run`."""
    parser = subparsers.add_parser(
        "status",
        help="the state of runs: step, loss, speed, checkpoint, evaluations, job",
        description="The state of runs, one line each. A checkpoint counts as verified by "
        f"{CHECKED}; `python -m canon_pretrain.checkpoint verify RUN` reads them. "
        "Nothing is written.",
        epilog="examples:\n"
        "  python -m canon_pretrain.run status outputs            all runs below outputs/\n"
        "  python -m canon_pretrain.run status 'outputs/lr*' --watch\n"
        "  python -m canon_pretrain.run status RUN --json | jq '.runs[0].loss'",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="a run folder, a folder of runs, or a pattern"
    )
    parser.add_argument("--json", action="store_true", help="one document, for scripts")
    parser.add_argument(
        "--watch",
        nargs="?",
        type=_interval,
        const=WATCH_S,
        metavar="SECONDS",
        help=f"repeat every so many seconds (default {WATCH_S:g}), until Ctrl-C",
    )
    parser.set_defaults(run=show_status)


def _interval(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of seconds; name the runs before --watch"
        ) from None
    if not 0.1 <= seconds <= 86_400:
        raise argparse.ArgumentTypeError(f"{text}: expected 0.1 to 86400 seconds")
    return seconds


def show_status(args: argparse.Namespace) -> int:
    """Print the overview; returns 0. Raises UserError if no run is named."""
    if args.json and args.watch is not None:
        raise UserError("--json gives one document, --watch repeats: choose one of them")
    overview = look(args.runs)
    if not overview.runs:
        raise UserError(
            f"no run in {', '.join(args.runs)}: expected a folder that canon_pretrain.train wrote "
            "(job.dump_folder), a folder that holds some, or a pattern that matches some"
        )
    if args.json:
        print(json.dumps(overview.document(), indent=2, ensure_ascii=False))
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
    screen = Live(console=console, screen=True) if console.is_terminal else nullcontext()
    try:
        with screen as live:
            while True:
                if live is not None:
                    live.update(replace(overview, is_screen=True), refresh=True)
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
    # disks of a cluster answer slowly, and many at once
    with ThreadPoolExecutor(8) as pool:
        summaries = list(pool.map(lambda run, name: summarize_run(run, name, now), runs, names))
    return Overview(now, base, summaries, others)

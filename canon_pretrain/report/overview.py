"""`python -m canon_pretrain.run status RUN...`: how all runs stand, on one screen.

Here the runs are found and looked at, once or again and again; glance.py finds the facts of each,
overview_table.py shows them.
"""

import argparse
import glob
import json
import os
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType

from rich.live import Live

from canon_pretrain.core.cli import stdout_failure
from canon_pretrain.core.errors import UserError
from canon_pretrain.core.terminal import Console
from canon_pretrain.core.text import printable
from canon_pretrain.report.glance import CHECKED, look_at_run
from canon_pretrain.report.overview_table import Table
from canon_pretrain.run.names import natural, runs_below

WATCH_S = 5.0
_PIPED_WIDTH = 100_000  # no line of a table is as long: nothing is cut or folded

SLICE_S = 0.1  # how soon a signal is heard while nothing is drawn


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `status` to the commands of `python -m canon_pretrain.run`."""
    parser = subparsers.add_parser(
        "status",
        help="how runs stand: state, step, loss, speed, checkpoint, evaluations, job",
        description="How runs stand, one line each. A checkpoint counts as verified by "
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
        help=f"look again every so often (default {WATCH_S:g} s), until Ctrl-C",
    )
    parser.set_defaults(run=show_status)


def _interval(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no number of seconds; name the runs before --watch"
        ) from None
    if not 0.1 <= seconds <= 86_400:
        raise argparse.ArgumentTypeError(f"{text}: expected 0.1 to 86400 seconds")
    return seconds


def show_status(args: argparse.Namespace) -> int:
    """Print what `args` ask for; 0. Raises UserError where no run is named."""
    if args.json and args.watch is not None:
        raise UserError("--json gives one document, --watch goes on: choose one of them")
    table = look(args.runs)
    if not table.glances:
        raise UserError(
            f"no run in {', '.join(args.runs)}: expected a folder that canon_pretrain.train wrote "
            "(job.dump_folder), a folder that holds some, or a pattern that matches some"
        )
    if args.json:
        print(json.dumps(table.document(), indent=2, ensure_ascii=False))
        return 0
    console = Console()
    if not console.is_terminal:
        console = Console(width=_PIPED_WIDTH, color_system=None)
    if args.watch is None:
        console.print(table)
    else:
        _watch(console, table, args)
    return 0


def _watch(console: Console, table: Table, args: argparse.Namespace) -> None:
    """Show the runs again and again, until Ctrl-C or SIGTERM; what was last seen stays."""
    asked: list[int] = []

    def leave(number: int, frame: FrameType | None) -> None:
        # no exception: one in the middle of a drawing leaves rich with a buffer that it never shows
        asked.append(number)

    def pause() -> bool:
        """Wait for the next look; whether there is to be one."""
        end = time.monotonic() + args.watch
        while not asked and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, SLICE_S))
        return not asked

    before = {number: signal.signal(number, leave) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        if console.is_terminal:
            shown = replace(table, is_screen=True)
            with Live(shown, console=console, screen=True, refresh_per_second=4) as live:
                while stdout_failure() is None and pause():
                    table = look(args.runs)
                    live.update(replace(table, is_screen=True))
            console.print(table)
            return
        console.print(table)
        sys.stdout.flush()
        while stdout_failure() is None and pause():
            table = look(args.runs)
            console.print(table)
            sys.stdout.flush()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# ---- which runs


def find_runs(words: Iterable[str]) -> tuple[list[Path], list[str]]:
    """The run folders that `words` name, each once, in their order; and words that name none.

    A word is a run folder, a folder with runs in it (a sweep), or a pattern (`*`) of either. A name
    that exists is taken as it is, whatever characters it has.
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


def look(words: Sequence[str]) -> Table:
    """Look at all runs that `words` name."""
    runs, others = find_runs(words)
    now = datetime.now(UTC)
    base, names = _names(runs)
    # disks of a cluster answer slowly, and many at once
    with ThreadPoolExecutor(8) as pool:
        glances = list(pool.map(lambda run, name: look_at_run(run, name, now), runs, names))
    return Table(now, base, glances, others)


def _names(runs: Sequence[Path]) -> tuple[str, list[str]]:
    """The folder that all runs share, and what each is called in it."""
    if len(runs) < 2:
        return "", [printable(str(run)) for run in runs]
    absolute = [os.path.abspath(run) for run in runs]
    base = os.path.commonpath([os.path.dirname(path) for path in absolute])
    names = [printable(os.path.relpath(path, base)) for path in absolute]
    return printable(os.path.relpath(base) if base.startswith(os.getcwd()) else base), names

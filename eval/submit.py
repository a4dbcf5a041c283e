"""`eval submit`: evaluate a run's checkpoints as they come, each suite of each once, by Slurm jobs.

Any number of watchers (watcher.py) may run at once; a killed one costs nothing. The last job writes
the report. Meanwhile the trainer's retention keeps what is still to be evaluated.
"""

import argparse
import contextlib
import json
import os
import random
import sys
import time
from dataclasses import asdict
from pathlib import Path

from rich.table import Table
from rich.text import Text

from canon_pretrain.cluster.leases import SCRIPTS, NoQueue, Slurm
from canon_pretrain.core.errors import UserError
from canon_pretrain.core.terminal import Console
from canon_pretrain.run.folder import RunFolder, named_runs
from eval.run_command import add_how
from eval.schedule import RETRIES, Entry, Schedule, read_request, settle, to_words
from eval.suite_names import ALL, TASKS, is_task_file, split_suites, suite_name
from eval.watcher import Watcher, summary

MAX_IN_FLIGHT = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `eval submit`."""
    parser.description = (
        "Evaluate the checkpoints of runs as training saves them. What was asked for is kept in "
        "RUN/evals/schedule.json: later calls need no options."
    )
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="runs, or sweeps")
    add = parser.add_argument_group("what").add_argument
    add("--suites", metavar="A,B", help=f"suites, tasks or task files (default: {ALL})")
    about = "use task files outside eval/tasks without asking: they are code"
    add("--trust_task_files", action="store_true", help=about)
    about = "steps that are multiples of N, and the last (default: each that the run saves)"
    add("--every", type=int, metavar="N", help=about)
    about = f"how often a job that failed is submitted again (default: {RETRIES})"
    add("--retries", type=int, metavar="R", help=about)
    about = "let these options replace those of schedule.json"
    add("--change", action="store_true", help=about)
    about = "of the report (default: RUN/report of one run or sweep, ./report of several)"
    add("--report", type=Path, metavar="DIR", help=about)
    add = parser.add_argument_group("when and where").add_argument
    add("--once", action="store_true", help="look once, and end")
    about = f"jobs at a time, of all these runs (default: {MAX_IN_FLIGHT}; with --local 1)"
    add("--max_in_flight", type=int, metavar="K", help=about)
    add("--interval_s", type=float, default=60.0, help="between two looks (default: 60)")
    add("--local", action="store_true", help="run them here, one after the other")
    about = "a flag for each job, such as --sbatch=--partition=short (may be given again)"
    add("--sbatch", action="append", metavar="FLAG", help=about)
    add = parser.add_argument_group("instead").add_argument
    add("--status", action="store_true", help="a table of what is done and what not")
    add("--json", action="store_true", help="the same as JSON")
    add("--is_finished", action="store_true", help="exit code 0 if nothing is left, else 1")
    add_how(parser.add_argument_group("passed on to `eval run`"))


def execute(arguments: argparse.Namespace) -> None:
    """Watch the runs until all is evaluated, or show their state."""
    for name, least in (("max_in_flight", 1), ("retries", 0), ("every", 1)):
        value = getattr(arguments, name)
        if value is not None and value < least:
            raise UserError(f"--{name} {value}: expected at least {least}")
    if not SCRIPTS.is_dir():
        raise UserError(f"{SCRIPTS} is not there: install from the repository, with pip install -e")
    named = [Path(os.path.abspath(run)) for run in arguments.runs]
    runs = named_runs(named, planned=True)
    if len(set(runs)) < len(runs):
        raise UserError("a run is named twice")
    # of a throttled sweep some runs begin days after others, whose checkpoints do not wait for them
    absent = [run for run in runs if not RunFolder(run).config_file.exists()]
    if len(absent) < len(runs):
        runs = [run for run in runs if run not in absent]
    requests = [read_request(run, change=arguments.change) for run in runs]
    known = [suite for request in requests if request is not None for suite in request.suites]
    given = {
        "every": arguments.every,
        "retries": arguments.retries,
        "sbatch": arguments.sbatch,
        "suites": arguments.suites and split_suites(arguments.suites, known),
        "how": to_words(vars(arguments)) or None,
    }
    given = {name: value for name, value in given.items() if value is not None}
    looks_only = arguments.status or arguments.json or arguments.is_finished
    if not looks_only:
        _confirm_task_files(given.get("suites", known), arguments)
    settled = {"change": arguments.change, "keep": not looks_only}
    schedules = [Schedule(run, settle(run, given, **settled)) for run in runs]
    out = arguments.report or (Path("report") if len(named) > 1 else named[0] / "report")
    watcher = Watcher(
        schedules,
        _queue(needed=not (arguments.local or looks_only)),
        Path(os.path.abspath(out)),
        max_in_flight=arguments.max_in_flight or (1 if arguments.local else MAX_IN_FLIGHT),
        local=arguments.local,
        console=Console(),
        absent=absent,
    )
    (show if looks_only else watch)(watcher, arguments)


def _confirm_task_files(suites: list[str], arguments: argparse.Namespace) -> None:
    files = [s for s in suites if is_task_file(s) and not Path(s).resolve().is_relative_to(TASKS)]
    if not files or arguments.trust_task_files:
        return
    what = (
        f"{', '.join(dict.fromkeys(files))}: a task file is code, and its templates and functions "
        "can run any command as you"
    )
    answer = "no"
    if sys.stdin.isatty():
        with contextlib.suppress(EOFError):
            answer = input(f"{what}. Have the jobs use it? [y/N] ")
    if answer.strip().lower() not in ("y", "yes"):
        raise UserError(f"{what}. Read it, and give --trust_task_files to use it")
    arguments.trust_task_files = True


def _queue(*, needed: bool) -> Slurm:
    """Return the cluster; unless `needed`, one that does not answer counts as without news."""
    slurm = Slurm()
    if needed and not slurm.is_there():
        raise UserError(
            "this machine has no Slurm (sbatch, squeue, scontrol): run the evaluations here with "
            "--local, or call this on a login node"
        )
    try:
        slurm.look()
    except UserError:
        if needed:
            raise
        return NoQueue()
    return slurm


def watch(watcher: Watcher, arguments: argparse.Namespace) -> None:
    """Pass after pass; exit code 1 if some evaluations failed for good."""
    while True:
        if any(RunFolder(run).config_file.exists() for run in watcher.absent):
            return execute(arguments)  # a run has begun: its own schedule joins the others
        try:
            overview = watcher.one_pass()
        except UserError as error:
            if arguments.once:
                raise
            watcher.say(f"{error}; trying again in {arguments.interval_s:.0f} s")
        else:
            if watcher.is_finished(overview):
                watcher.say("finished")
                failed = any(e.state == "failed" for _, found in overview for e in found)
                if failed or watcher.report_state()[0] != "done":
                    raise SystemExit(1)
                return
            if arguments.once:
                return
        # not in step with other watchers
        time.sleep(arguments.interval_s * random.uniform(0.8, 1.2))


def show(watcher: Watcher, arguments: argparse.Namespace) -> None:
    """Print what a look finds: a table per run, or one JSON object, or an exit code alone."""
    overview = watcher.look()
    finished = watcher.is_finished(overview)
    if arguments.is_finished:
        raise SystemExit(0 if finished else 1)
    console, report = watcher.console, watcher.report_state()
    if arguments.json:
        runs = {str(s.run.path): [asdict(entry) for entry in found] for s, found in overview}
        content = {"runs": runs, "report": report[0], "finished": finished}
        console.file.write(json.dumps(content, indent=1) + "\n")
        return
    for schedule, found in overview:
        console.print(_table(str(schedule.run.path), found))
        for entry in found:
            if entry.why and entry.state in ("failed", "missing", "damaged", "waiting"):
                line = f"step {entry.step} {suite_name(entry.suite)}: {entry.state}: {entry.why}"
                console.print(Text(line), soft_wrap=True)
    what = "finished" if finished else "going on"
    words = f"{what}: {summary(overview)}; report: {' '.join(filter(None, report))}"
    console.print(Text(words), soft_wrap=True)
    watcher.say_absent()


def _table(title: str, found: list[Entry]) -> Table:
    table = Table(title=Text(title), title_justify="left")
    table.add_column("step", justify="right")
    for suite in dict.fromkeys(entry.suite for entry in found):
        table.add_column(Text(suite_name(suite)))
    steps = list(dict.fromkeys(entry.step for entry in found if entry.state != "to come"))
    for step in steps:
        table.add_row(f"{step:,}", *(_words(entry) for entry in found if entry.step == step))
    if later := sorted({entry.step for entry in found} - set(steps)):
        table.caption = f"{len(later)} steps to come, the next is {later[0]:,}"
    return table


def _words(entry: Entry) -> str:
    words: str = entry.state
    if entry.state in ("running", "queued") and entry.lease is not None:
        words += f" {entry.lease.job}"
    if entry.attempts > 1 or (entry.attempts and entry.state in ("waiting", "failed")):
        words += f" ({entry.attempts} {'try' if entry.attempts == 1 else 'tries'})"
    return words

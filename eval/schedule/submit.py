"""`eval submit`: evaluate a run's checkpoints as they come, each suite of each once, by Slurm jobs.

    python -m eval submit RUN... [--suites all|a,b] [--every N] [--once | --local | --status]

Looks which suites of which finished checkpoints lack results (schedule.py), claims some of them
(leases.py) and submits a job for each (slurm/eval.sh), never more than --max_in_flight at a time.
Any number of watchers may do that at once and at any time; each pass is whole by itself, so a
killed one costs nothing. After the last, one job writes the report. Meanwhile the trainer's
retention keeps what is still to be evaluated.
"""

import argparse
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

from canon_pretrain.core.errors import UserError
from canon_pretrain.core.terminal import Console
from canon_pretrain.run.folder import RunFolder
from canon_pretrain.run.names import named_runs
from eval.run_command import add_how
from eval.schedule.cluster import SCRIPTS, NoQueue, Slurm
from eval.schedule.request import RETRIES, known_suites, settle, to_words
from eval.schedule.schedule import CLAIM_EXPIRY_S, Queue, Schedule
from eval.schedule.show import show_status
from eval.schedule.watcher import Watcher
from eval.suite_names import ALL, TASKS, is_task_file, split_suites

MAX_IN_FLIGHT = 8
INTERVAL_S = 60.0
EXIT_NOT_FINISHED = 1
EXIT_FAILED = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds those of `eval submit`."""
    parser.description = (
        "Evaluate the checkpoints of runs as training saves them. What was asked for is kept in "
        "RUN/evals/schedule.json: later calls need no options. Without --once it looks again and "
        "again until the runs are DONE, all is evaluated and the report is written."
    )
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="runs, or sweeps")
    what = parser.add_argument_group("what")
    what.add_argument(
        "--suites",
        metavar="A,B",
        help=f"suites, tasks or paths of task files, or `{ALL}`, the paper's (default: {ALL})",
    )
    what.add_argument(
        "--trust_task_files",
        action="store_true",
        help="use task files outside eval/tasks without asking: they are code",
    )
    what.add_argument(
        "--every",
        type=int,
        metavar="N",
        help="steps that are multiples of N, and the last (default: every checkpoint that the "
        "run's schedule saves)",
    )
    what.add_argument(
        "--retries",
        type=int,
        metavar="R",
        help=f"how often a job that failed is submitted again (default: {RETRIES})",
    )
    what.add_argument(
        "--change", action="store_true", help="let these options replace those of schedule.json"
    )
    what.add_argument(
        "--report",
        type=Path,
        metavar="DIR",
        help="where the report of all these runs is written after the last evaluation (default: "
        "RUN/report of one run or sweep, ./report of several)",
    )
    when = parser.add_argument_group("when and where")
    when.add_argument("--once", action="store_true", help="look once, and end")
    when.add_argument(
        "--max_in_flight",
        type=int,
        metavar="K",
        help=f"jobs at a time, of all these runs (default: {MAX_IN_FLIGHT}; with --local 1)",
    )
    when.add_argument(
        "--interval_s", type=float, default=INTERVAL_S, help="between two looks (default: 60)"
    )
    when.add_argument("--local", action="store_true", help="run them here, one after the other")
    when.add_argument(
        "--sbatch",
        action="append",
        metavar="FLAG",
        help="a flag for each job, such as --sbatch=--partition=short (may be given again)",
    )
    when.add_argument(
        "--claim_expiry_s",
        type=float,
        default=CLAIM_EXPIRY_S,
        help="after how long a claim without a job is another's (default: 600)",
    )
    look = parser.add_argument_group("instead")
    look.add_argument("--status", action="store_true", help="a table of what is done and what not")
    look.add_argument("--json", action="store_true", help="the same as JSON")
    look.add_argument(
        "--is_finished", action="store_true", help="exit code 0 where nothing is left, else 1"
    )
    add_how(parser.add_argument_group("passed on to `eval run`"))  # type: ignore[arg-type]


def execute(arguments: argparse.Namespace) -> None:
    """Submit, or show; see the module."""
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
    known = [suite for run in runs for suite in known_suites(run, change=arguments.change)]
    given = _given(arguments, known)
    looks_only = arguments.status or arguments.json or arguments.is_finished
    if not looks_only:
        _confirm_task_files(given.get("suites", known), arguments)
    schedules = [
        Schedule(
            run,
            settle(run, given, change=arguments.change, keep=not looks_only),
            claim_expiry_s=arguments.claim_expiry_s,
        )
        for run in runs
    ]
    queue = _queue(needed=not (arguments.local or looks_only))
    out = arguments.report or (Path("report") if len(named) > 1 else named[0] / "report")
    watcher = Watcher(
        schedules,
        queue,
        Path(os.path.abspath(out)),
        max_in_flight=arguments.max_in_flight or (1 if arguments.local else MAX_IN_FLIGHT),
        local=arguments.local,
        console=Console(),
        absent=absent,
    )
    if looks_only:
        _show(watcher, arguments)
    else:
        _watch(watcher, arguments)


def _confirm_task_files(suites: list[str], arguments: argparse.Namespace) -> None:
    """Ask before jobs run the code of the user's task files. Raises UserError without a yes."""
    files = [s for s in suites if is_task_file(s) and not Path(s).resolve().is_relative_to(TASKS)]
    if not files or arguments.trust_task_files:
        return
    what = (
        f"{', '.join(dict.fromkeys(files))}: a task file is code, and its templates and functions "
        "can run any command as you"
    )
    answer = "no"
    if sys.stdin.isatty():
        try:
            answer = input(f"{what}. Have the jobs use it? [y/N] ")
        except EOFError:
            pass
    if answer.strip().lower() not in ("y", "yes"):
        raise UserError(f"{what}. Read it, and give --trust_task_files to use it")
    arguments.trust_task_files = True


def _queue(*, needed: bool) -> Queue:
    """The cluster; where it isn't `needed`, its jobs are taken for alive if it does not answer."""
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


def _given(arguments: argparse.Namespace, known: list[str]) -> dict[str, Any]:
    """The fields of a Request that the command line names; `known`: see split_suites."""
    given: dict[str, Any] = {
        "every": arguments.every,
        "retries": arguments.retries,
        "sbatch": arguments.sbatch,
        "suites": arguments.suites and split_suites(arguments.suites, known),
        "how": to_words(vars(arguments)) or None,
    }
    return {name: value for name, value in given.items() if value is not None}


def _show(watcher: Watcher, arguments: argparse.Namespace) -> None:
    overview = watcher.look()
    finished = watcher.is_finished(overview)
    if arguments.is_finished:
        raise SystemExit(0 if finished else EXIT_NOT_FINISHED)
    reported = watcher.report_state()
    show_status(overview, finished, reported, watcher.console, as_json=arguments.json)
    if not arguments.json:
        watcher.say_absent()


def _watch(watcher: Watcher, arguments: argparse.Namespace) -> None:
    """Pass after pass; exit code 1 where some evaluations failed for good."""
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
                    raise SystemExit(EXIT_FAILED)
                return
            if arguments.once:
                return
        # not in step with other watchers
        time.sleep(arguments.interval_s * random.uniform(0.8, 1.2))

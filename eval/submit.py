"""`eval submit`: evaluate a run's checkpoints as they are saved, each suite once, by Slurm jobs.

Any number of watchers may run at once: they take turns, by a lock on each run's schedule. A killed
one loses nothing (see cluster/leases.py).
"""

import argparse
import contextlib
import hashlib
import json
import os
import random
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from rich.table import Table
from rich.text import Text

from canon_pretrain.cluster.leases import (
    BEAT_S,
    LOCAL,
    SCRIPTS,
    Lease,
    Leases,
    NoQueue,
    Slurm,
    SlurmTimeout,
    new_lease,
)
from canon_pretrain.core.children import kill_tree, start_child
from canon_pretrain.core.errors import UserError
from canon_pretrain.core.terminal import Console, is_tty
from canon_pretrain.run.folder import RunFolder, named_runs
from eval.run_command import add_evaluation_options, check_minimum
from eval.schedule import (
    ACTIVE_STATES,
    DEFAULT_RETRIES,
    FINAL_STATES,
    Entry,
    Schedule,
    leases_of,
    lock_schedule,
    num_attempts,
    read_request,
    to_argv,
    update_request,
)
from eval.suite_names import ALL, TASKS, is_task_file, split_suites, suite_name

MAX_IN_FLIGHT = 8
REPORT_DONE = "done"  # file in the folder of the report's leases


class RunEntries(NamedTuple):
    """The evaluations of one run, and their states."""

    schedule: Schedule
    entries: list[Entry]


Overview = list[RunEntries]


class ReportState(NamedTuple):
    """The state of the report's job, or "done", "failed" or "waiting", and the reason."""

    state: str
    reason: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Evaluate the checkpoints of runs as training saves them. The request is stored in "
        "RUN/evals/schedule.json: later calls need no options."
    )
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="runs, or sweeps")
    add = parser.add_argument
    add(
        "--suite",
        "--suites",
        dest="suites",
        metavar="A,B",
        help=f"suites, tasks or task files (default: {ALL})",
    )
    add(
        "--every",
        type=int,
        metavar="N",
        help="steps that are multiples of N, and the last (default: every saved step)",
    )

    # Watch by default, or do one thing and exit.
    add("--local", action="store_true", help="run the evaluations here, one after the other")
    add("--once", action="store_true", help="submit what is due, and exit")
    add("--status", action="store_true", help="print a table of the evaluations' states")
    add("--json", action="store_true", help="print the states as JSON")
    add("--is-finished", action="store_true", help="exit with code 0 if nothing is left, else 1")

    # How a watcher works.
    add(
        "--max-in-flight",
        type=int,
        metavar="K",
        help=f"jobs at a time over all these runs (default: {MAX_IN_FLIGHT}; with --local 1)",
    )
    add(
        "--retries",
        type=int,
        metavar="R",
        help=f"how often a failed job is submitted again (default: {DEFAULT_RETRIES})",
    )
    add("--interval-s", type=float, default=60.0, help="seconds between two polls (default: 60)")
    add(
        "--report",
        type=Path,
        metavar="DIR",
        help="folder of the report (default: RUN/report; of several runs ./report)",
    )
    add(
        "--change",
        action="store_true",
        help="replace the options in schedule.json by those of this call",
    )
    add(
        "--sbatch",
        action="append",
        metavar="FLAG",
        help="a flag for each job, such as --sbatch=--partition=short (repeatable)",
    )
    add(
        "--trust-task-files",
        action="store_true",
        help="use task files outside eval/tasks, which are code, without a prompt",
    )
    add_evaluation_options(parser.add_argument_group("passed on to `eval run`"))


def run(arguments: argparse.Namespace) -> None:
    """Watch the runs until all is evaluated, or print their states."""
    check_minimum(arguments, {"max_in_flight": 1, "retries": 0, "every": 1})
    if not SCRIPTS.is_dir():
        raise UserError(
            "submit.no_scripts",
            f"{SCRIPTS} does not exist: install from the repository with pip install -e",
            path=SCRIPTS,
        )
    read_only = arguments.status or arguments.json or arguments.is_finished

    # Runs of a throttled sweep may start days after others, whose checkpoints can't wait. If none
    # has started, all are read below, which reports the first.
    folders = [Path(os.path.abspath(folder)) for folder in arguments.runs]
    runs = list(dict.fromkeys(named_runs(folders, planned=True)))
    absent = [run for run in runs if not RunFolder(run).config_file.exists()]
    if len(absent) < len(runs):
        runs = [run for run in runs if run not in absent]
    elif arguments.suites:
        split_suites(arguments.suites)  # unknown suites are reported before missing runs

    # The options of this call, checked; all others are those of the stored requests. Suites that
    # are stored already are not checked again.
    requests = [read_request(run, change=arguments.change) for run in runs]
    stored_suites = [suite for request in requests if request for suite in request.suites]
    options = {
        "every": arguments.every,
        "retries": arguments.retries,
        "sbatch": arguments.sbatch,
        "suites": arguments.suites and split_suites(arguments.suites, stored_suites),
        "how": to_argv(vars(arguments)) or None,
    }
    options = {name: value for name, value in options.items() if value is not None}
    if not read_only:
        _confirm_task_files(options.get("suites", stored_suites), arguments)
    watched: list[Schedule] = []
    for run in runs:
        request = update_request(run, options, change=arguments.change, keep=not read_only)
        watched.append(Schedule(run, request))

    # Watch the runs, or show what a watcher would do.
    default_report = folders[0] / "report" if len(folders) == 1 else Path("report")
    default_max_in_flight = 1 if arguments.local else MAX_IN_FLIGHT
    watcher = Watcher(
        watched,
        _queue(needed=not (arguments.local or read_only)),
        Path(os.path.abspath(arguments.report or default_report)),
        max_in_flight=arguments.max_in_flight or default_max_in_flight,
        local=arguments.local,
        console=Console(),
        absent=absent,
    )
    if read_only:
        show(watcher, arguments)
    else:
        watch(watcher, arguments)


def _confirm_task_files(suites: list[str], arguments: argparse.Namespace) -> None:
    """Ask before jobs use task files of the user. Raises UserError unless the answer is yes."""
    files = []
    for suite in suites:
        if is_task_file(suite) and not Path(suite).resolve().is_relative_to(TASKS):
            files.append(suite)
    if not files or arguments.trust_task_files:
        return

    warning = f"{', '.join(dict.fromkeys(files))}: a task file is code, which can run any command"
    answer = ""
    if is_tty(sys.stdin):
        with contextlib.suppress(EOFError):
            answer = input(f"{warning}. Let the jobs use it? [y/N] ")

    if answer.strip().lower() not in ("y", "yes"):
        raise UserError(
            "submit.untrusted_task",
            f"{warning}. Read it, then pass --trust-task-files",
            files=files,
        )
    arguments.trust_task_files = True  # `watch` may call `run` again


def _queue(*, needed: bool) -> Slurm:
    """Return the Slurm queue; an empty one if Slurm does not answer and is not `needed`."""
    slurm = Slurm()
    if needed and not slurm.is_available():
        raise UserError(
            "submit.no_slurm",
            "Slurm commands not found (sbatch, squeue, scontrol). Pass --local, or run on a login "
            "node",
        )

    # Without Slurm, the states of jobs are unknown, but those of results are not.
    try:
        slurm.refresh()
    except UserError:
        if needed:
            raise
        return NoQueue()
    return slurm


@dataclass(frozen=True)
class JobSpec:
    """A job to submit: its script in slurm/, arguments and leases."""

    name: str
    leases: Leases
    script: str
    arguments: list[str]
    log_folder: Path
    flags: list[str]

    def argv(self, lease: Lease) -> list[str]:
        """Return the script's arguments; an evaluation checks its lease first."""
        if self.script == "eval.sh":
            return ["--lease", lease.id, *self.arguments]
        return self.arguments


@dataclass
class Watcher:
    """Submits the evaluations of several runs; never finished while some runs are `absent`."""

    schedules: list[Schedule]
    queue: Slurm
    out: Path
    max_in_flight: int
    local: bool
    console: Console
    absent: Sequence[Path] = ()

    def log(self, line: str) -> None:
        self.console.print(
            f"{time.strftime('%H:%M:%S')} {line}",
            soft_wrap=True,
            markup=False,
        )

    def overview(self) -> Overview:
        return [RunEntries(schedule, schedule.entries(self.queue)) for schedule in self.schedules]

    def poll(self) -> Overview:
        """Hold checkpoints, start jobs, and the report if all is done; return the overview."""
        while True:
            with self._lock_schedules():
                self.queue.refresh()
                overview = self.overview()
                self._hold_checkpoints(overview)
                local_job = self._start_due(overview)
            if local_job is None:
                break
            self._run_locally(*local_job)  # without the locks: it may take hours

        for run in self.absent:
            self.log(f"{run}: not started, or not a run folder")
        self.log(summary(overview))
        return overview

    @contextlib.contextmanager
    def _lock_schedules(self) -> Iterator[None]:
        """Let no other watcher of these runs submit a job within the block."""
        with contextlib.ExitStack() as locks:
            # in order: two watchers of several runs do not wait for each other
            for run in sorted({schedule.run.path.resolve() for schedule in self.schedules}):
                locks.enter_context(lock_schedule(run))
            yield

    def _hold_checkpoints(self, overview: Overview) -> None:
        """Keep the trainer from pruning checkpoints to be evaluated; warn if it has no room."""
        for schedule, entries in overview:
            schedule.update_holds(entries)
            late = {entry.step for entry in entries if entry.state in ("waiting", *ACTIVE_STATES)}
            if schedule.max_waiting and len(late) > schedule.max_waiting:
                self.log(
                    f"{schedule.run.path}: {len(late)} checkpoints wait, but the trainer keeps "
                    f"{schedule.max_waiting}: raise --max-in-flight or --checkpoint.max_held"
                )

    def is_finished(self, overview: Overview) -> bool:
        """Return whether nothing is left to do, including the report."""
        return self._is_evaluated(overview) and self.report_state().state in ("done", "failed")

    def report_state(self) -> ReportState:
        report = self._report_job()
        if (report.leases.folder / REPORT_DONE).exists():
            return ReportState("done", str(self.out))
        lease = report.leases.current()
        job_state, _, reason = report.leases.work_state(lease, self.queue)
        if job_state is not None:
            return ReportState(job_state, reason)
        if num_attempts(report.leases) > self.schedules[0].request.retries:
            return ReportState("failed", reason)
        return ReportState("waiting", reason)

    def is_stalled(self, overview: Overview) -> bool:
        """Return whether nothing is left to do here, and no launch trains any of the runs."""
        is_idle = all(entry.state in ("to come", *FINAL_STATES) for entry in all_entries(overview))
        return is_idle and not any(schedule.is_training() for schedule in self.schedules)

    def settle(self) -> None:
        """Wait for no further checkpoints and runs, and log which."""
        for run in self.absent:
            self.log(f"{run}: not started, not waited for")
        self.absent = ()

        for schedule in self.schedules:
            if not schedule.run.done_file.exists():
                schedule.settle()
                newest = max(schedule.steps, default=0)
                self.log(
                    f"{schedule.run.path}: no launch trains it, evaluated to step {newest:,}; "
                    "once it is resumed, the same command evaluates the rest"
                )

        if not any(schedule.steps for schedule in self.schedules):
            raise UserError(
                "submit.no_checkpoint",
                "no checkpoint to evaluate, and no launch that would save one",
            )

    def _is_evaluated(self, overview: Overview) -> bool:
        return not self.absent and all(
            schedule.is_finished(entries) for schedule, entries in overview
        )

    def _due_jobs(self, overview: Overview) -> list[JobSpec]:
        """Return jobs up to the limit, oldest steps first, or the report after the last one."""
        if self._is_evaluated(overview):
            return [self._report_job()] if self.report_state().state == "waiting" else []

        num_in_flight = sum(entry.state in ACTIVE_STATES for entry in all_entries(overview))
        waiting = [
            (entry, schedule)
            for schedule, entries in overview
            for entry in entries
            if entry.state == "waiting"
        ]
        waiting.sort(key=lambda pair: pair[0].step)
        room = max(0, self.max_in_flight - num_in_flight)
        return [self._evaluation_job(schedule, entry) for entry, schedule in waiting[:room]]

    def _start_due(self, overview: Overview) -> tuple[JobSpec, Lease] | None:
        """Submit the due jobs. With `local`, claim the first, and return it with its claim."""
        for job in self._due_jobs(overview):
            # the claim comes first: if this watcher dies, the next one finds the job by its name
            last = job.leases.current()
            lease = new_lease(
                1 if last is None else last.number + 1,
                job.name,
                cluster=self.queue.name,
                job=LOCAL if self.local else None,
            )
            job.leases.claim(lease)
            if self.local:
                return job, lease
            self._submit(job, lease)
        return None

    def _evaluation_job(self, schedule: Schedule, entry: Entry) -> JobSpec:
        run = schedule.run.path
        checkpoint = schedule.checkpoints.step_path(entry.step)
        leases = leases_of(run, entry.step, entry.suite)
        return JobSpec(
            name=_plain(f"eval-{run.name}-step-{entry.step}-{suite_name(entry.suite)}"),
            leases=leases,
            script="eval.sh",
            arguments=[str(checkpoint), entry.suite, *schedule.options_for(entry.suite)],
            log_folder=leases.folder.parent,
            flags=schedule.request.sbatch,
        )

    def _report_job(self) -> JobSpec:
        """Return the report's job; its leases depend on the set of runs, steps and suites."""
        runs = [str(schedule.run.path) for schedule in self.schedules]
        content = [
            [run, schedule.steps, schedule.request.suites]
            for run, schedule in zip(runs, self.schedules, strict=True)
        ]
        digest = hashlib.sha256(json.dumps(content).encode()).hexdigest()[:12]
        folder = self.out / "leases" / digest

        return JobSpec(
            name=_plain(f"eval-report-{self.schedules[0].run.path.name}"),
            leases=Leases(folder),
            script="eval_report.sh",
            arguments=["--mark", str(folder / REPORT_DONE), *runs, "--out", str(self.out)],
            log_folder=folder,
            flags=self.schedules[0].request.sbatch,
        )

    def _submit(self, job: JobSpec, lease: Lease) -> None:
        """Submit a claimed job and record its id; end the claim if sbatch refuses it."""
        # in a path, sbatch replaces %j by the job's id, and %% by %
        log = f"{str(job.log_folder).replace('%', '%%')}/slurm-%j.log"
        if "\\" in log:  # sbatch treats it as an escape
            log = "/dev/null"
        flags = [f"--job-name={lease.name}", f"--output={log}", *job.flags]

        try:
            job_id = self.queue.submit(job.script, job.argv(lease), flags)
        except SlurmTimeout:
            raise  # it may have the job: keep the claim, and find the job by its name
        except UserError as error:
            job.leases.record(lease, ended=f"given back: {error}")
            raise

        job.leases.record(lease, job=job_id)
        self.log(f"job {job_id}: {job.name}")

    def _run_locally(self, job: JobSpec, lease: Lease) -> None:
        """Run a claimed job to its end, with heartbeats; an interrupt ends it."""
        self.log(f"local: {job.name}")
        command = ["bash", str(SCRIPTS / job.script), "--local", *job.argv(lease)]
        environ = os.environ | {"CANON_REPO": str(SCRIPTS.parent)}
        process = start_child(command, env=environ, stdin=subprocess.DEVNULL)

        try:
            # until it ends, show other watchers that this one is alive
            while process.poll() is None:
                try:
                    process.wait(BEAT_S)
                except subprocess.TimeoutExpired:
                    job.leases.beat(lease)
        except BaseException:
            # the job may store what it has done; its claim no longer counts as an attempt
            process.terminate()
            try:
                process.wait()
            finally:  # a second Ctrl-C does not wait
                if process.returncode is None:
                    kill_tree(process.pid)
                    process.wait()
                job.leases.record(lease, job=None, ended="given back: interrupted")
            raise

        job.leases.record(lease, ended=f"exit code {process.returncode}")


def _plain(name: str) -> str:
    """Return a job's name without characters that are special to a shell or squeue."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", name)


def all_entries(overview: Overview) -> list[Entry]:
    return [entry for _, entries in overview for entry in entries]


def watch(watcher: Watcher, arguments: argparse.Namespace) -> None:
    """Poll until all is done; exit with code 1 if some evaluations failed.

    With --local, checkpoints are waited for only while a launch trains: not after two polls without
    one, since sweep.sh restarts failed runs.
    """
    num_stalled = 0  # consecutive polls
    while True:
        if any(RunFolder(run).config_file.exists() for run in watcher.absent):
            return run(arguments)  # a run has started: add its schedule

        try:
            overview = watcher.poll()
        except UserError as error:  # such as Slurm not answering
            if arguments.once:
                raise
            watcher.log(f"{error}; retrying in {arguments.interval_s:.0f} s")
        else:
            if watcher.is_finished(overview):
                watcher.log("finished")
                has_failed = any(entry.state == "failed" for entry in all_entries(overview))
                if has_failed or watcher.report_state().state != "done":
                    raise SystemExit(1)
                return

            if arguments.local and watcher.is_stalled(overview):
                num_stalled += 1
            else:
                num_stalled = 0
            if num_stalled > 1:
                watcher.settle()  # and poll again, without waiting
                continue
            if arguments.once:
                return

        # avoid polling in step with other watchers
        time.sleep(arguments.interval_s * random.uniform(0.8, 1.2))


def summary(overview: Overview) -> str:
    """Return the number of evaluations by state: `3 done, 1 running`."""
    counts = Counter(entry.state for entry in all_entries(overview))
    texts = [f"{count} {state}" for state, count in sorted(counts.items())]
    return ", ".join(texts) or "none"


def show(watcher: Watcher, arguments: argparse.Namespace) -> None:
    """Print a table per run or one JSON object, or only exit with a code."""
    overview = watcher.overview()
    is_finished = watcher.is_finished(overview)
    if arguments.is_finished:
        raise SystemExit(0 if is_finished else 1)

    console = watcher.console
    report = watcher.report_state()

    if arguments.json:
        content = {
            "runs": {
                str(schedule.run.path): [asdict(entry) for entry in entries]
                for schedule, entries in overview
            },
            "report": report.state,
            "finished": is_finished,
        }
        console.file.write(json.dumps(content, indent=1) + "\n")
        return

    for schedule, entries in overview:
        console.print(_table(schedule.run.path, entries))
        for entry in entries:
            if entry.why and entry.state in ("failed", "missing", "damaged", "waiting"):
                evaluation = f"step {entry.step} {suite_name(entry.suite)}"
                line = f"{evaluation}: {entry.state}: {entry.why}"
                console.print(Text(line), soft_wrap=True)

    progress = "finished" if is_finished else "in progress"
    report_text = " ".join(filter(None, report))
    line = f"{progress}: {summary(overview)}; report: {report_text}"
    console.print(Text(line), soft_wrap=True)


def _table(run: Path, entries: list[Entry]) -> Table:
    """Return the states by step and suite, without steps to come."""
    table = Table("step", title=Text(str(run)), title_justify="left")
    for suite in dict.fromkeys(entry.suite for entry in entries):
        table.add_column(Text(suite_name(suite)))
    for step in dict.fromkeys(entry.step for entry in entries if entry.state != "to come"):
        states = (entry.state for entry in entries if entry.step == step)
        table.add_row(f"{step:>5,}", *states)
    return table

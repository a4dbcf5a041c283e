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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.table import Table
from rich.text import Text

from canon_pretrain.cluster import leases as cluster
from canon_pretrain.cluster.leases import LOCAL, SCRIPTS, Lease, Leases, Slurm
from canon_pretrain.core.children import kill_tree, start_child
from canon_pretrain.core.errors import UserError
from canon_pretrain.core.terminal import Console
from canon_pretrain.run.folder import RunFolder, named_runs
from eval import schedule as schedules
from eval.run_command import add_evaluation_options
from eval.schedule import ACTIVE_STATES, FINAL_STATES, Entry, Schedule, leases_of
from eval.suite_names import ALL, TASKS, is_task_file, split_suites, suite_name

MAX_IN_FLIGHT = 8
Overview = list[tuple[Schedule, list[Entry]]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `eval submit`."""
    parser.description = (
        "Evaluate the checkpoints of runs as training saves them. The request is stored in "
        "RUN/evals/schedule.json: later calls need no options."
    )
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="runs, or sweeps")
    add = parser.add_argument
    about = f"suites, tasks or task files (default: {ALL})"
    add("--suite", "--suites", dest="suites", metavar="A,B", help=about)
    about = "steps that are multiples of N, and the last (default: every saved step)"
    add("--every", type=int, metavar="N", help=about)
    add("--local", action="store_true", help="run the evaluations here, one after the other")
    add("--once", action="store_true", help="submit what is due, and exit")
    add("--status", action="store_true", help="print a table of the evaluations' states")
    add("--json", action="store_true", help="print the states as JSON")
    add("--is-finished", action="store_true", help="exit with code 0 if nothing is left, else 1")
    about = f"jobs at a time over all these runs (default: {MAX_IN_FLIGHT}; with --local 1)"
    add("--max-in-flight", type=int, metavar="K", help=about)
    about = f"how often a failed job is submitted again (default: {schedules.DEFAULT_RETRIES})"
    add("--retries", type=int, metavar="R", help=about)
    add("--interval-s", type=float, default=60.0, help="seconds between two polls (default: 60)")
    about = "folder of the report (default: RUN/report; of several runs ./report)"
    add("--report", type=Path, metavar="DIR", help=about)
    add("--change", action="store_true", help="replace the options in schedule.json by those given")
    about = "a flag for each job, such as --sbatch=--partition=short (repeatable)"
    add("--sbatch", action="append", metavar="FLAG", help=about)
    about = "use task files outside eval/tasks, which are code, without a prompt"
    add("--trust-task-files", action="store_true", help=about)
    add_evaluation_options(parser.add_argument_group("passed on to `eval run`"))


def run(arguments: argparse.Namespace) -> None:
    """Watch the runs until all is evaluated, or print their states."""
    for name, least in (("max_in_flight", 1), ("retries", 0), ("every", 1)):
        value = getattr(arguments, name)
        option = f"--{name.replace('_', '-')}"
        if value is not None and value < least:
            raise UserError(
                "eval.option_range", f"{option} {value}: expected at least {least}", option=name
            )
    if not SCRIPTS.is_dir():
        raise UserError(
            "submit.no_scripts",
            f"{SCRIPTS} does not exist: install from the repository with pip install -e",
            path=SCRIPTS,
        )
    named = [Path(os.path.abspath(run)) for run in arguments.runs]
    runs = [*dict.fromkeys(named_runs(named, planned=True))]
    # runs of a throttled sweep may start days after others, whose checkpoints can't wait
    absent = [run for run in runs if not RunFolder(run).config_file.exists()]
    if len(absent) < len(runs):
        runs = [run for run in runs if run not in absent]
    elif arguments.suites:
        split_suites(arguments.suites)  # before a watch of runs to come is refused or queued
    requests = [schedules.read_request(run, change=arguments.change) for run in runs]
    known = [suite for request in requests if request is not None for suite in request.suites]
    given = {
        "every": arguments.every,
        "retries": arguments.retries,
        "sbatch": arguments.sbatch,
        "suites": arguments.suites and split_suites(arguments.suites, known),
        "how": schedules.to_argv(vars(arguments)) or None,
    }
    given = {name: value for name, value in given.items() if value is not None}
    read_only = arguments.status or arguments.json or arguments.is_finished
    if not read_only:
        _confirm_task_files(given.get("suites", known), arguments)
    stored = [
        schedules.update_request(run, given, change=arguments.change, keep=not read_only)
        for run in runs
    ]
    out = arguments.report or (Path("report") if len(named) > 1 else named[0] / "report")
    watcher = Watcher(
        [*map(Schedule, runs, stored)],
        _queue(needed=not (arguments.local or read_only)),
        Path(os.path.abspath(out)),
        max_in_flight=arguments.max_in_flight or (1 if arguments.local else MAX_IN_FLIGHT),
        local=arguments.local,
        console=Console(),
        absent=absent,
    )
    (show if read_only else watch)(watcher, arguments)


def _confirm_task_files(suites: list[str], arguments: argparse.Namespace) -> None:
    files = [s for s in suites if is_task_file(s) and not Path(s).resolve().is_relative_to(TASKS)]
    if not files or arguments.trust_task_files:
        return
    what = f"{', '.join(dict.fromkeys(files))}: a task file is code, which can run any command"
    answer = ""
    if sys.stdin.isatty():
        with contextlib.suppress(EOFError):
            answer = input(f"{what}. Let the jobs use it? [y/N] ")
    if answer.strip().lower() not in ("y", "yes"):
        raise UserError(
            "submit.untrusted_task", f"{what}. Read it, then give --trust-task-files", files=files
        )
    arguments.trust_task_files = True


def _queue(*, needed: bool) -> Slurm:
    """Return the Slurm queue; an empty one if Slurm does not answer and is not `needed`."""
    slurm = Slurm()
    if needed and not slurm.is_available():
        raise UserError(
            "submit.no_slurm",
            "no Slurm here (sbatch, squeue, scontrol): give --local, or use a login node",
        )
    try:
        slurm.refresh()
    except UserError:
        if needed:
            raise
        return cluster.NoQueue()
    return slurm


@dataclass(frozen=True)
class JobSpec:
    """A job to submit: its script in slurm/, arguments, leases and completion test."""

    name: str
    leases: Leases
    script: str
    words: list[str]
    is_done: Callable[[], bool]
    log_folder: Path
    flags: list[str]

    def words_for(self, lease: Lease) -> list[str]:
        """Return the script's arguments; an evaluation checks its lease first."""
        return ["--lease", lease.id, *self.words] if self.script == "eval.sh" else self.words


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
        self.console.print(f"{time.strftime('%H:%M:%S')} {line}", soft_wrap=True, markup=False)

    def overview(self) -> Overview:
        return [(schedule, schedule.entries(self.queue)) for schedule in self.schedules]

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
            self._run_locally(*local_job)  # perhaps for hours

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
                locks.enter_context(schedules.lock_schedule(run))
            yield

    def _hold_checkpoints(self, overview: Overview) -> None:
        for schedule, found in overview:
            schedule.update_holds(found)
            late = {entry.step for entry in found if entry.state in ("waiting", *ACTIVE_STATES)}
            bound = schedule.kept + schedule.max_held
            if schedule.kept and len(late) > bound:
                self.log(
                    f"{schedule.run.path}: {len(late)} checkpoints wait, but the trainer keeps "
                    f"{bound}: raise --max-in-flight or --checkpoint.max_held"
                )

    def is_finished(self, overview: Overview) -> bool:
        """Return whether nothing is left to do, including the report."""
        return self._is_evaluated(overview) and self.report_state()[0] in ("done", "failed")

    def report_state(self) -> tuple[str, str]:
        """Return done, failed, waiting or the state of the report's job, and the reason."""
        work = self._report_job()
        if work.is_done():
            return "done", str(self.out)
        state, _, ended = work.leases.judge(work.leases.current(), self.queue)
        failed = sum(lease.job is not None for lease in work.leases.all())
        is_over = failed > self.schedules[0].request.retries
        return state or ("failed" if is_over else "waiting"), ended

    def is_stalled(self, overview: Overview) -> bool:
        """Return whether nothing is left to do here, and no launch trains any of the runs."""
        entries = [entry for _, found in overview for entry in found]
        is_idle = all(entry.state in ("to come", *FINAL_STATES) for entry in entries)
        return is_idle and not any(schedule.is_training() for schedule in self.schedules)

    def settle(self) -> None:
        """Wait for no further checkpoints and runs, and say of which."""
        for run in self.absent:
            self.log(f"{run}: not started, not waited for")
        self.absent = ()
        for schedule in self.schedules:
            if not schedule.run.done_file.exists():
                schedule.settle()
                where = f"evaluated to step {max(schedule.steps, default=0):,}"
                text = f"{schedule.run.path}: no launch trains it, {where}; once it is resumed, "
                self.log(text + "the same command evaluates the rest")
        if not any(schedule.steps for schedule in self.schedules):
            raise UserError(
                "submit.no_checkpoint",
                "no checkpoint to evaluate, and no launch that would save one",
            )

    def _is_evaluated(self, overview: Overview) -> bool:
        return not self.absent and all(s.is_finished(found) for s, found in overview)

    def _start_due(self, overview: Overview) -> tuple[JobSpec, Lease] | None:
        """Submit jobs up to the limit, oldest steps first, and the report after the last one.

        With `local`, submit nothing: claim the first and return it.
        """
        waiting = [(s, e) for s, found in overview for e in found if e.state == "waiting"]
        waiting.sort(key=lambda pair: pair[1].step)
        in_flight = sum(entry.state in ACTIVE_STATES for _, found in overview for entry in found)
        fitting = waiting[: max(0, self.max_in_flight - in_flight)]
        due = [self._evaluation_job(schedule, entry) for schedule, entry in fitting]
        if self._is_evaluated(overview) and self.report_state()[0] == "waiting":
            due.append(self._report_job())

        for work in due:
            last = work.leases.current()
            lease = cluster.new_lease(
                1 if last is None else last.number + 1,
                work.name,
                cluster=self.queue.name,
                job=LOCAL if self.local else None,
            )
            work.leases.claim(lease)
            if self.local:
                return work, lease
            self._submit(work, lease)
        return None

    def _evaluation_job(self, schedule: Schedule, entry: Entry) -> JobSpec:
        checkpoint = str(schedule.checkpoints.step_path(entry.step))
        leases = leases_of(schedule.run.path, entry.step, entry.suite)
        return JobSpec(
            name=_plain(
                f"eval-{schedule.run.path.name}-step-{entry.step}-{suite_name(entry.suite)}"
            ),
            leases=leases,
            script="eval.sh",
            words=[checkpoint, entry.suite, *schedule.options_for(entry.suite)],
            is_done=lambda: schedule.has_results(entry.step, entry.suite),
            log_folder=leases.folder.parent,
            flags=schedule.request.sbatch,
        )

    def _report_job(self) -> JobSpec:
        """Return the report's job; its leases depend on the set of runs, steps and suites."""
        what = [[str(s.run.path), s.steps, s.request.suites] for s in self.schedules]
        digest = hashlib.sha256(json.dumps(what).encode()).hexdigest()[:12]
        folder = self.out / "leases" / digest
        runs = [str(schedule.run.path) for schedule in self.schedules]
        return JobSpec(
            name=_plain(f"eval-report-{self.schedules[0].run.path.name}"),
            leases=Leases(folder),
            script="eval_report.sh",
            words=["--mark", str(folder / "done"), *runs, "--out", str(self.out)],
            is_done=(folder / "done").exists,
            log_folder=folder,
            flags=self.schedules[0].request.sbatch,
        )

    def _submit(self, work: JobSpec, lease: Lease) -> None:
        log = f"{str(work.log_folder).replace('%', '%%')}/slurm-%j.log"
        if "\\" in log:  # sbatch treats it as an escape
            log = "/dev/null"
        flags = [f"--job-name={lease.name}", f"--output={log}", *work.flags]
        try:
            job = self.queue.submit(work.script, work.words_for(lease), flags)
        except cluster.SlurmTimeout:
            raise  # it may have the job: keep the claim, and find the job by its name
        except UserError as error:
            work.leases.record(lease, ended=f"given back: {error}")
            raise
        work.leases.record(lease, job=job)
        self.log(f"job {job}: {work.name}")

    def _run_locally(self, work: JobSpec, lease: Lease) -> None:
        self.log(f"local: {work.name}")
        command = ["bash", str(SCRIPTS / work.script), "--local", *work.words_for(lease)]
        environ = os.environ | {"CANON_REPO": str(SCRIPTS.parent)}
        process = start_child(command, env=environ, stdin=subprocess.DEVNULL)
        try:
            while process.poll() is None:
                try:
                    process.wait(cluster.BEAT_S)
                except subprocess.TimeoutExpired:
                    work.leases.beat(lease)
        except BaseException:
            process.terminate()
            try:
                process.wait()
            finally:  # a second Ctrl-C does not wait
                if process.returncode is None:
                    kill_tree(process.pid)
                    process.wait()
                work.leases.record(lease, job=None, ended="given back: interrupted")
            raise
        work.leases.record(lease, ended=f"exit code {process.returncode}")


def _plain(name: str) -> str:
    """Return a job's name without characters that are special to a shell or squeue."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", name)


def watch(watcher: Watcher, arguments: argparse.Namespace) -> None:
    """Poll until all is done; exit with code 1 if some evaluations failed.

    With --local, checkpoints are waited for only while a launch trains: not after two polls without
    one, since sweep.sh restarts failed runs.
    """
    stalled = 0
    while True:
        if any(RunFolder(run).config_file.exists() for run in watcher.absent):
            return run(arguments)  # a run has started: add its schedule
        try:
            overview = watcher.poll()
        except UserError as error:
            if arguments.once:
                raise
            watcher.log(f"{error}; retrying in {arguments.interval_s:.0f} s")
        else:
            is_stalled = arguments.local and watcher.is_stalled(overview)
            stalled = stalled + 1 if is_stalled else 0
            if stalled > 1 and not watcher.is_finished(overview):
                watcher.settle()
                continue
            if watcher.is_finished(overview):
                watcher.log("finished")
                failed = any(e.state == "failed" for _, found in overview for e in found)
                if failed or watcher.report_state()[0] != "done":
                    raise SystemExit(1)
                return
            if arguments.once:
                return
        # avoid polling in step with other watchers
        time.sleep(arguments.interval_s * random.uniform(0.8, 1.2))


def summary(overview: Overview) -> str:
    """Return the number of evaluations by state: `3 done, 1 running`."""
    counts = Counter(entry.state for _, found in overview for entry in found)
    return ", ".join(f"{count} {state}" for state, count in sorted(counts.items())) or "none"


def show(watcher: Watcher, arguments: argparse.Namespace) -> None:
    """Print a table per run or one JSON object, or only exit with a code."""
    overview = watcher.overview()
    finished = watcher.is_finished(overview)
    if arguments.is_finished:
        raise SystemExit(0 if finished else 1)
    console, report = watcher.console, watcher.report_state()
    if arguments.json:
        runs = {str(s.run.path): [asdict(entry) for entry in found] for s, found in overview}
        content = {"runs": runs, "report": report[0], "finished": finished}
        console.file.write(json.dumps(content, indent=1) + "\n")
        return
    reasons = ("failed", "missing", "damaged", "waiting")
    for schedule, found in overview:
        console.print(_table(schedule.run.path, found))
        for entry in found:
            if entry.why and entry.state in reasons:
                line = f"step {entry.step} {suite_name(entry.suite)}: {entry.state}: {entry.why}"
                console.print(Text(line), soft_wrap=True)
    words = "finished" if finished else "in progress"
    line = f"{words}: {summary(overview)}; report: {' '.join(filter(None, report))}"
    console.print(Text(line), soft_wrap=True)


def _table(run: Path, found: list[Entry]) -> Table:
    table = Table("step", title=Text(str(run)), title_justify="left")
    for suite in dict.fromkeys(entry.suite for entry in found):
        table.add_column(Text(suite_name(suite)))
    for step in dict.fromkeys(entry.step for entry in found if entry.state != "to come"):
        states = (entry.state for entry in found if entry.step == step)
        table.add_row(f"{step:>5,}", *states)
    return table

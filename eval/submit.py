"""`eval submit`: evaluate a run's checkpoints as they come, each suite of each once, by Slurm jobs.

Any number of watchers may run at once, kept apart by cluster/leases.py; a killed one costs nothing.
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
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.table import Table
from rich.text import Text

from canon_pretrain.cluster import leases as cluster
from canon_pretrain.cluster.leases import LOCAL, SCRIPTS, Lease, Leases, Slurm
from canon_pretrain.core.errors import UserError
from canon_pretrain.core.terminal import Console
from canon_pretrain.run.folder import RunFolder, named_runs
from eval import schedule as schedules
from eval.run_command import add_evaluation_options
from eval.schedule import ACTIVE_STATES, Entry, Schedule, leases_of
from eval.suite_names import ALL, TASKS, is_task_file, split_suites, suite_name

MAX_IN_FLIGHT = 8
Overview = list[tuple[Schedule, list[Entry]]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `eval submit`."""
    parser.description = (
        "Evaluate the checkpoints of runs as training saves them. What was asked for is kept in "
        "RUN/evals/schedule.json: later calls need no options."
    )
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="runs, or sweeps")
    add = parser.add_argument
    add("--suites", metavar="A,B", help=f"suites, tasks or task files (default: {ALL})")
    about = "use task files outside eval/tasks without asking: they are code"
    add("--trust_task_files", action="store_true", help=about)
    about = "steps that are multiples of N, and the last (default: each that the run saves)"
    add("--every", type=int, metavar="N", help=about)
    about = f"how often a job that failed is submitted again (default: {schedules.DEFAULT_RETRIES})"
    add("--retries", type=int, metavar="R", help=about)
    about = "let these options replace those of schedule.json"
    add("--change", action="store_true", help=about)
    add("--report", type=Path, metavar="DIR", help="default: RUN/report, of several runs ./report")
    add("--once", action="store_true", help="look once, and end")
    about = f"jobs at a time, of all these runs (default: {MAX_IN_FLIGHT}; with --local 1)"
    add("--max_in_flight", type=int, metavar="K", help=about)
    add("--interval_s", type=float, default=60.0, help="between two looks (default: 60)")
    add("--local", action="store_true", help="run them here, one after the other")
    about = "a flag for each job, such as --sbatch=--partition=short (may be given again)"
    add("--sbatch", action="append", metavar="FLAG", help=about)
    add("--status", action="store_true", help="a table of what is done and what not")
    add("--json", action="store_true", help="the same as JSON")
    add("--is_finished", action="store_true", help="exit code 0 if nothing is left, else 1")
    add_evaluation_options(parser.add_argument_group("passed on to `eval run`"))


def execute(arguments: argparse.Namespace) -> None:
    """Watch the runs until all is evaluated, or show their state."""
    for name, least in (("max_in_flight", 1), ("retries", 0), ("every", 1)):
        value = getattr(arguments, name)
        if value is not None and value < least:
            raise UserError("todo.submit", f"--{name} {value}: expected at least {least}")
    if not SCRIPTS.is_dir():
        raise UserError(
            "todo.submit",
            f"{SCRIPTS} is not there: install from the repository, with pip install -e",
        )
    named = [Path(os.path.abspath(run)) for run in arguments.runs]
    runs = [*dict.fromkeys(named_runs(named, planned=True))]
    # of a throttled sweep some runs begin days after others, whose checkpoints do not wait for them
    absent = [run for run in runs if not RunFolder(run).config_file.exists()]
    if len(absent) < len(runs):
        runs = [run for run in runs if run not in absent]
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
    settled = {"change": arguments.change, "keep": not read_only}
    out = arguments.report or (Path("report") if len(named) > 1 else named[0] / "report")
    watcher = Watcher(
        [Schedule(run, schedules.update_request(run, given, **settled)) for run in runs],
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
            answer = input(f"{what}. Have the jobs use it? [y/N] ")
    if answer.strip().lower() not in ("y", "yes"):
        raise UserError("todo.submit", f"{what}. Read it, and give --trust_task_files to use it")
    arguments.trust_task_files = True


def _queue(*, needed: bool) -> Slurm:
    """Return the cluster; unless `needed`, one that does not answer counts as without news."""
    slurm = Slurm()
    if needed and not slurm.is_available():
        raise UserError(
            "todo.submit",
            "no Slurm here (sbatch, squeue, scontrol): give --local, or log in elsewhere",
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
    """What one job does: a script in slurm/, its words after those of the lease, and its end."""

    name: str
    leases: Leases
    script: str
    words: list[str]
    is_done: Callable[[], bool]
    log_folder: Path
    flags: list[str]


@dataclass
class Watcher:
    """Gives out the work of several runs; nothing is finished while some are `absent`."""

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
        """Hold, give out what may be, report if all is done; return what a look then finds."""
        looks_again = True
        while looks_again:
            self.queue.refresh()
            overview = self.overview()
            for schedule, found in overview:
                schedule.update_holds(found)
                late = {entry.step for entry in found if entry.state in ("waiting", *ACTIVE_STATES)}
                if schedule.kept and len(late) > (bound := schedule.kept + schedule.max_held):
                    self.log(
                        f"{schedule.run.path}: {len(late)} checkpoints wait, and the trainer keeps "
                        f"{bound}: raise --max_in_flight or --checkpoint.max_held"
                    )
            looks_again = self._start_waiting(overview)
        if self._is_evaluated(overview) and self.report_state()[0] == "waiting":
            work = self._report_job()
            self._start(work, work.leases.current())
        for run in self.absent:
            self.log(f"{run}: it has not begun, or is no run folder")
        self.log(summary(overview))
        return overview

    def is_finished(self, overview: Overview) -> bool:
        """Return whether nothing is left to do, the report included."""
        return self._is_evaluated(overview) and self.report_state()[0] in ("done", "failed")

    def report_state(self) -> tuple[str, str]:
        """Return done, failed, waiting, or the state of its job; and why."""
        work = self._report_job()
        if work.is_done():
            return "done", str(self.out)
        state, _, ended = work.leases.judge(work.leases.current(), self.queue)
        failed = sum(lease.job is not None for lease in work.leases.all())
        is_over = failed > self.schedules[0].request.retries
        return state or ("failed" if is_over else "waiting"), ended

    def _is_evaluated(self, overview: Overview) -> bool:
        return not self.absent and all(s.is_finished(found) for s, found in overview)

    def _start_waiting(self, overview: Overview) -> bool:
        """Start as much as may be, oldest first; return whether to look again at once."""
        waiting = [(s, e) for s, found in overview for e in found if e.state == "waiting"]
        in_flight = sum(entry.state in ACTIVE_STATES for _, found in overview for entry in found)
        for schedule, entry in sorted(waiting, key=lambda pair: pair[1].step):
            if in_flight >= self.max_in_flight:
                return False
            if not self._start(self._evaluation_job(schedule, entry), entry.lease):
                in_flight = self._num_in_flight()
            elif self.local:  # it took hours, and is over
                return True
            else:
                in_flight += 1
        return False

    def _evaluation_job(self, schedule: Schedule, entry: Entry) -> JobSpec:
        checkpoint = str(schedule.checkpoints.step_path(entry.step))
        leases = leases_of(schedule.run.path, entry.step, entry.suite)
        return JobSpec(
            name=f"eval-{schedule.run.path.name}-step-{entry.step}-{suite_name(entry.suite)}",
            leases=leases,
            script="eval.sh",
            words=[checkpoint, entry.suite, *schedule.options_for(entry.suite)],
            is_done=lambda: schedule.has_results(entry.step, entry.suite),
            log_folder=leases.folder.parent,
            flags=schedule.request.sbatch,
        )

    def _report_job(self) -> JobSpec:
        """One report of what there is now: another set of runs or steps is another report."""
        what = [[str(s.run.path), s.steps, s.request.suites] for s in self.schedules]
        digest = hashlib.sha256(json.dumps(what).encode()).hexdigest()[:12]
        folder = self.out / "leases" / digest
        runs = [str(schedule.run.path) for schedule in self.schedules]
        return JobSpec(
            name=f"eval-report-{self.schedules[0].run.path.name}",
            leases=Leases(folder),
            script="eval_report.sh",
            words=["--mark", str(folder / "done"), *runs, "--out", str(self.out)],
            is_done=(folder / "done").exists,
            log_folder=folder,
            flags=self.schedules[0].request.sbatch,
        )

    def _start(self, work: JobSpec, before: Lease | None) -> bool:
        """Claim and submit `work`; return False if another has it, or too much is in flight."""
        number = 1 if before is None else before.number + 1
        # a name without what a shell or squeue would take amiss
        name = re.sub(r"[^A-Za-z0-9._-]", "_", work.name)
        lease = cluster.new_lease(number, name, cluster=self.queue.name)
        if not work.leases.claim(lease):
            return False
        if why := self._reason_to_skip(work, lease):
            work.leases.record(lease, ended=f"given back: {why}")
            return False
        words = (["--lease", lease.id] if work.script == "eval.sh" else []) + work.words
        if self.local:
            self._run_locally(work, lease, words)
            return True
        log = f"{str(work.log_folder).replace('%', '%%')}/slurm-%j.log"
        if "\\" in log:  # sbatch would take it for a sign of its own
            log = "/dev/null"
        flags = [f"--job-name={lease.name}", f"--output={log}", *work.flags]
        try:
            job = self.queue.submit(work.script, words, flags)
        except cluster.SlurmTimeout:
            raise  # it may have the job: the claim stands, and the job is looked for by its name
        except UserError as error:
            work.leases.record(lease, ended=f"given back: {error}")
            raise
        if not work.leases.is_current(lease.id):
            self.queue.cancel(job)  # we slept so long that another took over
            return False
        work.leases.record(lease, job=job)
        self.log(f"job {job}: {name}")
        return True

    def _reason_to_skip(self, work: JobSpec, lease: Lease) -> str:
        """Return what has changed since the look, now that all see the claim; empty if nothing."""
        if work.is_done():
            return "it is done"
        if work.script == "eval.sh" and self._num_in_flight() > self.max_in_flight:
            return f"{self.max_in_flight} are in flight"
        return "" if work.leases.is_current(lease.id) else "another watcher has a later claim"

    def _run_locally(self, work: JobSpec, lease: Lease, words: list[str]) -> None:
        lease = work.leases.record(lease, job=LOCAL)
        self.log(f"here: {work.name}")
        command = ["bash", str(SCRIPTS / work.script), "--local", *words]
        environ = os.environ | {"CANON_REPO": str(SCRIPTS.parent)}
        process = subprocess.Popen(command, env=environ, stdin=subprocess.DEVNULL)
        try:
            while process.poll() is None:
                try:
                    process.wait(cluster.BEAT_S)
                except subprocess.TimeoutExpired:
                    work.leases.beat(lease)
        except BaseException:  # Ctrl-C: the child has got it too
            process.terminate()
            process.wait()
            work.leases.record(lease, job=None, ended="given back: interrupted")
            raise
        work.leases.record(lease, ended=f"exit code {process.returncode}")

    def _num_in_flight(self) -> int:
        self.queue.refresh()
        return sum(entry.state in ACTIVE_STATES for _, found in self.overview() for entry in found)


def watch(watcher: Watcher, arguments: argparse.Namespace) -> None:
    """Pass after pass; exit code 1 if some evaluations failed for good."""
    while True:
        if any(RunFolder(run).config_file.exists() for run in watcher.absent):
            return execute(arguments)  # a run has begun: its own schedule joins the others
        try:
            overview = watcher.poll()
        except UserError as error:
            if arguments.once:
                raise
            watcher.log(f"{error}; trying again in {arguments.interval_s:.0f} s")
        else:
            if watcher.is_finished(overview):
                watcher.log("finished")
                failed = any(e.state == "failed" for _, found in overview for e in found)
                if failed or watcher.report_state()[0] != "done":
                    raise SystemExit(1)
                return
            if arguments.once:
                return
        # not in step with other watchers
        time.sleep(arguments.interval_s * random.uniform(0.8, 1.2))


def summary(overview: Overview) -> str:
    """Return how many evaluations are in which state: `3 done, 1 running`."""
    counts = Counter(entry.state for _, found in overview for entry in found)
    return ", ".join(f"{count} {state}" for state, count in sorted(counts.items())) or "none"


def show(watcher: Watcher, arguments: argparse.Namespace) -> None:
    """Print what a look finds: a table per run, or one JSON object, or an exit code alone."""
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
    words = "finished" if finished else "going on"
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

"""One look at runs' evaluations after another: hold checkpoints, give work out, report at the end.

cluster/leases.py keeps several watchers apart and takes the jobs.
"""

import hashlib
import json
import os
import re
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from canon_pretrain.cluster.leases import (
    BEAT_S,
    LOCAL,
    SCRIPTS,
    Lease,
    Leases,
    NoAnswer,
    Slurm,
    new_lease,
)
from canon_pretrain.core.errors import UserError
from canon_pretrain.core.terminal import Console
from eval.schedule import IN_FLIGHT, Entry, Schedule, leases_of
from eval.suite_names import suite_name

Overview = list[tuple[Schedule, list[Entry]]]


def summary(overview: Overview) -> str:
    """Return how many evaluations are in which state: `3 done, 1 running`."""
    counts = Counter(str(entry.state) for _, found in overview for entry in found)
    return ", ".join(f"{count} {state}" for state, count in sorted(counts.items())) or "none"


@dataclass(frozen=True)
class Work:
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

    def say(self, line: str) -> None:
        self.console.print(f"{time.strftime('%H:%M:%S')} {line}", soft_wrap=True, markup=False)

    def say_absent(self) -> None:
        for run in self.absent:
            self.say(f"{run}: it has not begun, or is no run folder")

    def look(self) -> Overview:
        return [(schedule, schedule.look(self.queue)) for schedule in self.schedules]

    def one_pass(self) -> Overview:
        """Hold, give out what may be, report if all is done; return what a look then finds."""
        looks_again = True
        while looks_again:
            self.queue.look()
            overview = self.look()
            for schedule, found in overview:
                schedule.hold(found)
                late = {entry.step for entry in found if entry.state in ("waiting", *IN_FLIGHT)}
                bound = schedule.kept + schedule.max_held
                if schedule.kept and len(late) > bound:
                    self.say(
                        f"{schedule.run.path}: {len(late)} checkpoints wait, and the trainer keeps "
                        f"{bound}: raise --max_in_flight or --checkpoint.max_held"
                    )
            looks_again = self._start_next(overview)
        if self._is_evaluated(overview) and self.report_state()[0] == "waiting":
            work = self._report_work()
            self._start(work, work.leases.current())
        self.say_absent()
        self.say(summary(overview))
        return overview

    def is_finished(self, overview: Overview) -> bool:
        """Return whether nothing is left to do, the report included."""
        return self._is_evaluated(overview) and self.report_state()[0] in ("done", "failed")

    def report_state(self) -> tuple[str, str]:
        """Return done, failed, waiting, or the state of its job; and why."""
        work = self._report_work()
        if work.is_done():
            return "done", str(self.out)
        state, _, ended = work.leases.judge(work.leases.current(), self.queue)
        if state is not None:
            return state, ended
        failed = sum(lease.job is not None for lease in work.leases.all())
        return "failed" if failed > self.schedules[0].request.retries else "waiting", ended

    def _is_evaluated(self, overview: Overview) -> bool:
        return not self.absent and all(s.is_finished(found) for s, found in overview)

    def _start_next(self, overview: Overview) -> bool:
        """Start as much as may be, oldest first; return whether to look again at once."""
        waiting = [(s, e) for s, found in overview for e in found if e.state == "waiting"]
        in_flight = self._num_in_flight(overview)
        for schedule, entry in sorted(waiting, key=lambda pair: pair[1].step):
            if in_flight >= self.max_in_flight:
                return False
            if not self._start(self._work(schedule, entry), entry.lease):
                in_flight = self._num_in_flight()
            elif self.local:  # it took hours, and is over
                return True
            else:
                in_flight += 1
        return False

    def _work(self, schedule: Schedule, entry: Entry) -> Work:
        checkpoint = str(schedule.checkpoints.step_path(entry.step))
        leases = leases_of(schedule.run.path, entry.step, entry.suite)
        return Work(
            name=f"eval-{schedule.run.path.name}-step-{entry.step}-{suite_name(entry.suite)}",
            leases=leases,
            script="eval.sh",
            words=[checkpoint, entry.suite, *schedule.request.how],
            is_done=lambda: schedule.has_results(entry.step, entry.suite),
            log_folder=leases.folder.parent,
            flags=schedule.request.sbatch,
        )

    def _report_work(self) -> Work:
        """One report of what there is now: another set of runs or steps is another report."""
        what = [[str(s.run.path), s.steps, s.request.suites] for s in self.schedules]
        digest = hashlib.sha256(json.dumps(what).encode()).hexdigest()[:12]
        folder = self.out / "leases" / digest
        runs = [str(schedule.run.path) for schedule in self.schedules]
        return Work(
            name=f"eval-report-{self.schedules[0].run.path.name}",
            leases=Leases(folder),
            script="eval_report.sh",
            words=["--mark", str(folder / "done"), *runs, "--out", str(self.out)],
            is_done=(folder / "done").exists,
            log_folder=folder,
            flags=self.schedules[0].request.sbatch,
        )

    def _start(self, work: Work, before: Lease | None) -> bool:
        """Claim and submit `work`; return False if another has it, or too much is in flight."""
        number = 1 if before is None else before.number + 1
        # a name without what a shell or squeue would take amiss
        name = re.sub(r"[^A-Za-z0-9._-]", "_", work.name)
        lease = new_lease(number, name, cluster=self.queue.name)
        if not work.leases.claim(lease):
            return False
        if why := self._changed(work, lease):
            work.leases.record(lease, ended=f"given back: {why}")
            return False
        words = (["--lease", lease.id] if work.script == "eval.sh" else []) + work.words
        if self.local:
            self._run_here(work, lease, words)
            return True
        log = f"{str(work.log_folder).replace('%', '%%')}/slurm-%j.log"
        if "\\" in log:  # sbatch would take it for a sign of its own
            log = "/dev/null"
        flags = [f"--job-name={lease.name}", f"--output={log}", *work.flags]
        try:
            job = self.queue.submit(work.script, words, flags)
        except NoAnswer:
            raise  # it may have the job: the claim stands, and the job is looked for by its name
        except UserError as error:
            work.leases.record(lease, ended=f"given back: {error}")
            raise
        if not work.leases.is_current(lease.id):
            self.queue.cancel(job)  # we slept so long that another took over
            return False
        work.leases.record(lease, job=job)
        self.say(f"job {job}: {name}")
        return True

    def _changed(self, work: Work, lease: Lease) -> str:
        """Return what has changed since the look, now that all see the claim; empty if nothing."""
        if not work.leases.is_current(lease.id):
            return "another watcher has a later claim"
        if work.is_done():
            return "it is done"
        if work.script == "eval.sh" and self._num_in_flight() > self.max_in_flight:
            return f"{self.max_in_flight} are in flight"
        return ""

    def _run_here(self, work: Work, lease: Lease, words: list[str]) -> None:
        lease = work.leases.record(lease, job=LOCAL)
        self.say(f"here: {work.name}")
        command = ["bash", str(SCRIPTS / work.script), "--local", *words]
        environ = os.environ | {"CANON_REPO": str(SCRIPTS.parent)}
        process = subprocess.Popen(command, env=environ, stdin=subprocess.DEVNULL)
        try:
            while process.poll() is None:
                try:
                    process.wait(BEAT_S)
                except subprocess.TimeoutExpired:
                    work.leases.beat(lease)
        except BaseException:  # Ctrl-C: the child has got it too
            process.terminate()
            process.wait()
            work.leases.record(lease, job=None, ended="given back: interrupted")
            raise
        work.leases.record(lease, ended=f"exit code {process.returncode}")

    def _num_in_flight(self, overview: Overview | None = None) -> int:
        if overview is None:
            self.queue.look()
            overview = self.look()
        return sum(entry.state in IN_FLIGHT for _, found in overview for entry in found)

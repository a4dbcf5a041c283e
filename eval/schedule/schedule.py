"""What of a run is to be evaluated, and how far that is: checkpoints x suites, and their states.

Between the run folder and `eval submit` (watcher.py). A scan opens no data: a suite of a step has
results where RUN/evals/step-N/SUITE holds a results.json of it, whole (`limit` None), of the
checkpoint that is there, that was asked with the options of the request (request.py). It does not
see that a task's file or its data have changed since; `eval run` does, and asks anew. A checkpoint
is taken as it is saved under its final name with all files of the right sizes; the job that loads
it checks its hashes. No torch.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from canon_pretrain.checkpoint.folder import EVALS, CheckpointFolder, entries
from canon_pretrain.checkpoint.manifest import DamagedCheckpoint, Manifest, find_faults
from canon_pretrain.checkpoint.retention import held_steps, hold, release
from canon_pretrain.core.errors import UserError
from canon_pretrain.report.evaluations import is_outdated
from canon_pretrain.run.folder import RunFolder
from canon_pretrain.run.results import RESULTS, read_results
from eval.schedule.cluster import Verdict
from eval.schedule.leases import LOCAL, Lease, Leases, leases_of, new_lease
from eval.schedule.request import Request, answers
from eval.suite_names import suite_name

HOLD = "submit"
"""The name of our holds: RUN/evals/holds/step-N.submit."""
CLAIM_EXPIRY_S = 600.0
"""A claim without a job is its watcher's death after this long; sbatch takes seconds."""
LOCAL_EXPIRY_S = 120.0

States = Literal[
    "to come", "waiting", "claimed", "queued", "running", "done", "failed", "missing", "damaged"
]
IN_FLIGHT = ("claimed", "queued", "running")
FINAL = ("done", "failed", "missing")
"""States from which nothing is done any more, once the run is DONE."""


class Queue(Protocol):
    """What is asked about jobs: eval.schedule.cluster.Slurm."""

    @property
    def name(self) -> str | None: ...
    def look(self) -> None: ...
    def find(self, name: str) -> str | None: ...
    def verdict(self, job: str) -> Verdict: ...


@dataclass(frozen=True)
class Entry:
    """One suite of one checkpoint, as a look found it."""

    step: int
    suite: str
    """As it was given: a name or the path of a task's YAML."""
    state: States
    lease: Lease | None = None
    attempts: int = 0
    """Jobs so far."""
    why: str = ""


class Schedule:
    """The evaluations of one run. Raises UserError where `path` is no run."""

    def __init__(
        self, path: Path, request: Request, *, claim_expiry_s: float = CLAIM_EXPIRY_S
    ) -> None:
        self.run = RunFolder(path)
        self.request = request
        self._claim_expiry_s = claim_expiry_s
        config = self.run.read_config().get("config", {})
        checkpoint = config.get("checkpoint", {})
        self.checkpoints = CheckpointFolder.of_run(self.run)
        self._interval = int(checkpoint.get("interval", 1))
        self._last = int(config.get("training", {}).get("steps", 0))
        self._seq_len = int(config.get("training", {}).get("seq_len", 0))
        self.kept, self.max_held = checkpoint.get("keep_latest_k", 0), checkpoint.get("max_held", 4)
        every = request.every or self._interval
        if every < 1 or every % self._interval:
            raise UserError(
                f"--every {request.every}: {path} saves a checkpoint each {self._interval} steps "
                "(checkpoint.interval); expected a multiple of that"
            )
        self._every = every

    @property
    def steps(self) -> list[int]:
        """The steps to evaluate: multiples of --every, and the run's last."""
        regular = range(self._every, self._last + 1, self._every)
        return sorted({*regular, *([self._last] if self._last else [])})

    @property
    def is_done(self) -> bool:
        """Whether training has ended well, and retention moves nothing any more."""
        return self.run.done_file.exists() and not self.checkpoints.leftovers()

    def leases(self, step: int, suite: str) -> Leases:
        return leases_of(self.run.path, step, suite_name(suite))

    def look(self, queue: Queue) -> list[Entry]:
        """Every suite of every step; `queue` has been looked at before, so that results count."""
        newest = max(self.checkpoints.steps(), default=0)
        found = []
        for step in self.steps:
            lies, why = self._checkpoint(step, newest)
            for suite in self.request.suites:
                found.append(self._entry(step, suite, lies, why, queue))
        return found

    def is_finished(self, overview: Sequence[Entry]) -> bool:
        """Whether nothing is left to be evaluated."""
        return self.is_done and all(
            entry.state in FINAL or entry.state == "damaged" for entry in overview
        )

    def has_results(self, step: int, suite: str) -> bool:
        """See the module: whether the suite of this step is answered."""
        folder = self.run.path / EVALS / f"step-{step}" / suite_name(suite)
        for path in folder.glob(f"*/{RESULTS}"):
            try:
                results = read_results(path)
            except UserError:
                continue
            asked = results.asked
            own = asked["suite"] == suite_name(suite) and asked["step"] == step
            if (
                (own and asked["limit"] is None)
                and answers(asked, suite, self.request.how, self._seq_len)
                and not is_outdated(self.run, results)
            ):
                return True
        return False

    def hold(self, overview: Sequence[Entry]) -> None:
        """Have the trainer keep every step that is still to be evaluated, saved or not, and let
        go of the others."""
        wanted: set[int] = set()
        if not self.is_finished(overview):
            wanted = {e.step for e in overview if e.state not in ("done", "failed")}
        ours = self._held()
        for step in sorted(wanted - ours):
            hold(self.run.path, step, HOLD)
        for step in sorted(ours - wanted):
            release(self.run.path, step, HOLD)

    def _held(self) -> set[int]:
        folder = self.run.path / EVALS / "holds"
        names = {path.name for path in entries(folder)}
        return {step for step in held_steps(self.run.path) if f"step-{step}.{HOLD}" in names}

    def _checkpoint(self, step: int, newest: int) -> tuple[States, str]:
        """`waiting` where the step is saved, else why it can't be evaluated."""
        path = self.checkpoints.step_path(step)
        if not path.is_dir():
            moving = f".replaced-step-{step}" in {p.name for p in self.checkpoints.leftovers()}
            if moving or (step > newest and not self.run.done_file.exists()):
                return "to come", ""
            return "missing", "no checkpoint of it is left"
        try:
            faults = find_faults(path, Manifest.read(path), hashes=False)
        except DamagedCheckpoint as error:
            faults = [str(error)]
        return ("damaged", faults[0]) if faults else ("waiting", "")

    def _entry(self, step: int, suite: str, lies: States, why: str, queue: Queue) -> Entry:
        leases = self.leases(step, suite)
        known = leases.all()
        lease = known[-1] if known else None
        attempts = sum(each.job is not None for each in known)
        if self.has_results(step, suite):
            return Entry(step, suite, "done", lease, attempts)
        state, lease, ended = judge(leases, lease, queue, self._claim_expiry_s)
        if state is not None:
            attempts += lease is not None and lease.job is not None and known[-1].job is None
            return Entry(step, suite, state, lease, attempts, ended)
        if attempts > self.request.retries:
            return Entry(step, suite, "failed", lease, attempts, ended)
        return Entry(step, suite, lies, lease, attempts, why or ended)


def judge(
    leases: Leases, lease: Lease | None, queue: Queue, claim_expiry_s: float = CLAIM_EXPIRY_S
) -> tuple[States | None, Lease | None, str]:
    """The state of work that is claimed, None where nobody is at it; and how the last one ended.

    A job that is found gone is noted in the lease, so that Slurm is not asked again.
    """
    if lease is None or lease.ended is not None:
        return None, lease, lease.ended or "" if lease else ""
    if lease.job == LOCAL:
        if leases.holder_lives(lease, LOCAL_EXPIRY_S):
            return "running", lease, f"on {lease.holder.host}"
        return None, _record(leases, lease, ended="its process is gone"), "its process is gone"
    if lease.job is None:
        if leases.age_s(lease) <= claim_expiry_s:
            return "claimed", lease, f"by {lease.holder.host}"
        # the watcher died after sbatch, before it could write down the job?
        job = queue.find(lease.name) if lease.name else None
        if job is None:
            return None, lease, ""
        lease = _record(leases, lease, job=job)
    assert lease.job is not None
    if lease.cluster not in (None, queue.name):
        return "queued", lease, f"job {lease.job} of cluster {lease.cluster}"
    lives, word = queue.verdict(lease.job)
    if lives:
        state: States = "queued" if word == "pending" else "running"
        return state, lease, f"job {lease.job}"
    ended = f"job {lease.job} {word}"
    return None, _record(leases, lease, ended=ended), ended


def _record(leases: Leases, lease: Lease, **values: Any) -> Lease:
    try:
        return leases.record(lease, **values)
    except FileNotFoundError:  # archived meanwhile
        return dataclasses.replace(lease, **values)


def claim(leases: Leases, before: Lease | None, name: str, cluster: str | None) -> Lease | None:
    """Claim work whose last lease was `before`; None where another was faster."""
    lease = new_lease(1 if before is None else before.number + 1, cluster=cluster)
    lease = dataclasses.replace(lease, name=f"{name}-{lease.id[:8]}")
    return lease if leases.claim(lease) else None

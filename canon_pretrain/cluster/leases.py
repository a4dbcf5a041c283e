"""Leases on work items: which job does each one, so that none is submitted twice.

    FOLDER/K.json    the K-th claim of a work item, and its job

A watcher, which holds the lock of its runs (eval/schedule.py), claims a work item, submits a Slurm
job and records it; the job checks the claim first. The highest number counts, and none is deleted:
a watcher that finds the job gone makes the next claim. In doubt a job is alive: work is submitted
again only if Slurm reports its job gone.
"""

import os
import re
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from canon_pretrain.checkpoint.folder import entries
from canon_pretrain.core.errors import UserError
from canon_pretrain.core.files import UnreadableFile, read_record, write_json
from canon_pretrain.core.holder import Holder, process_lives

DEAD = (
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY",
    "PREEMPTED", "REVOKED", "TIMEOUT", "GONE",
)  # fmt: skip
"""Final states of a job; GONE: unknown to Slurm."""
TIMEOUT_S = 120.0
SCRIPTS = Path(__file__).resolve().parents[2] / "slurm"

BEAT_S = 10.0  # interval of `Leases.beat`
CLAIM_EXPIRY_S = 600.0  # of a claim without a job: its watcher counts as dead; sbatch takes seconds
LOCAL_EXPIRY_S = 120.0
LOCAL = "local"

InFlight = Literal["claimed", "queued", "running"]


class SlurmTimeout(UserError):
    """Slurm did not answer in time: the command may have taken effect or not."""


def parse_config(output: str) -> dict[str, str]:
    """Return the settings in the output of `scontrol show config`; empty for an error message."""
    settings = {}
    for line in output.splitlines():
        name, equals, value = line.partition("=")
        if equals:
            settings[name.strip()] = value.strip()
    return settings


class Slurm:
    """A cluster with the state of its queue at the last `refresh`."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        # the variables of the watcher's job must not reach the jobs that it submits
        site = ("SLURM_CONF", "SLURM_CLUSTERS")
        self._environ = {
            name: value
            for name, value in environ.items()
            if not name.startswith("SLURM_") or name in site
        }
        self._states: dict[str, str] = {}  # by job id
        self._jobs: dict[str, str] = {}  # ids by name
        self._name: str | None = None

    @staticmethod
    def is_available() -> bool:
        return all(shutil.which(name) for name in ("sbatch", "squeue", "scontrol"))

    @property
    def name(self) -> str | None:
        """Slurm's name of the cluster; None if it does not answer."""
        if self._name is None:
            config = parse_config(self._run("scontrol", "show", "config").stdout)
            self._name = config.get("ClusterName")
        return self._name

    def refresh(self) -> None:
        """Read the queue. Raises UserError if Slurm does not answer."""
        queue = self._run("squeue", "--me", "--noheader", "--states=all", "--format=%i|%T|%j")
        if queue.returncode:
            raise UserError("slurm.queue", f"squeue failed: {queue.stderr.strip()}")
        rows = [line.split("|", 2) for line in queue.stdout.splitlines()]
        self._states = {job: state for job, state, _ in rows}
        self._jobs = {name: job for job, _, name in rows}

    def find(self, name: str) -> str | None:
        """Return the id of the job `name`; None if it is not in the queue."""
        return self._jobs.get(name)

    def verdict(self, job: str) -> tuple[bool, str]:
        """Return whether `job` may still run, and its state in lower case."""
        state = self._states.get(job) or self._state_of(job)
        self._states[job] = state
        return state not in DEAD, state.lower()

    def _state_of(self, job: str) -> str:
        """Ask for the state of a job that the queue does not list."""
        shown = self._run("scontrol", "show", "job", "-o", job)
        if match := re.search(r"\bJobState=(\S+)", shown.stdout):
            return match[1]
        if "Invalid job id" not in shown.stderr:
            return "UNKNOWN"  # no answer from the controller

        # The controller has forgotten it: the accounting may know its final state.
        for source in ([], ["--completion"]):  # the second works without a database
            accounting = self._run("sacct", *source, "-n", "-P", "-o", "State", "-j", job)
            if accounting.returncode == 0 and accounting.stdout.strip():
                # the first row is the job's, others are its steps'; CANCELLED by 1000
                return accounting.stdout.split()[0].split("|")[0]
        return "GONE"

    def submit(self, script: str, arguments: Sequence[str], flags: Sequence[str]) -> str:
        """Submit slurm/`script`; return the job's id. Raises UserError, SlurmTimeout."""
        done = self._run(
            "bash",
            str(SCRIPTS / "submit.sh"),
            "--parsable",
            *flags,
            str(SCRIPTS / script),
            *arguments,
            CANON_REPO=str(SCRIPTS.parent),
            CANON_JOB_CHECKED="1",
        )
        # The last word of --parsable is ID, or ID;CLUSTER.
        output = done.stdout.split()
        if done.returncode or not output:
            reason = (done.stderr or done.stdout).strip()
            raise UserError("slurm.refused", f"sbatch refused {script}: {reason}")
        return output[-1].partition(";")[0]

    def _run(self, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a command with additional environment variables; a missing one exits with 127."""
        try:
            return subprocess.run(
                command,
                env=self._environ | variables,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=TIMEOUT_S,
            )
        except FileNotFoundError:
            # as a shell reports it
            return subprocess.CompletedProcess(
                command,
                returncode=127,
                stdout="",
                stderr=f"{command[0]}: not found",
            )
        except subprocess.TimeoutExpired:
            raise SlurmTimeout(
                "slurm.timeout", f"{command[0]} has not answered for {TIMEOUT_S:.0f} s"
            ) from None


class NoQueue(Slurm):
    """A machine without Slurm: the state of jobs is unknown, so no work is submitted again."""

    name = None

    def refresh(self) -> None:
        pass

    def verdict(self, job: str) -> tuple[bool, str]:
        return True, "unknown here"


@dataclass(frozen=True)
class Lease:
    """One claim of a work item: its file's number, its holder and its job.

    `name`: the job's unique name, by which it is found if its id was not recorded. `cluster`:
    Slurm's name of the cluster of `job`. `job`: an id, None until it is submitted, LOCAL for a
    process of the holder. `ended`: why the claim ended; None before.
    """

    number: int
    holder: Holder
    name: str = ""
    cluster: str | None = None
    job: str | None = None
    ended: str | None = None

    @property
    def id(self) -> str:
        return self.holder.id


def new_lease(number: int, name: str = "", **fields: Any) -> Lease:
    """Return a claim of this process; its job's name starts with `name`."""
    holder = Holder.of_this_process()
    job_name = ""
    if name:
        job_name = f"{name}-{holder.id[:8]}"
    return Lease(number, holder, job_name, **fields)


class WorkState(NamedTuple):
    """The state of a work item (None: not in flight), its lease, updated, and details."""

    state: InFlight | None = None
    lease: Lease | None = None
    details: str = ""


class Leases:
    """The claims of one work item, in `folder`, which need not exist yet."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def all(self) -> list[Lease]:
        """Return all claims, by number; an unreadable one has an unknown holder and no job."""
        names = [path.stem for path in entries(self.folder)]
        numbers = sorted(int(name) for name in names if name.isdecimal())
        return [self._read(number) for number in numbers]

    def current(self) -> Lease | None:
        return next(reversed(self.all()), None)

    def claim(self, lease: Lease) -> None:
        """Make `lease` the current one."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(self._path(lease.number), asdict(lease))

    def record(self, lease: Lease, **values: Any) -> Lease:
        """Write `values` to the claim, unless it has been archived."""
        lease = replace(lease, **values)
        if self.folder.is_dir():
            write_json(self._path(lease.number), asdict(lease))
        return lease

    def beat(self, lease: Lease) -> None:
        """Write a heartbeat, for a holder that does the work itself."""
        os.utime(self._path(lease.number))

    def work_state(
        self, lease: Lease | None, queue: Slurm, expiry_s: float = CLAIM_EXPIRY_S
    ) -> WorkState:
        """Return whether the claimed work is in flight; record the end of its job."""
        if lease is None:
            return WorkState()
        if lease.ended is not None:
            return WorkState(None, lease, lease.ended)

        # The holder does the work itself.
        if lease.job == LOCAL:
            is_alive = process_lives(lease.holder)
            if is_alive is None:  # on another machine: judge by the heartbeat
                is_alive = self._age_s(lease) <= LOCAL_EXPIRY_S
            if is_alive:
                return WorkState("running", lease, f"on {lease.holder.host}")
            return self._end(lease, "its process is gone")

        # A claim without a job is about to get one, until it expires.
        job = lease.job
        if job is None:
            if self._age_s(lease) <= expiry_s:
                return WorkState("claimed", lease, f"by {lease.holder.host}")
            # the watcher may have died after sbatch, before it recorded the job
            job = queue.find(lease.name)
            if job is None:
                return WorkState(lease=lease)
            lease = self.record(lease, job=job)

        # Another cluster cannot be asked: in doubt the job is alive.
        if lease.cluster not in (None, queue.name):
            return WorkState("queued", lease, f"job {job} of cluster {lease.cluster}")
        may_run, state = queue.verdict(job)
        if not may_run:
            return self._end(lease, f"job {job} {state}")
        if state == "pending":
            return WorkState("queued", lease, f"job {job}")
        return WorkState("running", lease, f"job {job}")

    def _end(self, lease: Lease, reason: str) -> WorkState:
        lease = self.record(lease, ended=reason)
        return WorkState(None, lease, reason)

    def _age_s(self, lease: Lease) -> float:
        """Return the seconds since the claim was written, or its last heartbeat."""
        written = self._path(lease.number).stat().st_mtime
        return time.time() - written

    def _read(self, number: int) -> Lease:
        try:
            return replace(read_record(self._path(number), Lease), number=number)
        except UnreadableFile:
            # in doubt another's: it counts as a claim until it expires
            holder = Holder(
                id=f"damaged-{number}",
                host="unknown",
                pid=1,
                boot=None,
                job_id=None,
                restart_count=0,
                taken="",
            )
            return Lease(number, holder)

    def _path(self, number: int) -> Path:
        return self.folder / f"{number}.json"

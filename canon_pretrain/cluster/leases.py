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
from typing import Any, Literal

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


class Slurm:
    """A cluster with the state of its queue at the last `refresh`."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        # the variables of a watcher's own job must not reach the jobs that it submits
        kept = ("SLURM_CONF", "SLURM_CLUSTERS")
        self._environ = {
            k: v for k, v in environ.items() if not k.startswith("SLURM_") or k in kept
        }
        self._states: dict[str, str] = {}
        self._jobs: dict[str, str] = {}
        self._name: str | None = None

    @staticmethod
    def is_available() -> bool:
        return all(shutil.which(name) for name in ("sbatch", "squeue", "scontrol"))

    @property
    def name(self) -> str | None:
        if self._name is None:
            shown = self._run("scontrol", "show", "config").stdout
            found = re.search(r"^ClusterName\s*=\s*(\S+)", shown, re.MULTILINE)
            self._name = found[1] if found else None
        return self._name

    def refresh(self) -> None:
        """Read the queue. Raises UserError if Slurm does not answer."""
        found = self._run("squeue", "--me", "--noheader", "--states=all", "--format=%i|%T|%j")
        if found.returncode:
            raise UserError("slurm.queue", f"squeue failed: {found.stderr.strip()}")
        lines = [line.split("|", 2) for line in found.stdout.splitlines()]
        self._states = {job: state for job, state, _ in lines}
        self._jobs = {name: job for job, _, name in lines}

    def find(self, name: str) -> str | None:
        return self._jobs.get(name)

    def verdict(self, job: str) -> tuple[bool, str]:
        """Return whether `job` may still run, and its state in lower case."""
        self._states[job] = state = self._states.get(job) or self._state_of(job)
        return state not in DEAD, state.lower()

    def _state_of(self, job: str) -> str:
        shown = self._run("scontrol", "show", "job", "-o", job)
        if found := re.search(r"\bJobState=(\S+)", shown.stdout):
            return found[1]
        if "Invalid job id" not in shown.stderr:
            return "UNKNOWN"  # no answer from the controller
        for more in ((), ("--completion",)):  # the second works without a database
            kept = self._run("sacct", *more, "-n", "-P", "-o", "State", "-j", job)
            if kept.returncode == 0 and kept.stdout.strip():
                return kept.stdout.split()[0].split("|")[0]
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
        words = done.stdout.split()
        if done.returncode or not words:
            text = (done.stderr or done.stdout).strip()
            raise UserError("slurm.refused", f"sbatch refused {script}: {text}")
        return words[-1].partition(";")[0]

    def _run(self, *command: str, **more: str) -> subprocess.CompletedProcess[str]:
        try:
            return subprocess.run(
                command,
                env=self._environ | more,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=TIMEOUT_S,
            )
        except FileNotFoundError:
            return subprocess.CompletedProcess(command, 127, "", f"{command[0]}: not found")
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


def new_lease(number: int, name: str = "", **more: Any) -> Lease:
    """Return a claim of this process; its job's name starts with `name`."""
    holder = Holder.of_this_process()
    return Lease(number, holder, name and f"{name}-{holder.id[:8]}", **more)


class Leases:
    """The claims of one work item, in `folder`, which need not exist yet."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def all(self) -> list[Lease]:
        """Return all claims, by number; an unreadable one has an unknown holder and no job."""
        numbers = [int(path.stem) for path in entries(self.folder) if path.stem.isdecimal()]
        return [self._read(number) for number in sorted(numbers)]

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

    def judge(
        self, lease: Lease | None, queue: Slurm, expiry_s: float = CLAIM_EXPIRY_S
    ) -> tuple[InFlight | None, Lease | None, str]:
        """Return the state of the work (None: not in flight), the lease, updated, and details."""
        if lease is None or lease.ended is not None:
            return None, lease, (lease and lease.ended) or ""

        if lease.job == LOCAL:
            lives = process_lives(lease.holder)
            if lives is None:  # on another machine: by its heartbeat
                lives = self._age_s(lease) <= LOCAL_EXPIRY_S
            if lives:
                return "running", lease, f"on {lease.holder.host}"
            ended = "its process is gone"
            return None, self.record(lease, ended=ended), ended

        if lease.job is None:
            if self._age_s(lease) <= expiry_s:
                return "claimed", lease, f"by {lease.holder.host}"
            # the watcher may have died after sbatch, before it recorded the job
            job = queue.find(lease.name) if lease.name else None
            if job is None:
                return None, lease, ""
            lease = self.record(lease, job=job)

        assert lease.job is not None
        if lease.cluster not in (None, queue.name):
            return "queued", lease, f"job {lease.job} of cluster {lease.cluster}"
        lives, word = queue.verdict(lease.job)
        if lives:
            return "queued" if word == "pending" else "running", lease, f"job {lease.job}"
        ended = f"job {lease.job} {word}"
        return None, self.record(lease, ended=ended), ended

    def _age_s(self, lease: Lease) -> float:
        return time.time() - self._path(lease.number).stat().st_mtime

    def _read(self, number: int) -> Lease:
        try:
            return replace(read_record(self._path(number), Lease), number=number)
        except UnreadableFile:
            return Lease(number, Holder(f"damaged-{number}", "unknown", 1, None, None, 0, ""))

    def _path(self, number: int) -> Path:
        return self.folder / f"{number}.json"

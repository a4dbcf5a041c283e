"""What `eval submit` asks of Slurm: which jobs live, and to take one more.

Between schedule.py, which says what is to be done, and the cluster's own commands. In doubt a job
lives: work is given out again only when Slurm says that the job is gone. No torch here.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from canon_pretrain.core.errors import UserError

DEAD = (
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY",
    "PREEMPTED", "REVOKED", "TIMEOUT",
)  # fmt: skip
"""States from which a job does not come back; one that is requeued is PENDING."""
TIMEOUT_S = 120.0
REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPTS = REPOSITORY / "slurm"


class NoAnswer(UserError):
    """Slurm did not answer in time: what it was asked may have happened, or not."""


class Verdict(NamedTuple):
    """Whether a job lives, and Slurm's word for its state, in lower case."""

    lives: bool
    word: str


class Slurm:
    """A cluster as one look at its queue shows it; `look` looks again."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        # what a watcher's own job was given is not for the jobs that it submits
        kept = ("SLURM_CONF", "SLURM_CLUSTERS")
        self._environ = {
            k: v for k, v in environ.items() if not k.startswith("SLURM_") or k in kept
        }
        self._states: dict[str, str] = {}
        self._names: dict[str, str] = {}
        self._name: str | None = None

    @staticmethod
    def is_there() -> bool:
        """Whether this machine has Slurm's commands."""
        return all(shutil.which(name) for name in ("sbatch", "squeue", "scontrol"))

    @property
    def name(self) -> str | None:
        """The cluster's own name."""
        if self._name is None:
            shown = self._ask("scontrol", "show", "config").stdout
            found = re.search(r"^ClusterName\s*=\s*(\S+)", shown, re.MULTILINE)
            self._name = found[1] if found else None
        return self._name

    def look(self) -> None:
        """Read the queue. Raises UserError where Slurm does not answer."""
        found = self._ask("squeue", "--me", "--noheader", "--states=all", "--format=%i|%T|%j")
        if found.returncode:
            raise UserError(f"squeue failed, nothing was submitted: {found.stderr.strip()}")
        self._states, self._names = {}, {}
        for line in found.stdout.splitlines():
            job, state, name = line.split("|", 2)
            self._states[job], self._names[name] = state, job

    def find(self, name: str) -> str | None:
        """The id of the job of this name, as long as the queue shows it."""
        return self._names.get(name)

    def verdict(self, job: str) -> Verdict:
        """Whether `job` may still run or come to run. One that nobody knows any more is gone."""
        state = self._states.get(job) or self._state_of(job)
        if state is None:
            return Verdict(False, "gone")
        self._states[job] = state
        return Verdict(state not in DEAD, state.lower())

    def _state_of(self, job: str) -> str | None:
        """The state of a job that the look did not show: of another user's, new, or forgotten."""
        shown = self._ask("scontrol", "show", "job", "-o", job)
        found = re.search(r"\bJobState=(\S+)", shown.stdout)
        if found:
            return found[1]
        if "Invalid job id" not in shown.stderr:
            return "UNKNOWN"  # the controller does not answer
        for more in ((), ("--completion",)):  # the second works without a database
            kept = self._ask("sacct", *more, "-n", "-P", "-o", "State", "-j", job)
            if kept.returncode == 0 and kept.stdout.strip():
                return kept.stdout.split()[0].split("|")[0]
        return None

    def submit(self, script: str, arguments: Sequence[str], flags: Sequence[str]) -> str:
        """Submit slurm/`script` with the settings of cluster.env; the job's id.

        Raises UserError with sbatch's words where it is refused, NoAnswer where that is not known.
        """
        submit, job_script = SCRIPTS / "submit.sh", SCRIPTS / script
        command = ["bash", str(submit), "--parsable", *flags, str(job_script), *arguments]
        done = self._ask(*command, CANON_REPO=str(REPOSITORY))
        words = done.stdout.split()
        if done.returncode or not words:
            raise UserError(f"sbatch refused {script}: {(done.stderr or done.stdout).strip()}")
        return words[-1].partition(";")[0]

    def cancel(self, job: str) -> None:
        self._ask("scancel", job)

    def _ask(self, *command: str, **more: str) -> subprocess.CompletedProcess[str]:
        try:
            return subprocess.run(
                command,
                env=self._environ | more,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=TIMEOUT_S,
                stdin=subprocess.DEVNULL,
            )
        except FileNotFoundError:
            return subprocess.CompletedProcess(command, 127, "", f"{command[0]}: not found")
        except subprocess.TimeoutExpired:
            raise NoAnswer(f"{command[0]} has not answered for {TIMEOUT_S:.0f} s") from None


class NoQueue:
    """A machine without Slurm: nothing is known of its jobs, so none is given out again."""

    name: str | None = None

    def look(self) -> None:
        pass

    def find(self, name: str) -> str | None:
        return None

    def verdict(self, job: str) -> Verdict:
        return Verdict(True, "unknown here")

"""Slurm's answers: which jobs live, and to submit one more.

In doubt a job lives: its work is given out again only when Slurm says that the job is gone.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from canon_pretrain.core.errors import UserError

DEAD = (
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY",
    "PREEMPTED", "REVOKED", "TIMEOUT",
)  # fmt: skip
"""States from which a job does not come back; one that is requeued is PENDING."""
TIMEOUT_S = 120.0
SCRIPTS = Path(__file__).resolve().parents[2] / "slurm"


class NoAnswer(UserError):
    """Slurm did not answer in time: what it was asked may have happened, or not."""


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
        """Return whether this machine has Slurm's commands."""
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
        """Read the queue. Raises UserError if Slurm does not answer."""
        found = self._ask("squeue", "--me", "--noheader", "--states=all", "--format=%i|%T|%j")
        if found.returncode:
            raise UserError(f"squeue failed, nothing was submitted: {found.stderr.strip()}")
        lines = [line.split("|", 2) for line in found.stdout.splitlines()]
        self._states = {job: state for job, state, _ in lines}
        self._names = {name: job for job, _, name in lines}

    def find(self, name: str) -> str | None:
        """Return the id of the job of this name, as long as the queue shows it."""
        return self._names.get(name)

    def verdict(self, job: str) -> tuple[bool, str]:
        """Return whether `job` may still run or come to run, and its state in lower case.

        One that nobody knows is gone.
        """
        state = self._states.get(job) or self._state_of(job)
        if state is None:
            return False, "gone"
        self._states[job] = state
        return state not in DEAD, state.lower()

    def _state_of(self, job: str) -> str | None:
        """Return the state of a job not in the look: another user's, new, or forgotten."""
        shown = self._ask("scontrol", "show", "job", "-o", job)
        if found := re.search(r"\bJobState=(\S+)", shown.stdout):
            return found[1]
        if "Invalid job id" not in shown.stderr:
            return "UNKNOWN"  # the controller does not answer
        for more in ((), ("--completion",)):  # the second works without a database
            kept = self._ask("sacct", *more, "-n", "-P", "-o", "State", "-j", job)
            if kept.returncode == 0 and kept.stdout.strip():
                return kept.stdout.split()[0].split("|")[0]
        return None

    def submit(self, script: str, arguments: Sequence[str], flags: Sequence[str]) -> str:
        """Submit slurm/`script` with the settings of cluster.env; return the job's id.

        Raises UserError with sbatch's words if it is refused, NoAnswer if that is not known.
        """
        command = ["bash", str(SCRIPTS / "submit.sh"), "--parsable", *flags]
        command += [str(SCRIPTS / script), *arguments]
        done = self._ask(*command, CANON_REPO=str(SCRIPTS.parent))
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


class NoQueue(Slurm):
    """A machine without Slurm: nothing is known of its jobs, so none is given out again."""

    name = None

    def look(self) -> None:
        pass

    def verdict(self, job: str) -> tuple[bool, str]:
        return True, "unknown here"

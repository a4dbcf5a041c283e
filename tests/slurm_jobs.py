"""Jobs on the test cluster, with a cluster.env as a user has it.

A job finds Python by the VENV of its cluster.env. `tests/slurm_site` is on its PYTHONPATH: its
sitecustomize.py injects the faults that variables request.
"""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import pytest

from tests.ranks import logged_step
from tests.slurm_cluster import SlurmCluster
from tests.support import ROOT

TIMEOUT_S = 400.0
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL")
SITE = ROOT / "tests" / "slurm_site"
CPUS = "--gpus-per-node=0"


class Job:
    def __init__(self, cluster: SlurmCluster, number: str, output: Path) -> None:
        self.cluster, self.id, self.output = cluster, number, output
        self._hurried = 0

    def fields(self, *names: str) -> list[str]:
        """Return fields as scontrol shows them; of a repeated one, the first value."""
        words = self.cluster.run("scontrol", "show", "job", "-o", self.id).stdout.split()
        values = dict(word.split("=", 1) for word in reversed(words) if "=" in word)
        return [values[name] for name in names]

    def field(self, name: str) -> str:
        return self.fields(name)[0]

    @property
    def state(self) -> str:
        return self.field("JobState")

    @property
    def restarts(self) -> int:
        return int(self.field("Restarts"))

    def update(self, *fields: str) -> None:
        self.cluster.run("scontrol", "update", f"JobId={self.id}", *fields)

    def until(self, happened: Callable[[], object], what: str) -> None:
        """Wait for it; a requeued job does not wait for two minutes."""
        end = time.monotonic() + TIMEOUT_S
        while not happened():
            if time.monotonic() > end:
                pytest.fail(f"waited {TIMEOUT_S} s for {what}: {self.state}\n{self.text()}")
            # let a requeued job start soon; Slurm revokes its old credential first
            state, restarts = self.fields("JobState", "Restarts")
            if state == "PENDING" and int(restarts) > self._hurried:
                update = self.cluster.run(
                    "scontrol", "update", f"JobId={self.id}", "StartTime=now+2", check=False
                )
                if update.returncode == 0:  # refused if no node is left for it
                    self._hurried = int(restarts)
            time.sleep(0.2)

    def until_step(self, run: Path, step: int) -> None:
        """Wait until the run has logged `step`; fail if the job ends before."""
        self.until(lambda: self.state in ENDED or logged_step(run) >= step, f"step {step}")
        if logged_step(run) < step:
            pytest.fail(f"it ended before step {step}: {self.text()}\n{log_of(run)}")

    def until_requeued(self, restarts: int) -> None:
        self.until(lambda: self.restarts >= restarts, f"restart {restarts}")

    def until_ended(self) -> str:
        self.until(lambda: self.state in ENDED, "its end")
        return self.state

    def cancel(self) -> None:
        self.cluster.run("scancel", self.id)

    def text(self) -> str:
        return self.output.read_text() if self.output.exists() else ""


class Jobs:
    """Submits jobs with a cluster.env in `folder`, which the test may rewrite between launches."""

    def __init__(self, cluster: SlurmCluster, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder
        self.settings = folder / "cluster.env"
        self.submitted: list[Job] = []
        self.set()

    def set(self, **variables: object) -> None:
        """Write cluster.env: CPUs, one rank per node, no preflight, and `variables`."""
        values = {"CANON_CPU": 1, "RANKS_PER_NODE": 1, "PREFLIGHT": 0, **variables}
        lines = [f"VENV='{sys.prefix}'", *(f"export {name}={v}" for name, v in values.items())]
        self.settings.write_text("\n".join(lines) + "\n")

    def environ(self, variables: Mapping[str, object]) -> dict[str, str]:
        return self.cluster.environ | {
            "CANON_CLUSTER_ENV": str(self.settings),
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "PYTHONPATH": str(SITE),
            "OMP_NUM_THREADS": "1",
            **{name: str(value) for name, value in variables.items()},
        }

    def script(
        self, name: str, *words: object, cwd: Path = ROOT, **variables: object
    ) -> subprocess.CompletedProcess[str]:
        return script(name, *words, environ=self.environ(variables), cwd=cwd)

    def submit(
        self, *words: object, flags: tuple[str, ...] = (), cwd: Path = ROOT, **variables: object
    ) -> Job:
        """Submit a script."""
        done = self.cluster.run(
            "sbatch",
            "--parsable",
            f"--output={self.folder}/sbatch-%j.out",
            *flags,
            *map(str, words),
            cwd=cwd,
            env=self.environ(variables),
        )
        number = done.stdout.strip()
        job = Job(self.cluster, number, self.folder / f"sbatch-{number}.out")
        self.submitted.append(job)
        return job

    def array(self, done: subprocess.CompletedProcess[str], *elements: int) -> list[Job]:
        """Return tasks of the array that a script has submitted."""
        assert done.returncode == 0, done
        (array,) = re.findall(r"^Submitted batch job (\d+)$", done.stdout, re.M)
        return [Job(self.cluster, f"{array}_{i}", self.folder) for i in elements]

    def clear(self) -> None:
        """Cancel the remaining jobs, which a failed test may leave."""
        for job in self.submitted:
            if job.state not in ENDED:
                job.cancel()
                job.until_ended()


def script(
    name: str, *words: object, environ: Mapping[str, str], cwd: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    """Run a script of slurm/."""
    return subprocess.run(
        ["bash", str(ROOT / "slurm" / name), *map(str, words)],
        cwd=cwd,
        env=environ,
        capture_output=True,
        text=True,
        timeout=600,
    )


def log_of(run: Path) -> str:
    """Return the log of a run's jobs, "" without one."""
    path = run / "slurm.log"
    return path.read_text(errors="replace") if path.exists() else ""


def ended(run: Path) -> str | None:
    """Return the action after the run's newest launch."""
    return json.loads((run / "restarts.json").read_text())["ended"]  # type: ignore[no-any-return]


def processes_of(text: str) -> dict[int, str]:
    """Return the command lines that contain `text`, joined by spaces, by process."""
    lines = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            pid = int(path.parent.name)
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if text in line and pid != os.getpid():
                lines[pid] = line
    return lines

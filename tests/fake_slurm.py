"""Stubs of sbatch, squeue, scontrol, sacct and scancel that keep jobs in a folder.

No job runs: a test sets the state of each, or FORGOTTEN. COMMAND.fails holds a command's error.
"""

import os
import sys
from pathlib import Path

PROGRAM = f"""#!{sys.executable} -IS
import os, sys, time
folder = os.path.dirname(os.path.abspath(sys.argv[0]))
command, words = os.path.basename(sys.argv[0]), sys.argv[1:]
try:
    sys.exit(open(f"{{folder}}/{{command}}.fails").read())
except FileNotFoundError:
    pass
def jobs():
    for name in os.listdir(folder):
        if name.endswith(".job"):
            state, job_name = open(f"{{folder}}/{{name}}").read().split("|")
            if state != "FORGOTTEN":
                yield name[:-4], state, job_name
if command == "sbatch":
    job_name = next(w.split("=", 1)[1] for w in words if w.startswith("--job-name="))
    temporary = f"{{folder}}/{{os.getpid()}}.tmp"
    open(temporary, "w").write(f"PENDING|{{job_name}}")
    number = 1
    while True:
        try:
            os.link(temporary, f"{{folder}}/{{number}}.job")
            break
        except FileExistsError:
            number += 1
    open(f"{{folder}}/{{number}}.words", "w").write("\\0".join(words))
    time.sleep(0.05)
    print(number)
elif command == "squeue":
    for number, state, job_name in jobs():
        print(number, state, job_name, sep="|")
elif command == "scontrol" and words[1] == "config":
    print("ClusterName             = fake")
elif command == "scontrol":
    found = {{number: state for number, state, _ in jobs()}}
    if words[-1] not in found:
        sys.exit("slurm_load_jobs error: Invalid job id specified")
    print(f"JobId={{words[-1]}} JobState={{found[words[-1]]}} Reason=None")
elif command == "sacct":
    sys.exit("Slurm accounting storage is disabled")
elif command == "scancel":
    path = f"{{folder}}/{{words[-1]}}.job"
    state, job_name = open(path).read().split("|")
    open(path, "w").write(f"CANCELLED|{{job_name}}")
"""


class FakeSlurm:
    """`environ` has its commands first on PATH."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        for name in ("sbatch", "squeue", "scontrol", "sacct", "scancel"):
            (folder / name).write_text(PROGRAM)
            (folder / name).chmod(0o755)
        self.environ = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"}

    def jobs(self) -> dict[str, tuple[str, str]]:
        paths = sorted(self.folder.glob("*.job"), key=lambda path: int(path.stem))
        rows = {path.stem: path.read_text().split("|") for path in paths}
        return {job: (state, name) for job, (state, name) in rows.items()}

    @property
    def names(self) -> list[str]:
        """The jobs' names in order of submission, without their unique suffix."""
        return [name.rpartition("-")[0] for _, name in self.jobs().values()]

    def words(self, job: str) -> list[str]:
        return (self.folder / f"{job}.words").read_text().split("\0")

    def set(self, job: str, state: str) -> None:
        name = self.jobs()[job][1]
        (self.folder / f"{job}.job").write_text(f"{state}|{name}")

    def end(self, part: str, state: str) -> None:
        """Set the state of the jobs with `part` in their names."""
        for job, (_, name) in self.jobs().items():
            if part in name:
                self.set(job, state)

    def break_down(self, command: str, words: str = "error: Unable to contact controller") -> None:
        """Make `command` fail with `words`; if empty, make it work again."""
        path = self.folder / f"{command}.fails"
        path.write_text(words) if words else path.unlink()

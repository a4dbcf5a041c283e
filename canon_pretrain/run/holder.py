"""Who a launch is: its process and its job, and whether that process still exists.

The content of a run folder's lock (run/lock.py); status.json names its writer the same way.
"""

import os
import socket
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from canon_pretrain.core.errors import UserError


def utc_now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def host_name(environ: Mapping[str, str] = os.environ) -> str:
    """Slurm's name of this node, which is the one to ask Slurm about, or the machine's own."""
    return environ.get("SLURMD_NODENAME") or socket.gethostname()


def read_count(environ: Mapping[str, str], name: str) -> int:
    """The number in a launcher's variable, 0 if unset. Raises UserError if it is not a number."""
    value = environ.get(name) or "0"
    if not (value.isascii() and value.isdigit()):
        raise UserError(f"{name} = {value!r} in the environment: expected a number; unset it")
    return int(value)


@dataclass(frozen=True)
class Holder:
    """A launch that holds the lock, or wants to."""

    id: str
    host: str
    pid: int
    boot: str | None
    """BOOT/NAMESPACE/START of the process (see `boot_of`); None where /proc does not tell."""
    job_id: str | None
    restart_count: int
    taken: str
    heartbeat: str
    beats: int = 0

    @classmethod
    def of_this_process(cls, environ: Mapping[str, str] = os.environ) -> "Holder":
        """This process under a new id; Slurm's variables in `environ` name its job."""
        now = utc_now()
        return cls(
            id=uuid.uuid4().hex,
            host=host_name(environ),
            pid=os.getpid(),
            boot=boot_of(os.getpid()),
            job_id=environ.get("SLURM_JOB_ID"),
            restart_count=read_count(environ, "SLURM_RESTART_COUNT"),
            taken=now,
            heartbeat=now,
        )

    def heir(self) -> "Holder":
        """This launch under a new id: who the lock passes to while it is let go of."""
        return replace(self, id=uuid.uuid4().hex)

    def is_heir_of(self, other: "Holder") -> bool:
        """Whether this is the same launch as `other` under another id."""
        launches = [(h.host, h.pid, h.boot, h.taken) for h in (self, other)]
        return self.id != other.id and launches[0] == launches[1]

    def __str__(self) -> str:
        job = f", Slurm job {self.job_id} (restart {self.restart_count})" if self.job_id else ""
        return f"host {self.host}, pid {self.pid}{job}, since {self.taken}"


def boot_of(pid: int) -> str | None:
    """The kernel's boot id, our pid namespace and the start time of process `pid`, slash-joined.

    A pid says nothing on another machine, in another container or after it was given away again;
    this string does. None where /proc does not show them.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/pid")
        # the name, in brackets, may hold anything; the 22nd field is the start time
        start = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return None
    return f"{boot}/{namespace}/{start}"


def process_lives(holder: Holder) -> bool | None:
    """Whether the holder's process exists; None where we cannot know: it is on another machine."""
    ours = boot_of(os.getpid())
    if ours is None or holder.boot is None or holder.host != host_name():
        return None
    if ours.rpartition("/")[0] != holder.boot.rpartition("/")[0]:
        return None
    try:
        os.kill(holder.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # it exists and is another user's
    start = boot_of(holder.pid)
    if start is None:
        return True  # it exists, and /proc hides it
    return start == holder.boot and not _is_zombie(holder.pid)


def _is_zombie(pid: int) -> bool:
    """Whether the process was killed, to its last thread, and only waits for its parent."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state in "ZX" and len(os.listdir(f"/proc/{pid}/task")) <= 1
    except FileNotFoundError:
        return True

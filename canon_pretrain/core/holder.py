"""A process that holds a lock, and the lock file that names it (core/lock.py)."""

import errno
import hashlib
import json
import os
import socket
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import Field

from canon_pretrain.core.errors import UserError
from canon_pretrain.core.files import open_nonblocking, parse_record

MAX_BYTES = 4096
READ_ATTEMPTS = 3
READ_PAUSE_S = 0.01
START_TIME = 19  # in the fields of /proc/PID/stat from the third on: number 22 in proc(5)
NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
# prefixes of ids: of an unreadable lock file, and of a holder that is releasing the lock
DAMAGED = "damaged-"
LEAVING = "leaving-"


def utc_now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def host_name(environ: Mapping[str, str] = os.environ) -> str:
    """Return Slurm's name of this node, or the host name."""
    return environ.get("SLURMD_NODENAME") or socket.gethostname()


def read_count(environ: Mapping[str, str], name: str) -> int:
    """Return the integer in an environment variable, 0 if unset. Raises UserError."""
    value = environ.get(name) or "0"
    if not (value.isascii() and value.isdigit()):
        raise UserError(
            "env.not_a_number",
            f"{name} = {value!r} in the environment: expected a number; unset it",
            name=name,
            given=value,
        )
    return int(value)


@dataclass(frozen=True)
class Holder:
    """A process that holds or requests a lock."""

    id: Annotated[str, Field(pattern="^[^/]*$")]
    host: str
    pid: Annotated[int, Field(gt=0)]
    boot: str | None  # see `boot_of`
    job_id: str | None
    restart_count: int
    taken: str

    @classmethod
    def of_this_process(cls, environ: Mapping[str, str] = os.environ) -> "Holder":
        """Return this process under a new id; Slurm's variables in `environ` name its job."""
        pid = os.getpid()
        return cls(
            id=uuid.uuid4().hex,
            host=host_name(environ),
            pid=pid,
            boot=boot_of(pid),
            job_id=environ.get("SLURM_JOB_ID"),
            restart_count=read_count(environ, "SLURM_RESTART_COUNT"),
            taken=utc_now(),
        )

    def __str__(self) -> str:
        job = f", Slurm job {self.job_id} (restart {self.restart_count})" if self.job_id else ""
        return f"host {self.host}, pid {self.pid}{job}, since {self.taken}"


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the third on, after the process name."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def boot_of(pid: int) -> str | None:
    """Return boot id/pid namespace/start time of `pid`; None if /proc hides them."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/pid")
        return f"{boot}/{namespace}/{_stat(pid)[START_TIME]}"
    except (OSError, IndexError):
        return None


def process_lives(holder: Holder) -> bool | None:
    """Return whether the holder's process exists; None if unknown: on another machine."""
    our_boot = boot_of(os.getpid())
    if our_boot is None or holder.boot is None or holder.host != host_name():
        return None

    # without the start times: the machine since it was booted, and the pid namespace
    if our_boot.rpartition("/")[0] != holder.boot.rpartition("/")[0]:
        return None

    try:
        with suppress(PermissionError):  # another user's
            os.kill(holder.pid, 0)
        boot = boot_of(holder.pid)
        if boot is None:  # it exists, and /proc hides it
            return True
        if boot != holder.boot:  # another process has its pid now
            return False

        # a zombie without live threads only waits for its parent
        is_zombie = _stat(holder.pid)[0] in "ZX"
        return not (is_zombie and len(os.listdir(f"/proc/{holder.pid}/task")) <= 1)
    except (ProcessLookupError, FileNotFoundError):
        return False


# -- lock files


def content_of(holder: Holder) -> bytes:
    return (json.dumps(asdict(holder), indent=2) + "\n").encode()


def parse(content: bytes) -> Holder | None:
    """Return the holder that `content` names; None if it is damaged."""
    with suppress(ValueError):
        return parse_record(content, Holder)
    return None


class LockFile(NamedTuple):
    """What a lock file says: the holder, and its last heartbeat."""

    holder: Holder
    mtime_ns: int


def read(path: Path) -> LockFile | None:
    """Return the content of a lock file; None if it does not exist."""
    for _ in range(READ_ATTEMPTS):
        try:
            with open(path, "rb", opener=open_nonblocking) as file:
                content = file.read(MAX_BYTES) or b""
                mtime_ns = os.fstat(file.fileno()).st_mtime_ns
        except FileNotFoundError:
            return None
        holder = parse(content)
        if holder is not None:
            return LockFile(holder, mtime_ns)
        time.sleep(READ_PAUSE_S)  # it may be half written

    # an id by content: it changes with the file, as a holder does
    damaged_holder = Holder(
        id=DAMAGED + hashlib.sha256(content).hexdigest()[:32],
        host="unknown",
        pid=0,
        boot=None,
        job_id=None,
        restart_count=0,
        taken="an unknown time",
    )
    return LockFile(damaged_holder, mtime_ns)


@contextmanager
def temporary_file(path: Path, holder: Holder) -> Iterator[Path]:
    """Write a lock file next to `path`, and remove it after the block."""
    temporary = path.with_name(f"{path.name}.{holder.id}.tmp")
    try:
        temporary.write_bytes(content_of(holder))
        yield temporary
    finally:
        remove(temporary)


def link(temporary: Path, name: Path) -> bool:
    """Create `name` with the content of `temporary` atomically; False if it exists."""
    try:
        os.link(temporary, name)
    except FileExistsError:
        # NFS: the link was made, the reply was lost, and the retry found it
        return temporary.stat().st_nlink > 1
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        # a file system without hard links: readers may see the file half written
        try:
            with open(name, "xb") as file:
                file.write(temporary.read_bytes())
        except FileExistsError:
            return False
    return True


def remove(path: Path) -> None:
    """Remove a file, ignoring errors."""
    with suppress(OSError):
        path.unlink()
